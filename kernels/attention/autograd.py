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
    """The gradients of q, k and v through autograd. The forward runs at the first call on each stream: autograd works
    on the stream of the forward, and a CUDA graph cannot be captured on one stream with work on another."""
    import torch

    kept: dict[int, tuple[Any, list[torch.Tensor]]] = {}

    def call() -> Any:
        stream = torch.cuda.current_stream().cuda_stream if inputs["q"].is_cuda else 0
        if stream not in kept:
            leaves = [inputs[name].detach().requires_grad_() for name in ("q", "k", "v")]
            kept[stream] = forward(*leaves), leaves
        out, leaves = kept[stream]
        return torch.autograd.grad(out, leaves, inputs["d_out"], retain_graph=True)

    return f"{title} backward", call
