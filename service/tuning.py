"""Tune one workload and keep what comes of it: the glue of search and database that command line and worker share."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from kernelwright.cost_model import own_model
from kernelwright.cost_model.model import CostModel
from kernelwright.kernels import get_operator
from kernelwright.kernels.steps import step
from kernelwright.search import Budget, Progress, Runner, Session, make_strategy
from kernelwright.search.runner import RecordedCode, WarmsUp
from kernelwright.service.answering import fingerprints
from kernelwright.types import VENDOR_TEMPLATE, Trial, TuningRecord, Workload

OnTrial = Callable[[Trial, Progress], None]
"""Told after each trial was stored; what it raises ends the run, and the stored trials stay."""


class TrialKeeper(Protocol):
    """What a search needs of a store; `kernelwright.db.Store` has it."""

    def add_trial(self, trial: Trial, *, job_id: str | None = None) -> object:
        """Keep a trial."""
        ...

    def trials(
        self,
        workload_key: str | None = None,
        device_key: str | None = None,
        toolchain_key: str | None = None,
        *,
        trusted: bool = False,
    ) -> Iterable[Trial]:
        """The trials that meet all conditions; trusted: without those imported that nobody vouches for."""
        ...

    def put_winner(self, record: TuningRecord) -> object:
        """Keep the outcome of a search."""
        ...


@dataclasses.dataclass(frozen=True)
class TuneRequest:
    """What to tune and how. budget: known trials count against it. job_id: under which job to file the trials.
    models: folder of the user's own cost models. model: what the strategy starts from, in place of those. patient: see
    `Session`."""

    workload: Workload
    strategy: str = "model"
    budget: Budget = dataclasses.field(default_factory=Budget)
    seed: int = 0
    job_id: str | None = None
    models: Path | None = None
    model: CostModel | None = None
    patient: bool = True


@dataclasses.dataclass(frozen=True)
class TuneResult:
    """The record that was stored, and what the run did. seconds: wall time, the final round included."""

    record: TuningRecord
    new_trials: int
    known_trials: int
    failed_trials: int
    seconds: float


def tune_and_store(store: TrialKeeper, runner: Runner, request: TuneRequest, on_trial: OnTrial) -> TuneResult:
    """Search, store every trial as it comes, store the winner.

    Trials that the store holds already are not measured again, so that an interrupted run goes on where it stopped. The
    seconds of a budget count from when the runner is ready: starting it up is no search.
    Raises UsageError for what the operator or runner cannot do, NoWorkingSchedule when every schedule failed.
    """
    start = time.monotonic()
    workload = request.workload
    get_operator(workload.operator).validate(workload)
    known = known_trials(store, runner, workload)
    with step("space and strategy"):
        session = _session(runner, request, known)
    if request.budget.seconds is not None and isinstance(runner, WarmsUp):
        runner.warm_up()
    new, failed = 0, 0
    for trial in session:
        with step("store"):
            store.add_trial(trial, job_id=request.job_id)
        new += 1
        failed += not trial.measurement.ok
        on_trial(trial, session.progress())
    record = session.record
    with step("store"):
        store.put_winner(record)
    return TuneResult(record, new, len(known), failed, time.monotonic() - start)


def known_trials(store: TrialKeeper, runner: Runner, workload: Workload) -> list[Trial]:
    """The stored trials that a run on this runner need not repeat: same device, toolchain and template sources.

    Those that were imported without a valid signature are not among them.
    """
    current = code_of(runner, workload)
    place = {"workload_key": workload.key, "device_key": runner.device.key, "toolchain_key": runner.toolchain.key}
    found = store.trials(**place, trusted=True)
    return [
        trial
        for trial in found
        if trial.schedule.template != VENDOR_TEMPLATE
        and trial.template_fingerprint == current.get(trial.schedule.template)
    ]


def code_of(runner: Runner, workload: Workload) -> Mapping[str, str]:
    """Fingerprint by template of the code that the runner's times belong to."""
    if isinstance(runner, RecordedCode):
        return runner.fingerprints(workload)
    return fingerprints(workload.operator)


def _session(runner: Runner, request: TuneRequest, known: list[Trial]) -> Session:
    workload, budget = request.workload, request.budget
    space = runner.space(workload)
    if request.strategy == "exhaustive" and budget == Budget():
        budget = Budget(trials=max(1, len(space)))
    model = request.model
    if model is None and request.models is not None:
        model = own_model(workload.operator, request.models)
    strategy = make_strategy(request.strategy, workload, runner.device, space, request.seed, model)
    return Session(workload, runner, strategy, budget, origin="tune", known=known, patient=request.patient)
