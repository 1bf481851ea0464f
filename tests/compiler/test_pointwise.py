"""What stands behind a product is taken for an activation only where it is one, and never ends the pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernelwright.compiler.passes import matmul
from kernelwright.compiler.passes.products import Products

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X, W = (torch.randn(*size, generator=torch.Generator().manual_seed(0)) for size in ((6, 8), (8, 12)))


@pytest.mark.parametrize(
    "behind",
    [
        lambda y: y > 0,
        lambda y: (y > 0) & (y < 1),
        lambda y: torch.isnan(y),
        lambda y: (y > 0).float() * 3,
        lambda y: torch.where(y > 0, y, W[:6]),
        lambda y: y.int() + 1,
        lambda y: torch.sign(y),
        lambda y: torch.complex(y, y),
        lambda y: y.bool(),
    ],
    ids=["greater", "between", "isnan", "counted", "where", "integers", "sign", "complex", "bool"],
)
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex operators")
def test_steps_that_give_no_real_numbers_are_no_activation(forced: Any, behind: Callable[..., Any]) -> None:
    """And a product beside them is ours all the same."""

    def model(x: torch.Tensor, w: torch.Tensor) -> Any:
        return behind(x @ w), torch.relu(x @ w[:, :4])

    with torch.no_grad():
        torch.testing.assert_close(forced.compile(model)(X, W), model(X, W))
    assert sorted(forced.epilogues()) == [(), ("relu",)] and forced.report.warnings == []


@pytest.mark.parametrize("limit", [1e4, 1e7, 3e12, 1e37])
def test_a_bound_far_away_is_kept(forced: Any, limit: float) -> None:
    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w).clamp(max=limit)

    args = X * limit**0.5, W * 2 * limit**0.5
    with torch.no_grad():
        got = forced.compile(model)(*args)
    torch.testing.assert_close(got, model(*args))
    assert got.max() == torch.tensor(limit) and forced.epilogues() == [("relu",)]


def test_steps_that_fail_where_they_are_tried_are_no_activation(forced: Any) -> None:
    library = torch.library.Library("kernelwright_tests", "FRAGMENT")
    library.define("only_fp32(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))

    def only_fp32(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.float32:
            raise ValueError("fp32, please")
        return torch.relu(x)

    library.impl("only_fp32", only_fp32, "CPU")
    torch.library.register_fake("kernelwright_tests::only_fp32", torch.empty_like, lib=library)

    def model(x: torch.Tensor, w: torch.Tensor) -> Any:
        return torch.ops.kernelwright_tests.only_fp32(x @ w)

    with torch.no_grad():
        torch.testing.assert_close(forced.compile(model)(X, W), model(X, W))
    assert forced.epilogues() == [()] and forced.report.warnings == []


def test_a_form_that_fails_costs_no_other_place(forced: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = matmul.workload_of

    def fails_at_relu(a: Any, b: Any, bias: Any, epilogue: Any, dtype: Any) -> Any:
        return real(a, b, bias, epilogue, dtype) if "relu" not in epilogue else 1 // 0

    monkeypatch.setattr(matmul, "workload_of", fails_at_relu)

    def model(x: torch.Tensor, w: torch.Tensor) -> Any:
        return torch.relu(x @ w), torch.tanh(x @ w[:, :4])

    with torch.no_grad():
        torch.testing.assert_close(forced.compile(model)(X, W), model(X, W))
    assert forced.epilogues() == [(), ("tanh",)] and forced.report.warnings == []


def test_a_place_whose_forms_cannot_be_found_costs_no_other_place(forced: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Products.places

    def fails_at_wide(self: Products, node: torch.fx.Node) -> Any:
        if node.meta["val"].shape[-1] == 12:
            raise ZeroDivisionError
        return real(self, node)

    monkeypatch.setattr(Products, "places", fails_at_wide)

    def model(x: torch.Tensor, w: torch.Tensor) -> Any:
        return torch.relu(x @ w), torch.tanh(x @ w[:, :4])

    with torch.no_grad():
        torch.testing.assert_close(forced.compile(model)(X, W), model(X, W))
    assert forced.epilogues() == [("tanh",)] and forced.report.warnings == []
