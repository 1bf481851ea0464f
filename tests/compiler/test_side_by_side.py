"""Weights of neighbouring layers in one block of memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from kernelwright.compiler.side_by_side import beside, joined, lay_side_by_side


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(16, width) for width in (32, 16, 16))


class Gated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = torch.nn.Linear(16, 24), torch.nn.Linear(16, 24)


def test_layers_are_laid_out_once_and_keep_their_values() -> None:
    model = torch.nn.Sequential(Attention(), Gated())
    before = copy.deepcopy(model.state_dict())
    parameters = list(model.parameters())
    assert (lay_side_by_side(model), lay_side_by_side(model)) == (2, 0)
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    attention: Any = model[0]
    assert beside([layer.weight.t() for layer in (attention.q, attention.k, attention.v)])
    model[0].q.weight.data.zero_()
    assert torch.equal(model[0].k.weight, before["0.k.weight"])


def test_tied_weights_are_left_alone() -> None:
    model = Gated()
    model.up.weight = model.gate.weight
    assert lay_side_by_side(model) == 0


@pytest.mark.parametrize("apart", ["gap", "order", "type", "rows"])
def test_what_does_not_lie_side_by_side_is_copied(apart: str) -> None:
    block = torch.randn(10, 8)
    first, second = block[:4].t(), block[4:].t()
    assert beside([first, second]) and joined([first, second]).data_ptr() == block.data_ptr()
    others = {
        "gap": (block[:3].t(), second),
        "order": (second, first),
        "type": (first, block.view(torch.int32)[4:].t()),
        "rows": (block[:4, :4].t(), block[4:, :4].t()),
    }[apart]
    assert not beside(others)
    if apart != "type":
        assert torch.equal(joined(others), torch.cat(others, 1))
