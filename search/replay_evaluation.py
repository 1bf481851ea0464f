"""How good is a strategy? Replays on recorded data, scored against the best that was recorded.

Quality after k measurements is the best recorded time over the best time found so far, 0 while nothing worked. A
failure counts as a measurement. Strategies see the space and what they measured, nothing else, and start anew for
each seed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kernelwright.kernels.space import Space
from kernelwright.search.strategy import Strategy
from kernelwright.types import Measurement, Schedule

FloatArray = npt.NDArray[np.float64]

LIMIT = 220
"""Most measurements of one replay."""

CHECKPOINTS = (16, 32, 64, 128, 220)
SCORED_FROM = 10
"""First number of measurements that counts for the score."""

EXACT_RANDOM = "random (exact)"
"""Name of the row that holds the exact expectation of random search."""

_RESAMPLES = 1000
_INTERVAL = (2.5, 97.5)


@dataclasses.dataclass(frozen=True)
class Case:
    """One recorded problem. seconds: what each measurement cost, empty where unknown."""

    space: Space
    measurements: Mapping[Schedule, Measurement]
    make: Callable[[str, int], Strategy]
    seconds: Mapping[Schedule, float] = dataclasses.field(default_factory=dict)

    def optimum_us(self) -> float:
        """The best recorded time."""
        return min(m.median_us for m in self.measurements.values() if m.median_us is not None)


@dataclasses.dataclass(frozen=True)
class Replay:
    """One seed's search. quality: after 1, 2, ... measurements, [limit]. seconds: spent by then, None if unknown."""

    quality: FloatArray
    seconds: FloatArray | None


def replay(case: Case, strategy: str, seed: int, limit: int = LIMIT, batch: int = 1) -> Replay:
    """Search one case; `batch` schedules are proposed at a time. A space smaller than `limit` is exhausted, and the
    last quality stands for the rest."""
    chosen = case.make(strategy, seed)
    best, shares, spent = case.optimum_us(), [0.0], [0.0]
    while len(shares) <= limit and (schedules := chosen.propose(min(batch, limit + 1 - len(shares)))):
        for schedule in schedules:
            measurement = case.measurements[schedule]
            chosen.observe(schedule, measurement)
            shares.append(0.0 if measurement.median_us is None else best / measurement.median_us)
            spent.append(case.seconds.get(schedule, math.nan))
    rest = limit + 1 - len(shares)
    quality = np.pad(np.maximum.accumulate(shares), (0, rest), mode="edge")[1:]
    seconds = np.pad(np.cumsum(spent), (0, rest), mode="edge")[1:] if case.seconds else None
    return Replay(quality, seconds)


def expected_random(case: Case, limit: int = LIMIT) -> FloatArray:
    """Mean quality of drawing at random without replacement after 1, 2, ... measurements, worked out exactly."""
    best = case.optimum_us()
    found = (0.0 if m.median_us is None else best / m.median_us for m in case.measurements.values())
    shares = np.sort(np.array(list(found)))[::-1]
    count = len(shares)
    drawn = np.arange(1, limit + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, count + 1)))])
    out = np.ones(limit)
    for k in drawn[drawn <= count]:
        # The best of k draws is the i-th best of all when the other k - 1 come from those after it.
        i = np.arange(count - k + 1)
        chance = logs[count - i - 1] - logs[k - 1] - logs[count - i - k] - logs[count] + logs[k] + logs[count - k]
        out[k - 1] = float(shares[i] @ np.exp(chance))
    return out


def score(mean_quality: FloatArray, random_quality: FloatArray) -> float:
    """Share of the way from random search to the optimum, averaged over SCORED_FROM to the last measurement."""
    left = np.maximum(1 - random_quality[SCORED_FROM - 1 :], 1e-9)
    return float(np.mean((mean_quality[SCORED_FROM - 1 :] - random_quality[SCORED_FROM - 1 :]) / left))


def make_row(space: str, strategy: str, runs: Sequence[Sequence[Replay]], random_quality: FloatArray) -> dict[str, Any]:
    """The row of a result file: `runs` are the seeds of each case, and every figure is over all of them.

    random_quality: what drawing at random reaches, mean over the cases. `curve` is the mean quality, `seconds_curve`
    the median seconds spent, after 1, 2, ... measurements.
    """
    qualities = np.array([[run.quality for run in seeds] for seeds in runs])
    curves = qualities.reshape(-1, qualities.shape[-1])
    limit = curves.shape[1]
    mean = curves.mean(axis=0)
    row: dict[str, Any] = {"space": space, "strategy": strategy, "seeds": qualities.shape[1], "cases": len(runs)}
    row |= {f"q{k}": round(float(mean[k - 1]), 4) for k in CHECKPOINTS if k <= limit}
    row |= {f"median_{k}": round(float(np.median(curves[:, k - 1])), 4) for k in (1, 8, *CHECKPOINTS) if k <= limit}
    row |= {f"p10_{k}": round(float(np.percentile(curves[:, k - 1], 10)), 4) for k in CHECKPOINTS if k <= limit}
    row[f"fscore_{SCORED_FROM}_{limit}"] = round(score(mean, random_quality), 4)
    row["intervals"] = _intervals(qualities, random_quality)
    row["curve"] = [round(float(value), 4) for value in mean]
    seconds = [run.seconds for seeds in runs for run in seeds if run.seconds is not None]
    if seconds:
        row["seconds_curve"] = [round(float(value), 2) for value in np.median(seconds, axis=0)]
    return row


def random_row(space: str, cases: Sequence[Case], limit: int = LIMIT) -> tuple[dict[str, Any], FloatArray]:
    """The exact expectation of random search as a row, and the same as an array."""
    curve = np.mean([expected_random(case, limit) for case in cases], axis=0)
    row: dict[str, Any] = {"space": space, "strategy": EXACT_RANDOM, "seeds": 0, "cases": len(cases)}
    row |= {f"q{k}": round(float(curve[k - 1]), 4) for k in CHECKPOINTS if k <= limit}
    row[f"fscore_{SCORED_FROM}_{limit}"] = 0.0
    return row | {"curve": [round(float(value), 4) for value in curve]}, curve


def _intervals(qualities: FloatArray, random_quality: FloatArray) -> dict[str, list[float]]:
    """95 % bootstrap intervals over seeds, drawn together for all cases."""
    limit = qualities.shape[-1]
    by_seed = qualities.mean(axis=0)
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, len(by_seed), (_RESAMPLES, len(by_seed)))
    means = np.stack([by_seed[places].mean(axis=0) for places in drawn])
    out = {f"q{k}": means[:, k - 1] for k in CHECKPOINTS if k <= limit}
    out[f"fscore_{SCORED_FROM}_{limit}"] = np.array([score(mean, random_quality) for mean in means])
    return {name: [round(float(v), 4) for v in np.percentile(values, _INTERVAL)] for name, values in out.items()}


def replays(
    cases: Sequence[Case], strategy: str, seeds: int, limit: int = LIMIT, batch: int = 1
) -> Iterator[list[Replay]]:
    """The seeds 0, 1, ... of each case, one case after the other."""
    for case in cases:
        yield [replay(case, strategy, seed, limit, batch) for seed in range(seeds)]
