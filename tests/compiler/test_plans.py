"""What a call of ours does before its kernels run reads no tensor: a CUDA graph can record it, and nothing waits."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from kernelwright.db.pretuned import load_pretuned
from kernelwright.db.store import Store
from kernelwright.errors import KernelwrightError
from kernelwright.kernels import get_operator
from kernelwright.kernels.build import plan_on_meta
from kernelwright.kernels.device import named_device
from kernelwright.types import Workload

H100 = named_device("h100")

LEAST = {"matmul": 8, "conv2d": 8, "attention": 4}
"""How many templates must have been planned at least, by operator."""


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> list[Workload]:
    """The workloads that ship with winners."""
    with Store.open(f"sqlite:///{tmp_path_factory.mktemp('shipped') / 'shipped.db'}") as store:
        load_pretuned(store)
        return [record.workload for record in store.records(device_key=H100.key, limit=None, trusted=True)]


def planned(operator: str, workloads: Iterable[Workload]) -> set[str]:
    """Templates of which a schedule was planned on tensors without data, three workloads for each."""
    counts: dict[str, int] = {}
    for workload in workloads:
        for name, template in get_operator(operator).templates.items():
            if counts.get(name, 0) == 3:
                continue
            try:
                space = template.space(workload, H100)
            except KernelwrightError:
                continue
            for schedule in space.sample(random.Random(0), 1):
                plan_on_meta(workload, schedule)
                counts[name] = counts.get(name, 0) + 1
    return set(counts)


@pytest.mark.parametrize("operator", LEAST)
def test_plans_read_no_tensor(operator: str, shipped: list[Workload]) -> None:
    found = planned(operator, [workload for workload in shipped if workload.operator == operator])
    assert len(found) >= LEAST[operator], sorted(set(get_operator(operator).templates) - found)
