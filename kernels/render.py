"""One schedule as a standalone Python file: the kernel, a function that launches it, and a check of its result.

The file needs only torch and triton; making it needs neither. Equal arguments give equal text.
"""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from kernelwright.errors import IllegalSchedule, UsageError
from kernelwright.kernels import get_operator
from kernelwright.kernels.matmul.workload import Problem, problem_of
from kernelwright.kernels.source import kernel_sources
from kernelwright.types import VENDOR_TEMPLATE, Schedule, Workload

_TORCH_DTYPES = {"fp16": "torch.float16", "bf16": "torch.bfloat16", "fp32": "torch.float32"}

_TORCH_ACTIVATIONS = {
    "": "x",
    "relu": "torch.relu(x)",
    "gelu": "torch.nn.functional.gelu(x)",
    "gelu_tanh": 'torch.nn.functional.gelu(x, approximate="tanh")',
    "silu": "torch.nn.functional.silu(x)",
    "sigmoid": "torch.sigmoid(x)",
    "tanh": "torch.tanh(x)",
}

_HARNESS_IMPORTS = ("import argparse", "import sys", "import torch", "import triton")


def render(workload: Workload, schedule: Schedule, provenance: Mapping[str, str] = MappingProxyType({})) -> str:
    """Python source that defines `matmul(a, b, bias=None, out=None)` and checks and times it when run.

    provenance: what is known of the kernel, written into the head of the file, in the order given.
    Raises IllegalSchedule for a template that the operator does not have, the operator's errors for the workload, and
    UsageError for an operator that cannot be rendered.
    """
    operator = get_operator(workload.operator)
    operator.validate(workload)
    if operator.name != "matmul":
        raise UsageError(f"only matmul kernels can be written as a file, got {operator.name}")
    if schedule.template == VENDOR_TEMPLATE:
        call = schedule.knobs.get("call", "the vendor library")
        raise IllegalSchedule(f"{call} is a library call, there is no kernel to write; ask for one of ours instead")
    if schedule.template not in operator.templates:
        raise IllegalSchedule(f"template must be one of {', '.join(operator.templates)}, got {schedule.template!r}")
    imports, code = inline(operator.templates[schedule.template].kernel_module)
    parts = [
        _head(workload, schedule, {**provenance, "template source": operator.templates[schedule.template].fingerprint}),
        _sorted_imports({*imports, *_HARNESS_IMPORTS}),
        _constants(workload, schedule, operator.tolerance(workload)),
    ]
    code += [_function(problem_of(workload)), _MAIN]
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
    for name, text in kernel_sources(module).items():
        tree = ast.parse(text)
        for defined in _defined(tree):
            if owners.setdefault(defined, name) != name:
                raise UsageError(f"{defined} is defined in both {owners[defined]} and {name}; rename one of them")
        imports |= set(_foreign_imports(tree, name))
        code.append(_without_imports(name, text, tree))
    return imports, code


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


def _without_imports(name: str, text: str, tree: ast.Module) -> str:
    """The file's text after its docstring, without import statements, under a comment that says where it is from."""
    dropped: set[int] = set()
    doc = ast.get_docstring(tree) or ""
    for position, node in enumerate(tree.body):
        if isinstance(node, ast.Import | ast.ImportFrom) or (doc and position == 0):
            dropped |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    kept = [line for number, line in enumerate(text.splitlines(), 1) if number not in dropped]
    title = _comment(f"From {name}: {doc.partition(chr(10))[0]}".removesuffix(": "))
    return f"{title}\n\n" + "\n".join(kept).strip("\n")


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


def _head(workload: Workload, schedule: Schedule, provenance: Mapping[str, str]) -> str:
    facts = {"workload": str(workload), "schedule": str(schedule), **provenance}
    return "\n".join(
        [
            '"""A matrix product kernel written by Kernelwright. Needs torch and triton; run it to check it."""',
            "",
            "# SPDX-License-Identifier: Apache-2.0",
            "#",
            *(_comment(f"{name}: {value}") for name, value in facts.items()),
        ]
    )


def _constants(workload: Workload, schedule: Schedule, tolerance: float) -> str:
    problem = problem_of(workload)
    knobs = ", ".join(f"{name!r}: {value!r}" for name, value in schedule.knobs.items())
    layouts = {
        name: (layout.order, layout.leading - (columns if layout.order == "row" else rows))
        for name, layout, rows, columns in (
            ("a", problem.a, problem.m, problem.k),
            ("b", problem.b, problem.k, problem.n),
            ("out", problem.out, problem.m, problem.n),
        )
    }
    return f"""
M, N, K = {problem.m}, {problem.n}, {problem.k}
TEMPLATE = {schedule.template!r}
SCHEDULE = {{{knobs}}}
EPILOGUE = {workload.epilogue!r}
DTYPE = {_TORCH_DTYPES[problem.a_dtype]}
OUT_DTYPE = {_TORCH_DTYPES[problem.out_dtype]}
# order ("row": the last dimension is dense) and how many elements lie between one line and the next
LAYOUTS = {layouts!r}
# largest relative error (Frobenius norm, against fp64) with which a result counts as right
TOLERANCE = {tolerance!r}
"""


