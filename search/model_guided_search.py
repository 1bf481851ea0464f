"""Search led by a cost model: tries what the model expects to be fast, and corrects the model by what it sees.

The merit of a schedule is the logarithm of the share of the best speed that is expected of it: what the model
predicts, plus what it got wrong on similar schedules of this workload, plus hope where nothing similar was tried. So it
adapts even to a model that cannot learn, and a model that is right is followed closely.
"""

from __future__ import annotations

import functools
import itertools
import math
import random

import numpy as np
import numpy.typing as npt

from kernelwright.cost_model.calibration import tells_regret
from kernelwright.cost_model.model import CostModel
from kernelwright.kernels.space import Space
from kernelwright.types import DeviceSpec, Measurement, Schedule, Toolchain, Trial, Workload

FloatArray = npt.NDArray[np.float64]

FAILED_SHARE = 0.1
"""Share of the best speed that failures, and anything slower, count as: bad, but not so bad as to hide the rest."""

_EXPLORE = 0.15
_EXPLORE_HALF_LIFE = 16
_NEIGHBOUR_BONUS = 0.05
_FIRST_SPREAD = 0.4
_LATER_SPREAD = 0.1
_ACROSS_TEMPLATES = 0.2
# Inverse lengths over a knob's whole range, (tile sizes, all other knobs): batches are spread over tiles above all,
# while errors of the model carry over from schedules that are near in every knob.
_SPREAD_SCALES = (3.0, 0.75)
_ERROR_SCALES = (2.0, 1.0)
_READING_NOISE = 0.05
_LEAST_ERROR = 0.1
_HOPE = 0.75
_REMEMBERED = 256
_TINY = 1e-9
_FIRST = 1e6
"""More than all merits."""

# The model only compares trials of one search, so any toolchain that is the same for all of them will do.
_SAME_TOOLCHAIN = Toolchain(triton="", torch="", driver="", compiler="", timer=0)


