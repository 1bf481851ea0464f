"""Tune many workloads on the devices of a fleet under one budget. All is in the store, so it can be gone on with."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kernelwright.cost_model import own_model, packaged_model
from kernelwright.cost_model.model import CostModel
from kernelwright.db import Store
from kernelwright.errors import KernelwrightError, NoWorkingSchedule, UsageError
from kernelwright.kernels import get_operator
from kernelwright.kernels.operator import roofline_us
from kernelwright.search import Budget, Progress, Runner
from kernelwright.search.campaign import Campaign, Round, Share, Standing
from kernelwright.search.runner import WarmsUp
from kernelwright.search.shared_model import SharedModel
from kernelwright.service.answering import Answers
from kernelwright.service.trial_pages import TrialPages
from kernelwright.service.tuning import TuneRequest, known_trials, tune_and_store
from kernelwright.types import DeviceSpec, Trial, Workload

logger = logging.getLogger(__name__)

_GUESSED_ROOFLINE = 0.6

_LEAST_US = 3.0
"""What no kernel falls below by much, however little it does."""

_LOOKED_AT = 512
"""Schedules of a space that the cost model looks at to say what a workload promises."""

LATE_S = 15.0
"""How far past its seconds a run may go on, for trials and final rounds under way, before it is late."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How to spend the budget. trials: most a workload. seconds: wall time, final rounds of the last workloads on top.
    worth: see `Campaign`. models: folder of the user's own cost models."""

    strategy: str = "model"
    trials: int | None = None
    seconds: float | None = None
    worth: float = 0.0001
    seed: int = 0
    models: Path | None = None


class _Stopped(Exception):
    """The run was told to stop."""


