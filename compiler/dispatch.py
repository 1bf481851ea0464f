"""Where answers come from while a model is compiled: the records of the local database, read once for a graph, and what
a service says, whichever knows better."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from sqlalchemy import make_url

from kernelwright.compiler.operands import DETERMINISTIC
from kernelwright.db.engine import default_url
from kernelwright.db.store import Store
from kernelwright.errors import DatabaseUnavailable
from kernelwright.kernels import get_operator
from kernelwright.kernels.device import named_device, present_device
from kernelwright.kernels.triton_adapter import current_toolchain
from kernelwright.search.answer import Answer, find_winner
from kernelwright.search.timing import TIMER_VERSION
from kernelwright.types import DeviceSpec, FrozenMap, Toolchain, TuningRecord, Workload, digest

CERTAINTY = ("measured", "stale", "nearest", "predicted", "vendor")
"""Kinds of answer, the most certain first."""

REST_SECONDS = 60.0
"""After a database was waited for in vain, how long it is left alone."""

LONG_SECONDS = 1.0
"""What fails sooner made nobody wait."""

_resting: dict[str, tuple[float, str]] = {}
"""Databases that are left alone: until when, and why."""


@runtime_checkable
class Prepared(Protocol):
    """A source of answers that would rather be asked for many workloads at once."""

    def prepare(self, workloads: Sequence[Workload]) -> None:
        """Make ready what will be asked for next."""
        ...


class Answers(Protocol):
    """A source of answers whose present state can be told."""

    @property
    def state(self) -> str:
        """Digest of all that the answers depend on: equal states give equal answers."""
        ...

    def __call__(self, workload: Workload) -> Answer:
        """What is fastest for the workload; a miss is an answer too."""
        ...


class MostCertain:
    """Several sources; of their answers the most certain one counts, and of equally certain ones the first."""

    def __init__(self, sources: Sequence[Answers]) -> None:
        self._sources = tuple(sources)

    def prepare(self, workloads: Sequence[Workload]) -> None:
        """See `Prepared`."""
        for source in self._sources:
            if isinstance(source, Prepared):
                source.prepare(workloads)

    def __call__(self, workload: Workload) -> Answer:
        """The answer that counts."""
        return min((source(workload) for source in self._sources), key=_certainty)

    @property
    def state(self) -> str:
        """See `Answers`."""
        return digest([source.state for source in self._sources])


class RecordedAnswers:
    """Answers from a list of records, newest first. Remembers what it was asked, since models repeat their layers."""

    def __init__(self, records: Sequence[TuningRecord], device: DeviceSpec, toolchain: Toolchain) -> None:
        self._records = records
        self._device = device
        self._toolchain = toolchain
        self._by_workload: dict[str, list[TuningRecord]] = defaultdict(list)
        self._by_family: dict[tuple[object, ...], list[TuningRecord]] = defaultdict(list)
        for record in records:
            self._by_workload[record.workload.key].append(record)
            self._by_family[_family(record.workload)].append(record)
        self._answers: dict[Workload, Answer] = {}

    def __call__(self, workload: Workload) -> Answer:
        """What is fastest for the workload; a miss is an answer too."""
        if workload not in self._answers:
            answer = find_winner(workload, self._device, self, toolchain=self._toolchain)
            self._answers[workload] = min(answer, self._in_order(workload) or answer, key=_certainty)
        return self._answers[workload]

    def _in_order(self, workload: Workload) -> Answer | None:
        """For sums in a fixed order: what is known of them in any, if its schedule adds up in a fixed one anyway."""
        if not workload.attributes.get(DETERMINISTIC):
            return None
        others = FrozenMap({name: value for name, value in workload.attributes.items() if name != DETERMINISTIC})
        answer = self(dataclasses.replace(workload, attributes=others))
        space = get_operator(workload.operator).space(workload, self._device)
        fits = answer.schedule is not None and not space.why_illegal(answer.schedule)
        return dataclasses.replace(answer, workload=workload) if fits else None

    @property
    def state(self) -> str:
        """Digest of all that the answers depend on: equal states give equal answers."""
        seen = [[record.key, record.schedule.key, record.winner, record.created_at] for record in self._records]
        return digest([self._device.key, self._toolchain.key, sorted(seen)])

    def find_records(self, workload_key: str, device_key: str) -> list[TuningRecord]:
        """See `kernelwright.search.answer.Records`."""
        return [record for record in self._by_workload.get(workload_key, []) if record.device.key == device_key]

    def neighbours(self, workload: Workload, device_key: str, limit: int = 64) -> list[TuningRecord]:
        """See `kernelwright.search.answer.Records`; all there are, because sorting them out is cheap here."""
        family = self._by_family.get(_family(workload), [])
        return [r for r in family if r.device.key == device_key and r.workload.dims != workload.dims]


def _certainty(answer: Answer) -> int:
    return CERTAINTY.index(answer.how)


def device_of(name: str | None) -> DeviceSpec:
    """A GPU by name, None: the present one. UnknownDevice where there is no such GPU."""
    return present_device(torch.cuda.current_device()) if name is None else named_device(name)


def local_answers(
    url: str | None = None, device: str | None = None, toolchain: Toolchain | None = None
) -> RecordedAnswers:
    """Answers from the database at `url` (None: the user's own) for a GPU by name (None: the present one) with this
    software (None: what is here).

    Raises DatabaseError when it cannot be read or there is none, UnknownDevice where there is no such GPU.
    """
    with opened(url) as store:
        spec = device_of(device)
        records = store.records(device_key=spec.key, limit=None, trusted=True)
    return RecordedAnswers(records, spec, toolchain or current_toolchain(TIMER_VERSION))


@contextlib.contextmanager
def opened(url: str | None) -> Iterator[Store]:
    """The store at `url` (None: the user's own), for a compile to read. One that was waited for in vain, as it was
    locked or its server gone, is left alone for a while: a model may be hundreds of graphs. Raises DatabaseError."""
    where = url or default_url()
    check_exists(where)
    until, reason = _resting.get(where, (0.0, ""))
    began = time.monotonic()
    if began < until:
        raise DatabaseUnavailable(reason)
    try:
        with Store.open(url) as store:
            yield store
    except DatabaseUnavailable as error:
        now = time.monotonic()
        if now - began > LONG_SECONDS:
            _resting[where] = (now + REST_SECONDS, str(error))
        raise


def check_exists(url: str) -> None:
    """DatabaseUnavailable unless there is a database: opening would make an empty one, which is not for a compile to
    do."""
    try:
        parsed = make_url(url)
    except Exception:
        return
    path = parsed.database
    if parsed.get_backend_name() == "sqlite" and path and not path.startswith("file:") and not Path(path).exists():
        raise DatabaseUnavailable(f"there is no database at {path}; fill one by: kernelwright tune")


def _family(workload: Workload) -> tuple[object, ...]:
    """All of a workload but its sizes."""
    w = workload
    return w.operator, w.dtypes, w.layouts, w.epilogue, w.attributes, w.error_budget
