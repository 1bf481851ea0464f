"""Search spaces: knobs, and named constraints that say in plain words why a schedule is illegal on a device."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from kernelwright.types import FrozenMap, Scalar, Schedule, digest


@dataclasses.dataclass(frozen=True)
class Knob:
    """One choice of a template: its values in order, and how a model should read them.

    scale: "log2" for sizes, "linear" for counts, "category" for names and switches.
    """

    name: str
    values: tuple[Scalar, ...]
    scale: str = "linear"

    def encode(self, value: Scalar) -> float:
        """A number for a cost model: log2 of the value, the value, or its place in the list."""
        code = self._codes.get(value)
        return self._code(value) if code is None else code

    @functools.cached_property
    def _codes(self) -> dict[Scalar, float]:
        return {value: self._code(value) for value in self.values}

    def _code(self, value: Scalar) -> float:
        if self.scale == "category":
            return float(self.values.index(value))
        return math.log2(float(value)) if self.scale == "log2" else float(value)


@dataclasses.dataclass(frozen=True)
class Constraint:
    """A named rule: `check` gets the knob values and returns why they are illegal, or None.

    It depends on nothing but the knobs it asks for, and holds up for values that other constraints forbid.
    """

    name: str
    check: Callable[[Mapping[str, Scalar]], str | None]


class _NotSet(Exception):
    """A constraint asked for a knob, `args[0]`, that has no value yet."""


class _Partial(Mapping[str, Scalar]):
    """Values chosen for some of the knobs `names`. Asking for another one raises _NotSet; so does whatever needs them
    all."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.chosen: dict[str, Scalar] = {}

    def __getitem__(self, name: str) -> Scalar:
        try:
            return self.chosen[name]
        except KeyError:
            raise (_NotSet(name) if name in self.names else KeyError(name)) from None

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        for name in self.names:
            self[name]
        return iter(self.names)

    def __len__(self) -> int:
        return len(list(iter(self)))


Waiting = list[tuple[str, Constraint]]
"""Constraints that cannot be told yet, each with the knob that it asks for next."""


def _narrowed(constraints: Iterable[Constraint], partial: _Partial) -> Waiting | None:
    """Those of the constraints that need further knobs; None when one is broken whatever these will be.

    Checks are pure, so one that ends without asking for a further knob ends the same for every value of it: whole
    branches of the space are left out at once, and nothing is checked twice.
    """
    waiting = []
    for constraint in constraints:
        try:
            if constraint.check(partial) is not None:
                return None
        except _NotSet as needs:
            waiting.append((needs.args[0], constraint))
    return waiting


