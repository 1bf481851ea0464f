"""Compiled graphs whose convolutions and attentions are computed by our real kernels, in triton's interpreter."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from kernelwright.compiler import torch_calls
from kernelwright.kernels import get_operator
from kernelwright.kernels.device import named_device
from kernelwright.search.answer import Answer
from kernelwright.types import Workload

with warnings.catch_warnings():
    # Inductor imports parts of torch that torch itself has deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    from kernelwright.compiler.backend import kernelwright

H100 = named_device("h100")
LAST = torch.channels_last


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise AssertionError("a kernel of ours must compute this")

    monkeypatch.setattr(torch_calls, "compute", refuse)


class Portable:
    """Answers every question with a portable schedule of ours, and remembers the questions."""

    def __init__(self) -> None:
        self.asked: list[Workload] = []

    def __call__(self, workload: Workload) -> Answer:
        self.asked.append(workload)
        operator = get_operator(workload.operator)
        device = H100
        templates = {"conv2d": ("implicit_gemm", "implicit_gemm_input_gradient", "implicit_gemm_weight_gradient")}
        names = templates.get(workload.operator, ("forward", "backward", "pointer"))
        spaces = [operator.templates[name].space(workload, device) for name in names if name in operator.templates]
        members = next(space for space in spaces if space.members)
        schedule = members.sample(random.Random(1), 1)[0]
        return Answer("measured", workload, device, schedule, "kernel", 1.0, "torch", 2.0)


def compiled(model: Callable[..., Any], answers: Portable) -> Callable[..., Any]:
    torch._dynamo.reset()
    found: Callable[..., Any] = torch.compile(
        model, backend=kernelwright, options={"answers": answers, "devices": ("cpu",)}
    )
    return found


def test_residual_block_runs_on_our_kernels() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(16, 16, 3, padding=1, bias=False).to(memory_format=LAST)
    norm = torch.nn.BatchNorm2d(16).eval()
    torch.nn.init.uniform_(norm.running_mean)
    x = torch.randn(2, 16, 6, 5).to(memory_format=LAST)
    answers = Portable()

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(norm(layer(x)) + x)

    with torch.no_grad():
        got, want = compiled(model, answers)(x), model(x)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    assert got.is_contiguous(memory_format=LAST)
    assert answers.asked[0].epilogue == ("scale_vec", "bias", "residual", "relu")


def test_gradients_of_a_convolution() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(16, 16, 3, stride=2).to(memory_format=LAST)
    x = torch.randn(2, 16, 7, 5).to(memory_format=LAST).requires_grad_()
    leaves = [x, layer.weight, layer.bias]
    answers = Portable()
    got, want = (torch.autograd.grad(run(x).square().sum(), leaves) for run in (compiled(layer, answers), layer))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
    directions = {workload.attributes.get("direction") for workload in answers.asked}
    assert {"input_gradient", "weight_gradient"} <= directions


@pytest.mark.parametrize("training", [False, True])
def test_attention_runs_on_our_kernels(training: bool) -> None:
    torch.manual_seed(0)
    sizes = (1, 4, 20, 16), (1, 2, 20, 16), (1, 2, 20, 16)
    leaves = [torch.randn(size, requires_grad=training) for size in sizes]
    answers = Portable()

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    runs = (compiled(model, answers), model)
    found = [torch.autograd.grad(run(*leaves).sum(), leaves) if training else [run(*leaves)] for run in runs]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    assert len(answers.asked) == 1 + training
