"""The custom operator on the CPU: torch computes it there, and the guards that stand before a kernel."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelwright.compiler import export, ops
from kernelwright.compiler.current_device import at_device
from kernelwright.compiler.ops import MATMUL, by_torch, matmul
from kernelwright.kernels.matmul.reference import activations
from kernelwright.types import Schedule

POINTER = json.dumps(Schedule("pointer", {"block_m": 16}).to_json())
TMA = json.dumps(Schedule("persistent_tma", {"block_m": 64, "repack": 0}).to_json())
REPACKING = json.dumps(Schedule("persistent_tma", {"block_m": 64, "repack": 1}).to_json())


def tensor(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)


class FakeOperator:
    """Stands for the matmul operator: its only launch fills the output with sevens, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.plans: list[tuple[Any, Any]] = []

    def plan(self, workload: Any, schedule: Any, inputs: Any, out: torch.Tensor) -> list[Any]:
        self.plans.append((workload, schedule))
        if self.error is not None:
            raise self.error
        return [({(1,): lambda: out.fill_(7)}, (1,), (), {})]


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> FakeOperator:
    fake = FakeOperator()
    monkeypatch.setattr(ops, "get_operator", lambda name: fake)
    ops._call.cache_clear()
    return fake


@pytest.mark.parametrize("activation", ["", *sorted(activations())])
@pytest.mark.parametrize("with_bias", [False, True])
def test_on_the_cpu_it_is_torch(with_bias: bool, activation: str) -> None:
    a, b, bias = tensor(6, 8), tensor(8, 12), tensor(12) if with_bias else None
    epilogue = ",".join(filter(None, ("bias" if with_bias else "", activation)))
    want = a @ b + (bias if bias is not None else 0)
    want = activations()[activation](want) if activation else want
    torch.testing.assert_close(MATMUL(a, b, bias, epilogue, POINTER, "float32"), want)


def test_it_passes_the_checks_of_torch() -> None:
    args = (tensor(6, 8), tensor(8, 12), tensor(12), "bias,relu", POINTER, "float32")
    torch.library.opcheck(MATMUL, args, test_utils=("test_schema", "test_faketensor"))


def test_strides_are_part_of_the_contract() -> None:
    assert torch.Tag.needs_exact_strides in MATMUL.tags


def test_operators_take_nothing_that_a_package_hands_over_as_something_else() -> None:
    """Torch 2.11 runs an operator of a package with float64 where float32 was written; other enumerations are alike."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("kernelwright::")]
    assert len(names) >= len(export.LIBRARIES)
    for name in names:
        for argument in getattr(torch.ops.kernelwright, name.partition("::")[2]).default._schema.arguments:
            types_named = set(re.split(r"\W+", repr(argument.real_type)))
            assert not types_named & {"ScalarType", "Layout", "MemoryFormat"}, (name, argument.name)


def test_all_operators_are_there_for_a_package() -> None:
    """Whoever loads it imports nothing else."""
    folder = Path(ops.__file__).parent
    modules = [file.stem for file in folder.glob("*.py") if "torch.library.Library(" in file.read_text()]
    assert len(modules) > 4
    for name in modules:
        assert importlib.import_module(f"kernelwright.compiler.{name}").LIBRARY in export.LIBRARIES, name


def test_result_may_have_another_type() -> None:
    a, b = tensor(6, 8, dtype=torch.bfloat16), tensor(8, 12, dtype=torch.bfloat16)
    assert MATMUL(a, b, None, "", POINTER, "float32").dtype is torch.float32


def test_kernel_runs_with_its_workload_and_schedule(operator: FakeOperator) -> None:
    out = matmul(tensor(6, 8), tensor(12, 8).t(), tensor(12), "bias,gelu", POINTER, "float32")
    assert (out == 7).all()
    (workload, schedule) = operator.plans[0]
    assert dict(workload.layouts) == {"a": "row", "b": "col", "out": "row"}
    assert workload.epilogue == ("bias", "gelu")
    assert schedule == Schedule("pointer", {"block_m": 16})


@pytest.mark.parametrize(("schedule", "runs"), [(POINTER, True), (REPACKING, True), (TMA, False)])
def test_unaligned_operands_only_reach_kernels_that_take_them(
    operator: FakeOperator, schedule: str, runs: bool
) -> None:
    a, b = tensor(6 * 8 + 1)[1:].view(6, 8), tensor(8, 12)
    out = matmul(a, b, None, "", schedule, "float32")
    assert bool(operator.plans) is runs
    torch.testing.assert_close(out, torch.full_like(out, 7) if runs else a @ b)


def test_failing_kernel_is_replaced_by_torch_and_told_once(
    operator: FakeOperator, caplog: pytest.LogCaptureFixture
) -> None:
    operator.error = RuntimeError("planted")
    a, b = tensor(6, 8), tensor(8, 12)
    for _ in range(3):
        torch.testing.assert_close(matmul(a, b, None, "relu", POINTER, "float32"), torch.relu(a @ b))
    assert len(operator.plans) == 1
    assert [record.getMessage().endswith("planted") for record in caplog.records] == [True]


@pytest.mark.parametrize("sizes", [(0, 8, 12), (6, 0, 12), (6, 8, 0)])
def test_empty_operands_need_no_kernel(operator: FakeOperator, sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    bias = tensor(n)
    out = matmul(tensor(m, k), tensor(k, n), bias, "bias", POINTER, "float32")
    torch.testing.assert_close(out, bias.expand(m, n))
    assert not operator.plans


def test_strides_that_no_kernel_has_go_to_torch(operator: FakeOperator) -> None:
    a, b = tensor(6, 1).expand(6, 8), tensor(8, 12)
    torch.testing.assert_close(matmul(a, b, None, "", POINTER, "float32"), a @ b)
    assert not operator.plans


def test_by_torch_takes_half_precision() -> None:
    a, b = tensor(6, 8, dtype=torch.float16), tensor(8, 12, dtype=torch.float16)
    out = by_torch(a, b, None, "silu", torch.float16)
    torch.testing.assert_close(out.float(), torch.nn.functional.silu(a.float() @ b.float()), atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize(("index", "entered"), [(0, []), (3, ["cuda:3"])])
def test_an_operator_runs_with_the_gpu_of_its_operands(
    index: int, entered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def device(which: torch.device) -> Iterator[None]:
        seen.append(str(which))
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", device)
    operand = types.SimpleNamespace(get_device=lambda: index, device=torch.device("cuda", index))
    assert at_device(lambda operands, text: text)([operand], "done") == "done" and seen == entered