class Space(Protocol):
    """A finite set of legal schedules."""

    @property
    def fingerprint(self) -> str:
        """Digest of what the space offers; equal spaces have equal fingerprints."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Schedule]:
        """All legal schedules, in a fixed order."""
        ...

    def contains(self, schedule: Schedule) -> bool:
        """Whether the schedule is legal."""
        ...

    def why_illegal(self, schedule: Schedule) -> tuple[str, ...]:
        """Every reason, as "constraint: words"; empty when legal."""
        ...

    def sample(self, rng: random.Random, count: int) -> list[Schedule]:
        """Up to `count` different legal schedules, uniformly."""
        ...

    def neighbours(self, schedule: Schedule) -> list[Schedule]:
        """The legal schedules one step away in one knob."""
        ...

    def encode(self, schedule: Schedule) -> dict[str, float]:
        """The knobs as numbers, for distances and models."""
        ...


class _Enumerated:
    """What spaces that hold a list of their members share."""

    members: tuple[Schedule, ...]

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Schedule]:
        return iter(self.members)

    def sample(self, rng: random.Random, count: int) -> list[Schedule]:
        return rng.sample(self.members, min(count, len(self.members)))

    @functools.cached_property
    def _member_set(self) -> frozenset[Schedule]:
        return frozenset(self.members)

    def contains(self, schedule: Schedule) -> bool:
        return schedule in self._member_set


class KnobSpace(_Enumerated):
    """One template's knobs under constraints. Enumerates its legal members on first use."""

    def __init__(self, template: str, knobs: Sequence[Knob], constraints: Sequence[Constraint]) -> None:
        self.template = template
        self.knobs = {knob.name: knob for knob in knobs}
        self.constraints = tuple(constraints)

    @functools.cached_property
    def members(self) -> tuple[Schedule, ...]:  # type: ignore[override]
        out: list[Schedule] = []
        partial = _Partial(list(self.knobs))
        partial.chosen.update({name: knob.values[0] for name, knob in self.knobs.items() if len(knob.values) == 1})
        waiting = _narrowed(self.constraints, partial)
        if waiting is not None:
            self._enumerate([name for name in self.knobs if name not in partial.chosen], partial, waiting, out)
        return tuple(out)

    def _enumerate(self, free: list[str], partial: _Partial, waiting: Waiting, out: list[Schedule]) -> None:
        """Add the members with the knobs set so far, in the order of `itertools.product` over the free ones."""
        if not free:
            out.append(Schedule(self.template, FrozenMap(partial.chosen)))
            return
        name, rest = free[0], free[1:]
        due = [constraint for wanted, constraint in waiting if wanted == name]
        later = [entry for entry in waiting if entry[0] != name] if due else waiting
        for value in self.knobs[name].values:
            partial.chosen[name] = value
            still = _narrowed(due, partial)
            if still is not None:
                self._enumerate(rest, partial, later + still if still else later, out)
        del partial.chosen[name]

    @functools.cached_property
    def fingerprint(self) -> str:
        knobs = [[k.name, list(k.values), k.scale] for k in self.knobs.values()]
        return digest([self.template, knobs, sorted(c.name for c in self.constraints), len(self)])

    def why_illegal(self, schedule: Schedule) -> tuple[str, ...]:
        if schedule.template != self.template:
            return (f"template: must be {self.template}, got {schedule.template}",)
        if set(schedule.knobs) != set(self.knobs):
            return (f"knobs: must be {', '.join(self.knobs)}, got {', '.join(schedule.knobs)}",)
        reasons = [
            f"{knob.name}: must be one of {', '.join(map(str, knob.values))}, got {schedule.knobs[knob.name]}"
            for knob in self.knobs.values()
            if schedule.knobs[knob.name] not in knob.values
        ]
        if reasons:
            return tuple(reasons)
        found = [(c.name, c.check(schedule.knobs)) for c in self.constraints]
        return tuple(f"{name}: {why}" for name, why in found if why is not None)

    def neighbours(self, schedule: Schedule) -> list[Schedule]:
        out = []
        for knob in self.knobs.values():
            at = knob.values.index(schedule.knobs[knob.name])
            places = range(len(knob.values)) if knob.scale == "category" else (at - 1, at + 1)
            for place in places:
                if place != at and 0 <= place < len(knob.values):
                    step = Schedule(self.template, {**schedule.knobs, knob.name: knob.values[place]})  # type: ignore[arg-type]
                    if self.contains(step):
                        out.append(step)
        return out

    def encode(self, schedule: Schedule) -> dict[str, float]:
        return {knob.name: knob.encode(schedule.knobs[knob.name]) for knob in self.knobs.values()}


class UnionSpace(_Enumerated):
    """The spaces of several templates side by side."""

    def __init__(self, parts: Sequence[KnobSpace]) -> None:
        self.parts = {part.template: part for part in parts}

    @functools.cached_property
    def members(self) -> tuple[Schedule, ...]:  # type: ignore[override]
        return tuple(schedule for part in self.parts.values() for schedule in part)

    @functools.cached_property
    def fingerprint(self) -> str:
        return digest([part.fingerprint for part in self.parts.values()])

    def why_illegal(self, schedule: Schedule) -> tuple[str, ...]:
        if schedule.template not in self.parts:
            return (f"template: must be one of {', '.join(self.parts) or 'none'}, got {schedule.template}",)
        return self.parts[schedule.template].why_illegal(schedule)

    def sample(self, rng: random.Random, count: int) -> list[Schedule]:
        """Uniform inside each template, templates taking turns, so that a small one is not drowned by a large one."""
        hands = [part.sample(rng, count) for part in self.parts.values() if len(part)]
        dealt = [s for turn in itertools.zip_longest(*hands) for s in turn if s is not None]
        return dealt[:count]

    def neighbours(self, schedule: Schedule) -> list[Schedule]:
        return self.parts[schedule.template].neighbours(schedule)

    def encode(self, schedule: Schedule) -> dict[str, float]:
        return self.parts[schedule.template].encode(schedule)


class FiniteSpace(_Enumerated):
    """A given list of schedules, such as those that were recorded; neighbours differ in one knob."""

    def __init__(self, members: Sequence[Schedule]) -> None:
        self.members = tuple(dict.fromkeys(members))

    @functools.cached_property
    def fingerprint(self) -> str:
        return digest(sorted(schedule.key for schedule in self.members))

    def why_illegal(self, schedule: Schedule) -> tuple[str, ...]:
        return () if self.contains(schedule) else ("recorded: this schedule is not among those listed",)

    def neighbours(self, schedule: Schedule) -> list[Schedule]:
        return [s for s in self.members if s.template == schedule.template and _distance(s, schedule) == 1]

    def encode(self, schedule: Schedule) -> dict[str, float]:
        out = {}
        for name, value in schedule.knobs.items():
            if isinstance(value, str):
                out[f"{name}={value}"] = 1.0
            else:
                out[name] = math.log2(value) if value > 0 else float(value) - 1.0
        return out


def _distance(one: Schedule, other: Schedule) -> int:
    return sum(one.knobs.get(name) != value for name, value in other.knobs.items())
