"""Random operands of a conv2d workload, with its types and strides, in buffers whose gaps hold NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernelwright.kernels.conv2d.layout import Layout, Sizes, overlaps
from kernelwright.kernels.conv2d.workload import OPERANDS, Problem
from kernelwright.kernels.operator import Inputs

if TYPE_CHECKING:
    import torch

GUARD = 128
"""Elements of NaN before and after every tensor: reading beyond an edge must not go unseen."""


def torch_dtype(name: str) -> torch.dtype:
    """torch's type of that name."""
    import torch

    return {
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp32": torch.float32,
        "fp8e4m3": torch.float8_e4m3fn,
        "fp8e5m2": torch.float8_e5m2,
        "int8": torch.int8,
        "int32": torch.int32,
    }[name]


def operand_name(epilogue: tuple[str, ...], position: int) -> str:
    """Under which name the operand of a step stands among the inputs: the step's, numbered when it comes again."""
    step = epilogue[position]
    return step if epilogue.index(step) == position else f"{step}_{position}"


def strided(sizes: Sizes, layout: Layout, dtype: str, device: str) -> torch.Tensor:
    """A tensor of these sizes, laid out as said, all NaN (integers: the least value), as are its gaps and surroundings.

    Its base is at a multiple of 16 bytes, and layout.offset elements further.
    """
    import torch

    last = sum((size - 1) * stride for size, stride in zip(sizes, layout.strides, strict=True) if size)
    kind = torch_dtype(dtype)
    storage = torch.empty(last + 1 + layout.offset + 2 * GUARD, dtype=kind, device=device)
    if not kind.is_floating_point:
        storage.fill_(torch.iinfo(kind).min)
    elif kind.itemsize == 1:
        # no kernel of torch fills such types; all ones but the sign are NaN in both of them
        storage.view(torch.uint8).fill_(127)
    else:
        storage.fill_(float("nan"))
    return storage.as_strided(sizes, layout.strides, layout.offset + GUARD)


def empty_output(problem: Problem, device: str) -> torch.Tensor:
    """The result, filled with NaN (integers: the least value)."""
    name = problem.result
    return strided(problem.shapes[name], problem.layouts[name], problem.dtypes[name], device)


def make_inputs(problem: Problem, seed: int, device: str) -> Inputs:
    """Both operands and what the epilogue reads, random normal (integers: from -128 to 127).

    "x", "w" and "d_out" (in a gradient's workload), "bias" and "scale_vec" [K], "residual" and "multiply" like out.
    Vectors have the type of out, but fp32 where channels are scaled: a folded batch norm comes that way.
    """
    import torch

    generator = torch.Generator(device=device if device != "meta" else "cpu").manual_seed(seed)
    inputs: Inputs = {}
    for name in problem.operands:
        empty = strided(problem.shapes[name], problem.layouts[name], problem.dtypes[name], device)
        inputs["d_out" if name == "out" else name] = fill_random(empty, generator)
    vectors = "fp32" if "scale_vec" in problem.epilogue else problem.dtypes["out"]
    for position, step in enumerate(problem.epilogue):
        where = OPERANDS.get(step)
        if where is None:
            continue
        if where == "k":
            empty = torch.empty(problem.k, dtype=torch_dtype(vectors), device=device)
        else:
            empty = empty_output(problem, device)
        inputs[operand_name(problem.epilogue, position)] = fill_random(empty, generator)
    return inputs


def fill_random(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Fill a tensor in place, through views that repeat elements too; meta tensors stay as they are."""
    import torch

    if tensor.device.type == "meta" or tensor.numel() == 0:
        return tensor
    target = tensor
    sizes = (tensor.shape, tensor.stride()) if tensor.dim() == 4 else ((), ())
    if sizes[0] and overlaps(*sizes):
        span = 1 + sum((size - 1) * stride for size, stride in zip(*sizes, strict=True))
        target = tensor.as_strided((span,), (1,), tensor.storage_offset())
    if target.dtype == torch.int8:
        fresh = torch.randint(-128, 128, target.shape, dtype=torch.int8, device=tensor.device, generator=generator)
    else:
        fresh = torch.randn(target.shape, device=tensor.device, generator=generator).to(target.dtype)
    target.copy_(fresh)
    return tensor
