"""The attention operator with gradients, run on the CPU by triton's interpreter with schedules of its templates."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from kernelwright.compiler import attention_ops
from kernelwright.compiler.attention import attention
from kernelwright.types import Schedule

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

FORWARD = Schedule(
    "forward",
    {
        "block_m": 32,
        "block_n": 32,
        "num_warps": 4,
        "num_stages": 2,
        "section": 1,
        "head": "pad",
        "precision": "ieee",
    },
)
BACKWARD = Schedule(
    "backward",
    {
        "block_m1": 32,
        "block_n1": 64,
        "block_m2": 64,
        "block_n2": 32,
        "num_warps": 4,
        "num_warps2": 4,
        "num_stages": 2,
        "num_stages2": 2,
        "loads": "pointer",
        "precision": "ieee",
    },
)
SCHEDULES = {"schedule": json.dumps(FORWARD.to_json()), "backward_schedule": json.dumps(BACKWARD.to_json())}

CASES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window and cap": {"causal": True, "window": 9, "softcap": 2.0},
    "mask and sinks": {"mask": (1, 2, 40, 50), "sinks": (2,)},
    "mask of keys": {"mask": (50,)},
    "packed": {"causal": True, "cu_q": (0, 13, 40), "cu_k": (0, 22, 50)},
}


def drawn(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)


@pytest.fixture(autouse=True)
def kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch computing instead would pass unseen."""

    def fail(*_: Any) -> Any:
        raise AssertionError("torch computed what a kernel should have")

    monkeypatch.setattr(attention_ops.reference, "forward", fail)
    monkeypatch.setattr(attention_ops.reference, "backward", fail)


def operands(case: str, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, torch.Tensor]]:
    """(what has gradients, the options, the bounds of packed sequences)."""
    options = dict(CASES[case])
    packed = "cu_q" in options
    shapes = {"q": (40, 2, 16), "k": (50, 1, 16)} if packed else {"q": (1, 2, 40, 16), "k": (1, 1, 50, 16)}
    tensors = {name: drawn(*shapes[name[0]], dtype=dtype) for name in ("q", "k")}
    tensors["v"] = tensors["k"].flip(0 if packed else 2).contiguous() * 0.7
    for name in ("mask", "sinks"):
        if name in options:
            tensors[name] = drawn(*options.pop(name), dtype=dtype if name == "mask" else torch.float32)
    bounds = {name: torch.tensor(options.pop(name), dtype=torch.int32) for name in ("cu_q", "cu_k") if packed}
    return tensors, options, bounds


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_right(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, options, bounds = operands(case, dtype)
    ours = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    out = attention(**ours, **bounds, **options, **SCHEDULES)
    assert isinstance(out, torch.Tensor)
    d_out = drawn(*out.shape, dtype=dtype)
    out.backward(d_out)
    monkeypatch.undo()
    exact = {name: x.double().requires_grad_() for name, x in tensors.items()}
    want = attention(**exact, **bounds, **options)
    assert isinstance(want, torch.Tensor)
    want.backward(d_out.double())
    limit = 2e-3 if dtype is torch.float16 else 1e-5
    for name, got, right in [("out", out, want)] + [(name, x.grad, exact[name].grad) for name, x in ours.items()]:
        assert got is not None and right is not None
        error = ((got - right).norm() / right.norm()).item()
        assert error < limit, f"{name}: {error}"


def test_compiled_whole() -> None:
    q, k, v = (drawn(1, 2, 20, 16, dtype=torch.float32).requires_grad_() for _ in range(3))

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = attention(q, k, v, causal=True, **SCHEDULES)
        assert isinstance(out, torch.Tensor)
        return out.square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(q, k, v), (q, k, v))
    for one, other in zip(found, torch.autograd.grad(loss(q, k, v), (q, k, v)), strict=True):
        torch.testing.assert_close(one, other)
