"""One schedule as a standalone Python file: the kernel, a function that launches it, and a check of its result.

The file needs only torch and triton; making it needs neither. Equal arguments give equal text.
"""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from kernelwright.errors import IllegalSchedule, UsageError
from kernelwright.kernels import get_operator
from kernelwright.kernels.attention import rendered as attention
from kernelwright.kernels.conv2d import rendered as conv2d
from kernelwright.kernels.matmul import rendered as matmul
from kernelwright.kernels.source import kernel_sources
from kernelwright.types import VENDOR_TEMPLATE, Schedule, Workload

_AROUND: Mapping[str, Any] = {"matmul": matmul, "conv2d": conv2d, "attention": attention}
"""What stands around a kernel, by operator: a module with a TITLE, `constants` and `harness`."""

_HARNESS_IMPORTS = ("import argparse", "import sys", "import torch", "import triton")


def render(workload: Workload, schedule: Schedule, provenance: Mapping[str, str] = MappingProxyType({})) -> str:
    """Python source that defines a function named like the operator and checks and times it when run.

    For a matmul it is `matmul(a, b, .., out=None)`; between b and out stand scales, offsets and the operands of the
    epilogue, in its order.

    provenance: what is known of the kernel, written into the head of the file, in the order given.
    Raises IllegalSchedule for a template that the operator does not have, the operator's errors for the workload, and
    UsageError for an operator that cannot be rendered.
    """
    operator = get_operator(workload.operator)
    operator.validate(workload)
    if operator.name not in _AROUND:
        raise UsageError(f"kernels of {', '.join(_AROUND)} can be written as a file, got {operator.name}")
    around = _AROUND[operator.name]
    if schedule.template == VENDOR_TEMPLATE:
        call = schedule.knobs.get("call", "the vendor library")
        raise IllegalSchedule(f"{call} is a library call, there is no kernel to write; ask for one of ours instead")
    if schedule.template not in operator.templates:
        raise IllegalSchedule(f"template must be one of {', '.join(operator.templates)}, got {schedule.template!r}")
    imports, code = inline(operator.templates[schedule.template].kernel_module)
    parts = [
        _head(
            around.TITLE,
            {
                "workload": str(workload),
                "schedule": str(schedule),
                **provenance,
                "template source": operator.templates[schedule.template].fingerprint,
            },
        ),
        _sorted_imports({*imports, *_HARNESS_IMPORTS}),
        around.constants(workload, schedule, operator.tolerance(workload)),
    ]
    code += around.harness(workload)
    return (
        "\n\n".join(part.strip("\n") for part in parts) + "\n\n\n" + "\n\n\n".join(x.strip("\n") for x in code) + "\n"
    )


def inline(module: str) -> tuple[set[str], list[str]]:
    """(import statements, code of each file) of a kernel file and the kernel files of ours that it imports.

    UsageError when two of the files define one name, or import ours in another way than `from file import name`.
    """
    imports: set[str] = set()
    code: list[str] = []
    owners: dict[str, str] = {}
    wanted: dict[str, set[str]] = {}
    # those that import come after those that they import from, so that from behind all wishes are known
    for name, text in reversed(kernel_sources(module).items()):
        tree = ast.parse(text)
        kept = _needed(tree, wanted.get(name, set())) if name != module else set(_defined(tree))
        for defined in kept:
            if owners.setdefault(defined, name) != name:
                raise UsageError(f"{defined} is defined in both {owners[defined]} and {name}; rename one of them")
        imports |= set(_foreign_imports(tree, name))
        for node in tree.body:
            if isinstance(node, ast.ImportFrom):
                wanted.setdefault(str(node.module), set()).update(alias.name for alias in node.names)
        code.insert(0, _without_imports(name, text, tree, kept))
    return imports, code


def _needed(tree: ast.Module, wanted: set[str]) -> set[str]:
    """Names that a file's top level defines and that `wanted` names need, themselves among them."""
    uses = {
        name: {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        for node in tree.body
        for name in _defined(ast.Module([node], []))
    }
    found: set[str] = set()
    open_names = wanted & set(uses)
    while open_names:
        found |= open_names
        open_names = {used for name in open_names for used in uses[name]} & set(uses) - found
    return found


def _defined(tree: ast.Module) -> Iterator[str]:
    """Names that the file's top level defines."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def _foreign_imports(tree: ast.Module, name: str) -> Iterator[str]:
    """The import statements, save those of kernel files of ours."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            if any(alias.name.startswith("kernelwright") for alias in node.names):
                raise UsageError(f"{name} must import kernel files as `from file import name`, got {ast.unparse(node)}")
            yield from (ast.unparse(ast.Import([alias])) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if not (node.module or "").startswith("kernelwright"):
                yield ast.unparse(node)
            elif any(alias.asname for alias in node.names):
                raise UsageError(f"{name} must import kernel files without `as`, got {ast.unparse(node)}")


def _without_imports(name: str, text: str, tree: ast.Module, kept: set[str]) -> str:
    """The file's text after its docstring, without import statements and without definitions that are not kept, under a
    comment that says where it is from."""
    dropped: set[int] = set()
    doc = ast.get_docstring(tree) or ""
    for position, node in enumerate(tree.body):
        defined = set(_defined(ast.Module([node], [])))
        unneeded = bool(defined) and not defined & kept
        if isinstance(node, ast.Import | ast.ImportFrom) or (doc and position == 0) or unneeded:
            decorators = [decorator.lineno for decorator in getattr(node, "decorator_list", [])]
            dropped |= set(range(min([node.lineno, *decorators]), (node.end_lineno or node.lineno) + 1))
    lines = [line for number, line in enumerate(text.splitlines(), 1) if number not in dropped]
    title = _comment(f"From {name}: {doc.partition(chr(10))[0]}".removesuffix(": "))
    return f"{title}\n\n" + "\n".join(lines).strip("\n")


def _sorted_imports(statements: set[str]) -> str:
    """Import statements in a fixed order: __future__, then the standard library, then others."""

    def rank(statement: str) -> int:
        package = statement.split()[1].partition(".")[0]
        return 0 if package == "__future__" else 1 if package in sys.stdlib_module_names else 2

    groups = itertools.groupby(sorted(statements, key=lambda s: (rank(s), s.startswith("from"), s)), rank)
    return "\n\n".join("\n".join(group) for _, group in groups)


def _comment(text: str) -> str:
    """One comment line; what is not printable, line breaks above all, becomes a space."""
    return "# " + "".join(character if character.isprintable() else " " for character in text).strip()


def _head(title: str, facts: Mapping[str, str]) -> str:
    return "\n".join(
        [
            f'"""{title} written by Kernelwright. Needs torch and triton; run it to check it."""',
            "",
            "# SPDX-License-Identifier: Apache-2.0",
            "#",
            *(_comment(f"{name}: {value}") for name, value in facts.items()),
        ]
    )
