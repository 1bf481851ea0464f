"""When a result counts as right."""

from __future__ import annotations

import pytest
import torch

from kernelwright.search.verification import verify

TOLERANCE = 4e-3


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    reference = torch.randn(64, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 60
    return reference.to(torch.bfloat16), reference


def test_rounding_passes() -> None:
    out, reference = pair()
    verdict = verify(out, reference, TOLERANCE)
    assert verdict.right and 1e-3 < verdict.error < 2e-3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_element_that_was_not_written_fails(value: float) -> None:
    out, reference = pair()
    out[3, 5] = value
    assert "1 of 6144 elements" in verify(out, reference, TOLERANCE).reason


def test_one_misplaced_element_fails() -> None:
    out, reference = pair()
    out[3, 5] = out[3, 5] + 60
    assert not verify(out, reference, TOLERANCE).right


def test_a_dropped_product_fails() -> None:
    a, b = torch.randn(64, 512, dtype=torch.float64), torch.randn(512, 96, dtype=torch.float64)
    assert not verify((a[:, :-1] @ b[:-1]).to(torch.bfloat16), a @ b, TOLERANCE).right


def test_another_shape_fails() -> None:
    out, reference = pair()
    assert "shape" in verify(out.T, reference, TOLERANCE).reason


def test_zeros_and_empty_results() -> None:
    zeros = torch.zeros(4, 4, dtype=torch.float64)
    assert verify(zeros.half(), zeros, TOLERANCE).right
    assert not verify(zeros.half() + 1, zeros, TOLERANCE).right
    assert verify(torch.empty(0, 4), torch.empty(0, 4, dtype=torch.float64), TOLERANCE).right


def test_every_tensor_of_a_result_is_compared() -> None:
    (out, reference), (other, other_reference) = pair(), pair()
    assert verify((out, other), (reference, other_reference), TOLERANCE).right
    other[1, 2] += 60
    verdict = verify((out, other), (reference, other_reference), TOLERANCE)
    assert verdict.reason.startswith("tensor 1 of the result: relative error")
    assert "must have 2 tensors, got 1" in verify(out, (reference, other_reference), TOLERANCE).reason


def test_an_infinite_element_must_be_met() -> None:
    out, reference = pair()
    out, reference[3, 5], out[3, 5] = out.float(), -float("inf"), -float("inf")
    assert verify(out, reference, TOLERANCE).right
    for value in (0.0, float("inf"), float("nan")):
        out[3, 5] = value
        assert not verify(out, reference, TOLERANCE).right


def test_a_large_element_may_be_rounded_by_its_own_size() -> None:
    # one query of a causal attention sees one key, thousands see the mean of thousands
    reference = torch.randn(8192, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 50
    reference[0] = 4.015
    out = reference.bfloat16()
    assert verify(out, reference, 6e-3).right
    out[5, 3] = out[6, 3] + 0.08
    assert not verify(out, reference, 6e-3).right
