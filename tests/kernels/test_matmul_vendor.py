"""The vendor's strongest call of a matmul with unaligned rows: as it is, or padded with zeros inside the call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernelwright.kernels import get_operator
from kernelwright.kernels.matmul import vendor
from kernelwright.kernels.matmul.workload import matmul_workload, problem_of
from kernelwright.types import Workload

MATMUL = get_operator("matmul")

UNALIGNED = [
    matmul_workload(13, 24, 17, "fp16"),
    matmul_workload(16, 21, 32, "fp16", epilogue=("bias", "gelu")),
    matmul_workload(9, 16, 19, "fp32", "nn", epilogue=("residual",)),
    matmul_workload(11, 10, 7, "fp16", "tn", epilogue=("bias", "relu")),
    matmul_workload(5, 8, 1, "fp16", "tt"),
]


@pytest.mark.parametrize("workload", UNALIGNED, ids=str)
def test_padding_changes_no_number(workload: Workload) -> None:
    inputs, problem = MATMUL.make_inputs(workload, 1, "cpu"), problem_of(workload)
    name, call = vendor._padded(problem, inputs)
    assert name == "+".join(("padded torch.mm", *problem.epilogue))
    want = MATMUL.reference(workload, inputs)
    torch.testing.assert_close(call().double(), want.double(), rtol=2e-2, atol=2e-2)
    for matrix in ("a", "b"):
        wide = vendor._with_zeros(inputs[matrix], 3, 5)
        rows, columns = inputs[matrix].shape
        assert wide.shape == (rows + 3, columns + 5)
        assert (wide.stride(0) == 1) == (inputs[matrix].stride(0) == 1)
        assert torch.equal(wide[:rows, :columns], inputs[matrix])
        assert wide.count_nonzero() == inputs[matrix].count_nonzero()


def test_a_gpu_takes_the_faster_of_both_and_aligned_products_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def slowest_name(calls: Any) -> Any:
        asked.append([name for name, _ in calls])
        return calls[-1]

    monkeypatch.setattr(vendor, "fastest", slowest_name)
    workload = matmul_workload(13, 24, 17, "fp16", epilogue=("bias",))
    on_gpu = {"a": type("Cuda", (), {"is_cuda": True, "element_size": lambda self: 2})()}
    inputs = {**MATMUL.make_inputs(workload, 1, "cpu"), **on_gpu}
    name, _ = vendor._strongest(problem_of(workload), inputs)
    assert asked == [["unpadded torch.addmm", "padded torch.mm+bias"]] and name == "padded torch.mm+bias"
    aligned = matmul_workload(16, 24, 32, "fp16", epilogue=("bias",))
    assert vendor._strongest(problem_of(aligned), MATMUL.make_inputs(aligned, 1, "cpu"))[0] == "torch.addmm"
    assert len(asked) == 1


def test_without_a_gpu_it_is_the_product_as_it_is() -> None:
    workload = matmul_workload(13, 24, 17, "fp16")
    found = MATMUL.vendor(workload, MATMUL.make_inputs(workload, 1, "cpu"))
    assert found is not None and found[0] == "unpadded torch.mm"