def _function(problem: Problem) -> str:
    bias = "bias [N]; " if problem.has_bias else ""
    return f'''
def strided(rows, columns, layout, dtype, device):
    """An uninitialised [rows, columns] tensor with the layout of LAYOUTS[layout]."""
    order, gap = LAYOUTS[layout]
    lines, length = (rows, columns) if order == "row" else (columns, rows)
    storage = torch.empty(max(lines, 1) * (length + gap), dtype=dtype, device=device)
    strides = (length + gap, 1) if order == "row" else (1, length + gap)
    return storage.as_strided((rows, columns), strides)


def matmul(a, b, bias=None, out=None):
    """out [M, N] = epilogue(a [M, K] @ b [K, N]); {bias}operands have the layouts of LAYOUTS. The tiles were chosen for
    M={problem.m}, N={problem.n}, K={problem.k}; other sizes are right too, but may be slow."""
    inputs = {{"a": a, "b": b}}
    if ("bias" in EPILOGUE) != (bias is not None):
        raise ValueError(f"bias must be given exactly when the epilogue has one; the epilogue is {{EPILOGUE}}")
    if bias is not None:
        inputs["bias"] = bias
    if out is None:
        out = strided(a.shape[0], b.shape[1], "out", OUT_DTYPE, a.device)
    for kernel, grid, args, options in plan(inputs, out, SCHEDULE, EPILOGUE):
        kernel[grid](*args, **options)
    return out


def torch_matmul(a, b, bias=None):
    """What matmul computes, by torch, in the type of a."""
    x = a @ b
    if bias is not None:
        x = x + bias.to(x.dtype)
    return {_TORCH_ACTIVATIONS[problem.activation]}
'''


_MAIN = '''
def relative_error(found, wanted):
    """Frobenius norm of the difference over that of the right answer; NaN where a result was not written."""
    size = wanted.norm().item()
    difference = (found.double() - wanted).norm().item()
    return difference / size if size else difference


def main():
    interpreted = triton.knobs.runtime.interpret
    parser = argparse.ArgumentParser(description="Check the kernel against fp64, and time it on a GPU.")
    parser.add_argument("sizes", nargs="*", type=int, metavar="M N K", help="default: those it was made for")
    sizes = parser.parse_args().sizes
    if sizes and len(sizes) != 3:
        parser.error(f"give all of M, N and K or none, got {len(sizes)} numbers")
    if not interpreted and not torch.cuda.is_available():
        parser.error("there is no GPU here; set TRITON_INTERPRET=1 to check the kernel on the CPU, at small sizes")
    # The interpreter is slow, so that it gets sizes of the same alignment; and its bf16 products are wrong.
    m, n, k = sizes or [s if s <= 192 or not interpreted else 128 + s % 64 for s in (M, N, K)]
    dtype, out_dtype = (torch.float16 if interpreted and t == torch.bfloat16 else t for t in (DTYPE, OUT_DTYPE))
    device = "cpu" if interpreted else "cuda"
    torch.manual_seed(0)
    a = strided(m, k, "a", dtype, device).normal_()
    b = strided(k, n, "b", dtype, device).normal_()
    bias = torch.randn(n, device=device).to(out_dtype) if "bias" in EPILOGUE else None
    out = strided(m, n, "out", out_dtype, device).fill_(float("nan"))
    matmul(a, b, bias, out)
    error = relative_error(out, torch_matmul(a.double(), b.double(), bias))
    right = error <= TOLERANCE
    verdict = "right" if right else "WRONG"
    print(f"M={m} N={n} K={k} {dtype}: relative error {error:.2e}, limit {TOLERANCE:.1e}: {verdict}")
    if not right:
        sys.exit(1)
    if not interpreted:
        if SCHEDULE["precision"] == "tf32":
            torch.backends.cuda.matmul.allow_tf32 = True
        ours = triton.testing.do_bench(lambda: matmul(a, b, bias, out), return_mode="median")
        theirs = triton.testing.do_bench(lambda: torch_matmul(a, b, bias), return_mode="median")
        print(f"{ours * 1e3:.1f} us, torch {theirs * 1e3:.1f} us (L2 cleared before each call; launch gaps are inside)")


if __name__ == "__main__":
    main()
'''
