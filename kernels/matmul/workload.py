"""How a matmul is written as a Workload: dims M, N, K; tensors a [M, K], b [K, N], out [M, N].

A layout is "row" (unit stride in the last dimension), "col" (unit stride in the first), or either with the leading
stride in elements when rows are not dense: "row:50304". The weight [N, K] of an nn.Linear, used as x @ w.T, is b="col".
Epilogue steps, in order: "bias" (a vector of N in the output's dtype), then at most one activation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kernelwright.errors import InvalidWorkload, UnsupportedDtype
from kernelwright.kernels.precision import allowed
from kernelwright.types import DTYPES, Workload

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh")
"""Pointwise functions an epilogue can end with; gelu is the exact (erf) form."""

LAYOUTS = {"nt": ("row", "col"), "nn": ("row", "row"), "tn": ("col", "row"), "tt": ("col", "col")}
"""Layouts of a and b by their BLAS letters, for operands stored row-major; nn.Linear is "nt"."""

FLOATS = ("fp16", "bf16", "fp32")

TMA_ALIGNMENT = 16
"""Bytes by which the bulk copy engine needs bases and leading strides to be divisible."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """A parsed layout: which dimension has unit stride, and the distance between its neighbours in elements."""

    order: str
    leading: int

    def strides(self) -> tuple[int, int]:
        """Strides of the [rows, columns] tensor in elements."""
        return (self.leading, 1) if self.order == "row" else (1, self.leading)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A matmul workload taken apart; `problem_of` makes it."""

    m: int
    n: int
    k: int
    a: Layout
    b: Layout
    out: Layout
    a_dtype: str
    b_dtype: str
    out_dtype: str
    has_bias: bool
    activation: str

    def aligned(self, tensor: str) -> bool:
        """Whether the leading stride of "a", "b" or "out" is a multiple of TMA_ALIGNMENT bytes."""
        layout: Layout = getattr(self, tensor)
        bits = DTYPES[getattr(self, f"{tensor}_dtype")]
        return layout.leading * bits % (TMA_ALIGNMENT * 8) == 0


def matmul_workload(
    m: int,
    n: int,
    k: int,
    dtype: str = "bf16",
    layout: str = "nt",
    epilogue: Sequence[str] = (),
    *,
    out_dtype: str | None = None,
    error_budget: float | None = None,
) -> Workload:
    """The workload of dense operands of one dtype; raises InvalidWorkload for what a matmul cannot be."""
    if layout not in LAYOUTS:
        raise InvalidWorkload(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if dtype not in DTYPES:
        raise UnsupportedDtype(f"dtype must be one of {', '.join(FLOATS)}, got {dtype!r}")
    a, b = LAYOUTS[layout]
    try:
        workload = Workload(
            "matmul",
            {"M": m, "N": n, "K": k},  # type: ignore[arg-type]
            {"a": dtype, "b": dtype, "out": out_dtype or dtype},  # type: ignore[arg-type]
            {"a": a, "b": b, "out": "row"},  # type: ignore[arg-type]
            tuple(epilogue),
            error_budget=error_budget,
        )
    except ValueError as error:
        raise InvalidWorkload(str(error)) from error
    problem_of(workload)
    return workload


def problem_of(workload: Workload) -> Problem:
    """Take a matmul workload apart; raises InvalidWorkload or UnsupportedDtype with what was wanted."""
    _check_names(workload)
    m, n, k = (workload.dims[name] for name in ("M", "N", "K"))
    for name, dtype in workload.dtypes.items():
        if dtype not in FLOATS:
            raise UnsupportedDtype(f"matmul computes {', '.join(FLOATS)}; dtype of {name} is {dtype!r}")
    a, b, out = (workload.dtypes[name] for name in ("a", "b", "out"))
    if a != b:
        raise UnsupportedDtype(f"a and b must have one dtype, got {a} and {b}; cast one of them first")
    if not allowed(a, b, out, workload.error_budget):
        raise InvalidWorkload(
            f"no way to compute {out} from {a} operands keeps within an error of {workload.error_budget:g}; "
            "allow a larger error_budget or a wider result"
        )
    has_bias, activation = _parse_epilogue(workload.epilogue)
    return Problem(
        m,
        n,
        k,
        _parse_layout("a", workload.layouts["a"], m, k),
        _parse_layout("b", workload.layouts["b"], k, n),
        _parse_layout("out", workload.layouts["out"], m, n),
        a,
        b,
        out,
        has_bias,
        activation,
    )


def _check_names(workload: Workload) -> None:
    if workload.operator != "matmul":
        raise InvalidWorkload(f"operator must be 'matmul', got {workload.operator!r}")
    wanted = {"dims": {"M", "N", "K"}, "dtypes": {"a", "b", "out"}, "layouts": {"a", "b", "out"}, "attributes": set()}
    for field, names in wanted.items():
        got = set(getattr(workload, field))
        if got != names:
            want = ", ".join(sorted(names)) or "none"
            raise InvalidWorkload(f"matmul {field} must be {want}, got {', '.join(sorted(got)) or 'none'}")


def _parse_layout(name: str, text: str, rows: int, columns: int) -> Layout:
    order, _, leading = text.partition(":")
    if order not in ("row", "col") or (":" in text and not leading.isdigit()):
        raise InvalidWorkload(f"layout of {name} must be row, col, row:<stride> or col:<stride>, got {text!r}")
    dense = columns if order == "row" else rows
    if leading and int(leading) < dense:
        raise InvalidWorkload(f"leading stride of {name} must be at least {dense}, got {leading}")
    return Layout(order, int(leading) if leading else dense)


def _parse_epilogue(steps: Sequence[str]) -> tuple[bool, str]:
    has_bias = bool(steps) and steps[0] == "bias"
    rest = list(steps[1:] if has_bias else steps)
    if len(rest) > 1 or (rest and rest[0] not in ACTIVATIONS):
        raise InvalidWorkload(
            f"epilogue must be an optional bias, then at most one of {', '.join(ACTIVATIONS)}; got {', '.join(steps)}"
        )
    return has_bias, rest[0] if rest else ""
