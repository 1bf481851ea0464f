"""All ranks of a distributed job run the same kernels: the first to answer a question answers it for the others.

The answers go through the store that torch.distributed has for its own start, by compare-and-set. No answer waits for
another rank, so ranks may compile different graphs, in any order. What was measured holds for the whole job. That
nothing was measured holds for the graph that was compiled without it: once the workload is tuned, later graphs take the
kernel. A rank that knows nothing, for whatever reason, takes what the others know.

A graph out of Inductor's cache was decided before, by what a rank knew then, and tells nobody. So graphs are kept there
only where all ranks know the same, and go on knowing it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from kernelwright.compiler.written_answers import read, written
from kernelwright.search.answer import Answer
from kernelwright.types import Workload, digest

PATIENCE_S = 10.0
"""How long a rank waits, once, for all others to say what they know; those that compile nothing say nothing."""

_POLL_S = (0.02, 1.0)
"""How long to wait before the store is asked again: at first, and at most, as a job may have thousands of ranks."""

_log = logging.getLogger(__name__)

T = TypeVar("T")


class KeyValueStore(Protocol):
    """The part of torch.distributed.Store that is needed for answers."""

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Set the key if it has this value ("" for a key that is not there); returns the value that it has then."""
        ...


class CountingStore(KeyValueStore, Protocol):
    """The part of torch.distributed.Store that is needed for a job."""

    def add(self, key: str, amount: int) -> int:
        """Add to the number under a key, which is 0 at first; returns the sum."""
        ...


@dataclasses.dataclass
class _Remembered:
    """What this process remembers of a job. read: what it has read, by what that is; said: what it has told others."""

    read: dict[Hashable, Any] = dataclasses.field(default_factory=dict)
    said: set[str] = dataclasses.field(default_factory=set)


_jobs: weakref.WeakKeyDictionary[CountingStore, _Remembered] = weakref.WeakKeyDictionary()


class Job:
    """A job of several ranks that this process is one of. store: what they have in common; ranks: their number."""

    def __init__(self, store: CountingStore, ranks: int) -> None:
        self.store, self._ranks = store, ranks
        self._remembered = _jobs.setdefault(store, _Remembered())

    def once(self, what: Hashable, read: Callable[[], T]) -> T:
        """What `read` gives when it is first asked for in this job."""
        if what not in self._remembered.read:
            self._remembered.read[what] = read()
        found: T = self._remembered.read[what]
        return found

    def all_know(self, state: str) -> bool:
        """Whether all ranks have said that they know what has this digest, as this one does. It waits for them once."""
        key, new = f"kernelwright/state/{state}", state not in self._remembered.said
        self._remembered.said.add(state)
        end, pause = time.monotonic() + (PATIENCE_S if new else 0.0), _POLL_S[0]
        try:
            count = self.store.add(key, int(new))
            while count < self._ranks and time.monotonic() < end:
                time.sleep(pause)
                pause = min(1.5 * pause, _POLL_S[1])
                count = self.store.add(key, 0)
        except Exception as error:
            _log.warning("the store of the job failed: %s", error)
            return False
        return count >= self._ranks


def current_job() -> Job | None:
    """The job that this process belongs to; None where there is no such job."""
    import torch.distributed as distributed

    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() < 2:
        return None
    from torch.distributed import distributed_c10d

    return Job(distributed_c10d._get_default_store(), distributed.get_world_size())


class AgreedAnswers:
    """The answers of `source`, or those that another rank with the same GPU gave first."""

    def __init__(self, source: Callable[[Workload], Answer], store: KeyValueStore) -> None:
        self._source = source
        self._store = store
        self._agreed: dict[Workload, Answer] = {}
        self._graph = ""

    def prepare(self, workloads: Sequence[Workload]) -> None:
        """See `kernelwright.compiler.dispatch.Prepared`: the questions of one graph, the same on all ranks."""
        self._graph = digest(sorted(workload.key for workload in workloads))
        self._agreed = {}
        self._let("prepare", workloads)

    def tune(self, calls: Mapping[Workload, int]) -> None:
        """See `kernelwright.compiler.tuning.Tuning`: every rank tunes on its own GPU, and the first answer counts."""
        self._let("tune", calls)

    def __call__(self, workload: Workload) -> Answer:
        """The answer that all ranks give."""
        if workload not in self._agreed:
            own = self._source(workload)
            mine, place = json.dumps(written(own)), f"{own.device.key}/{workload.key}"
            # an empty text stays empty until somebody has measured
            measured = self._first(f"answer/{place}", mine if own.how == "measured" else "")
            said = self._first(f"graph/{self._graph}/{place}", measured or mine)
            self._agreed[workload] = own if said is None else read(json.loads(said), workload, own.device)
        return self._agreed[workload]

    def _let(self, do: str, what: Any) -> None:
        """Let the source do something, where it does that. A rank that fails goes on: the others do, too."""
        try:
            getattr(self._source, do, lambda what: None)(what)
        except Exception as error:
            _log.warning("this rank goes on with what it and others know: %s", error)

    def _first(self, key: str, value: str) -> str | None:
        """The value that was given first under a key; None where the store cannot be asked."""
        try:
            return self._store.compare_set(f"kernelwright/{key}", "", value).decode()
        except Exception as error:
            _log.warning("ranks may choose different kernels, the store of the job failed: %s", error)
            return None