class CampaignRun:
    """One kind of device at work on a list of workloads.

    open_runner: a runner for one search, as often as it is called. side_by_side: searches of a device at once.
    """

    def __init__(
        self,
        store: Store,
        open_runner: Callable[[], Runner],
        devices: int,
        shares: Sequence[Share],
        plan: Plan,
        side_by_side: int = 1,
    ) -> None:
        self._store, self._open, self._plan = store, open_runner, plan
        self._pages = TrialPages(store)
        self._models: dict[str, CostModel] = {}
        self._side_by_side = side_by_side
        self._first = runner = open_runner()
        self.device = runner.device
        self._end: float | None = None
        self._seen: set[Workload] = set()
        for operator in {share.workload.operator for share in shares if plan.strategy == "model"}:
            self._model(operator)
        self.campaign = Campaign([self._standing(runner, share) for share in shares], plan.worth)
        self.trials = 0
        self.error: BaseException | None = None
        self._busy: list[Standing] = []
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._given_up = False
        searches = min(devices * side_by_side, max(1, len(shares)))
        self._threads = [
            threading.Thread(target=self._work, name=f"kernelwright-campaign-{number}") for number in range(searches)
        ]

    @property
    def busy(self) -> tuple[Standing, ...]:
        """What is being tuned now."""
        return tuple(self._busy)

    def start(self) -> None:
        """Begin; the seconds of the plan count from when all is up."""
        if isinstance(self._first, WarmsUp):
            self._first.warm_up()
        self._end = None if self._plan.seconds is None else time.monotonic() + self._plan.seconds
        for thread in self._threads:
            thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait at most so long; whether everything is done. Raises what ended the run early."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        self.close()
        if self.error is not None:
            raise self.error
        return True

    @property
    def late(self) -> bool:
        """Whether the budget was over so long ago that what is under way had better be ended."""
        return self._end is not None and time.monotonic() > self._end + LATE_S

    def give_up(self) -> None:
        """Begin nothing more, and take what goes wrong from now on for the end: whoever calls this closes the fleet."""
        self._given_up = True
        self._stop.set()

    def stop(self) -> None:
        """End after the trials that are being measured, and wait for that."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self.close()

    def close(self) -> None:
        """Store the last trials; closing twice is harmless."""
        self._pages.close()

    def _work(self) -> None:
        try:
            runner = self._open()
            while self.step(runner):
                pass
        except _Stopped:
            return
        except BaseException as error:
            if not self._given_up:
                self.error = self.error or error
            self._stop.set()

    def step(self, runner: Runner) -> bool:
        """Do the round that is most worth it, in this thread; whether there was one."""
        standing = self._take()
        if standing is None:
            return False
        try:
            self._round(runner, standing)
        finally:
            with self._changed:
                self._busy = [one for one in self._busy if one is not standing]
                self._changed.notify_all()
        return True

    def _take(self) -> Standing | None:
        """The next workload, waiting for rounds under way, after which there may be more to do."""
        with self._changed:
            while not self._stop.is_set() and (self._end is None or time.monotonic() < self._end):
                standing = self.campaign.next(self._busy)
                if standing is not None:
                    self._busy.append(standing)
                    return standing
                if not self._busy:
                    return None
                self._changed.wait(0.5)
        return None

    def _round(self, runner: Runner, standing: Standing) -> None:
        workload, plan, began = standing.share.workload, self._plan, time.monotonic()
        try:
            if workload not in self._seen:
                self._look(runner, standing)
                self._seen.add(workload)
            target = standing.next_trials()
            if standing.failure or target <= standing.trials:
                return
            left = None if self._end is None else max(0.001, self._end - time.monotonic())
            model = self._model(workload.operator) if plan.strategy == "model" else None
            # a result that comes late is waited for only where the run would have none
            request = TuneRequest(
                workload, plan.strategy, Budget(target, left), plan.seed, None, plan.models, model, not self.trials
            )
            result = tune_and_store(self._pages, runner, request, self._on_trial)
        except (NoWorkingSchedule, UsageError) as error:
            # A budget that ran out before the first trial is no failure of the workload.
            if self._end is None or time.monotonic() < self._end:
                standing.failure = str(error)
            return
        record, trials = result.record, result.known_trials + result.new_trials
        if trials < target and (self._end is None or time.monotonic() < self._end):
            standing.most = trials
        seconds = (time.monotonic() - began) / self._side_by_side
        outcome = Round(trials, record.measurement.median_us, record.vendor_us, seconds)
        with self._changed:
            standing.take(outcome)

    def _on_trial(self, trial: Trial, progress: Progress) -> None:
        self.trials += 1
        if self._stop.is_set():
            raise _Stopped

    def _standing(self, runner: Runner, share: Share) -> Standing:
        """What is known of a workload at once: its space, which takes a while, is looked at before its first round."""
        workload = share.workload
        try:
            get_operator(workload.operator).validate(workload)
            known = known_trials(self._store, runner, workload)
        except UsageError as error:
            return Standing(share, 0.0, failure=str(error))
        standing = Standing(share, _expected_us(workload, runner.device), most=self._plan.trials)
        times = [trial.measurement.median_us for trial in known if trial.measurement.median_us is not None]
        answer = Answers(self._store).stored(workload, runner.device, runner.toolchain)
        if answer.how == "measured":
            standing.take(Round(len(known), answer.expected_us, answer.vendor_us))
        elif times:
            standing.take(Round(len(known), min(times), None))
        return standing

    def _look(self, runner: Runner, standing: Standing) -> None:
        """Take in what the workload's space and the cost model say of it."""
        workload = standing.share.workload
        space = list(runner.space(workload))
        if not space:
            standing.failure = "no schedule is legal; the vendor library has to do it"
            return
        standing.most = len(space) if self._plan.trials is None else min(len(space), self._plan.trials)
        some = space[:: max(1, len(space) // _LOOKED_AT)]
        with contextlib.suppress(KernelwrightError):
            regret = self._model(workload.operator).expected_regret(workload, self.device, some)
            standing.regret = float(regret.min(initial=1.0))

    def _model(self, operator: str) -> CostModel:
        if operator not in self._models:
            folder = self._plan.models
            inner = packaged_model(operator) if folder is None else own_model(operator, folder)
            self._models[operator] = SharedModel(inner)
        return self._models[operator]


def _expected_us(workload: Workload, device: DeviceSpec) -> float:
    """Microseconds of a call that nothing was measured of."""
    try:
        return max(_LEAST_US, roofline_us(get_operator(workload.operator), workload, device) / _GUESSED_ROOFLINE)
    except UsageError:
        return _LEAST_US
