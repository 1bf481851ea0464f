"""The short epilogue's activations by numbers, and what is asked for ahead of an epilogue, without a GPU."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch

from kernelwright.kernels.matmul import epilogue_kernel, shared_parts_kernel, short_epilogue_kernel

X = np.concatenate([np.linspace(-12, 12, 4801), [-1e4, 1e4, 1e-6, -1e-6, 0.0]]).astype(np.float32)

EXACT = {
    "gelu": lambda x: torch.nn.functional.gelu(x),
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def short(name: str, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The kernel's own code on numpy's fp32."""
    language = types.SimpleNamespace(
        abs=np.abs, exp2=np.exp2, maximum=np.fmax, minimum=np.fmin, constexpr=None, float32=np.float32
    )
    names = {"tl": language, "reciprocal": lambda y: np.float32(1) / y}
    code = types.FunctionType(short_epilogue_kernel.short_activation.fn.__code__, names)
    with np.errstate(over="ignore", invalid="ignore"):
        found: np.ndarray[Any, Any] = code(x, name)
    assert found.dtype == np.float32
    return found


@pytest.mark.parametrize("name", EXACT)
def test_activations_are_those_of_torch(name: str) -> None:
    wanted = EXACT[name](torch.from_numpy(X).double()).numpy()
    found = short(name, X)
    # absolute and relative: Abramowitz and Stegun's 7.1.26 is off by 1.5e-7 of 1
    assert np.abs(found - wanted).max() <= 3e-7 * 12
    seen = (np.abs(X) < 5) & (np.abs(X) > 1e-3)
    assert (np.abs(found - wanted)[seen] <= 2e-2 * np.abs(wanted)[seen]).all()
    near = np.abs(X) < 2
    assert (np.abs(found - wanted)[near] <= 1e-5 * np.abs(wanted)[near] + 2e-7).all()


@pytest.mark.parametrize("name", EXACT)
def test_numbers_that_are_none_and_infinity_stay_so(name: str) -> None:
    found = short(name, np.array([np.nan, np.inf], np.float32))
    assert np.isnan(found[0])
    assert found[1] == (np.inf if name in ("gelu", "gelu_tanh", "silu") else 1)


def test_exactly_these_activations_count_as_long() -> None:
    for name in ("gelu", "gelu_tanh", "silu", "sigmoid", "tanh"):
        assert short_epilogue_kernel.is_activation.fn(name)
        assert short_epilogue_kernel.is_long.fn(f"add_n,{name}")
    for name in ("relu", "add_n", "mul_mn", "gelu_backward", ""):
        assert not short_epilogue_kernel.is_activation.fn(name)
        assert not short_epilogue_kernel.is_long.fn(name)


@pytest.mark.parametrize("strides", [(1000, 1), (1, 700)], ids=["row", "column"])
@pytest.mark.parametrize(("step", "wanted"), [("add_n", "n"), ("mul_m", "m"), ("gelu_backward", "mn"), ("mul_1", "1")])
def test_what_an_epilogue_reads_is_asked_for_and_nothing_beyond_its_end(
    step: str, wanted: str, strides: tuple[int, int]
) -> None:
    rows, columns, asked = 700, 1000, []
    row, col = 640, 768
    constants = ("operation_of", "where_of", "step_at", "step_count")
    names: dict[str, Any] = {name: getattr(epilogue_kernel, name).fn for name in constants}
    names |= {
        "gl": types.SimpleNamespace(
            arange=lambda start, end, layout: np.arange(start, end), SliceLayout=lambda *args: None,
            BlockedLayout=lambda *args: None, minimum=np.minimum, static_range=range, int64=np.int64, constexpr=None,
        ),
        "sk_prefetch_lines": lambda places: asked.extend(np.ravel(places).tolist()),
    }  # fmt: skip
    by_row, by_column = {"n": (0, 1), "m": (1, 0), "mn": strides, "1": (0, 0)}[wanted]
    code = shared_parts_kernel.sk_prefetch.fn.__code__

    class Number(np.ndarray[Any, Any]):
        def to(self, dtype: Any) -> Any:
            return self.astype(dtype)

    names["gl"].minimum = lambda x, y: np.minimum(x, y).view(Number)
    types.FunctionType(code, names)([(0, 0, by_row, by_column)], row, col, rows, columns, 128, 256, 64, step)
    read = {r * by_row + c * by_column for r in range(row, rows) for c in range(col, columns)}
    if wanted == "1":
        assert not asked
        return
    assert set(asked) <= read
    if wanted == "m" or by_row > by_column or wanted == "n":
        assert {place // 64 for place in read} <= {place // 64 + more for place in asked for more in (0, 1)}
