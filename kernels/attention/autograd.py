"""The backward pass of a library's attention as a call that can be timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kernelwright.kernels.operator import Inputs

if TYPE_CHECKING:
    import torch

Call = tuple[str, Callable[[], Any]]
"""What a library call is named, and the call."""


def backward_of(title: str, forward: Callable[..., torch.Tensor], inputs: Inputs) -> Call:
    """The gradients of q, k and v through autograd; the forward runs once, at the first call."""
    import torch

    kept: list[Any] = []

    def call() -> Any:
        if not kept:
            leaves = [inputs[name].detach().requires_grad_() for name in ("q", "k", "v")]
            kept.extend((forward(*leaves), leaves))
        return torch.autograd.grad(kept[0], kept[1], inputs["d_out"], retain_graph=True)

    return f"{title} backward", call
