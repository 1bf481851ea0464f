"""Random quantised operands of a matmul, and what they stand for in fp64; see `workload.py` for the formats."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kernelwright.kernels.matmul.workload import Problem, group_size
from kernelwright.kernels.operator import Inputs

if TYPE_CHECKING:
    import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of fp4 by its low three bits; the fourth is the sign."""

BITS16 = ("fp16", "bf16")


def random_packed(rows: int, k: int, dtype: str, generator: torch.Generator, device: str) -> torch.Tensor:
    """Random bytes [rows, K/2]: every byte is two numbers of either packed type ("int4", "fp4")."""
    import torch

    if device == "meta":
        return torch.empty((rows, k // 2), dtype=torch.uint8, device=device)
    return torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, device=device, generator=generator)


def random_scales(problem: Problem, generator: torch.Generator, device: str) -> Inputs:
    """a_scale and b_scale for the scalings block128, group:g, mx and nvfp4, near 1 (group: near 0.1)."""
    import torch

    p, group = problem, group_size(problem.scaling)
    groups = p.k // group
    if p.scaling == "block128":
        sizes = {"a_scale": (p.m, groups), "b_scale": (groups, math.ceil(p.n / group))}
        return {name: _uniform(size, 0.5, 2.0, torch.float32, generator, device) for name, size in sizes.items()}
    if p.scaling.startswith("group:"):
        kind = torch.float16 if p.a_dtype == "fp16" else torch.bfloat16
        return {"b_scale": _uniform((groups, p.n), 0.02, 0.2, kind, generator, device)}
    rows = {"b_scale": p.n} if p.a_dtype in BITS16 else {"a_scale": p.m, "b_scale": p.n}
    if p.scaling == "nvfp4":
        return {
            name: _uniform((size, groups), 0.25, 2.0, torch.float8_e4m3fn, generator, device)
            for name, size in rows.items()
        }
    if device == "meta":
        return {name: torch.empty((size, groups), dtype=torch.uint8, device=device) for name, size in rows.items()}
    return {
        name: torch.randint(125, 130, (size, groups), dtype=torch.uint8, device=device, generator=generator)
        for name, size in rows.items()
    }


def _uniform(
    size: tuple[int, ...], low: float, high: float, kind: torch.dtype, generator: torch.Generator, device: str
) -> torch.Tensor:
    import torch

    if device == "meta":
        return torch.empty(size, dtype=kind, device=device)
    return torch.empty(size, dtype=torch.float32, device=device).uniform_(low, high, generator=generator).to(kind)


def dequantised(tensor: torch.Tensor, scale: torch.Tensor | None, dtype: str, scaling: str, along: str) -> torch.Tensor:
    """The numbers that an operand stands for, in fp64.

    along: "row" for a [M, K] (packed: [M, K/2]), "col" for b [K, N] (packed: [K/2, N]). scale: laid out as the scaling
    says; None leaves the numbers as they are stored.
    """
    lines = tensor if along == "row" else tensor.T
    numbers = _unpacked(lines, dtype) if dtype in ("int4", "fp4") else lines.double()
    if scale is not None:
        numbers = numbers * _scale_of_each(scale, scaling, along, *numbers.shape)
    return numbers if along == "row" else numbers.T


def _unpacked(lines: torch.Tensor, dtype: str) -> torch.Tensor:
    """Numbers [rows, K] of bytes [rows, K/2], the low half of a byte first."""
    import torch

    halves = torch.stack((lines & 15, lines >> 4), dim=-1).flatten(-2)
    if dtype == "int4":
        return halves.double() - 8
    table = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.float64, device=lines.device)
    return table[halves.long()]


def _scale_of_each(scale: torch.Tensor, scaling: str, along: str, rows: int, k: int) -> torch.Tensor:
    """The scale of every number of an operand's lines [rows, K]."""
    import torch

    group = group_size(scaling)
    if scaling == "mx":
        # the greatest byte is NaN (OCP microscaling formats, e8m0)
        factors = torch.exp2(scale.double() - 127).masked_fill(scale == 255, math.nan)
    elif scaling == "nvfp4":
        factors = scale.double()
    else:
        factors = scale.double() if along == "row" else scale.double().T
        if scaling == "block128" and along == "col":
            factors = factors.repeat_interleave(group, 0)[:rows]
    return factors.repeat_interleave(group, 1)[:, :k]
