"""Convolutions brought into stride 1 and many channels: the arranged operands give the same result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernelwright.kernels.conv2d import inputs, reference
from kernelwright.kernels.conv2d.resident_arrange_kernel import arranged
from kernelwright.kernels.conv2d.workload import complete_attributes, conv2d_workload, problem_of
from kernelwright.kernels.operator import launch_all

CASES: list[tuple[int, dict[str, Any]]] = [
    (0, {"image": (2, 3, 13, 12), "k": 20, "kernel": 7, "stride": 2, "padding": 3}),
    (0, {"image": (1, 3, 16, 12), "k": 16, "kernel": 4, "stride": 4, "layout": "nchw"}),
    (0, {"image": (2, 1, 9, 7), "k": 17, "kernel": (5, 3), "padding": (1, 2)}),
    (0, {"image": (1, 4, 8, 11), "k": 8, "kernel": 3, "stride": (1, 3), "padding": 4, "layouts": {"w": "nchw"}}),
    (0, {"image": (1, 3, 30, 30), "k": 8, "kernel": 6, "stride": 2, "layouts": {"x": "strided:3000,1,95,3+1"}}),
    (1, {"image": (1, 8, 5, 6), "k": 12, "kernel": 3, "padding": 1}),
    (4, {"image": (2, 32, 6, 7), "k": 16, "kernel": 3, "padding": 1, "groups": 8}),
    (2, {"image": (1, 24, 5, 4), "k": 36, "kernel": (3, 2), "padding": (0, 1), "groups": 6}),
]


@pytest.mark.parametrize(
    ("span", "given", "direction"),
    [(*case, kind) for case in CASES for kind in ("forward", "input_gradient") if case[0] or kind == "forward"],
)
def test_arranged_operands_give_the_same_result(span: int, given: dict[str, Any], direction: str) -> None:
    workload = conv2d_workload(**given, dtype="fp16", direction=direction)
    problem, attributes = problem_of(workload), complete_attributes(workload)
    operands = inputs.make_inputs(problem, 1, "cpu")
    out = inputs.empty_output(problem, "cpu")
    form, launches = arranged(operands, out, span, attributes)
    launch_all(launches)
    tensor, sizes, strides = form.image
    assert all(stride * 2 % 16 == 0 for stride in strides[:-1]) or span
    image = tensor.as_strided(sizes, strides, tensor.storage_offset()).double().permute(0, 3, 1, 2)
    assert not image.isnan().any()
    weight = form.weight.unflatten(1, form.taps).permute(0, 3, 1, 2).double()
    if span == 0:
        weight = weight[:, : image.shape[1]]
    # taps turned round may begin inside of the image or end before it
    pad_h, pad_w = form.pad
    p, q = out.shape[2:]
    below, right = p + form.taps[0] - 1 - pad_h - sizes[1], q + form.taps[1] - 1 - pad_w - sizes[2]
    image = torch.nn.functional.pad(image, (pad_w, right, pad_h, below))
    got = torch.nn.functional.conv2d(image, weight, groups=form.groups)
    first, second = (operands["d_out" if name == "out" else name] for name in problem.operands)
    assert torch.allclose(got, reference.convolve(problem, first, second), rtol=1e-9, atol=1e-9)