class ModelGuidedSearch:
    """Proposes the best expected schedules, spread over templates and tiles, with a shrinking share of random ones.

    The first proposal is the model's first choice. A model that never saw this operator measured may be wrong about
    whole templates, so that with it the first batch has one schedule of each template before a second of any. And where
    a trained model never saw one of the templates, half of the first batch after the first choice is of such templates.
    The model is told every result: give each search its own.
    """

    def __init__(self, workload: Workload, device: DeviceSpec, space: Space, seed: int, model: CostModel) -> None:
        self._workload = workload
        self._device = device
        self._space = space
        self._model = model
        self._each_template = not tells_regret(model, workload.operator)
        self._rng = random.Random(seed)
        self._members = list(space)
        self._place = {schedule: place for place, schedule in enumerate(self._members)}
        self._open = np.ones(len(self._members), dtype=np.bool_)
        self._times: dict[int, float] = {}
        self._untaught: list[Trial] = []
        self._expected: FloatArray | None = None
        self._rows: dict[int, FloatArray] = {}
        # What comes first until something was measured, however many proposals are made by then.
        self._turns: list[str] | None = None
        self._unseen: list[str] = []

    def propose(self, count: int) -> list[Schedule]:
        """Up to `count` of the schedules of highest merit, each unlike the others, some of them random."""
        count = min(count, int(self._open.sum()))
        if count <= 0:
            return []
        merit = self._merit()
        spread = _LATER_SPREAD if self._times else _FIRST_SPREAD
        nearest = np.zeros(len(self._members))
        chosen = []
        if self._times:
            self._turns, self._unseen = [], []
        elif self._turns is None:
            self._turns = self._templates_by(merit) if self._each_template else []
            self._unseen = self._fresh(count)
        for number in range(count):
            value = merit - spread * nearest
            if self._turns:
                value = np.where(self._of(self._turns.pop(0)) & self._open, merit + _FIRST, value)
            elif self._unseen and (number or not self._open.all()):
                value = np.where(self._of(self._unseen.pop(0)) & self._open, value + _FIRST, value)
            place = self._pick(value)
            self._open[place] = False
            nearest = np.maximum(nearest, self._similarity(place, _SPREAD_SCALES))
            chosen.append(self._members[place])
        return chosen

    def observe(self, schedule: Schedule, measurement: Measurement) -> None:
        """Take in a time or a failure; schedules outside the space are passed over."""
        place = self._place.get(schedule)
        if place is None:
            return
        self._open[place] = False
        # Taken out first so that the order of the dictionary is that of the last observations.
        self._times.pop(place, None)
        self._times[place] = measurement.median_us or math.inf
        self._untaught.append(
            Trial(self._workload, self._device, _SAME_TOOLCHAIN, schedule, measurement, origin="search")
        )

    def expected_gain(self) -> float:
        """The most that any one schedule not tried yet is expected to be faster than the best so far, as a share;
        infinite while nothing worked. By the model as corrected by what it got wrong here: expected improvement."""
        best = min(self._times.values(), default=math.inf)
        if math.isinf(best):
            return math.inf
        if not self._open.any():
            return 0.0
        expected = self._predict()
        places, wrong = self._errors(expected, best)
        middle = float(np.median(wrong))
        mean, unknown = self._posterior(places, wrong - middle)
        spread = max(_LEAST_ERROR, float(np.std(wrong))) * unknown[self._open] + _TINY
        above = (expected + middle + mean)[self._open]
        ratio = above / spread
        density = np.exp(-(ratio**2) / 2) / math.sqrt(2 * math.pi)
        below = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in ratio])
        return float(np.max(above * below + spread * density))

    def _templates_by(self, merit: FloatArray) -> list[str]:
        """The templates, that of the open schedule of highest merit first."""
        order = np.argsort(-merit, kind="stable").tolist()
        return list(dict.fromkeys(self._members[place].template for place in order if self._open[place]))

    def _fresh(self, count: int) -> list[str]:
        """Templates that a trained model never saw, by turns, for half of the first batch."""
        seen = set(getattr(self._model, "metadata", {}).get("templates", ()))
        unseen = sorted({schedule.template for schedule in self._members} - seen) if seen else []
        return list(itertools.islice(itertools.cycle(unseen), count // 2)) if unseen else []

    def _of(self, template: str) -> npt.NDArray[np.bool_]:
        return np.array([schedule.template == template for schedule in self._members], dtype=np.bool_)

    def _pick(self, value: FloatArray) -> int:
        seen = len(self._times)
        if seen and self._rng.random() < _EXPLORE * _EXPLORE_HALF_LIFE / (_EXPLORE_HALF_LIFE + seen):
            return int(self._rng.choice(np.flatnonzero(self._open).tolist()))
        return int(np.argmax(np.where(self._open, value, -np.inf)))

    def _merit(self) -> FloatArray:
        expected = self._predict()
        best = min(self._times.values(), default=math.inf)
        if math.isinf(best):
            return expected + self._away_from_failures()
        merit = expected + self._correction(expected, best)
        incumbent = next(place for place, time in self._times.items() if time == best)
        for neighbour in self._space.neighbours(self._members[incumbent]):
            merit[self._place[neighbour]] += _NEIGHBOUR_BONUS
        return merit

    def _predict(self) -> FloatArray:
        if self._untaught or self._expected is None:
            if self._untaught:
                self._model.update(self._untaught)
                self._untaught = []
            scores = np.asarray(self._model.predict(self._workload, self._device, self._members), dtype=np.float64)
            self._expected = np.log(np.maximum(scores, 1e-9))
        return self._expected

    def _correction(self, expected: FloatArray, best: float) -> FloatArray:
        """What the model got wrong on similar schedules: a Gaussian process over its errors."""
        places, wrong = self._errors(expected, best)
        return self._interpolate(places, wrong - np.median(wrong))

    def _errors(self, expected: FloatArray, best: float) -> tuple[list[int], FloatArray]:
        """The members tried last, and by how much each was better than the model said."""
        places = list(self._times)[-_REMEMBERED:]
        shares = np.array([best / self._times[place] for place in places])
        return places, np.log(np.maximum(shares, FAILED_SHARE)) - expected[places]

    def _away_from_failures(self) -> FloatArray:
        places = list(self._times)[-_REMEMBERED:]
        return self._interpolate(places, np.full(len(places), math.log(FAILED_SHARE)))

    def _interpolate(self, places: list[int], values: FloatArray) -> FloatArray:
        """The process's mean given values at some members, and hope where it knows little: an upper bound."""
        if not places:
            return np.zeros(len(self._members))
        mean, unknown = self._posterior(places, values)
        spread = max(_LEAST_ERROR, float(np.std(values)))
        return mean + _HOPE * spread * unknown

    def _posterior(self, places: list[int], values: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The process's mean given values at some members, and how little it knows of each: 1 for nothing."""
        known = self._rows
        self._rows = {at: known[at] if at in known else self._similarity(at, _ERROR_SCALES) for at in places}
        rows = np.stack(list(self._rows.values()))
        solved = np.linalg.solve(rows[:, places] + _READING_NOISE * np.eye(len(places)), rows)
        unknown = np.sqrt(np.maximum(0.0, 1 - (rows * solved).sum(axis=0)))
        return np.asarray(values @ solved), unknown

    def _similarity(self, place: int, scales: tuple[float, float]) -> FloatArray:
        """How alike each member is to one of them: 1 for itself, towards 0 for other tiles and other templates."""
        knobs, is_tile, templates = self._coordinates
        square = (((knobs - knobs[place]) * np.where(is_tile, *scales)) ** 2).sum(axis=1)
        alike = np.exp(-square / 2)
        return np.where(templates == templates[place], alike, _ACROSS_TEMPLATES * alike)

    @functools.cached_property
    def _coordinates(self) -> tuple[FloatArray, npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """Knobs scaled to their range [n, k], which of them are tile sizes [k], and the template's number [n]."""
        coded = [self._space.encode(schedule) for schedule in self._members]
        names = sorted({name for codes in coded for name in codes})
        knobs = np.array([[codes.get(name, 0.0) for name in names] for codes in coded]).reshape(len(coded), len(names))
        span = np.ptp(knobs, axis=0)
        is_tile = np.array([name.startswith("block") for name in names], dtype=np.bool_)
        numbers = {name: n for n, name in enumerate(sorted({s.template for s in self._members}))}
        templates = np.array([numbers[s.template] for s in self._members], dtype=np.int64)
        return knobs / np.where(span > 0, span, 1.0), is_tile, templates
