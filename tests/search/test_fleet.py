"""Devices of a fleet get lost, fall silent, lie and come back; no trial is lost, and none is done twice for nothing."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kernelwright.errors import DeviceLost, NothingRecorded, UnknownDevice
from kernelwright.search import Budget, Session, make_strategy
from kernelwright.search.device_guard import Clocks, Probe
from kernelwright.search.fleet import ASIDE, IDLE, Fleet
from kernelwright.search.fleet_runner import FleetRunner
from kernelwright.search.runner import Runner
from kernelwright.types import Measurement, Schedule, Status, Toolchain, Workload
from tests.contracts.runner_contract import RunnerContract
from tests.search.fakes import TOOLCHAIN, WORKLOAD, FakeRunner, failure, fake_space, works
from tests.search.fleets import FAST, FaultyLink, ProbedRunner, RecordedRunner, Slow, fleet_of, measured

MEMBERS = list(fake_space())
WELL = Probe(500.0, 300.0, Clocks(1980, 1980))


class TestOneDeviceAtATime(RunnerContract):
    @pytest.fixture
    def workload(self) -> Workload:
        return WORKLOAD

    @pytest.fixture
    def runner(self) -> Iterator[Runner]:
        fleet = fleet_of(FaultyLink(), FaultyLink())
        yield FleetRunner(fleet, "h100")
        fleet.close()


class TestSeveralAtOnce(TestOneDeviceAtATime):
    @pytest.fixture
    def runner(self) -> Iterator[Runner]:
        fleet = fleet_of(*(FaultyLink() for _ in range(3)))
        yield FleetRunner(fleet, "h100", width=3)
        fleet.close()


def dies_at(*numbers: int, what: str = "measure") -> Any:
    """A hook after which the device is dead from the given calls of a method on, until it is revived."""

    def hook(link: FaultyLink, method: str, args: tuple[Any, ...]) -> None:
        link.dead = link.dead and not link.revived
        if method == what and link.calls.count(what) in numbers:
            link.dead = True
            link.revived = 0

    return hook


def all_of(runner: Runner, schedules: list[Schedule] = MEMBERS) -> dict[Schedule, Measurement]:
    pairs = list(runner.measure(WORKLOAD, schedules))
    assert len(pairs) == len({schedule for schedule, _ in pairs})
    return dict(pairs)


def test_a_lost_device_costs_its_trial_one_repetition() -> None:
    lost, other = FaultyLink(hook=dies_at(5)), FaultyLink()
    fleet = fleet_of(lost, other)
    answers = all_of(FleetRunner(fleet, "h100"))
    assert answers == {schedule: works(schedule) for schedule in MEMBERS}
    assert len(lost.runner.measured) == 4 and len(other.runner.measured) == len(MEMBERS) - 4
    wait_for(lambda: fleet.members()[0].state == IDLE)
    assert lost.revived == 1


def test_the_only_device_comes_back_and_goes_on() -> None:
    link = FaultyLink(hook=dies_at(3, 9))
    fleet = fleet_of(link)
    assert len(all_of(FleetRunner(fleet, "h100"))) == len(MEMBERS)
    assert len(link.runner.measured) == len(MEMBERS)


def test_a_schedule_that_takes_devices_down_is_a_crashed_trial() -> None:
    bad = MEMBERS[7]

    def poisoned(link: FaultyLink, method: str, args: tuple[Any, ...]) -> None:
        if method == "measure" and args[1] == bad:
            raise DeviceLost("illegal memory access")

    links = [FaultyLink(hook=poisoned), FaultyLink(hook=poisoned)]
    answers = all_of(FleetRunner(fleet_of(*links), "h100"))
    assert answers[bad].status is Status.CRASHED and "illegal memory access" in answers[bad].message
    assert sum(not measurement.ok for measurement in answers.values()) == 1
    assert len(measured(*links)) == len(MEMBERS) - 1


def test_a_device_that_is_lost_again_and_again_is_set_aside() -> None:
    def dead(link: FaultyLink, method: str, args: tuple[Any, ...]) -> None:
        link.dead = method == "measure" or link.calls.count("measure") > 0

    broken, fine = FaultyLink(hook=dead), FaultyLink()
    fleet = fleet_of(broken, fine)
    assert len(all_of(FleetRunner(fleet, "h100", width=2))) == len(MEMBERS)
    wait_for(lambda: fleet.members()[0].state == ASIDE)
    assert "could not be brought back: the process ended" in fleet.members()[0].reason
    assert broken.closed and not fine.closed
    assert len(fine.runner.measured) == len(MEMBERS)


def test_without_any_device_left_it_says_so_and_keeps_what_was_yielded() -> None:
    def dead(link: FaultyLink, method: str, args: tuple[Any, ...]) -> None:
        link.dead = link.dead or link.calls.count("measure") == 4

    fleet = fleet_of(FaultyLink(hook=dead))
    seen = []
    with pytest.raises(DeviceLost, match=r"no h100 is left to measure on .*gpu0.*run it again"):
        for pair in FleetRunner(fleet, "h100").measure(WORKLOAD, MEMBERS):
            seen.append(pair)
    assert len(seen) == 3


def test_a_device_that_has_fallen_off_is_found_by_its_probe() -> None:
    gone, fine = ProbedRunner(WELL), ProbedRunner(WELL)
    first, second = FaultyLink(gone), FaultyLink(fine)
    fleet = fleet_of(first, second)
    gone.failures = dict.fromkeys(MEMBERS, failure(Status.CRASHED, "CUDA error"))
    gone.told = DeviceLost("no device")
    answers = all_of(FleetRunner(fleet, "h100"))
    crashed = [schedule for schedule, measurement in answers.items() if not measurement.ok]
    assert len(crashed) == FAST.suspicious - 1
    wait_for(lambda: fleet.members()[0].state == ASIDE)
    assert "could not be brought back: no device" in fleet.members()[0].reason


def test_crashes_of_schedules_do_not_cost_a_healthy_device() -> None:
    runner = ProbedRunner(WELL)
    runner.failures = dict.fromkeys(MEMBERS[:8], failure(Status.CRASHED, "CUDA error"))
    link = FaultyLink(runner)
    fleet = fleet_of(link)
    assert sum(not m.ok for m in all_of(FleetRunner(fleet, "h100")).values()) == 8
    assert fleet.members()[0].state == IDLE and link.revived == 0 and link.calls.count("probe") == 1 + 8 // 3


def test_an_idle_device_repeats_what_a_straggler_holds_up() -> None:
    done, quick = threading.Event(), Slow(seconds_each=0.001)
    held: list[bool] = []
    straggler = FaultyLink(hook=lambda link, method, args: held.append(done.wait(120)) if method == "measure" else None)
    fleet = fleet_of(straggler, FaultyLink(quick))
    assert len(all_of(FleetRunner(fleet, "h100", width=2), MEMBERS[:20])) == 20
    # all of it is there while the straggler is still at work
    assert held == [] and len(quick.measured) == 20
    done.set()


def test_whoever_is_at_work_when_the_fleet_is_closed_is_told() -> None:
    busy, closed = threading.Event(), threading.Event()

    def ends(link: FaultyLink, method: str, args: tuple[Any, ...]) -> None:
        if method == "finals":
            busy.set()
            closed.wait(60)
            raise DeviceLost("its process was ended")

    fleet = fleet_of(FaultyLink(hook=ends), FaultyLink(hook=ends))
    threading.Thread(target=lambda: (busy.wait(60), fleet.close(), closed.set())).start()
    with pytest.raises(DeviceLost, match="the fleet was closed"):
        FleetRunner(fleet, "h100").finals(WORKLOAD, MEMBERS[:2])


def test_final_round_moves_to_another_device() -> None:
    lost, other = FaultyLink(hook=dies_at(1, what="finals")), FaultyLink()
    runner = FleetRunner(fleet_of(lost, other), "h100")
    finals = runner.finals(WORKLOAD, MEMBERS[:2])
    assert finals.vendor == "torch.mm" and all(measurement.ok for _, measurement in finals.measurements)
    assert other.runner.final_rounds == [tuple(MEMBERS[:2])]


def test_final_round_that_takes_devices_down_fails_as_one() -> None:
    def dead(link: FaultyLink, method: str, args: tuple[Any, ...]) -> None:
        if method == "finals":
            raise DeviceLost("gone")

    runner = FleetRunner(fleet_of(FaultyLink(hook=dead), FaultyLink(hook=dead)), "h100")
    finals = runner.finals(WORKLOAD, MEMBERS[:2])
    assert {measurement.status for _, measurement in finals.measurements} == {Status.CRASHED}


def test_errors_of_ours_are_raised_and_the_device_stays() -> None:
    def misuse(link: FaultyLink, method: str, args: tuple[Any, ...]) -> None:
        if method == "measure":
            raise NothingRecorded("never recorded")

    fleet = fleet_of(FaultyLink(hook=misuse))
    with pytest.raises(NothingRecorded, match="never recorded"):
        list(FleetRunner(fleet, "h100").measure(WORKLOAD, MEMBERS[:3]))
    assert fleet.members()[0].state == IDLE


def test_searches_side_by_side_never_share_a_device_and_keep_their_own() -> None:
    links = [FaultyLink(RecordedRunner(seconds_each=0.001)) for _ in range(3)]
    fleet = fleet_of(*links)
    records: list[Any] = []

    def search(seed: int) -> None:
        runner = FleetRunner(fleet, "h100")
        strategy = make_strategy("random", WORKLOAD, runner.device, runner.space(WORKLOAD), seed)
        session = Session(WORKLOAD, runner, strategy, Budget(trials=20))
        list(session)
        records.append(session.record)

    threads = [threading.Thread(target=search, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(records) == 6
    assert len(measured(*links)) == 6 * 20


@pytest.mark.parametrize("strategy", ["random", "bayesian", "evolutionary"])
def test_same_winner_as_one_device_with_the_same_budget(strategy: str) -> None:
    def winner(runner: Runner) -> Any:
        chosen = make_strategy(strategy, WORKLOAD, runner.device, runner.space(WORKLOAD), 3)
        session = Session(WORKLOAD, runner, chosen, Budget(trials=32))
        trials = [trial.schedule for trial in session]
        return session.record.schedule, trials

    alone = winner(RecordedRunner())
    assert winner(FleetRunner(fleet_of(FaultyLink(), FaultyLink()), "h100")) == alone
    lossy = fleet_of(FaultyLink(hook=dies_at(4, 11)), FaultyLink(hook=dies_at(7)))
    assert winner(FleetRunner(lossy, "h100")) == alone


def test_a_session_stopped_midway_gives_its_device_back() -> None:
    fleet = fleet_of(FaultyLink(RecordedRunner(seconds_each=0.005)))
    runner = FleetRunner(fleet, "h100")
    results = runner.measure(WORKLOAD, MEMBERS)
    next(iter(results))
    results.close()  # type: ignore[attr-defined]
    assert len(list(runner.measure(WORKLOAD, MEMBERS[:2]))) == 2


def test_devices_that_are_not_like_their_kind_are_set_aside() -> None:
    other = RecordedRunner()
    other.toolchain = dataclasses.replace(TOOLCHAIN, triton="3.6.0")
    hot = Probe(500.0, 300.0, Clocks(1200, 1980, ("too hot (hardware)",)))
    weak = Probe(560.0, 300.0)
    links = [FaultyLink(ProbedRunner(p)) for p in (WELL, WELL, WELL, hot, weak)] + [FaultyLink(other)]
    fleet = fleet_of(*links)
    reasons = [member.reason for member in fleet.members()]
    assert reasons[:3] == ["", "", ""]
    assert "too hot (hardware)" in reasons[3] and "1200 of 1980 MHz" in reasons[3]
    assert "product takes 560.0 us, 500.0 us" in reasons[4]
    assert "toolchain" in reasons[5]
    assert all_of(FleetRunner(fleet, "h100")) and not links[3].runner.measured


def test_other_kernel_sources_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    links = [FaultyLink(FakeRunner())]
    fleet_of(*links)
    monkeypatch.setattr("kernelwright.search.fleet.installed_code", lambda: "another")
    fleet = fleet_of(*links)
    with pytest.raises(DeviceLost, match="install the same release on every machine"):
        list(FleetRunner(fleet, "h100").measure(WORKLOAD, MEMBERS[:1]))


def test_starting_is_not_counted_as_work() -> None:
    def slow(link: FaultyLink, method: str, args: tuple[Any, ...]) -> None:
        time.sleep(0.05)

    fleet = fleet_of(FaultyLink(hook=slow))
    (member,) = fleet.members()
    assert (member.calls, member.busy_s) == (0, 0.0)
    FleetRunner(fleet, "h100").finals(WORKLOAD, MEMBERS[:1])
    assert member.calls == 1 and member.busy_s >= 0.05


def test_unreachable_devices_are_told() -> None:
    def never(link: FaultyLink, method: str, args: tuple[Any, ...]) -> None:
        raise DeviceLost("connection refused")

    with pytest.raises(DeviceLost, match="gpu0: connection refused"):
        fleet_of(FaultyLink(hook=never))
    with pytest.raises(DeviceLost, match="it has none"):
        Fleet({})
    assert fleet_of(FaultyLink(hook=never), FaultyLink()).slugs() == ["h100"]
    with pytest.raises(UnknownDevice, match="the fleet has h100, got 'b200'"):
        FleetRunner(fleet_of(FaultyLink()), "b200")


def test_a_device_that_is_slow_to_start_joins_later() -> None:
    ready = threading.Event()

    def starting(link: FaultyLink, method: str, args: tuple[Any, ...]) -> None:
        if method == "describe":
            ready.wait(60)

    fleet = fleet_of(FaultyLink(hook=starting), FaultyLink(), rules=dataclasses.replace(FAST, grace_s=0.01))
    assert len(all_of(FleetRunner(fleet, "h100"), MEMBERS[:3])) == 3
    ready.set()
    wait_for(lambda: fleet.members()[0].state == IDLE)


def test_a_toolchain_that_changes_under_way_is_not_mixed_in() -> None:
    link = FaultyLink(hook=dies_at(2))
    fleet = fleet_of(link, FaultyLink())
    link.runner.toolchain = Toolchain("3.8.0", "2.14.0", "600", "ptxas 13", 1)
    assert len(all_of(FleetRunner(fleet, "h100"))) == len(MEMBERS)
    wait_for(lambda: fleet.members()[0].state == ASIDE)
    assert "came back as" in fleet.members()[0].reason


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    """Until the condition holds; fails when it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
