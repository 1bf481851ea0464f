"""The written limits of CONTRIBUTING.md, held to: size of files and functions, and what source does not contain."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

MAX_FILE_LINES = 400

MAX_FUNCTION_LINES = 50

PACKAGE = ("src", "kernels", "cost_model", "search", "db", "service", "compiler")

FILES = [path for folder in (*PACKAGE, "benchmarks", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]

UNFINISHED = re.compile(r"#.*\b(TODO|FIXME|XXX|HACK)\b")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def in_package(path: Path) -> bool:
    return path.relative_to(ROOT).parts[0] in PACKAGE


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def host_functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function but GPU code (@triton.jit, @gluon.jit), whose body cannot be split for free."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = {ast.unparse(decorator).split("(")[0] for decorator in node.decorator_list}
            if not decorators & {"triton.jit", "gluon.jit"}:
                yield node


def test_files_are_short() -> None:
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    long = {}
    for path in FILES:
        for function in host_functions(parsed(path)):
            length = (function.end_lineno or function.lineno) - function.lineno + 1
            if length > MAX_FUNCTION_LINES:
                long[f"{name_of(path)}:{function.lineno} {function.name}"] = length
    assert long == {}


def test_no_star_imports() -> None:
    for path in FILES:
        for node in ast.walk(parsed(path)):
            starred = isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
            assert not starred, f"{name_of(path)} imports *"


def test_only_the_command_line_prints() -> None:
    wrong = []
    for path in filter(in_package, FILES):
        if not (path.parent == ROOT / "service" and path.name.startswith("cli")):
            for node in ast.walk(parsed(path)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                    wrong.append(f"{name_of(path)}:{node.lineno}")
    assert wrong == []


def reads_environment(node: ast.AST) -> bool:
    """Whether it looks up a variable; handing the whole environment on to a child process is no reading."""
    if isinstance(node, ast.Attribute):
        return ast.unparse(node) in ("os.getenv", "os.environ.get")
    if isinstance(node, ast.Subscript):
        return ast.unparse(node.value) == "os.environ"
    return isinstance(node, ast.Compare) and any(ast.unparse(side) == "os.environ" for side in node.comparators)


def test_only_settings_the_backend_and_the_adapter_read_the_environment() -> None:
    readers = {
        name_of(path) for path in filter(in_package, FILES) if any(map(reads_environment, ast.walk(parsed(path))))
    }
    # the adapter names Triton's cache and assembler before Inductor does
    assert readers <= {"service/settings.py", "compiler/backend.py", "kernels/triton_adapter.py"}
    assert reads_environment(ast.parse("os.environ['A']", mode="eval").body)


def test_nothing_is_left_unfinished() -> None:
    for path in FILES:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert not UNFINISHED.search(line) or path == Path(__file__), f"{name_of(path)}:{number} {line.strip()}"


def test_public_functions_and_classes_are_documented() -> None:
    bare = []
    for path in filter(in_package, FILES):
        tree = parsed(path)
        nodes = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        public = [node for node in nodes if not node.name.startswith("_")]
        jitted = {node.name for node in public if isinstance(node, ast.FunctionDef)} - {
            function.name for function in host_functions(tree)
        }
        if not ast.get_docstring(tree) and tree.body:
            bare.append(name_of(path))
        bare += [
            f"{name_of(path)}:{node.lineno} {node.name}"
            for node in public
            if not ast.get_docstring(node) and node.name not in jitted
        ]
    assert bare == []


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").iterdir()), ids=lambda path: path.name)
def test_scripts_are_short(script: Path) -> None:
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 120
