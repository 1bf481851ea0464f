"""A compiled graph whose products are computed by our real kernels, in triton's interpreter."""

from __future__ import annotations

import json
import random
import warnings
from typing import Any

import pytest
import torch

from kernelwright.compiler import ops
from kernelwright.kernels import get_operator
from kernelwright.kernels.device import named_device
from kernelwright.search.answer import Answer
from kernelwright.types import Workload

with warnings.catch_warnings():
    # Inductor imports parts of torch that torch itself has deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    from kernelwright.compiler.backend import kernelwright
    from kernelwright.compiler.report import Report

MATMUL = get_operator("matmul")
H100 = named_device("h100")


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise AssertionError("a kernel of ours must compute this")

    monkeypatch.setattr(ops, "by_torch", refuse)


@pytest.mark.parametrize("template", ["persistent_tma", "pointer", "skinny"])
def test_model_runs_on_our_kernels(template: str) -> None:
    told = Report()

    def answers(workload: Workload) -> Answer:
        schedule = MATMUL.templates[template].space(workload, H100).sample(random.Random(1), 1)[0]
        return Answer("measured", workload, H100, schedule, "kernel", 1.0, "torch.addmm", 2.0)

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 64), torch.nn.SiLU())
    x = torch.randn(2, 32, 64)
    options = {"answers": answers, "devices": ("cpu",), "report": told}
    compiled = torch.compile(model, backend=kernelwright, options=options)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    replaced = [decision.workload for decision in told.replaced]
    assert [workload.epilogue for workload in replaced if workload] == [("bias", "gelu"), ("bias", "silu")]


@pytest.mark.parametrize("template", ["persistent_tma", "pointer", "skinny"])
def test_operator_takes_an_operand_cut_from_a_larger_one(template: str) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(64, 128)[:, 64:], torch.randn(64, 64).t()
    workload = ops.workload_of(a, b, None, (), torch.float32)
    assert workload.layouts["a"] == "row:128"
    for schedule in MATMUL.templates[template].space(workload, H100).sample(random.Random(2), 2):
        out = ops.MATMUL(a, b, None, "", json.dumps(schedule.to_json()), "float32")
        torch.testing.assert_close(out, a @ b, rtol=1e-4, atol=1e-4)


def test_open_batches_run_on_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernelwright.compiler import open_call, torch_calls

    def refuse(*args: Any) -> Any:
        raise AssertionError("a kernel of ours must compute this")

    monkeypatch.setattr(open_call, "by_torch", refuse)
    monkeypatch.setattr(torch_calls, "compute", refuse)

    def answers(workload: Workload) -> Answer:
        schedule = get_operator(workload.operator).default_schedule(workload, H100)
        return Answer("measured", workload, H100, schedule, "kernel", 1.0, "torch", 2.0)

    torch._dynamo.reset()
    torch.manual_seed(0)
    report = Report()
    options = {"answers": answers, "devices": ("cpu",), "report": report}
    w = torch.randn(16, 16, 3, 3)

    def model(x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.conv2d(x, w, padding=1)
        return torch.bmm(y.flatten(2), y.flatten(2).transpose(1, 2))

    compiled = torch.compile(model, backend=kernelwright, options=options)
    with torch.no_grad():
        for images in (4, 5):
            x = torch.randn(images, 16, 4, 4)
            torch._dynamo.mark_dynamic(x, 0)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-3)
    assert len(report.replaced) == 2
