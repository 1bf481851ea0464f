"""The source text of kernel files, with the kernel files of ours that they import: for fingerprints and rendering."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from pathlib import Path


def kernel_sources(module: str) -> dict[str, str]:
    """Source text by dotted module name, imported kernel files before those that import them; `module` comes last."""
    found: dict[str, str] = {}
    _collect(module, found, set())
    return found


def _collect(module: str, found: dict[str, str], begun: set[str]) -> None:
    begun.add(module)
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"no kernel file {module}")
    text = Path(spec.origin).read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        name = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if name.startswith("kernelwright.") and name not in begun:
            _collect(name, found, begun)
    found[module] = text


@functools.cache
def source_fingerprint(module: str) -> str:
    """A 16-digit digest of a kernel file and all that it imports of ours."""
    text = "\0".join(f"{name}\0{source}" for name, source in kernel_sources(module).items())
    return hashlib.sha256(text.encode()).hexdigest()[:16]
