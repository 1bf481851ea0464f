"""Questions for the best kernel, as the API answers them: from memory, from one read, or with the cost model's help."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import time
from collections.abc import Collection
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool

import anyio
from anyio import to_thread

from kernelwright.db import Store
from kernelwright.db.change_watch import ChangeWatch
from kernelwright.db.record_lookup import Found, RecordLookup
from kernelwright.errors import KernelwrightError
from kernelwright.search import Answer
from kernelwright.service.answer_cache import AnswerCache, Given, etag_of
from kernelwright.service.answer_json import answer_json
from kernelwright.service.answering import Answers
from kernelwright.service.metrics import Metrics
from kernelwright.service.predictor import Predictor
from kernelwright.service.settings import Settings
from kernelwright.service.together import Together
from kernelwright.types import DeviceSpec, TuningRecord, Workload

logger = logging.getLogger(__name__)

READERS = 2
MOST_TOGETHER = 32
MOST_UNFINISHED = 1024
"""Answers from neighbours that wait for the cost model's word; the oldest go without it until they are asked anew."""

RESTS = 4.0
"""How long the cost model rests after a word that nobody waits for, in times of what that took."""

BUSY = "; the cost model is busy with other questions, so ask again in a moment"


class _Elsewhere(Exception):
    """Neighbours are wanted, which takes too long for the event loop."""


class _OwnRecords:
    """Records that were read, without neighbours."""

    def __init__(self, found: Found) -> None:
        self.find_records = found.find_records
        self.find_untrusted = found.find_untrusted

    def neighbours(self, workload: Workload, device_key: str, limit: int = 16) -> list[TuningRecord]:
        """Raises _Elsewhere."""
        raise _Elsewhere


