"""Who may import whom, and that describing, storing and serving need no GPU stack."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

VOCABULARY = {"types", "errors", "pieces"}

MAY_IMPORT = {
    "types": set(),
    "errors": set(),
    "pieces": {"types"},
    "recorded": set(),
    "kernels": VOCABULARY,
    "cost_model": VOCABULARY | {"kernels"},
    "search": VOCABULARY | {"kernels", "cost_model", "recorded"},
    "db": VOCABULARY,
    "service": VOCABULARY | {"kernels", "cost_model", "search", "db", "recorded"},
    "compiler": VOCABULARY | {"kernels", "cost_model", "search", "db", "service.client"},
}

FOLDERS = ("kernels", "cost_model", "search", "db", "service", "compiler")

GPU_STACK = {"torch", "triton"}

OPTIONAL = (*sorted(GPU_STACK), "xgboost", "ray", "psycopg")

BLOCKED_IMPORTS = """
import importlib, importlib.abc, pkgutil, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(name + " is blocked")
        return None

sys.meta_path.insert(0, Block())
for name in {names!r}:
    importlib.import_module(name)
print(sorted(set(sys.modules) & set({blocked!r})))
"""


def source_files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports must be absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def top_level_imports(path: Path) -> set[str]:
    """First parts of what is imported when the file is: not inside functions, not for type checkers only."""
    names: set[str] = set()
    pending: list[ast.AST] = [parsed(path)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            names.update(name.split(".")[0] for name in imported_names(node))
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending.extend(ast.iter_child_nodes(node))
    return names


def is_jitted(node: ast.AST) -> bool:
    """Whether a function is GPU code: @triton.jit, @gluon.jit or either with arguments."""
    return isinstance(node, ast.FunctionDef) and any(
        ast.unparse(decorator).split("(")[0] in ("triton.jit", "gluon.jit") for decorator in node.decorator_list
    )


def allowed(target: str, targets: set[str]) -> bool:
    return any(target == name or target.startswith(name + ".") for name in targets)


def is_gpu_code(path: Path) -> bool:
    """Whether a file defines a kernel, or is named as one that launches those of other files."""
    return path.stem.endswith("_kernel") or any(map(is_jitted, ast.walk(parsed(path))))


@pytest.mark.parametrize("folder", [*FOLDERS, "types", "errors", "pieces"])
def test_directions(folder: str) -> None:
    files = list(source_files(folder)) or [ROOT / "src/kernelwright" / f"{folder}.py"]
    wrong = []
    for path in files:
        for name in imported_names(parsed(path)):
            first, _, target = name.partition(".")
            if first == "kernelwright" and not allowed(target, MAY_IMPORT[folder] | {folder}):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_compiler_needs_no_web_framework() -> None:
    for path in source_files("compiler"):
        assert not {name.split(".")[0] for name in imported_names(parsed(path))} & {"fastapi", "starlette", "uvicorn"}


@pytest.mark.parametrize("folder", ["src", "kernels", "cost_model", "search", "db", "service"])
def test_the_gpu_stack_is_imported_late(folder: str) -> None:
    """Only files of GPU code import torch and triton when they are imported themselves."""
    wrong = [
        str(path.relative_to(ROOT))
        for path in source_files(folder)
        if top_level_imports(path) & GPU_STACK and not is_gpu_code(path)
    ]
    assert not wrong


def test_gpu_code_needs_only_torch_triton_and_other_gpu_code() -> None:
    """A rendered kernel is such files, one after the other, and must run where Kernelwright is not installed."""
    for path in source_files("kernels"):
        if is_gpu_code(path):
            for name in imported_names(parsed(path)):
                ours = name.startswith("kernelwright.kernels.") and "_kernel" in name
                assert ours or name.split(".")[0] in GPU_STACK | sys.stdlib_module_names, f"{path}: {name}"


def test_everything_but_gpu_code_imports_without_optional_packages() -> None:
    names = ["kernelwright", *(f"kernelwright.{name}" for name in ("types", "errors", "pieces"))]
    for folder in ("kernels", "cost_model", "search", "db", "service"):
        for path in source_files(folder):
            gpu_code = is_gpu_code(path)
            alembic_script = "migrations" in path.parts
            if not gpu_code and not alembic_script:
                dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
                names.append(f"kernelwright.{dotted}")
    assert "kernelwright.service.app" in names
    code = BLOCKED_IMPORTS.format(blocked=OPTIONAL, names=names)
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_check_itself_sees_late_and_early_imports(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\nelse:\n    import json\n"
        "try:\n    import triton.language\nexcept ImportError:\n    pass\ndef late():\n    import numpy\n"
        "class C:\n    import ast\n"
    )
    assert top_level_imports(path) == {"typing", "json", "triton", "ast"}
