"""What stands behind a product is taken for an activation only where it is one, and never ends the pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

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
