"""A small made-up GPU: two templates, times from a formula, failures where asked, and a model that is half right."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from kernelwright.kernels.space import Constraint, Knob, KnobSpace, Space, UnionSpace
from kernelwright.search.runner import Finals
from kernelwright.types import (
    VENDOR_TEMPLATE,
    DeviceSpec,
    FrozenMap,
    Measurement,
    Schedule,
    Status,
    Toolchain,
    Trial,
    Workload,
)

DEVICE = DeviceSpec(
    "h100", "NVIDIA H100 SXM", "nvidia", "sm_90", 132, 232448, 50 << 20, 80 << 30, 3350.0, FrozenMap({"bf16": 989.0})
)
TOOLCHAIN = Toolchain("3.7.1", "2.13.0", "575.1", "ptxas 12.8.93", 1)
TYPES = FrozenMap({"a": "bf16", "b": "bf16", "out": "bf16"})
LAYOUTS = FrozenMap({"a": "row", "b": "col", "out": "row"})


def workload(m: int = 2048, n: int = 4096, k: int = 4096) -> Workload:
    """A bf16 matmul as nn.Linear has it."""
    return Workload("matmul", FrozenMap({"M": m, "N": n, "K": k}), TYPES, LAYOUTS)


WORKLOAD = workload()


def fake_space() -> UnionSpace:
    """110 schedules of two templates."""
    tiles = [Knob("block_m", (16, 32, 64, 128), "log2"), Knob("block_n", (32, 64, 128, 256), "log2")]
    small = Constraint("tile", lambda k: "too large" if int(k["block_m"]) * int(k["block_n"]) > 8192 else None)
    pointer = KnobSpace("pointer", [*tiles, Knob("num_stages", (2, 3, 4)), Knob("num_warps", (4, 8), "log2")], [small])
    skinny = KnobSpace(
        "skinny", [tiles[0], Knob("split_k", (1, 2, 4, 8), "log2"), Knob("mode", ("x", "y"), "category")], []
    )
    return UnionSpace([pointer, skinny])


def true_us(schedule: Schedule) -> float:
    """A smooth valley with its floor of 100 us at pointer(64, 128, stages 3, warps 4)."""
    knobs = schedule.knobs
    if schedule.template == "skinny":
        return 180.0 + 20 * abs(math.log2(float(knobs["block_m"])) - 5) + 5 * math.log2(float(knobs["split_k"]))
    off_tile = abs(math.log2(float(knobs["block_m"])) - 6) + abs(math.log2(float(knobs["block_n"])) - 7)
    return 100.0 + 30 * off_tile + 15 * abs(float(knobs["num_stages"]) - 3) + 8 * (knobs["num_warps"] == 8)


def works(schedule: Schedule) -> Measurement:
    """The formula's time, with what a compiler would tell."""
    return Measurement(
        Status.OK, true_us(schedule), error=1e-3, registers=128, spills=0, shared_bytes=65536, compile_s=0.5
    )


class FakeRunner:
    """Measures by formula. failures: what to answer instead; final_failures: what goes wrong in the final round."""

    def __init__(
        self,
        space: Space | None = None,
        failures: Mapping[Schedule, Measurement] | None = None,
        final_failures: Mapping[Schedule, Measurement] | None = None,
        seconds_each: float = 0.0,
    ) -> None:
        self.device = DEVICE
        self.toolchain = TOOLCHAIN
        self.offered = fake_space() if space is None else space
        self.failures = dict(failures or {})
        self.final_failures = dict(final_failures or {})
        self.seconds_each = seconds_each
        self.noise = 0.01
        self.measured: list[Schedule] = []
        self.final_rounds: list[tuple[Schedule, ...]] = []

    def space(self, workload: Workload) -> Space:
        return self.offered

    def measure(
        self, workload: Workload, schedules: Sequence[Schedule], deadline: float | None = None
    ) -> Iterator[tuple[Schedule, Measurement]]:
        for schedule in schedules:
            if deadline is not None and time.monotonic() >= deadline:
                return
            time.sleep(self.seconds_each)
            self.measured.append(schedule)
            yield schedule, self.failures.get(schedule) or works(schedule)

    def finals(self, workload: Workload, schedules: Sequence[Schedule]) -> Finals:
        self.final_rounds.append(tuple(schedules))
        seen = tuple((s, self.final_failures.get(s) or Measurement(Status.OK, true_us(s))) for s in schedules)
        return Finals(seen, "torch.mm", 110.0, self.noise, 1.001)

    def close(self) -> None:
        pass


class HalfRightModel:
    """Knows the tiles but not the rest, and thinks `skinny` twice as good as it is."""

    def __init__(self, flatter: float = 2.0) -> None:
        self.flatter = flatter
        self.told: list[Trial] = []

    def predict(self, workload: Workload, device: DeviceSpec, schedules: Sequence[Schedule]) -> np.ndarray:
        return np.array([self._score(schedule) for schedule in schedules])

    def _score(self, schedule: Schedule) -> float:
        if schedule.template == "skinny":
            return min(1.0, self.flatter * 100.0 / true_us(schedule) / 1.2)
        plain = Schedule("pointer", FrozenMap({**schedule.knobs, "num_stages": 3, "num_warps": 4}))
        return 100.0 / true_us(plain)

    def expected_regret(self, workload: Workload, device: DeviceSpec, schedules: Sequence[Schedule]) -> np.ndarray:
        scores = self.predict(workload, device, schedules)
        return 1 - scores / scores.max()

    def update(self, trials: Sequence[Trial]) -> None:
        self.told.extend(trials)

    def save(self, path: Path) -> None:
        raise NotImplementedError

    @classmethod
    def load(cls, path: Path) -> Self:
        raise NotImplementedError


def failure(status: Status = Status.BUILD_ERROR, message: str = "LLVM said no") -> Measurement:
    """A failed measurement."""
    return Measurement(status, message=message)


def trial(
    schedule: Schedule,
    measurement: Measurement | None = None,
    of: Workload = WORKLOAD,
    origin: str = "record",
    at: str = "2026-01-01T00:00:00+00:00",
    fingerprint: str = "f" * 20,
    toolchain: Toolchain = TOOLCHAIN,
) -> Trial:
    """A recorded trial with the formula's time unless told otherwise."""
    seen = works(schedule) if measurement is None else measurement
    return Trial(of, DEVICE, toolchain, schedule, seen, origin, fingerprint, at)


def vendor(us: float, of: Workload = WORKLOAD, call: str = "torch.mm") -> Trial:
    """A recorded vendor call."""
    schedule = Schedule(VENDOR_TEMPLATE, FrozenMap({"call": call}))
    return trial(schedule, Measurement(Status.OK, us), of, "record:final", fingerprint="")
