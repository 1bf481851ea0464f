"""Answers of a service for a compile, which must neither wait for it nor break with it.

All workloads of a graph are asked for in one go and within a time limit. What came back is kept in memory and in a
file, so that most compiles ask nothing at all, and one whose service is gone goes on with what is known. Whatever a
service says is checked before it is believed (`Client.answers`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from kernelwright.compiler.written_answers import read, written
from kernelwright.search.answer import Answer
from kernelwright.types import DeviceSpec, Toolchain, Workload, digest

if TYPE_CHECKING:
    from kernelwright.service.client import Client

SECONDS = 3.0
"""How long a compile waits for a service at most."""

FRESH_SECONDS = 3600.0
"""How long an answer is taken as it is before the service is asked again."""

REST_SECONDS = 60.0
"""After a service failed, how long it is left alone."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Known:
    """What is kept of a workload. asked_at: seconds since 1970, 0 where the service failed; answer: see `written`."""

    asked_at: float
    answer: dict[str, Any] | None


@dataclasses.dataclass(frozen=True)
class Source:
    """A service and what it is asked about. key: an API key; folder: where answers are kept between processes."""

    url: str
    device: DeviceSpec
    toolchain: Toolchain
    key: str | None = None
    seconds: float = SECONDS
    folder: Path | None = None

    @property
    def file(self) -> Path:
        """The file of the answers of this service for this GPU and software: with another, a time may be stale."""
        folder = self.folder or platformdirs.user_cache_path("kernelwright") / "answers"
        return folder / f"{digest([self.url, self.device.key, self.toolchain.key])}.json"

    def client(self) -> Client:
        """A new client; UsageError for a URL that is none."""
        from kernelwright.service.client import Client

        return Client(self.url, self.seconds, key=self.key)


class ServiceAnswers:
    """Answers from a service, by workload. Raises UsageError for an address that is none, and nothing later."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._client = source.client()
        self._lock = threading.Lock()
        self._known = _read(source.file)
        self._rests_until = 0.0
        self.warnings: list[str] = []

    def prepare(self, workloads: Sequence[Workload]) -> None:
        """Ask for the workloads that nothing fresh is known of; waits for `Source.seconds` at most."""
        now = time.time()
        wanted = list({workload: None for workload in workloads if not self._is_fresh(workload, now)})
        if not wanted or time.monotonic() < self._rests_until:
            return
        found = self._ask(wanted)
        if found is None:
            self._rests_until = time.monotonic() + REST_SECONDS
            # A graph that was compiled without an answer must not be found again once there is one.
            news = {w.key: Known(0.0, known.answer if (known := self._known.get(w.key)) else None) for w in wanted}
        else:
            news = {answer.workload.key: Known(now, written(answer)) for answer in found}
        with self._lock:
            self._known.update(news)
            _write(self._source.file, self._known)

    def __call__(self, workload: Workload) -> Answer:
        """What the service said of the workload; a miss is an answer too."""
        if workload.key not in self._known:
            self.prepare([workload])
        known = self._known.get(workload.key)
        try:
            if known is not None and known.answer is not None:
                return read(known.answer, workload, self._source.device)
        except (ValueError, KeyError, TypeError) as error:
            _log.warning("%s holds what cannot be: %s", self._source.file, error)
        return Answer("vendor", workload, self._source.device, note=f"{self._source.url} gave no answer")

    @property
    def state(self) -> str:
        """Digest of all that is known, and of what could not be asked: equal states give equal answers."""
        seen = {key: [known.answer, known.asked_at > 0] for key, known in self._known.items()}
        return digest([self._source.url, self._source.toolchain.key, seen])

    def _is_fresh(self, workload: Workload, now: float) -> bool:
        known = self._known.get(workload.key)
        return known is not None and 0 <= now - known.asked_at < FRESH_SECONDS

    def _ask(self, workloads: list[Workload]) -> list[Answer] | None:
        """What the service says, or None where it failed. A server that drips its answer is cut off too."""
        said: list[list[Answer]] = []
        complaints: list[str] = []

        def ask() -> None:
            try:
                said.append(self._client.answers(workloads, self._source.device, self._source.toolchain))
            except Exception as error:
                complaints.append(str(error))

        asking = threading.Thread(target=ask, daemon=True, name="kernelwright-ask")
        asking.start()
        asking.join(self._source.seconds)
        if said:
            return said[0]
        late = f"{self._source.url} did not answer within {self._source.seconds:g} s"
        self.warnings.append(f"{complaints[0] if complaints else late}; going on with what is known")
        _log.warning("%s", self.warnings[-1])
        return None


@functools.lru_cache(maxsize=16)
def service_answers(source: Source) -> ServiceAnswers:
    """The answers of a service, the same object for the same source, so that a failure is waited for only once."""
    return ServiceAnswers(source)


def _read(file: Path) -> dict[str, Known]:
    """What was kept; nothing where there is none or the file is damaged."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        return {str(key): Known(float(entry["at"]), entry["answer"]) for key, entry in kept.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _write(file: Path, known: dict[str, Known]) -> None:
    """Keep what is known; a place that cannot be written is no reason to stop a compile."""
    kept = {key: {"at": one.asked_at, "answer": one.answer} for key, one in {**_read(file), **known}.items()}
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, suffix=".json")
        with os.fdopen(handle, "w", encoding="utf-8") as text:
            json.dump(kept, text)
        Path(name).replace(file)
