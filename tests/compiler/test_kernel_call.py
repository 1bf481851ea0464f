"""What a call of ours hands to its kernel: tensors as it was measured with, whatever stride a size of 1 has."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from kernelwright.compiler import kernel_call
from kernelwright.compiler.kernel_call import Call, Form, written_forms
from kernelwright.kernels import get_operator
from kernelwright.kernels.attention.workload import attention_workload
from kernelwright.kernels.conv2d.workload import conv2d_workload
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.types import Workload

DEVICE = named_device("h200")

SINGLE = [
    attention_workload(2, 4, 1, 64, 16, dtype="bf16"),
    matmul_workload(1, 64, 32, "bf16"),
    conv2d_workload((1, 16, 1, 8), 16, 1),
]
"""Workloads with a size of 1 in their result: one query, one row, one image of one row."""


@pytest.mark.parametrize("workload", SINGLE, ids=lambda workload: workload.operator)
def test_a_kernel_gets_the_strides_that_it_was_measured_with(workload: Workload) -> None:
    """A stride of 1 where the size is 1 is another kernel for Triton, which would be compiled at the first launch."""
    operator = get_operator(workload.operator)
    inputs, out = operator.make_inputs(workload, 0, "cpu"), operator.empty_output(workload, "cpu")
    assert 1 in out.shape
    strides = tuple(1 if size == 1 else stride for size, stride in zip(out.shape, out.stride(), strict=True))
    assert strides != out.stride()
    wanted = Form(tuple(out.shape), strides, out.dtype)
    texts = [json.dumps(part.to_json()) for part in (workload, operator.default_schedule(workload, DEVICE))]
    call, seen = Call(",".join(inputs), *texts, written_forms([wanted])), []

    def plan(workload: object, schedule: object, given: dict[str, torch.Tensor], result: torch.Tensor) -> list[object]:
        seen.append(({name: one.stride() for name, one in given.items()}, result.stride()))
        return []

    call.operator = SimpleNamespace(plan=plan)
    odd = [
        one.as_strided(one.shape, [1 if n == 1 else s for n, s in zip(one.shape, one.stride(), strict=True)])
        for one in inputs.values()
    ]
    (got,) = call.run(odd)
    assert Form.of(got) == wanted
    assert seen == [({name: one.stride() for name, one in inputs.items()}, out.stride())]


def test_results_that_lie_otherwise_are_written_where_they_lie() -> None:
    tensor = torch.empty(4, 6, 1)
    assert Form((4, 6, 1), (1, 4, 1), torch.float32).seen_in(tensor) is tensor
    assert Form((4, 6, 1), (6, 1, 8), torch.float32).seen_in(tensor).stride() == (6, 1, 8)
    assert Form((4, 6, 1), (6, 1, 8), torch.float16).seen_in(tensor) is tensor


def test_the_forms_of_results_are_worked_out_once_and_outside_of_a_trace() -> None:
    workload = matmul_workload(3, 5, 7, "fp16")
    with torch._subclasses.FakeTensorMode():
        found = kernel_call.measured_results(workload)
    assert found == (Form((3, 5), (5, 1), torch.float16),) and kernel_call.measured_results(workload) is found
