"""All ranks of a distributed job run the same kernels: the first to answer a question answers it for the others.

The answers go through the store that torch.distributed has for its own start, by compare-and-set. Nobody waits for
anybody, so ranks may compile different graphs, in any order. What was measured holds for the whole job. That nothing
was measured holds for the graph that was compiled without it: once the workload is tuned, later graphs take the kernel.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kernelwright.compiler.written_answers import read, written
from kernelwright.search.answer import Answer
from kernelwright.types import Workload, digest

_log = logging.getLogger(__name__)


class KeyValueStore(Protocol):
    """The part of torch.distributed.Store that is needed here."""

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Set the key if it has this value ("" for a key that is not there); returns the value that it has then."""
        ...


def default_store() -> KeyValueStore | None:
    """The store of the job that this process belongs to; None where there is no such job."""
    import torch.distributed as distributed

    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() < 2:
        return None
    from torch.distributed import distributed_c10d

    store: KeyValueStore = distributed_c10d._get_default_store()
    return store


class AgreedAnswers:
    """The answers of `source`, or those that another rank with the same GPU gave first."""

    def __init__(self, source: Callable[[Workload], Answer], store: KeyValueStore, state: str | None) -> None:
        self._source = source
        self._store = store
        self._state = state
        self._agreed: dict[Workload, Answer] = {}
        self._graph = ""

    def prepare(self, workloads: Sequence[Workload]) -> None:
        """See `kernelwright.compiler.dispatch.Prepared`: the questions of one graph, the same on all ranks."""
        self._graph = digest(sorted(workload.key for workload in workloads))
        self._agreed = {}
        prepare = getattr(self._source, "prepare", None)
        if prepare is not None:
            prepare(workloads)

    def tune(self, calls: Mapping[Workload, int]) -> None:
        """See `kernelwright.compiler.tuning.Tuning`: every rank tunes on its own GPU, and the first answer counts."""
        tune = getattr(self._source, "tune", None)
        if tune is not None:
            tune(calls)

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

    @property
    def state(self) -> str | None:
        """The state of the source where all ranks began with the same one, else None: then graphs are not kept."""
        if self._state is None:
            return None
        return self._state if self._first("state", self._state) in (self._state, None) else None

    def _first(self, key: str, value: str) -> str | None:
        """The value that was given first under a key; None where the store cannot be asked."""
        try:
            return self._store.compare_set(f"kernelwright/{key}", "", value).decode()
        except Exception as error:
            _log.warning("ranks may choose different kernels, the store of the job failed: %s", error)
            return None
