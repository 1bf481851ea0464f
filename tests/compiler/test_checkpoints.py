"""What is put into a graph is computed again in the backward pass exactly where what it takes over would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch.utils.checkpoint import checkpoint

from kernelwright.compiler.kernel_call import CALL
from kernelwright.compiler.ops import MATMUL

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def tensor(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


STEPS: dict[str, tuple[Step, torch.Tensor, torch.Tensor]] = {
    "product": (lambda x, w: x @ w, tensor(8, 8), tensor(8, 8)),
    "residual": (lambda x, w: x @ w + x, tensor(8, 8), tensor(8, 8)),
    "residual in a view": (lambda x, w: functional.linear(x, w) + x, tensor(2, 4, 8), tensor(8, 8)),
    "batched": (torch.bmm, tensor(3, 8, 8), tensor(3, 8, 8)),
    "convolution": (lambda x, w: functional.conv2d(x, w, padding=1) + x, tensor(2, 4, 6, 6), tensor(4, 4, 3, 3)),
    "attention": (functional.scaled_dot_product_attention, tensor(2, 2, 8, 16), tensor(2, 2, 8, 16)),
}


def saved_by(run: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
    """How many numbers a forward pass leaves for the backward pass, and the gradients."""
    leaves, seen = [x.clone().requires_grad_(), w.clone().requires_grad_()], []

    def pack(one: torch.Tensor) -> torch.Tensor:
        seen.append(one.numel())
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        out = run(*leaves)
    return sum(seen), list(torch.autograd.grad(out.square().sum(), leaves))


@pytest.mark.parametrize("where", ["first", "last", "outside"])
@pytest.mark.parametrize("name", STEPS)
def test_a_call_is_annotated_as_what_it_takes_over(tried_with: Any, name: str, where: str) -> None:
    step, x, w = STEPS[name]
    attend = functional.scaled_dot_product_attention
    one: Step = step if step is not attend else lambda x, w: attend(x, w, w)

    def inside(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if where == "first":
            return torch.sin(one(x, w))
        return torch.sin(one(torch.cos(x), w) if where == "last" else torch.cos(x))

    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(inside, x, w, use_reentrant=False)
        return one(y, w) if where == "outside" else y

    ours, theirs = tried_with(lambda workload: True), tried_with(lambda workload: False)
    found, want = (saved_by(tried.compile(model), x, w) for tried in (ours, theirs))
    assert ours.report.replaced and ours.report.warnings == []
    assert found[0] <= want[0]
    torch.testing.assert_close(found[1], want[1], rtol=1e-4, atol=1e-4)
    (graph,) = ours.graphs
    forward = next(node for node in graph.nodes if node.target in (CALL, MATMUL))
    assert ("recompute" in forward.meta) == (where != "outside")
