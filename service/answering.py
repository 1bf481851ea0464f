"""From a question to the answer that API and command line give: `find_winner`, and how its answer is told."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kernelwright.cost_model import CostModel, own_model, packaged_model
from kernelwright.cost_model.calibration import tells_regret
from kernelwright.kernels import get_operator
from kernelwright.kernels.render import render
from kernelwright.search.answer import Answer, Records, find_winner
from kernelwright.service.answer_json import question_path
from kernelwright.service.missing import NotFound
from kernelwright.service.schemas import Links, RecordOut
from kernelwright.types import DeviceSpec, Schedule, Toolchain, TuningRecord, Workload

T = TypeVar("T")

MAX_REMEMBERED = 8192


def fingerprints(operator: str) -> dict[str, str]:
    """Fingerprint of each template of an operator, as the code stands."""
    return {name: template.fingerprint for name, template in get_operator(operator).templates.items()}


class NoRecords:
    """An empty store: what can be said without any measurement."""

    def find_records(self, workload_key: str, device_key: str) -> list[TuningRecord]:
        """None."""
        return []

    def neighbours(self, workload: Workload, device_key: str, limit: int = 64) -> list[TuningRecord]:
        """None."""
        return []


class Answers:
    """Answers questions from one store of records. Threads may share it.

    What the cost model says depends on nothing that changes while the process runs, so it is worked out once for each
    workload and remembered; each operator's model is loaded when it is first needed. models: folder of the user's own.
    """

    def __init__(self, records: Records, models: Path | None = None) -> None:
        self._records = records
        self._folder = models
        self._models: dict[str, CostModel] = {}
        self._remembered: dict[tuple[str, ...], object] = {}
        self._fingerprints = functools.cache(fingerprints)
        self._lock = threading.Lock()

    def best(self, workload: Workload, device: DeviceSpec, toolchain: Toolchain | None = None) -> Answer:
        """The best that is known. With a toolchain, times of any other one count as stale."""
        return self.completed(self.stored(workload, device, toolchain))

    def stored(
        self,
        workload: Workload,
        device: DeviceSpec,
        toolchain: Toolchain | None = None,
        records: Records | None = None,
    ) -> Answer:
        """The best that records alone tell: without the cost model, so that it is quick. records: instead of the
        store's."""
        prints = self._fingerprints(workload.operator)
        return find_winner(workload, device, records or self._records, toolchain=toolchain, fingerprints=prints)

    def completed(self, answer: Answer) -> Answer:
        """The answer with what the cost model adds: the regret of a neighbour's schedule, a prediction for a miss."""
        workload, device, schedule = answer.workload, answer.device, answer.schedule
        if answer.how == "nearest" and schedule is not None:
            model = self.model(workload.operator)
            if not tells_regret(model, workload.operator):
                return answer
            regret = self._once(
                ("regret", workload.key, device.key, schedule.key), lambda: _regret(model, workload, device, schedule)
            )
            return dataclasses.replace(answer, regret=regret)
        if answer.how == "vendor":
            model = self.model(workload.operator)
            found = self._once(
                ("predicted", workload.key, device.key, device.slug),
                lambda: find_winner(workload, device, NoRecords(), model=model),
            )
            return found
        return answer

    def model(self, operator: str) -> CostModel:
        """The cost model of an operator, loaded once."""
        with self._lock:
            if operator not in self._models:
                own = self._folder is not None and own_model(operator, self._folder)
                self._models[operator] = own or packaged_model(operator)
            return self._models[operator]

    def _once(self, key: tuple[str, ...], make: Callable[[], T]) -> T:
        if key not in self._remembered:
            made = make()
            with self._lock:
                if len(self._remembered) >= MAX_REMEMBERED:
                    self._remembered.clear()
                self._remembered[key] = made
            return made
        return self._remembered.get(key) or make()  # type: ignore[return-value]


def _regret(model: CostModel, workload: Workload, device: DeviceSpec, schedule: Schedule) -> float:
    space = get_operator(workload.operator).space(workload, device)
    return float(model.expected_regret(workload, device, [schedule, *space])[0])


def tell_record(record: TuningRecord) -> RecordOut:
    """A record in the form of the API."""
    links = {
        "self": f"/v1/kernels/{record.key}",
        "source": f"/v1/kernels/{record.key}/source",
        "workload": question_path(record.workload, record.device),
    }
    return RecordOut(
        id=record.key,
        winner="kernel" if record.winner == "kernel" else "vendor",
        speedup=record.speedup,
        record=record.to_json(),
        links=Links.model_validate(links),
    )


def source_of_record(record: TuningRecord) -> str:
    """The standalone file of a record's kernel."""
    return render(record.workload, record.schedule, _provenance(record))


def source_of_answer(answer: Answer) -> str:
    """The standalone file of an answer's kernel for the workload that was asked; NotFound when it has none."""
    if answer.schedule is None:
        raise NotFound(f"no kernel is known for {answer.workload} on {answer.device.name}; tune it first")
    provenance = {"answered as": answer.how, **(_provenance(answer.record) if answer.record else {})}
    return render(answer.workload, answer.schedule, provenance)


def _provenance(record: TuningRecord) -> dict[str, str]:
    vendor = f"{record.vendor} {record.vendor_us:.2f} us" if record.vendor_us is not None else "none"
    software = record.toolchain
    return {
        "record": record.key,
        "workload": str(record.workload),
        "measured on": record.device.name,
        "measured at": record.created_at,
        "measured time": f"{record.measurement.median_us:.2f} us",
        "vendor call": vendor,
        "trials": str(record.trials),
        "toolchain": f"triton {software.triton}, torch {software.torch}, driver {software.driver}, {software.compiler}",
    }
