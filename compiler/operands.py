"""From the tensors of a matrix product to the Workload that the records are filed under."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernelwright.errors import InvalidWorkload, UnsupportedDtype
from kernelwright.types import FrozenMap, Scalar, Workload

DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
"""Element types that our kernels compute, with their names in a workload."""

DETERMINISTIC = "deterministic"
"""The attribute of a workload whose sums have a fixed order."""

TF32_ERROR_BUDGET = 1e-3
"""Error budget of an fp32 product where torch may compute it in TF32: a little over the error of TF32 itself."""


def written_dtype(dtype: torch.dtype) -> str:
    """torch's name of an element type, as our operators take it: "bfloat16"; getattr(torch, name) reads it."""
    return str(dtype).removeprefix("torch.")


def layout_of(tensor: torch.Tensor) -> str:
    """ "row", "col", "row:LD" or "col:LD" of a [rows, columns] tensor; InvalidWorkload for any other strides."""
    (rows, columns), (down, across) = tensor.shape, tensor.stride()
    if across == 1 and down >= columns:
        return "row" if down == columns else f"row:{down}"
    if down == 1 and across >= rows:
        return "col" if across == rows else f"col:{across}"
    raise InvalidWorkload(f"one dimension must have unit stride and the other none that overlaps, got {(down, across)}")


def workload_of(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, epilogue: Sequence[str], out_dtype: torch.dtype
) -> Workload:
    """The workload of epilogue(a [M, K] @ b [K, N] + bias [N]), written row-major.

    Fake tensors will do. Raises UnsupportedDtype or InvalidWorkload, with the reason, for what has no workload.
    """
    if 0 in (*a.shape, *b.shape):
        raise InvalidWorkload(f"there must be something to multiply, got {tuple(a.shape)} @ {tuple(b.shape)}")
    _check_types(a, b, bias, out_dtype)
    name = DTYPE_NAMES[a.dtype]
    return Workload(
        "matmul",
        FrozenMap({"M": a.shape[0], "N": b.shape[1], "K": a.shape[1]}),
        FrozenMap({"a": name, "b": name, "out": name}),
        FrozenMap({"a": layout_of(a), "b": layout_of(b), "out": "row"}),
        tuple(epilogue),
        FrozenMap(sums_in_order()),
        error_budget=fp32_error_budget(a.dtype),
    )


def batched_workload_of(
    a: torch.Tensor, b: torch.Tensor, bias: None, epilogue: Sequence[str], out_dtype: torch.dtype
) -> Workload:
    """The workload of epilogue(a [B, M, K] @ b [B, K, N]), written row-major; as `workload_of` without a bias.

    A batch of stride 0 repeats one matrix.
    """
    if 0 in (*a.shape, *b.shape):
        raise InvalidWorkload(f"there must be something to multiply, got {tuple(a.shape)} @ {tuple(b.shape)}")
    _check_types(a, b, bias, out_dtype)
    name = DTYPE_NAMES[a.dtype]
    return Workload(
        "matmul",
        FrozenMap({"B": a.shape[0], "M": a.shape[1], "N": b.shape[2], "K": a.shape[2]}),
        FrozenMap({"a": name, "b": name, "out": name}),
        FrozenMap({"a": batched_layout_of(a), "b": batched_layout_of(b), "out": "row"}),
        tuple(epilogue),
        FrozenMap(sums_in_order()),
        error_budget=fp32_error_budget(a.dtype),
    )


def batched_layout_of(tensor: torch.Tensor) -> str:
    """`layout_of` each matrix of a [B, rows, columns] tensor, then "@" and the stride between them unless it is dense;
    "strided:.." where neither dimension of the matrices has unit stride."""
    (batch, rows, columns), (between, down, across) = tensor.shape, tensor.stride()
    try:
        text = layout_of(tensor[0])
    except InvalidWorkload:
        return f"strided:{down},{across}@{between}"
    dense = (down if text.startswith("row") else across) * (rows if text.startswith("row") else columns)
    if batch == 1 or between == dense:
        return text
    return f"{text}@{between}"


def is_static(tensor: torch.Tensor) -> bool:
    """Whether all sizes and strides are plain numbers; asking anything else of a symbolic one would bind it."""
    return all(isinstance(size, int) for size in (*tensor.shape, *tensor.stride()))


def _check_types(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> None:
    # A result of another type is left alone: there is no vendor call for it, so no record says which is faster.
    types = {tensor.dtype for tensor in (a, b, bias) if tensor is not None} | {out_dtype}
    if len(types) > 1 or a.dtype not in DTYPE_NAMES:
        got = ", ".join(sorted(str(dtype) for dtype in types))
        raise UnsupportedDtype(f"operands and result must all be one of {', '.join(DTYPE_NAMES.values())}, got {got}")
    columns = b.shape[-1]
    if bias is not None and (tuple(bias.shape) != (columns,) or bias.stride(0) != 1):
        raise InvalidWorkload(
            f"the bias must be a dense vector of {columns}, got shape {tuple(bias.shape)}, strides {bias.stride()}"
        )


def sums_in_order() -> dict[str, Scalar]:
    """The attribute that keeps out kernels which add up in no fixed order, where torch is told to give the same numbers
    each time (torch.use_deterministic_algorithms); dynamo compiles again where that changes."""
    return {DETERMINISTIC: True} if torch.are_deterministic_algorithms_enabled() else {}


def fp32_error_budget(dtype: torch.dtype) -> float | None:
    """The error that torch's settings allow a product of this type; None for that of the type itself."""
    # torch.get_float32_matmul_precision raises once this newer setting has been used; this one follows both.
    allows_tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return TF32_ERROR_BUDGET if dtype is torch.float32 and allows_tf32 else None
