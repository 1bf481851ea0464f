"""Workers of one queue on the devices of a fleet: one for each device, all in this process."""

from __future__ import annotations

import dataclasses
import threading

from kernelwright.db import Store
from kernelwright.errors import UnknownDevice
from kernelwright.search import Runner
from kernelwright.search.fleet import Fleet
from kernelwright.search.fleet_batch import Builders
from kernelwright.search.fleet_runner import FleetRunner
from kernelwright.service.worker import Worker, WorkerOptions, worker_name


class Crew:
    """As many workers as the fleet has devices; each job is tuned on whichever device of its kind is free."""

    def __init__(self, store: Store, fleet: Fleet, builders: Builders | None, options: WorkerOptions) -> None:
        self._fleet, self._builders = fleet, builders
        self._workers = [
            Worker(store, dataclasses.replace(options, name=worker_name()), self.open) for _ in fleet.members()
        ]

    def open(self, spec: str) -> Runner:
        """A runner for a job's device as typed; UnknownDevice for one that the fleet has not."""
        kind, _, slug = spec.strip().lower().partition(":")
        slugs = self._fleet.slugs()
        if kind == "replay":
            return FleetRunner(self._fleet, slug, builders=self._builders)
        if kind in slugs:
            return FleetRunner(self._fleet, kind, builders=self._builders)
        if len(slugs) != 1 or slug:
            raise UnknownDevice(f"a job for this fleet names one of {', '.join(slugs)} as its device, got {spec!r}")
        return FleetRunner(self._fleet, slugs[0], builders=self._builders)

    def run(self) -> None:
        """Take jobs until `stop`."""
        threads = [threading.Thread(target=one.run, name=one.options.name) for one in self._workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            # In slices, so that a signal is seen between them.
            while thread.is_alive():
                thread.join(0.5)

    def stop(self) -> None:
        """End after the trials that are being measured; their jobs go back to the queue."""
        for worker in self._workers:
            worker.stop()
