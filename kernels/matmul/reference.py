"""The right answer of a matmul, in fp64 and independent of the vendor's low-precision paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


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


def finished(product: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """activation(product + bias) in fp64: product [M, N] in fp64, bias [N] or None, activation by name or ""."""
    out = product if bias is None else product + bias.double()
    return activations()[activation](out) if activation else out


def product_check(a: torch.Tensor, b: torch.Tensor, product: torch.Tensor) -> float:
    """Relative error of product = a @ b by Freivalds' probe: product @ v against a @ (b @ v), without a matrix product.

    a [M, K], b [K, N], product [M, N] in fp64. A library that drops part of the sum is seen here.
    """
    import torch

    generator = torch.Generator(device=a.device).manual_seed(0)
    probe = torch.randn(b.shape[1], dtype=torch.float64, device=a.device, generator=generator)

    def rows_times(matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        parts = [(chunk.double() * vector).sum(1) for chunk in matrix.split(1024)]
        return torch.cat(parts) if parts else vector.new_zeros(0)

    want = rows_times(a, rows_times(b, probe))
    got = rows_times(product, probe)
    scale = want.norm().item()
    return float((got - want).norm().item() / scale if scale else got.norm().item())
