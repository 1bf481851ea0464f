"""How a matmul is written as a Workload: dims M, N, K; tensors a [M, K], b [K, N], out [M, N].

dims: "B" makes it batched (every tensor gets a leading dimension), "G" makes it grouped: a holds the rows of G experts
one after the other (M in all), b is [G, K, N], and `offsets` [G] (int32) says where each expert's rows end.

A layout is "row" (unit stride in the last dimension) or "col" (unit stride in the first), with, in this order and each
only where it differs from dense: ":50304" the leading stride in elements, "@0" the stride between matrices of a batch,
"+1" by how many elements the base address misses a multiple of 16 bytes. "strided:960,3" gives both strides of a
tensor without a unit stride, or with one that overlaps. The weight [N, K] of an nn.Linear, used as x @ w.T, is b="col".

dtypes: a, b and out. Quantised operands carry the attribute `scaling`: "tensor" (a_scale and b_scale are one fp32
number), "row" (a_scale [M], b_scale [N], fp32), "block128" (a_scale [M, K/128], b_scale [K/128, N/128], fp32, read by
their own strides), "group:128" (b is int4: two weights a byte along K, the even one in the low half, less 8, and
b_scale [K/128, N] in a's type), "mx" (a_scale [M, K/32] and b_scale [N, K/32], powers of two as e8m0 bytes,
which torch's float8_e8m0fnu views as they are: 255 is NaN, the largest scale is 254) and "nvfp4" (scales [M, K/16] and
[N, K/16] in fp8e4m3). A fp4 operand holds two numbers a byte along K, the even one low.

Epilogue steps, in order and at will: "bias" [N], "bias_m" [M], "scale" (one number), "scale_vec" [N], "scale_m" [M],
"residual" and "multiply" (matrices like out), "gelu_backward" (a matrix x: the product times gelu'(x)), activations and
at most one of PAIRS, which makes one column out of column j of the left and of the right half of N; out is then
[M, N/2]. Attributes `deterministic` (a fixed order of sums) and `workspace_bytes` (the most memory besides the
operands) limit the schedules.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence

from kernelwright.errors import InvalidWorkload, UnsupportedDtype
from kernelwright.kernels.precision import allowed
from kernelwright.types import DTYPES, FrozenMap, Scalar, Workload

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh")
"""Pointwise functions of an epilogue; gelu is the exact (erf) form."""

PAIRS = ("swiglu", "geglu", "glu")
"""Gated units: silu(left) * right, left * gelu(right), left * sigmoid(right)."""

OPERANDS: Mapping[str, str] = {
    "bias": "n",
    "bias_m": "m",
    "scale": "1",
    "scale_vec": "n",
    "scale_m": "m",
    "residual": "mn",
    "multiply": "mn",
    "gelu_backward": "mn",
}
"""Steps that read a tensor, and how it lies over the product: one number, one a row (m), one a column (n), a matrix."""

STEPS = (*OPERANDS, *ACTIVATIONS, *PAIRS)

LAYOUTS = {"nt": ("row", "col"), "nn": ("row", "row"), "tn": ("col", "row"), "tt": ("col", "col")}
"""Layouts of a and b by their BLAS letters, for operands stored row-major; nn.Linear is "nt"."""

FLOATS = ("fp16", "bf16", "fp32")

FP8 = ("fp8e4m3", "fp8e5m2")

SCALINGS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "": (FLOATS, FLOATS),
    "tensor": ((*FP8, "int8"), (*FP8, "int8")),
    "row": ((*FP8, "int8"), (*FP8, "int8")),
    "block128": (FP8, FP8),
    "group:32": (("fp16", "bf16"), ("int4",)),
    "group:64": (("fp16", "bf16"), ("int4",)),
    "group:128": (("fp16", "bf16"), ("int4",)),
    "mx": ((*FP8, "fp4", "bf16", "fp16"), (*FP8, "fp4")),
    "nvfp4": (("fp4", "bf16", "fp16"), ("fp4",)),
}
"""Values of the attribute `scaling`, with the element types that a and b may have under it."""

MX_GROUP, NVFP4_GROUP = 32, 16

TMA_ALIGNMENT = 16
"""Bytes by which the bulk copy engine needs bases and leading strides to be divisible."""

_LAYOUT = re.compile(r"(row|col)(?::(\d+))?(?:@(\d+))?(?:\+(\d+))?")
_STRIDED = re.compile(r"strided:(\d+),(\d+)(?:@(\d+))?(?:\+(\d+))?")


@dataclasses.dataclass(frozen=True)
class Layout:
    """A parsed layout: which dimension has unit stride, and the distance between its neighbours in elements.

    order is "strided" when none has; then `inner` is the stride of the last dimension and `leading` of the first.
    batch: stride between the matrices of a batch. offset: elements by which the base misses a multiple of 16 bytes.
    """

    order: str
    leading: int
    batch: int = 0
    offset: int = 0
    inner: int = 1

    def strides(self) -> tuple[int, int]:
        """Strides of the [rows, columns] tensor in elements."""
        return (1, self.leading) if self.order == "col" else (self.leading, self.inner)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A matmul workload taken apart; `problem_of` makes it. n counts the columns of b, out_n those of out.

    batch is 1 for a single product (then `batched` is False), groups 0 for one that is not grouped.
    """

    m: int
    n: int
    k: int
    a: Layout
    b: Layout
    out: Layout
    a_dtype: str
    b_dtype: str
    out_dtype: str
    epilogue: tuple[str, ...] = ()
    batch: int = 1
    batched: bool = False
    groups: int = 0
    scaling: str = ""
    deterministic: bool = False
    workspace_bytes: int | None = None

    @property
    def paired(self) -> bool:
        """Whether a gated unit halves the columns."""
        return any(step in PAIRS for step in self.epilogue)

    @property
    def out_n(self) -> int:
        """Columns of out."""
        return self.n // 2 if self.paired else self.n

    @property
    def has_bias(self) -> bool:
        """Whether a bias is added."""
        return "bias" in self.epilogue

    def aligned(self, tensor: str) -> bool:
        """Whether base, leading and batch stride of "a", "b" or "out" are multiples of TMA_ALIGNMENT bytes, with a unit
        stride in one dimension."""
        layout: Layout = getattr(self, tensor)
        bits = DTYPES[getattr(self, f"{tensor}_dtype")]
        whole = all(step * bits % (TMA_ALIGNMENT * 8) == 0 for step in (layout.leading, layout.batch))
        return whole and layout.offset == 0 and layout.order != "strided"


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
    b_dtype: str | None = None,
    scaling: str = "",
    batch: int | None = None,
    groups: int | None = None,
    attributes: Mapping[str, Scalar] | None = None,
) -> Workload:
    """The workload of dense operands; raises InvalidWorkload for what a matmul cannot be.

    dtype: of a, and of b unless b_dtype is given. out_dtype: a's type, bf16 for quantised operands, unless given.
    scaling, batch, groups and attributes (deterministic, workspace_bytes): as in the module's docstring.
    """
    if layout not in LAYOUTS:
        raise InvalidWorkload(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    for name in (dtype, b_dtype or dtype):
        if name not in DTYPES:
            raise UnsupportedDtype(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    a, b = LAYOUTS[layout]
    dims = {"M": m, "N": n, "K": k, **({"B": batch} if batch is not None else {})}
    dims |= {"G": groups} if groups is not None else {}
    out_dtype = out_dtype or (dtype if dtype in FLOATS else "bf16")
    try:
        workload = Workload(
            "matmul",
            FrozenMap(dims),
            FrozenMap({"a": dtype, "b": b_dtype or dtype, "out": out_dtype}),
            FrozenMap({"a": a, "b": b, "out": "row"}),
            tuple(epilogue),
            FrozenMap({**({"scaling": scaling} if scaling else {}), **(attributes or {})}),
            error_budget,
        )
    except ValueError as error:
        raise InvalidWorkload(str(error)) from error
    problem_of(workload)
    return workload


@functools.lru_cache(maxsize=4096)
def problem_of(workload: Workload) -> Problem:
    """Take a matmul workload apart; raises InvalidWorkload or UnsupportedDtype with what was wanted."""
    _check_names(workload)
    dims, attributes = workload.dims, workload.attributes
    m, n, k = (dims[name] for name in ("M", "N", "K"))
    scaling = str(attributes.get("scaling", ""))
    a, b, out = (workload.dtypes[name] for name in ("a", "b", "out"))
    _check_types(a, b, out, scaling)
    if not allowed(a, b, out, workload.error_budget):
        raise InvalidWorkload(
            f"no way to compute {out} from {a} operands keeps within an error of {workload.error_budget:g}; "
            "allow a larger error_budget or a wider result"
        )
    _check_epilogue(workload.epilogue, n)
    problem = Problem(
        m,
        n,
        k,
        parse_layout("a", workload.layouts["a"], m, k, "B" in dims),
        parse_layout("b", workload.layouts["b"], k, n, "B" in dims or "G" in dims),
        parse_layout(
            "out", workload.layouts["out"], m, n // 2 if set(workload.epilogue) & set(PAIRS) else n, "B" in dims
        ),
        a,
        b,
        out,
        workload.epilogue,
        dims.get("B", 1),
        "B" in dims,
        dims.get("G", 0),
        scaling,
        bool(attributes.get("deterministic", False)),
        _workspace(attributes),
    )
    _check_shape(problem)
    return problem


def _workspace(attributes: Mapping[str, Scalar]) -> int | None:
    limit = attributes.get("workspace_bytes")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise InvalidWorkload(f"workspace_bytes must be a whole number of bytes, got {limit!r}")
    return limit


def _check_names(workload: Workload) -> None:
    if workload.operator != "matmul":
        raise InvalidWorkload(f"operator must be 'matmul', got {workload.operator!r}")
    tensors = {"a", "b", "out"}
    known: Mapping[str, tuple[set[str], set[str]]] = {
        "dims": ({"M", "N", "K"}, {"B", "G"}),
        "dtypes": (tensors, set()),
        "layouts": (tensors, set()),
        "attributes": (set(), {"scaling", "deterministic", "workspace_bytes"}),
    }
    for field, (needed, optional) in known.items():
        got = set(getattr(workload, field))
        if not needed <= got <= needed | optional:
            want = ", ".join(sorted(needed)) or "none"
            also = f" (and {', '.join(sorted(optional))} at will)" if optional else ""
            raise InvalidWorkload(f"matmul {field} must be {want}{also}, got {', '.join(sorted(got)) or 'none'}")


def _check_types(a: str, b: str, out: str, scaling: str) -> None:
    if scaling not in SCALINGS:
        raise InvalidWorkload(f"scaling must be one of {', '.join(filter(None, SCALINGS))}, got {scaling!r}")
    for name, dtype, types in (("a", a, SCALINGS[scaling][0]), ("b", b, SCALINGS[scaling][1])):
        if dtype not in types:
            hint = "" if scaling else "; quantised operands need the attribute scaling"
            raise UnsupportedDtype(f"matmul computes {', '.join(types)}; dtype of {name} is {dtype!r}{hint}")
    if out not in FLOATS:
        raise UnsupportedDtype(f"matmul writes {', '.join(FLOATS)}; dtype of out is {out!r}")
    if scaling == "mx" and a in FLOATS and b != "fp4":
        raise UnsupportedDtype(f"under scaling mx a 16-bit operand goes with fp4 weights, got {a} and {b}")
    if scaling in ("", "tensor", "row") and a != b and not (a in FP8 and b in FP8):
        raise UnsupportedDtype(f"a and b must have one dtype, got {a} and {b}; cast one of them first")


def _check_shape(p: Problem) -> None:
    if p.groups and (p.batched or p.scaling):
        raise InvalidWorkload("a grouped matmul can be neither batched nor quantised")
    if p.batched and p.scaling:
        raise InvalidWorkload("a batched matmul cannot be quantised; run its products one by one")
    group = {"block128": 128, "mx": MX_GROUP, "nvfp4": NVFP4_GROUP}.get(p.scaling) or int(
        p.scaling.partition(":")[2] or 1
    )
    if p.k % group:
        raise InvalidWorkload(
            f"K must be a multiple of {group} under scaling {p.scaling}, got {p.k}; pad it with zeros"
        )
    if group > 1 and (p.a.order, p.b.order) != ("row", "col"):
        raise InvalidWorkload(f"scaling {p.scaling} needs a in row and b in col layout (both dense along K)")


def group_size(scaling: str) -> int:
    """How many neighbours along K share a scale; 1 where scales do not change along K."""
    named = {"block128": 128, "mx": MX_GROUP, "nvfp4": NVFP4_GROUP}
    return named[scaling] if scaling in named else int(scaling.partition(":")[2] or 1)


def parse_layout(name: str, text: str, rows: int, columns: int, batched: bool = False) -> Layout:
    """The Layout of a [rows, columns] tensor, or a batch of them, from its text; InvalidWorkload when it reads
    otherwise."""
    strided = _STRIDED.fullmatch(text)
    if strided:
        across, inner, between, missed = (int(part or 0) for part in strided.groups())
        return Layout("strided", across, between, missed, inner)
    match = _LAYOUT.fullmatch(text)
    if not match:
        raise InvalidWorkload(
            f"layout of {name} must be row or col, then :<leading stride> @<batch stride> +<offset> where they are not "
            f"dense, or strided:<row stride>,<column stride>; got {text!r}"
        )
    order, leading, batch, offset = match.groups()
    dense, lines = (columns, rows) if order == "row" else (rows, columns)
    if leading and int(leading) < dense:
        raise InvalidWorkload(f"leading stride of {name} must be at least {dense}, got {leading}")
    step = int(leading) if leading else dense
    return Layout(order, step, int(batch) if batch else step * lines if batched else 0, int(offset or 0))


def _check_epilogue(steps: Sequence[str], n: int) -> None:
    unknown = [step for step in steps if step not in STEPS]
    if unknown:
        raise InvalidWorkload(f"epilogue steps must be among {', '.join(STEPS)}; got {', '.join(unknown)}")
    pairs = [step for step in steps if step in PAIRS]
    if len(pairs) > 1:
        raise InvalidWorkload(f"an epilogue can have one of {', '.join(PAIRS)}, got {', '.join(pairs)}")
    if pairs and n % 2:
        raise InvalidWorkload(f"{pairs[0]} needs an even N, got {n}")
    before = steps[: list(steps).index(pairs[0])] if pairs else ()
    if any(OPERANDS.get(step) == "mn" for step in before):
        raise InvalidWorkload(f"steps before {pairs[0]} cannot read a matrix, got {', '.join(before)}")