class BestKernels:
    """Answers from a store for the event loop; what takes long is done in threads, a few at a time, or other processes.

    What this process writes shows at once, what another one writes after `settings.cache_seconds` at most.
    """

    def __init__(self, settings: Settings, store: Store, answers: Answers, metrics: Metrics) -> None:
        self._lookup = RecordLookup(store)
        self._answers = answers
        self._predictor = Predictor(answers, settings.model_processes, settings.models)
        self._watch = ChangeWatch(store.engine)
        self._cache = AnswerCache(settings.cache_bytes)
        self._fresh_seconds = settings.cache_seconds
        self._token: str | None = None
        self._looked = float("-inf")
        self._looking: asyncio.Task[None] | None = None
        self._reads = Together(self._read_together, MOST_TOGETHER)
        self._searches = Together(self._search, 1, rests=1.0)
        self._readers = anyio.CapacityLimiter(READERS)
        self._unfinished: collections.OrderedDict[str, tuple[str | None, Answer]] = collections.OrderedDict()
        self._finishing: asyncio.Task[None] | None = None
        self._searching: dict[str, asyncio.Task[Answer]] = {}
        self._counted = {how: metrics.queries.labels(how) for how in ("measured", "stale", "nearest", "predicted")}
        self._counted["vendor"] = metrics.queries.labels("vendor")
        self._used: collections.Counter[str] = collections.Counter()

    def remembered(self, query: bytes) -> Given | None:
        """The answer to a question in these very words, if it is known to be good still; needs no waiting."""
        key = self._cache.key_of(query)
        if key is None or self._is_due():
            return None
        given = self._cache.get(key, self._token)
        if given is None or not _will_do(given):
            return None
        self._count(given)
        return given

    async def one(self, workload: Workload, device: DeviceSpec, query: bytes = b"") -> Given:
        """The answer to one question, which was asked in the words of `query`.

        A neighbour's is given at once, and what the cost model says of it is added for those who ask later.
        """
        key = _key(workload, device)
        token = await self._current()
        given = self._cache.get(key, token)
        if given is None or not _will_do(given):
            given = await self._worked_out(key, token, workload, device)
        if query:
            self._cache.name(query, key)
        self._count(given)
        return given

    async def many(self, workloads: Collection[Workload], device: DeviceSpec, predict: bool) -> list[Given]:
        """The answers to many questions, from one read of the database. predict: with the cost model's help."""
        token = await self._current()
        keys = [_key(workload, device) for workload in workloads]
        found = {key: given for key in keys if (given := self._cache.get(key, token)) and (given.final or not predict)}
        missing = {key: workload for key, workload in zip(keys, workloads, strict=True) if key not in found}
        if missing:
            made = await to_thread.run_sync(self._make, missing, device, predict, limiter=self._readers)
            for key, given in made.items():
                self._cache.put(key, token, given)
            found |= made
        out = [found[key] for key in keys]
        for given in out:
            self._count(given)
        return out

    async def answers(self, workloads: Collection[Workload], device: DeviceSpec) -> list[Answer]:
        """What the records alone tell about many workloads, as values."""
        return await to_thread.run_sync(self._stored, workloads, device, limiter=self._readers)

    def whole(self, workload: Workload, device: DeviceSpec) -> Answer:
        """The answer as a value, with all that the cost model knows; not for the event loop, which it would block."""
        return self._completed(self._stored([workload], device)[0])

    def take_used(self) -> list[str]:
        """The records that were the answer since this was last called, each as often as it was."""
        used, self._used = self._used, collections.Counter()
        return list(used.elements())

    def begin(self) -> None:
        """Start what would otherwise start, and take a core for seconds, when it is first needed."""
        self._predictor.begin()

    def close(self) -> None:
        """End the threads and processes, and give the watching connection back."""
        if self._finishing is not None:
            self._finishing.cancel()
        self._predictor.close()
        self._reads.close()
        self._searches.close()
        self._watch.close()

    async def _worked_out(self, key: str, token: str | None, workload: Workload, device: DeviceSpec) -> Given:
        found = (
            self._lookup.find_at_once(workload, device.key)
            or await self._lookup.find_soon(workload, device.key)
            or await self._reads.ask((workload, device.key))
        )
        try:
            answer = self._answers.stored(workload, device, records=_OwnRecords(found))
        except _Elsewhere:
            if key not in self._searching:
                search = asyncio.create_task(self._searches.ask((workload, device, found)))
                self._searching[key] = search
                search.add_done_callback(lambda _: self._searching.pop(key, None))
            # Shielded, because others may wait for the same.
            answer = await asyncio.shield(self._searching[key])
        if answer.how == "nearest":
            self._finish_later(key, token, answer)
        elif answer.how == "vendor":
            coming = self._predictor.ask(answer)
            if coming is None:
                return _given(dataclasses.replace(answer, note=answer.note + BUSY))
            answer = await _when_done(coming, answer)
        given = _given(answer)
        self._cache.put(key, token, given)
        return given

    def _finish_later(self, key: str, token: str | None, answer: Answer) -> None:
        self._unfinished[key] = (token, answer)
        if len(self._unfinished) > MOST_UNFINISHED:
            self._unfinished.popitem(last=False)
        if self._finishing is None or self._finishing.done():
            self._finishing = asyncio.create_task(self._finish())

    async def _finish(self) -> None:
        while self._unfinished:
            key, (token, answer) = self._unfinished.popitem(last=False)
            began = time.monotonic()
            coming = self._predictor.ask(answer, must=True)
            assert coming is not None
            try:
                self._cache.put(key, token, _given(await _when_done(coming, answer)))
            except KernelwrightError as error:
                logger.warning("the cost model says nothing of %s: %s", answer.workload, error)
            # Nobody waits for it, so it may not take more than a fifth of a core from those who do.
            await asyncio.sleep(RESTS * (time.monotonic() - began))

    def _read_together(self, asked: list[tuple[Workload, str]]) -> list[Found]:
        found = {}
        for device_key in {device_key for _, device_key in asked}:
            workloads = [workload for workload, other in asked if other == device_key]
            found[device_key] = self._lookup.find(workloads, device_key)
        return [found[device_key] for _, device_key in asked]

    def _search(self, asked: list[tuple[Workload, DeviceSpec, Found]]) -> list[Answer]:
        return [self._answers.stored(workload, device, records=found) for workload, device, found in asked]

    def _stored(self, workloads: Collection[Workload], device: DeviceSpec) -> list[Answer]:
        records = self._lookup.find(list(workloads), device.key)
        return [self._answers.stored(workload, device, records=records) for workload in workloads]

    def _make(self, missing: dict[str, Workload], device: DeviceSpec, predict: bool) -> dict[str, Given]:
        answers = self._stored(missing.values(), device)
        if predict:
            answers = [self._completed(answer) for answer in answers]
        return {key: _given(answer) for key, answer in zip(missing, answers, strict=True)}

    def _completed(self, answer: Answer) -> Answer:
        if answer.how not in ("nearest", "vendor"):
            return answer
        coming = self._predictor.ask(answer, must=True)
        assert coming is not None
        try:
            return coming.result()
        except BrokenProcessPool:
            return answer

    def _is_due(self) -> bool:
        if self._looking is not None or self._watch.written.is_set():
            return True
        return time.monotonic() - self._looked > self._fresh_seconds

    async def _current(self) -> str | None:
        """The database's token, looked at if that was too long ago; those who ask meanwhile share one look."""
        if self._is_due():
            if self._looking is None or self._watch.written.is_set():
                self._looking = asyncio.create_task(self._look())
            await asyncio.shield(self._looking)
        return self._token

    async def _look(self) -> None:
        try:
            looked = time.monotonic()
            self._token = await to_thread.run_sync(self._watch.token)
            self._looked = looked
        finally:
            self._looking = None

    def _count(self, given: Given) -> None:
        self._counted[given.how].inc()
        if given.record_id is not None:
            self._used[given.record_id] += 1


def _key(workload: Workload, device: DeviceSpec) -> str:
    return f"{workload.key} {device.key} {device.slug}"


def _given(answer: Answer) -> Given:
    body = answer_json(answer)
    final = answer.how in ("measured", "stale", "predicted") or answer.regret is not None
    return Given(body, etag_of(body), answer.how, answer.record.key if answer.record else None, final)


def _will_do(given: Given) -> bool:
    """A neighbour's answer does without the cost model's word; "vendor" is the answer only where that was asked."""
    return given.final or given.how == "nearest"


async def _when_done(coming: Future[Answer], otherwise: Answer) -> Answer:
    try:
        # Shielded, because others may wait for the same.
        return await asyncio.shield(asyncio.wrap_future(coming))
    except BrokenProcessPool:
        return otherwise
