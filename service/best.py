"""Questions for the best kernel, as the API answers them: from memory, from one read, or with the cost model's help."""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Collection

import anyio
from anyio import to_thread

from kernelwright.db import Store
from kernelwright.db.change_watch import ChangeWatch
from kernelwright.db.record_lookup import RecordLookup
from kernelwright.search import Answer
from kernelwright.service.answer_cache import AnswerCache, Given, etag_of
from kernelwright.service.answering import Answers, tell
from kernelwright.service.metrics import Metrics
from kernelwright.service.settings import Settings
from kernelwright.service.together import Together
from kernelwright.types import DeviceSpec, Workload

READERS = 2
MODELLERS = 1
MOST_TOGETHER = 32


class BestKernels:
    """Answers from a store for the event loop; the work is done in threads, a few at a time.

    What this process writes shows at once, what another one writes after `settings.cache_seconds` at most.
    """

    def __init__(self, settings: Settings, store: Store, answers: Answers, metrics: Metrics) -> None:
        self._lookup = RecordLookup(store)
        self._answers = answers
        self._watch = ChangeWatch(store.engine)
        self._cache = AnswerCache(settings.cache_bytes)
        self._fresh_seconds = settings.cache_seconds
        self._token: str | None = None
        self._looked = float("-inf")
        self._looking: asyncio.Task[None] | None = None
        self._quick = Together(self._read_together, MOST_TOGETHER)
        self._readers = anyio.CapacityLimiter(READERS)
        self._modellers = anyio.CapacityLimiter(MODELLERS)
        self._counted = {how: metrics.queries.labels(how) for how in ("measured", "stale", "nearest", "predicted")}
        self._counted["vendor"] = metrics.queries.labels("vendor")
        self._used: collections.Counter[str] = collections.Counter()

    def remembered(self, query: bytes) -> Given | None:
        """The answer to a question in these very words, if it is known to be good still; needs no waiting."""
        key = self._cache.key_of(query)
        if key is None or self._is_due():
            return None
        given = self._cache.get(key, self._token)
        if given is None or not given.final:
            return None
        self._count(given)
        return given

    async def one(self, workload: Workload, device: DeviceSpec, query: bytes = b"") -> Given:
        """The answer to one question, which was asked in the words of `query`."""
        key = _key(workload, device)
        token = await self._current()
        given = self._cache.get(key, token)
        if given is None or not given.final:
            given = await self._quick.ask((key, workload, device))
            if not given.final:
                # Apart from the quick ones, which must not wait for the cost model.
                given = await to_thread.run_sync(self._predicted, workload, device, limiter=self._modellers)
            self._cache.put(key, token, given)
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
            make, limiter = (self._make_predicted, self._modellers) if predict else (self._make, self._readers)
            made = await to_thread.run_sync(make, missing, device, limiter=limiter)
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

    def take_used(self) -> list[str]:
        """The records that were the answer since this was last called, each as often as it was."""
        used, self._used = self._used, collections.Counter()
        return list(used.elements())

    def close(self) -> None:
        """Give the watching connection back."""
        self._watch.close()

    def _stored(self, workloads: Collection[Workload], device: DeviceSpec) -> list[Answer]:
        records = self._lookup.find(list(workloads), device.key)
        return [self._answers.stored(workload, device, records=records) for workload in workloads]

    def _make(self, missing: dict[str, Workload], device: DeviceSpec) -> dict[str, Given]:
        return {
            key: _given(answer) for key, answer in zip(missing, self._stored(missing.values(), device), strict=True)
        }

    def _read_together(self, asked: list[tuple[str, Workload, DeviceSpec]]) -> list[Given]:
        found: dict[str, Given] = {}
        for device in {device for _, _, device in asked}:
            found |= self._make({key: workload for key, workload, other in asked if other == device}, device)
        return [found[key] for key, _, _ in asked]

    def _make_predicted(self, missing: dict[str, Workload], device: DeviceSpec) -> dict[str, Given]:
        return {key: self._predicted(workload, device) for key, workload in missing.items()}

    def _predicted(self, workload: Workload, device: DeviceSpec) -> Given:
        return _given(self._answers.best(workload, device), final=True)

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


def _given(answer: Answer, *, final: bool = False) -> Given:
    """final: the cost model was asked, which answers from a record of the very workload do not need."""
    told = tell(answer)
    body = told.model_dump_json().encode()
    return Given(body, etag_of(body), answer.how, told.record_id, final or answer.how in ("measured", "stale"))
