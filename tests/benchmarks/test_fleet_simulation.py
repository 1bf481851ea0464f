"""The simulated installation conserves its work, and slows down where it must."""

from __future__ import annotations

import dataclasses

import pytest
from fleet_simulation import Costs, Installation, simulate

FREE = Costs([0.1], 0.5, 0.0, 0.0, 1, 0.0)
PLAN = Installation(devices=20, kinds=5, workloads=203, drivers=4, trials=16)


def test_without_costs_devices_are_always_busy() -> None:
    seen = simulate(PLAN, FREE)
    assert seen["trials_done"] == 203 * 16 and seen["trials_again"] == 0
    assert seen["devices_busy"] > 0.95
    # The last of a kind's devices has at most one workload more than the others.
    assert seen["seconds"] == pytest.approx(11 * (16 * 0.1 + 0.5), rel=0.1)


def test_a_driver_with_too_much_to_do_holds_the_devices_up() -> None:
    seen = simulate(PLAN, dataclasses.replace(FREE, driver_s=0.05))
    assert seen["drivers_busy"] > 0.9 and seen["devices_busy"] < 0.6
    assert seen["trials_per_s"] <= 4 / 0.05


def test_pages_spare_the_database() -> None:
    single = simulate(PLAN, dataclasses.replace(FREE, write_s=0.001))
    paged = simulate(PLAN, dataclasses.replace(FREE, write_s=0.001, page=16))
    assert paged["database_busy"] < single["database_busy"] / 4
    assert paged["trials_done"] == single["trials_done"] == 203 * 16


def test_faults_cost_repetitions_and_lose_nothing() -> None:
    seen = simulate(dataclasses.replace(PLAN, mtbf_s=5.0, repair_s=1.0, straggler=0.01, timeout_s=2.0), FREE)
    assert seen["trials_done"] == 203 * 16 and seen["trials_again"] > 20
    assert seen["devices_busy"] < 0.9
