"""The right answer of a matmul, in fp64 and independent of the vendor's low-precision paths."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kernelwright.kernels.matmul.workload import OPERANDS, PAIRS

if TYPE_CHECKING:
    import torch


@functools.cache
def activations() -> Mapping[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Each activation of an epilogue as torch computes it."""
    import torch
    import torch.nn.functional as functional

    return {
        "relu": torch.relu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "silu": functional.silu,
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
    }


def gelu_derivative(x: torch.Tensor) -> torch.Tensor:
    """The derivative of the exact gelu at x."""
    import torch

    density: torch.Tensor = torch.exp(-0.5 * x * x) / (2 * torch.pi) ** 0.5
    derivative: torch.Tensor = torch.special.ndtr(x) + x * density
    return derivative


def gated(step: str, x: torch.Tensor) -> torch.Tensor:
    """The gated unit `step` of x [.., 2 * columns]."""
    import torch
    import torch.nn.functional as functional

    left, right = x.chunk(2, -1)
    if step == "swiglu":
        return functional.silu(left) * right
    return left * functional.gelu(right) if step == "geglu" else left * torch.sigmoid(right)


def operand_name(epilogue: tuple[str, ...], position: int) -> str:
    """Under which name the operand of a step stands among the inputs: the step's, numbered when it comes again."""
    step = epilogue[position]
    return step if epilogue.index(step) == position else f"{step}_{position}"


def finished(product: torch.Tensor, inputs: Mapping[str, torch.Tensor], epilogue: tuple[str, ...]) -> torch.Tensor:
    """The epilogue on product [.., M, N], in the product's own type; operands are cast to it."""
    out = product
    for position, step in enumerate(epilogue):
        if step in PAIRS:
            out = gated(step, out)
        elif step in OPERANDS:
            value = inputs[operand_name(epilogue, position)].to(out.dtype)
            value = value.unsqueeze(-1) if OPERANDS[step] == "m" else value
            out = _with_operand(step, out, value)
        else:
            out = activations()[step](out)
    return out


def _with_operand(step: str, x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if step in ("bias", "bias_m", "residual"):
        return x + value
    return x * (gelu_derivative(value) if step == "gelu_backward" else value)


def product_check(a: torch.Tensor, b: torch.Tensor, product: torch.Tensor) -> float:
    """Relative error of product = a @ b by Freivalds' probe: product @ v against a @ (b @ v), without a matrix product.

    a [.., M, K], b [.., K, N], product [.., M, N] in fp64. A library that drops part of the sum is seen here.
    """
    import torch

    generator = torch.Generator(device=a.device).manual_seed(0)
    probe = torch.randn(b.shape[-1], dtype=torch.float64, device=a.device, generator=generator)

    def rows_times(matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        if matrix.numel() == 0:
            return (matrix.double() * vector.unsqueeze(-2)).sum(-1)
        parts = [(chunk.double() * vector.unsqueeze(-2)).sum(-1) for chunk in matrix.split(1024, -2)]
        return torch.cat(parts, -1)

    want = rows_times(a, rows_times(b, probe))
    got = rows_times(product, probe)
    scale = want.norm().item()
    return float((got - want).norm().item() / scale if scale else got.norm().item())
