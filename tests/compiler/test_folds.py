"""Vectors that several convolutions take along are computed by one list operator, with the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernelwright.compiler.kernel_call import CALL

aten = torch.ops.aten
LAST = torch.channels_last


class Layers(torch.nn.Module):
    """Convolutions with batch norms, one behind the other."""

    def __init__(self, count: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(count)
        self.convs = torch.nn.ModuleList(torch.nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(count))
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm2d(8) for _ in range(count))
        for norm in self.norms:
            for tensor in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
                torch.nn.init.uniform_(tensor, 0.5, 1.5)
        self.to(dtype=dtype, memory_format=LAST)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.relu(norm(conv(x)))
        return x


def image(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(2, 8, 6, 7, generator=torch.Generator().manual_seed(1))
    return x.to(dtype=dtype, memory_format=LAST)


def lists(tried: Any) -> list[torch.fx.Node]:
    return [node for graph in tried.graphs for node in graph.nodes if node.target is aten._foreach_mul.Scalar]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_folded_norms_are_one_list(forced: Any, dtype: torch.dtype) -> None:
    model, x = Layers(3, dtype).eval(), image(dtype)
    with torch.no_grad():
        got, want = forced.compile(model)(x), model(x)
    torch.testing.assert_close(got, want, rtol=1e-4 if dtype == torch.float32 else 5e-2, atol=1e-4)
    (together,) = lists(forced)
    assert len(together.args[0]) == 6
    calls = together.graph.find_nodes(op="call_function", target=CALL)
    assert all(sum(one.all_input_nodes[0] is together for one in call.all_input_nodes[2:]) == 2 for call in calls)
    assert all(part.meta["val"].dtype == torch.float32 for part in together.users)


def test_many_vectors_are_several_lists(forced: Any) -> None:
    model, x = Layers(10).eval(), image()
    with torch.no_grad():
        torch.testing.assert_close(forced.compile(model)(x), model(x), rtol=1e-4, atol=1e-4)
    assert [len(node.args[0]) for node in lists(forced)] == [16, 4]


def test_one_norm_stays_as_it_is(forced: Any) -> None:
    model, x = Layers(1).eval(), image()
    with torch.no_grad():
        torch.testing.assert_close(forced.compile(model)(x), model(x), rtol=1e-4, atol=1e-4)
    assert lists(forced) == []


def test_statistics_of_the_batch_are_not_known_before_it(forced: Any) -> None:
    model, other, x = Layers(3).train(), Layers(3).train(), image()
    with torch.no_grad():
        torch.testing.assert_close(forced.compile(model)(x), other(x), rtol=1e-4, atol=1e-4)
    assert lists(forced) == []


def test_weights_that_change_count(forced: Any) -> None:
    model, x = Layers(3).eval(), image()
    compiled = forced.compile(model)
    with torch.no_grad():
        compiled(x)
        model.norms[1].weight.mul_(3)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert len(lists(forced)) == 1


def test_steps_in_front_of_the_first_call_may_have_other_users(forced: Any) -> None:
    """The second norm's vectors are used by the image, too, before any convolution."""
    model, x = Layers(3).eval(), image()

    def run(x: torch.Tensor) -> torch.Tensor:
        norm = model.norms[1]
        wide = torch.rsqrt(norm.running_var + norm.eps) * norm.weight
        return model(x * wide[None, :, None, None])

    with torch.no_grad():
        torch.testing.assert_close(forced.compile(run)(x), run(x), rtol=1e-4, atol=1e-4)
    assert len(lists(forced)) == 1
