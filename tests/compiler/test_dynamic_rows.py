"""Products with a number of rows that only a call tells: one graph for all sizes, schedules near where they were
measured, torch elsewhere."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from kernelwright.compiler import ops
from kernelwright.compiler.ops import MATMUL
from kernelwright.kernels import get_operator
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.types import Schedule

H100 = named_device("h100")


def tensor(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


@pytest.mark.parametrize("biased", [True, False])
def test_one_graph_serves_all_sizes(forced: Any, biased: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 12, bias=biased), torch.nn.SiLU())
    compiled = forced.compile(model, dynamic=True)
    with torch.no_grad():
        for rows in (5, 17, 100, 3000):
            x = tensor(rows, 8)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert len(forced.graphs) == 1 and forced.targets().count(MATMUL) == 1
    assert forced.epilogues() == [("bias",) if biased else ()]


def test_only_rows_that_win_are_kept(tried_with: Any) -> None:
    tried = tried_with(lambda workload: workload.dims["M"] in (64, 128))
    layer = torch.nn.Linear(8, 12)
    compiled = tried.compile(layer, dynamic=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(tensor(9, 8)), layer(tensor(9, 8)))
    (decision,) = tried.report.decisions
    assert decision.replaced and decision.reason == "faster around 64, 128 rows"


def test_products_that_never_win_are_left_alone(tried_with: Any) -> None:
    tried = tried_with(lambda workload: False)
    compiled = tried.compile(torch.nn.Linear(8, 12), dynamic=True)
    with torch.no_grad():
        compiled(tensor(9, 8))
    assert not tried.report.replaced and MATMUL not in tried.targets()


@pytest.mark.parametrize(("rows", "measured"), [(64, 64), (80, 64), (100, 128), (181, 128), (40, None), (200, None)])
def test_schedule_is_the_nearest_within_reach(rows: int, measured: int | None) -> None:
    schedules = {}
    for size, warps in ((64, 4), (128, 8)):
        space = get_operator("matmul").templates["pointer"].space(matmul_workload(size, 64, 64, "fp16"), H100)
        schedules[size] = next(member for member in space.members if member.knobs["num_warps"] == warps)
    table = {"device": "h100", "rows": {str(size): schedule.to_json() for size, schedule in schedules.items()}}
    found = ops._schedule_for(matmul_workload(rows, 64, 64, "fp16"), table)
    assert found == (None if measured is None else schedules[measured])


def test_schedule_that_is_not_legal_here_is_not_run() -> None:
    table = {"device": "h100", "rows": {"64": Schedule("pointer", {"block_m": 7}).to_json()}}
    assert ops._schedule_for(matmul_workload(64, 64, 64, "fp16"), table) is None
    a, b = tensor(64, 64), tensor(64, 64)
    torch.testing.assert_close(ops.matmul(a, b, None, "", json.dumps(table), "float32"), a @ b)
