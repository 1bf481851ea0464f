"""torch.use_deterministic_algorithms keeps out kernels that add up in no fixed order, wherever a kernel is chosen."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from kernelwright.compiler.attention_form import Options, form_of
from kernelwright.compiler.dispatch import RecordedAnswers
from kernelwright.kernels import get_operator
from kernelwright.kernels.attention.workload import attention_workload
from kernelwright.kernels.conv2d.workload import conv2d_workload
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.kernels.triton_adapter import current_toolchain
from kernelwright.search.timing import TIMER_VERSION
from kernelwright.types import FrozenMap, Schedule, TuningRecord, Workload

H100, TOOLCHAIN = named_device("h100"), current_toolchain(TIMER_VERSION)

WORKLOADS = {
    "matmul": matmul_workload(256, 256, 65536, "bf16"),
    "conv2d": conv2d_workload((8, 64, 56, 56), 64, 3, padding=1, direction="weight_gradient"),
    "attention": attention_workload(2, 4, 512, 512, 64, "bf16", direction="backward"),
}


@pytest.fixture
def in_order() -> Iterator[None]:
    """What torch computes has to be the same each time."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Mixed(torch.nn.Module):
    """A convolution, products with and without steps behind them, batched ones and an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.qkv, self.out = torch.nn.Conv2d(3, 16, 4, 4), torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.image(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(y).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        y = y + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return torch.relu(torch.bmm(y, y.transpose(1, 2)))


def asked_in_training(tried: Any, **options: Any) -> list[Workload]:
    """What is asked for a forward and backward pass, which runs."""
    model, x = Mixed(), torch.randn(2, 3, 16, 16)
    with torch.random.fork_rng():
        run = tried.compile(model, **options)
        torch.autograd.grad(run(x).square().mean(), list(model.parameters()))
    assert tried.report.warnings == []
    return list(tried.answers.asked)


@pytest.mark.usefixtures("in_order", "fresh_dynamo")
@pytest.mark.parametrize("dynamic", [False, True])
def test_every_operator_is_looked_up_with_a_fixed_order(forced: Any, dynamic: bool) -> None:
    asked = asked_in_training(forced, dynamic=dynamic)
    assert {one.operator for one in asked} >= ({"matmul"} if dynamic else {"matmul", "conv2d", "attention"})
    assert dynamic or {"weight_gradient", "backward"} <= {one.attributes.get("direction") for one in asked}
    assert all(one.attributes.get("deterministic") is True for one in asked)


@pytest.mark.usefixtures("fresh_dynamo")
def test_without_that_any_order_will_do(forced: Any) -> None:
    assert all("deterministic" not in one.attributes for one in asked_in_training(forced))


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_graph_is_compiled_again_where_that_changes(forced: Any, request: pytest.FixtureRequest) -> None:
    a, b = torch.randn(16, 8), torch.randn(8, 16)
    run = forced.compile(torch.mm)
    run(a, b)
    request.getfixturevalue("in_order")
    run(a, b)
    assert ["deterministic" in one.attributes for one in forced.answers.asked] == [False, True]


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_fixed_order_for_cudnn_is_one_for_convolutions(forced: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    asked = asked_in_training(forced)
    assert {one.operator for one in asked if one.attributes.get("deterministic")} == {"conv2d"}
    assert all(one.attributes.get("deterministic") for one in asked if one.operator == "conv2d")


def test_calls_of_our_attention_are_told_apart(request: pytest.FixtureRequest) -> None:
    tensors = {name: torch.zeros(1, 2, 8, 16) for name in "qkv"}
    usual = form_of(tensors, Options(lse=True))
    request.getfixturevalue("in_order")
    ordered = form_of(tensors, Options(lse=True))
    assert usual != ordered
    for backward in (False, True):
        assert ordered.workload(backward=backward).attributes["deterministic"] is True
        assert "deterministic" not in usual.workload(backward=backward).attributes


def ordered(workload: Workload) -> Workload:
    return dataclasses.replace(workload, attributes=FrozenMap({**workload.attributes, "deterministic": True}))


def schedules(workload: Workload) -> tuple[Schedule, Schedule]:
    """One that adds up in a fixed order, and one that does not."""
    operator = get_operator(workload.operator)
    strict = operator.space(ordered(workload), H100)
    found = operator.space(workload, H100).sample(random.Random(0), 400)
    fixed = next(one for one in found if not strict.why_illegal(one))
    return fixed, next(one for one in found if strict.why_illegal(one))


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_record_serves_where_its_schedule_has_a_fixed_order(
    name: str, record_of: Callable[..., TuningRecord]
) -> None:
    workload = WORKLOADS[name]
    fixed, any_order = schedules(workload)
    for schedule, choice in ((fixed, "kernel"), (any_order, "vendor")):
        fingerprint = get_operator(name).templates[schedule.template].fingerprint
        own = {"workload": workload, "schedule": schedule, "template_fingerprint": fingerprint}
        record = dataclasses.replace(record_of(WORKLOADS["matmul"]), **own)
        answers = RecordedAnswers([record], H100, TOOLCHAIN)
        assert answers(workload).choice == "kernel"
        answer = answers(ordered(workload))
        assert (answer.choice, answer.workload) == (choice, ordered(workload))
        assert answer.schedule == (schedule if choice == "kernel" else None)
