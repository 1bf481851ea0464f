"""From the tensors of a convolution to the Workload that the records are filed under."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kernelwright.compiler.operands import DETERMINISTIC, DTYPE_NAMES, TF32_ERROR_BUDGET, sums_in_order
from kernelwright.errors import InvalidWorkload, UnsupportedDtype
from kernelwright.kernels.conv2d.layout import dense_strides
from kernelwright.kernels.conv2d.workload import conv2d_workload
from kernelwright.types import Workload

ORDERS = ("nhwc", "nchw")


@dataclasses.dataclass(frozen=True)
class Geometry:
    """How a convolution moves over its image; pairs are (vertical, horizontal)."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    transposed: bool
    output_padding: tuple[int, int]
    groups: int

    @classmethod
    def of(cls, args: Sequence[Any], dims: int = 2) -> Geometry:
        """From aten.convolution's arguments behind the bias: stride, padding, dilation, transposed, output_padding,
        groups. dims: 1 for a line, which is an image of height 1 under a kernel of height 1. InvalidWorkload for
        another number of dimensions, or where numbers are not known yet."""
        stride, padding, dilation, transposed, output_padding, groups = args
        pairs = (stride, padding, dilation, output_padding)
        if any(len(pair) not in (1, 2) for pair in pairs):
            raise InvalidWorkload(f"a convolution must have two dimensions, got {len(stride)}")
        if not all(isinstance(number, int) for number in (groups, *(x for pair in pairs for x in pair))):
            raise InvalidWorkload("the numbers of a convolution must be known before it runs")
        still = (1, 0, 1, 0) if dims == 1 else [pair[0] for pair in pairs]
        step, pad, apart, extra = ((first, pair[-1]) for first, pair in zip(still, pairs, strict=True))
        return cls(step, pad, apart, bool(transposed), extra, groups)


def workload_of(
    tensors: Mapping[str, torch.Tensor], geometry: Geometry, direction: str, epilogue: Sequence[str] = ()
) -> Workload:
    """The workload of a convolution of x [N, C, H, W] by w to out, or of a gradient of it, from all three tensors.

    Fake tensors will do. Raises UnsupportedDtype or InvalidWorkload, with the reason, for what has no workload.
    """
    x, w, out = (tensors[name] for name in ("x", "w", "out"))
    if any(tensor.dim() != 4 for tensor in (x, w, out)):
        raise InvalidWorkload(f"a convolution must have two dimensions, got {x.dim() - 2}")
    if any(0 in tensor.shape for tensor in (x, w, out)):
        raise InvalidWorkload(f"there must be something to compute, got {list(x.shape)} by {list(w.shape)}")
    types = {tensor.dtype for tensor in (x, w, out)}
    if len(types) > 1 or x.dtype not in DTYPE_NAMES:
        got = ", ".join(sorted(map(str, types)))
        raise UnsupportedDtype(f"operands and result must all be one of {', '.join(DTYPE_NAMES.values())}, got {got}")
    n, c, h, width = x.shape
    return conv2d_workload(
        (n, c, h, width),
        out.shape[1],
        (w.shape[2], w.shape[3]),
        DTYPE_NAMES[x.dtype],
        epilogue=epilogue,
        stride=geometry.stride,
        padding=geometry.padding,
        dilation=geometry.dilation,
        groups=geometry.groups,
        transposed=geometry.transposed,
        output_padding=geometry.output_padding,
        direction=direction,
        layouts=layouts_of(tensors),
        error_budget=_error_budget(x.dtype),
        attributes={DETERMINISTIC: True} if torch.backends.cudnn.deterministic else sums_in_order(),
    )


def layouts_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The layout of each tensor as text. One that could be called either way is named like the first that could not."""
    possible = {name: [order for order in ORDERS if _lies(tensor, order)] for name, tensor in tensors.items()}
    certain = [orders[0] for orders in possible.values() if len(orders) == 1]
    usual = certain[0] if certain else ORDERS[0]
    found = {}
    for name, tensor in tensors.items():
        orders = possible[name]
        strided = f"strided:{','.join(map(str, tensor.stride()))}"
        found[name] = strided if not orders else usual if usual in orders else orders[0]
    return found


def _lies(tensor: torch.Tensor, order: str) -> bool:
    """Whether a tensor lies in this order without gaps; strides of dimensions of size 1 say nothing."""
    n, c, h, w = tensor.shape
    pairs = zip(tensor.shape, tensor.stride(), dense_strides(order, (n, c, h, w)), strict=True)
    return all(size <= 1 or got == want for size, got, want in pairs)


def _error_budget(dtype: torch.dtype) -> float | None:
    allows_tf32 = torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
    return TF32_ERROR_BUDGET if dtype is torch.float32 and allows_tf32 else None
