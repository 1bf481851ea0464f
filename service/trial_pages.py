"""Trials of many searches at once, stored in pages: a transaction each would cost more than everything else they do."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from kernelwright.db import Store
from kernelwright.types import Trial, TuningRecord

PAGE_S = 0.2
"""Most seconds that a trial waits for its page: what a killed process loses."""


class TrialPages:
    """Implements `TrialKeeper` in front of a store. Whatever is read or concluded finds all trials stored.

    Raises in the calling thread what the store raised for an earlier page.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: list[Trial] = []
        self._error: BaseException | None = None
        self._changed = threading.Lock()
        self._writing = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._write_on, name="kernelwright-pages", daemon=True)
        self._thread.start()

    def add_trial(self, trial: Trial, *, job_id: str | None = None) -> object:
        """Keep a trial; it is stored within PAGE_S."""
        if job_id is not None:
            return self._store.add_trial(trial, job_id=job_id)
        with self._changed:
            self._waiting.append(trial)
        self._complain()
        return None

    def trials(
        self,
        workload_key: str | None = None,
        device_key: str | None = None,
        toolchain_key: str | None = None,
        *,
        trusted: bool = False,
    ) -> Iterable[Trial]:
        """See `Store.trials`."""
        self.flush()
        return self._store.trials(workload_key, device_key, toolchain_key, trusted=trusted)

    def put_winner(self, record: TuningRecord) -> object:
        """See `Store.put_winner`."""
        self.flush()
        return self._store.put_winner(record)

    def flush(self) -> None:
        """Store what waits, now."""
        with self._writing:
            with self._changed:
                page, self._waiting = self._waiting, []
            if page:
                self._store.add_trials(page)
        self._complain()

    def close(self) -> None:
        """Store what waits and end; closing twice is harmless."""
        self._closed.set()
        self._thread.join()
        self.flush()

    def _write_on(self) -> None:
        while not self._closed.wait(PAGE_S):
            try:
                self.flush()
            except Exception as error:
                self._error = error

    def _complain(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
