"""The source text of kernel files, with the kernel files of ours that they import: for fingerprints and rendering."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import re
from pathlib import Path

_IMPORT = re.compile(r"^from (kernelwright\.[\w.]+) import ", re.MULTILINE)
"""An import of ours at the top of a file. Reading dozens of files as Python would take a second of every compile."""


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
    for name in _IMPORT.findall(text):
        if name not in begun:
            _collect(name, found, begun)
    found[module] = text


@functools.cache
def source_fingerprint(module: str) -> str:
    """A 16-digit digest of a kernel file and all that it imports of ours."""
    text = "\0".join(f"{name}\0{source}" for name, source in kernel_sources(module).items())
    return hashlib.sha256(text.encode()).hexdigest()[:16]
