"""How a convolution is written as a Workload: dims N, C, H, W (input), K (output channels), R, S (kernel).

Tensors are x [N, C, H, W], w [K, C/groups, R, S] and out [N, K, P, Q], always as views in this order of dimensions;
P and Q follow from the other sizes. A one-dimensional convolution has H = R = 1.

A layout says how such a view lies in memory: "nhwc" (torch's channels_last; for w K, R, S, C), "nchw" (for w K, C, R,
S) or "strided:s0,s1,s2,s3" with four strides in elements, and "+1" where the base misses a multiple of 16 bytes by one
element. A batch may have stride 0 (one image repeated) in tensors that are read.

dtypes: x, w and out. The attribute `direction` says which of the three is computed from the other two:
"forward" (left out: it is the default), "input_gradient" (x, the gradient of the input, from `d_out` and w; `out` is
then the type and layout of d_out) or "weight_gradient" (w, the gradient of the weight, from x and `d_out`).

Attributes, each left out at its default: stride_h, stride_w (1), pad_h, pad_w (0), dilation_h, dilation_w (1), groups
(1), transposed (False; w is then [C, K/groups, R, S]) with output_pad_h, output_pad_w (0). `deterministic` (a fixed
order of sums) and `workspace_bytes` (the most memory besides the operands) limit the schedules.

Epilogue steps, forward only, in order and at will: "bias" [K], "scale_vec" [K] (a folded batch norm is scale_vec, then
bias), "residual" and "multiply" (tensors like out), and activations. A step that comes again reads "<step>_<place>".
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from kernelwright.errors import InvalidWorkload, UnsupportedDtype
from kernelwright.kernels.conv2d.layout import Layout, Sizes, overlaps, parse_layout
from kernelwright.kernels.precision import allowed
from kernelwright.types import DTYPES, FrozenMap, Scalar, Workload

ACTIVATIONS = ("relu", "relu6", "silu", "gelu", "gelu_tanh", "hardswish", "sigmoid", "tanh")
"""Pointwise functions of an epilogue; gelu is the exact (erf) form."""

OPERANDS: Mapping[str, str] = {"bias": "k", "scale_vec": "k", "residual": "out", "multiply": "out"}
"""Steps that read a tensor: one number a channel (k), or one for each element of the result (out)."""

STEPS = (*OPERANDS, *ACTIVATIONS)

DIRECTIONS = ("forward", "input_gradient", "weight_gradient")

FLOATS = ("fp16", "bf16", "fp32")

FP8 = ("fp8e4m3", "fp8e5m2")

DEFAULTS: Mapping[str, Scalar] = {
    "stride_h": 1,
    "stride_w": 1,
    "pad_h": 0,
    "pad_w": 0,
    "dilation_h": 1,
    "dilation_w": 1,
    "groups": 1,
    "transposed": False,
    "output_pad_h": 0,
    "output_pad_w": 0,
    "direction": "forward",
    "deterministic": False,
}
"""Attributes with their defaults; besides them there is `workspace_bytes`."""

TMA_ALIGNMENT = 16
"""Bytes by which the bulk copy engine needs bases and strides to be divisible."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A conv2d workload taken apart; `problem_of` makes it. Pairs are (vertical, horizontal)."""

    n: int
    c: int
    h: int
    w: int
    k: int
    r: int
    s: int
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    transposed: bool
    output_padding: tuple[int, int]
    direction: str
    dtypes: FrozenMap[str]
    laid_out: tuple[tuple[str, Layout], ...] = ()
    epilogue: tuple[str, ...] = ()
    deterministic: bool = False
    workspace_bytes: int | None = None

    @functools.cached_property
    def layouts(self) -> dict[str, Layout]:
        """The layouts of x, w and out."""
        return dict(self.laid_out)

    @functools.cached_property
    def out_size(self) -> tuple[int, int]:
        """(P, Q), rows and columns of out."""
        sizes = zip(
            (self.h, self.w),
            (self.r, self.s),
            self.stride,
            self.padding,
            self.dilation,
            self.output_padding,
            strict=True,
        )
        first, second = (_out_size(self.transposed, *each) for each in sizes)
        return first, second

    @functools.cached_property
    def shapes(self) -> dict[str, Sizes]:
        """Sizes of x, w and out."""
        inner = (self.k if self.transposed else self.c) // self.groups
        return {
            "x": (self.n, self.c, self.h, self.w),
            "w": (self.c if self.transposed else self.k, inner, self.r, self.s),
            "out": (self.n, self.k, *self.out_size),
        }

    @property
    def result(self) -> str:
        """Which of x, w and out is computed."""
        return {"forward": "out", "input_gradient": "x", "weight_gradient": "w"}[self.direction]

    @property
    def operands(self) -> tuple[str, str]:
        """The other two: the image that is read at every tap, then what it is multiplied with."""
        return {"out": ("x", "w"), "x": ("out", "w"), "w": ("x", "out")}[self.result]

    @property
    def scatters(self) -> bool:
        """Whether the result is an image of which each element of the operand image adds to R x S neighbours."""
        return self.direction == "input_gradient" or self.transposed

    @property
    def depthwise(self) -> bool:
        """Whether no channel of the input is mixed with another one."""
        return self.groups > 1 and self.groups == self.c

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the operands."""
        return DTYPES[self.dtypes[self.operands[0]]] // 8

    def aligned(self, tensor: str) -> bool:
        """Whether "x", "w" or "out" can be read by the bulk copy engine: neighbouring channels are neighbours in
        memory, its base and all its other strides are multiples of TMA_ALIGNMENT bytes."""
        layout, sizes = self.layouts[tensor], self.shapes[tensor]
        size_bytes = DTYPES[self.dtypes[tensor]] // 8
        pairs = [
            (size, stride) for place, (size, stride) in enumerate(zip(sizes, layout.strides, strict=True)) if place != 1
        ]
        whole = all(stride * size_bytes % TMA_ALIGNMENT == 0 for size, stride in pairs if size > 1)
        return whole and layout.offset == 0 and (layout.strides[1] == 1 or sizes[1] == 1)


def conv2d_workload(
    image: tuple[int, int, int, int],
    k: int,
    kernel: tuple[int, int] | int,
    dtype: str = "bf16",
    layout: str = "nhwc",
    epilogue: Sequence[str] = (),
    *,
    stride: tuple[int, int] | int = 1,
    padding: tuple[int, int] | int = 0,
    dilation: tuple[int, int] | int = 1,
    groups: int = 1,
    transposed: bool = False,
    output_padding: tuple[int, int] | int = 0,
    direction: str = "forward",
    dtypes: Mapping[str, str] | None = None,
    layouts: Mapping[str, str] | None = None,
    error_budget: float | None = None,
    attributes: Mapping[str, Scalar] | None = None,
) -> Workload:
    """The workload of a convolution of images [N, C, H, W] to k channels; InvalidWorkload for what cannot be.

    One number stands for both directions. dtype and layout: of x, w and out, unless `dtypes` or `layouts` say other
    ones; out of 8-bit operands is bf16. attributes: deterministic and workspace_bytes.
    """
    n, c, h, w = image
    (r, s), pairs = _pair(kernel), zip(("h", "w"), _pair(stride), _pair(padding), _pair(dilation), strict=True)
    given: dict[str, Scalar] = {"groups": groups, "transposed": transposed, "direction": direction}
    for axis, step, pad, apart in pairs:
        given |= {f"stride_{axis}": step, f"pad_{axis}": pad, f"dilation_{axis}": apart}
    given |= dict(zip(("output_pad_h", "output_pad_w"), _pair(output_padding), strict=True))
    given |= attributes or {}
    kinds = {"x": dtype, "w": dtype, "out": dtype if dtype in FLOATS else "bf16"} | dict(dtypes or {})
    try:
        workload = Workload(
            "conv2d",
            FrozenMap({"N": n, "C": c, "H": h, "W": w, "K": k, "R": r, "S": s}),
            FrozenMap(kinds),
            FrozenMap({"x": layout, "w": layout, "out": layout} | dict(layouts or {})),
            tuple(epilogue),
            FrozenMap({name: value for name, value in given.items() if value != DEFAULTS.get(name)}),
            error_budget,
        )
    except ValueError as error:
        raise InvalidWorkload(str(error)) from error
    problem_of(workload)
    return workload


def _pair(value: tuple[int, int] | int) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


@functools.lru_cache(maxsize=4096)
def problem_of(workload: Workload) -> Problem:
    """Take a conv2d workload apart; raises InvalidWorkload or UnsupportedDtype with what was wanted."""
    _check_names(workload)
    attributes, dims = _attributes(workload), workload.dims
    pairs = {x: (int(attributes[f"{x}_h"]), int(attributes[f"{x}_w"])) for x in ("stride", "pad", "dilation")}
    bare = Problem(
        n=dims["N"],
        c=dims["C"],
        h=dims["H"],
        w=dims["W"],
        k=dims["K"],
        r=dims["R"],
        s=dims["S"],
        stride=pairs["stride"],
        padding=pairs["pad"],
        dilation=pairs["dilation"],
        groups=int(attributes["groups"]),
        transposed=bool(attributes["transposed"]),
        output_padding=(int(attributes["output_pad_h"]), int(attributes["output_pad_w"])),
        direction=str(attributes["direction"]),
        dtypes=workload.dtypes,
        epilogue=workload.epilogue,
        deterministic=bool(attributes["deterministic"]),
        workspace_bytes=_workspace(workload.attributes),
    )
    _check_shape(bare)
    layouts = [(name, parse_layout(name, workload.layouts[name], sizes)) for name, sizes in bare.shapes.items()]
    problem = dataclasses.replace(bare, laid_out=tuple(layouts))
    _check_layouts(problem)
    _check_types(problem, workload.error_budget)
    _check_epilogue(problem)
    return problem


def complete_attributes(workload: Workload) -> dict[str, Scalar]:
    """The workload's attributes with the defaults filled in: what a kernel file's `plan` is given."""
    return {**DEFAULTS, **workload.attributes}


def _out_size(transposed: bool, size: int, taps: int, stride: int, pad: int, dilation: int, extra: int) -> int:
    reach = dilation * (taps - 1)
    if transposed:
        return (size - 1) * stride - 2 * pad + reach + extra + 1
    return (size + 2 * pad - reach - 1) // stride + 1


def _check_names(workload: Workload) -> None:
    if workload.operator != "conv2d":
        raise InvalidWorkload(f"operator must be 'conv2d', got {workload.operator!r}")
    tensors = {"x", "w", "out"}
    for field, needed in (("dims", set("NCHWKRS")), ("dtypes", tensors), ("layouts", tensors)):
        got = set(getattr(workload, field))
        if got != needed:
            raise InvalidWorkload(
                f"conv2d {field} must be {', '.join(sorted(needed))}, got {', '.join(sorted(got)) or 'none'}"
            )


def _attributes(workload: Workload) -> dict[str, Scalar]:
    """Attributes with defaults; those of a wrong name or type, and those that say a default, are refused."""
    for name, value in workload.attributes.items():
        if name == "workspace_bytes":
            continue
        if name not in DEFAULTS:
            known = ", ".join((*DEFAULTS, "workspace_bytes"))
            raise InvalidWorkload(f"conv2d attributes must be among {known}, got {name!r}")
        default = DEFAULTS[name]
        if type(value) is not type(default):
            kind = {int: "a whole number", bool: "true or false", str: "a name"}[type(default)]
            raise InvalidWorkload(f"attribute {name} must be {kind}, got {value!r}")
        if value == default:
            raise InvalidWorkload(
                f"attribute {name} is {default} by default; leave it out, so that equal problems have equal keys"
            )
    return complete_attributes(workload)


def _workspace(attributes: Mapping[str, Scalar]) -> int | None:
    limit = attributes.get("workspace_bytes")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise InvalidWorkload(f"workspace_bytes must be a whole number of bytes, got {limit!r}")
    return limit


def _check_shape(p: Problem) -> None:
    sizes = {"C": p.c, "H": p.h, "W": p.w, "K": p.k, "R": p.r, "S": p.s, "groups": p.groups}
    sizes |= {f"{name}_{axis}": pair[i] for name, pair in _positive(p) for i, axis in enumerate("hw")}
    small = [f"{name}={size}" for name, size in sizes.items() if size < 1]
    if small:
        raise InvalidWorkload(f"every size but the batch N must be at least 1, got {', '.join(small)}")
    if min(*p.padding, *p.output_padding) < 0:
        raise InvalidWorkload(f"padding must be 0 or more, got {p.padding} and {p.output_padding} of the output")
    if p.c % p.groups or p.k % p.groups:
        raise InvalidWorkload(f"groups must divide C and K, got groups={p.groups}, C={p.c}, K={p.k}")
    if p.direction not in DIRECTIONS:
        raise InvalidWorkload(f"direction must be one of {', '.join(DIRECTIONS)}, got {p.direction!r}")
    if p.transposed and p.direction != "forward":
        raise InvalidWorkload(
            f"a transposed convolution has only the direction forward, got {p.direction}; its input gradient is a "
            "forward convolution of d_out with the same weight, its weight gradient one with x and d_out exchanged"
        )
    _check_output(p)


def _positive(p: Problem) -> tuple[tuple[str, tuple[int, int]], ...]:
    return ("stride", p.stride), ("dilation", p.dilation)


def _check_output(p: Problem) -> None:
    for axis, size, taps, place in (("H", p.h, p.r, 0), ("W", p.w, p.s, 1)):
        pad, apart, extra, step = (pair[place] for pair in (p.padding, p.dilation, p.output_padding, p.stride))
        if extra and not p.transposed:
            raise InvalidWorkload("output_pad_h and output_pad_w belong to transposed convolutions; leave them out")
        if extra >= max(step, apart, 1) and extra:
            raise InvalidWorkload(
                f"output padding must be smaller than stride or dilation along {axis}, got {extra} for stride {step} "
                f"and dilation {apart}"
            )
        if p.out_size[place] >= 1:
            continue
        if p.transposed:
            raise InvalidWorkload(f"the result has no pixel along {axis}: padding {pad} takes away all of them")
        raise InvalidWorkload(
            f"the result has no pixel along {axis}: {taps} taps with dilation {apart} reach over "
            f"{apart * (taps - 1) + 1} pixels, the input with its padding has {size + 2 * pad}; pad it more"
        )


def _check_layouts(p: Problem) -> None:
    sizes, strides = p.shapes[p.result], p.layouts[p.result].strides
    if overlaps(sizes, strides):
        raise InvalidWorkload(
            f"the result {p.result} {list(sizes)} must have a place of its own for every element, got strides "
            f"{list(strides)}"
        )


def _check_types(p: Problem, error_budget: float | None) -> None:
    (first, second), result = (p.dtypes[name] for name in p.operands), p.dtypes[p.result]
    names, types = " and ".join(p.operands), (FLOATS if p.direction != "forward" else (*FLOATS, *FP8, "int8"))
    for name in p.operands:
        if p.dtypes[name] not in types:
            raise UnsupportedDtype(
                f"conv2d {p.direction} reads {', '.join(types)}; dtype of {name} is {p.dtypes[name]!r}"
            )
    if first != second and not (first in FP8 and second in FP8):
        raise UnsupportedDtype(f"{names} must have one dtype, got {first} and {second}; cast one of them first")
    written = (*FLOATS, "int32") if first == "int8" else FLOATS
    if result not in written:
        raise UnsupportedDtype(f"conv2d of {first} writes {', '.join(written)}; dtype of {p.result} is {result!r}")
    if not allowed(first, second, result, error_budget):
        raise InvalidWorkload(
            f"no way to compute {result} from {first} operands keeps within an error of {error_budget:g}; "
            "allow a larger error_budget or a wider result"
        )


def _check_epilogue(p: Problem) -> None:
    unknown = [step for step in p.epilogue if step not in STEPS]
    if unknown:
        raise InvalidWorkload(f"epilogue steps must be among {', '.join(STEPS)}; got {', '.join(unknown)}")
    if p.epilogue and p.direction != "forward":
        raise InvalidWorkload(f"only direction forward has an epilogue, got {', '.join(p.epilogue)} for {p.direction}")
    if p.epilogue and p.dtypes["out"] == "int32":
        raise InvalidWorkload("an int32 result takes no epilogue; let out be fp16, bf16 or fp32")
