"""Vectors that several convolutions take along are computed by one list operator, with the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

from kernelwright.compiler.kernel_call import CALL
from kernelwright.compiler.passes.folds import gather_folds

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


def test_only_vectors_are_gathered(forced: Any) -> None:
    """A small image is a step in front of the first call, too."""
    model, x = Layers(3).eval(), image()
    with torch.no_grad():
        torch.testing.assert_close(
            forced.compile(lambda x: model(x * 2 + 1))(x), model(x * 2 + 1), rtol=1e-4, atol=1e-4
        )
    (together,) = lists(forced)
    assert [value.dim() for value in together.meta["val"]] == [1] * 6


class FrozenNorm(torch.nn.Module):
    """A norm of buffers, as detectors have it, which gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("scale", "shift", "mean", "var"):
            self.register_buffer(name, torch.rand(8) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale * (self.var + 1e-5).rsqrt()
        return x * scale[:, None, None] + (self.shift - self.mean * scale)[:, None, None]


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "computed again"])
@pytest.mark.parametrize("behind", [1, 2], ids=["", "scaled result"])
def test_training_with_frozen_norms(forced: Any, kept: bool, behind: int) -> None:
    """Torch takes forward and backward apart, and can neither save nor compute again a list; and gradients that come
    in are no inputs of the forward pass."""
    model = Layers(3)
    model.norms = torch.nn.ModuleList(FrozenNorm() for _ in range(3))
    last = torch.nn.Conv2d(8, 8, 1).to(memory_format=LAST)

    def run(x: torch.Tensor) -> torch.Tensor:
        middle = model(x) if kept else torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        return last(middle) * behind

    def gradients(function: Any) -> list[torch.Tensor]:
        function(image()).square().sum().backward()
        parameters = [*model.parameters(), *last.parameters()]
        found = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for parameter in parameters:
            parameter.grad = None
        return found

    got, want = gradients(forced.compile(run)), gradients(run)
    assert len(got) == 5
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    assert CALL in forced.targets()


@pytest.mark.parametrize("written", [False, True])
def test_inputs_that_are_written_into_are_read_where_they_were(written: bool) -> None:
    graph = Graph()
    with FakeTensorMode():
        values = [torch.empty(8) for _ in range(5)]
    given = [graph.placeholder(f"v{place}") for place in range(5)]
    for node, value in zip(given, values, strict=True):
        node.meta["val"] = value
    for place, node in enumerate(given[:4]):
        if place == 3 and written:
            graph.call_function(aten.copy_.default, (node, given[4])).meta["val"] = values[3]
        wide = graph.call_function(aten.neg.default, (node,))
        wide.meta["val"] = values[place]
        graph.call_function(CALL, ([wide], "", "", "", "")).meta["val"] = [values[place]]
    graph.output(())
    gather_folds(graph)
    assert len(graph.find_nodes(op="call_function", target=aten._foreach_mul.Scalar)) == (not written)
