"""Random operands of a matmul workload, with its types and strides, and what quantised operands stand for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernelwright.kernels.matmul.reference import operand_name
from kernelwright.kernels.matmul.workload import OPERANDS, PAIRS, Layout, Problem
from kernelwright.kernels.operator import Inputs

if TYPE_CHECKING:
    import torch

PACKED = ("int4", "fp4")
"""Types of which two stand in a byte."""


def torch_dtype(name: str) -> torch.dtype:
    """torch's type of that name; bytes for packed types."""
    import torch

    types = {
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp32": torch.float32,
        "fp8e4m3": torch.float8_e4m3fn,
        "fp8e5m2": torch.float8_e5m2,
        "int8": torch.int8,
    }
    return types.get(name, torch.uint8)


def strided(batch: int | None, rows: int, columns: int, layout: Layout, dtype: str, device: str) -> torch.Tensor:
    """An empty [rows, columns] tensor, or [batch, rows, columns], laid out as said; gaps hold NaN (integers: zero)."""
    import torch

    sizes = (rows, columns) if batch is None else (batch, rows, columns)
    strides = layout.strides() if batch is None else (layout.batch, *layout.strides())
    # a whole line at the end, so that the last row's padding exists too
    length = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True) if size)
    length = -(-length // max(layout.leading, 1)) * max(layout.leading, 1) + layout.offset
    kind = torch_dtype(dtype)
    storage = torch.empty(length, dtype=kind, device=device)
    if kind.is_floating_point:
        storage = storage.view(torch.uint8).fill_(127).view(kind) if kind.itemsize == 1 else storage.fill_(float("nan"))
    else:
        storage.zero_()
    return storage.as_strided(sizes, strides, layout.offset)


def empty_output(problem: Problem, device: str) -> torch.Tensor:
    """out, filled with NaN."""
    batch = problem.batch if problem.batched else None
    return strided(batch, problem.m, problem.out_n, problem.out, problem.out_dtype, device)


def make_inputs(problem: Problem, seed: int, device: str) -> Inputs:
    """Every operand of the problem, random normal (integers: from -128 to 127; scales near 1). Vectors of the epilogue
    have the type of out, but fp32 where columns are scaled."""
    import torch

    p = problem
    generator = torch.Generator(device=device if device != "meta" else "cpu").manual_seed(seed)
    batch = p.batch if p.batched else None
    inputs: Inputs = {}
    for name, many, rows, columns, dtype in (
        ("a", batch, p.m, p.k, p.a_dtype),
        ("b", p.groups or batch, p.k, p.n, p.b_dtype),
    ):
        layout: Layout = getattr(p, name)
        if dtype in PACKED:
            from kernelwright.kernels.matmul.quantised import random_packed

            packed = random_packed(rows if name == "a" else columns, p.k, dtype, generator, device)
            inputs[name] = packed if name == "a" else packed.T
        else:
            inputs[name] = _random(strided(many, rows, columns, layout, dtype, device), generator)
    if p.groups:
        inputs["offsets"] = _offsets(p.m, p.groups, generator, device)
    inputs |= _scales(p, generator, device)
    return inputs | _epilogue_operands(problem, generator, device)


def _scales(p: Problem, generator: torch.Generator, device: str) -> Inputs:
    """a_scale and b_scale, positive; "tensor": fp32 [], "row": fp32 [M] and [N], others as `quantised` makes them."""
    import torch

    if p.scaling in ("tensor", "row"):
        sizes = {"a_scale": (p.m,), "b_scale": (p.n,)} if p.scaling == "row" else {"a_scale": (), "b_scale": ()}
        empty = {name: torch.empty(size, dtype=torch.float32, device=device) for name, size in sizes.items()}
        return empty if device == "meta" else {n: t.uniform_(0.5, 2.0, generator=generator) for n, t in empty.items()}
    if p.scaling:
        from kernelwright.kernels.matmul.quantised import random_scales

        return random_scales(p, generator, device)
    return {}


def _epilogue_operands(p: Problem, generator: torch.Generator, device: str) -> Inputs:
    out: Inputs = {}
    import torch

    columns = p.n
    # as a folded batch norm comes
    vectors = "fp32" if "scale_vec" in p.epilogue else p.out_dtype
    for position, step in enumerate(p.epilogue):
        if step in PAIRS:
            columns = p.out_n
        where = OPERANDS.get(step)
        if where is None:
            continue
        name = operand_name(p.epilogue, position)
        if where == "mn":
            batch = p.batch if p.batched else None
            layout = Layout("row", p.out_n, p.m * p.out_n)
            out[name] = _random(strided(batch, p.m, p.out_n, layout, p.out_dtype, device), generator)
        elif where == "1":
            out[name] = _random(torch.empty((), dtype=torch.float32, device=device), generator)
        else:
            size = p.m if where == "m" else columns
            out[name] = _random(torch.empty(size, dtype=torch_dtype(vectors), device=device), generator)
    return out


def _random(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Fill a tensor in place, through views that repeat elements too."""
    import torch

    if tensor.device.type == "meta" or tensor.numel() == 0:
        return tensor
    storage_like = tensor
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1 and not _overlaps(tensor):
        return tensor.normal_(generator=generator)
    if _overlaps(tensor):
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        storage_like = tensor.as_strided((span,), (1,), tensor.storage_offset())
    size, device = storage_like.shape, tensor.device
    if tensor.dtype == torch.int8:
        fresh = torch.randint(-128, 128, size, dtype=torch.int8, device=device, generator=generator)
    else:
        fresh = torch.randn(size, device=device, generator=generator).to(tensor.dtype)
    storage_like.copy_(fresh)
    return tensor


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two places of the tensor are one element, or may be."""
    reach = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1 and stride < reach:
            return True
        reach = max(reach, stride * size)
    return False


def _offsets(rows: int, groups: int, generator: torch.Generator, device: str) -> torch.Tensor:
    """Ends of the groups' rows: uneven, some groups empty where there are few rows; int32 [groups]."""
    import torch

    if device == "meta":
        return torch.empty(groups, dtype=torch.int32, device=device)
    shares = torch.rand(groups, generator=generator, device=device) + 0.5
    ends = (shares.cumsum(0) / shares.sum() * rows).round()
    ends[-1] = rows
    return ends.to(torch.int32)


def values(problem: Problem, inputs: Inputs, name: str) -> torch.Tensor:
    """What operand "a" or "b" stands for, in fp64: a [.., M, K], b [.., K, N]; tensor and row scales left out, since
    the epilogue's chain applies them."""
    tensor, dtype = inputs[name], getattr(problem, f"{name}_dtype")
    group_scaled = problem.scaling not in ("", "tensor", "row")
    scale = inputs.get(f"{name}_scale") if group_scaled else None
    if dtype not in PACKED and scale is None:
        return tensor.double()
    from kernelwright.kernels.matmul.quantised import dequantised

    along = "row" if name == "a" else "col"
    return dequantised(tensor, scale, dtype, problem.scaling, along)


def scaled(problem: Problem, inputs: Inputs, product: torch.Tensor) -> torch.Tensor:
    """A product [M, N] in fp64 times the tensor or row scales of its operands."""
    if problem.scaling not in ("tensor", "row"):
        return product
    a_scale, b_scale = inputs["a_scale"].double(), inputs["b_scale"].double()
    return product * (a_scale[:, None] if a_scale.dim() else a_scale) * b_scale
