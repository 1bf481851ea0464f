"""Answers from recorded trials instead of a GPU: for tests, first steps, and fair comparison of strategies."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kernelwright.errors import NothingRecorded
from kernelwright.kernels.space import FiniteSpace, Space
from kernelwright.search.runner import Finals
from kernelwright.types import VENDOR_TEMPLATE, DeviceSpec, Measurement, Schedule, Status, Toolchain, Trial, Workload

REPLAY_NOISE = 0.02
"""Relative noise of recorded times, which were not taken in turns with the vendor call."""

_NEARBY = 5


class ReplayRunner:
    """A device whose every measurement is read from a record; the same question always gets the same answer.

    trials: recordings; those of other devices than `device` are left out. `toolchain` is the one that most of them
    have. A schedule recorded more than once counts as wrong if it ever was; otherwise its middle time counts (the
    lower of two), from recordings with that toolchain where there are any; and where it never worked, its last failure.
    Recordings whose origin ends in ":final", timed in turns with the vendor call, answer the final round first, and
    `measure` only where there are no others.
    """

    def __init__(self, trials: Iterable[Trial], device: DeviceSpec) -> None:
        kept = [trial for trial in trials if trial.device.key == device.key]
        if not kept:
            raise NothingRecorded(
                f"a replay of {device.name} needs trials recorded on one, got none; record a sweep first"
            )
        self.device = device
        self.toolchain = _most_common_toolchain(kept)
        self._by_workload: dict[Workload, dict[Schedule, list[Trial]]] = {}
        for trial in kept:
            self._by_workload.setdefault(trial.workload, {}).setdefault(trial.schedule, []).append(trial)
        self._chosen: dict[tuple[Workload, bool], dict[Schedule, Trial]] = {}
        self._spaces: dict[Workload, FiniteSpace] = {}

    @property
    def workloads(self) -> tuple[Workload, ...]:
        """What was recorded, in the order of the recording."""
        return tuple(self._by_workload)

    def space(self, workload: Workload) -> Space:
        """The schedules that were recorded for the workload; NothingRecorded, naming the nearest, when it has none."""
        if workload not in self._spaces:
            ours = [schedule for schedule in self._recorded(workload) if schedule.template != VENDOR_TEMPLATE]
            if not ours:
                raise NothingRecorded(self._why_nothing(workload))
            self._spaces[workload] = FiniteSpace(ours)
        return self._spaces[workload]

    def measure(
        self, workload: Workload, schedules: Sequence[Schedule], deadline: float | None = None
    ) -> Iterator[tuple[Schedule, Measurement]]:
        """What was recorded for each schedule, in the order asked; NothingRecorded for one that was not."""
        for schedule in schedules:
            if deadline is not None and time.monotonic() >= deadline:
                return
            yield schedule, self._lookup(workload, schedule)

    def finals(self, workload: Workload, schedules: Sequence[Schedule]) -> Finals:
        """The recorded times of the schedules beside the fastest recorded vendor call."""
        calls = [
            (trial.measurement.median_us, str(schedule.knobs.get("call", "")))
            for schedule, trial in self._recorded(workload, final=True).items()
            if schedule.template == VENDOR_TEMPLATE and trial.measurement.median_us is not None
        ]
        vendor_us, vendor = min(calls, default=(None, ""))
        measurements = tuple((schedule, self._lookup(workload, schedule, final=True)) for schedule in schedules)
        return Finals(measurements, vendor, vendor_us, REPLAY_NOISE, aa_ratio=None)

    def fingerprints(self, workload: Workload) -> Mapping[str, str]:
        """Digest of each template's source as it was when the workload was recorded."""
        return {s.template: trial.template_fingerprint for s, trial in self._recorded(workload).items()}

    def close(self) -> None:
        """Nothing is held."""

    def _recorded(self, workload: Workload, final: bool = False) -> Mapping[Schedule, Trial]:
        if (workload, final) not in self._chosen:
            groups = self._by_workload.get(workload, {})
            chosen = {schedule: _choose(trials, self.toolchain, final) for schedule, trials in groups.items()}
            self._chosen[workload, final] = chosen
        return self._chosen[workload, final]

    def _lookup(self, workload: Workload, schedule: Schedule, final: bool = False) -> Measurement:
        trial = self._recorded(workload, final).get(schedule)
        if trial is None:
            self.space(workload)
            raise NothingRecorded(f"{schedule} was not recorded for {workload}; propose members of the runner's space")
        return trial.measurement

    def _why_nothing(self, workload: Workload) -> str:
        near = sorted((w for w in self._by_workload), key=lambda other: _distance(workload, other))[:_NEARBY]
        listed = "; ".join(map(str, near))
        return (
            f"the recording of {self.device.name} must hold trials of {workload}, but it has none; "
            f"nearest of {len(self._by_workload)} recorded workloads: {listed}"
        )


def _most_common_toolchain(trials: Sequence[Trial]) -> Toolchain:
    counts = Counter(trial.toolchain for trial in trials)
    last = {trial.toolchain: trial.measured_at for trial in sorted(trials, key=lambda trial: trial.measured_at)}
    return max(counts, key=lambda toolchain: (counts[toolchain], last[toolchain], toolchain.key))


def _choose(trials: Sequence[Trial], toolchain: Toolchain, final: bool) -> Trial:
    """The one of a schedule's recordings that stands for it."""
    comparable = [trial for trial in trials if trial.toolchain == toolchain] or trials
    same = sorted(comparable, key=lambda trial: trial.measured_at)
    wrong = [trial for trial in same if trial.measurement.status is Status.WRONG_RESULT]
    if wrong:
        return wrong[-1]
    wanted = [trial for trial in same if trial.origin.endswith(":final") == final] or same
    ok = sorted((t for t in wanted if t.measurement.ok), key=lambda t: t.measurement.median_us or math.inf)
    return ok[(len(ok) - 1) // 2] if ok else wanted[-1]


def _distance(one: Workload, other: Workload) -> tuple[bool, int, float]:
    differences = sum(
        getattr(one, name) != getattr(other, name) for name in ("dtypes", "layouts", "epilogue", "attributes")
    )
    names = set(one.dims) | set(other.dims)
    ratios = (math.log2((one.dims.get(name, 0) + 1) / (other.dims.get(name, 0) + 1)) for name in names)
    return one.operator != other.operator, differences, sum(ratio**2 for ratio in ratios)
