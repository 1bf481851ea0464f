"""What every runner must keep; a test class supplies the fixtures `runner` and `workload`."""

from __future__ import annotations

import time

from kernelwright.search.runner import Runner
from kernelwright.types import VENDOR_TEMPLATE, Workload


class RunnerContract:
    """Subclasses give the fixtures runner and workload, one that the runner can measure."""

    def test_offers_schedules_but_not_the_vendor_call(self, runner: Runner, workload: Workload) -> None:
        members = list(runner.space(workload))
        assert members
        assert VENDOR_TEMPLATE not in {schedule.template for schedule in members}

    def test_measures_each_schedule_once(self, runner: Runner, workload: Workload) -> None:
        schedules = list(runner.space(workload))[:6]
        answers = list(runner.measure(workload, schedules))
        assert sorted(s.key for s, _ in answers) == sorted(s.key for s in schedules)

    def test_measuring_nothing_is_allowed(self, runner: Runner, workload: Workload) -> None:
        assert list(runner.measure(workload, [])) == []

    def test_starts_nothing_after_the_deadline(self, runner: Runner, workload: Workload) -> None:
        schedules = list(runner.space(workload))[:6]
        assert list(runner.measure(workload, schedules, deadline=time.monotonic() - 1)) == []

    def test_the_final_round_answers_for_each_schedule(self, runner: Runner, workload: Workload) -> None:
        schedules = list(runner.space(workload))[:3]
        finals = runner.finals(workload, schedules)
        assert [schedule for schedule, _ in finals.measurements] == schedules
        assert finals.noise >= 0
        assert (finals.vendor == "") == (finals.vendor_us is None)

    def test_says_what_it_measures_on(self, runner: Runner) -> None:
        assert runner.device.key == type(runner.device).from_json(runner.device.to_json()).key
        assert runner.toolchain.triton

    def test_closing_twice_is_harmless(self, runner: Runner) -> None:
        runner.close()
        runner.close()
