"""Many workloads under one budget: typed as it is written, gone on with after an end, shared by several devices."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kernelwright.db import Store
from kernelwright.errors import DatabaseUnavailable, DeviceLost
from kernelwright.kernels.space import Space
from kernelwright.search import save_recorded
from kernelwright.search.campaign import FIRST_ROUND, Share
from kernelwright.search.fleet_runner import FleetRunner
from kernelwright.search.local_fleet import local_fleet
from kernelwright.service.campaign import CampaignRun, Plan
from kernelwright.service.workload_args import WorkloadArgs
from kernelwright.types import DeviceSpec, Workload
from tests.kernels.test_child_process import TARGETS
from tests.service.command_line import CommandLine
from tests.service.conftest import synthetic_trials

SIZES = (512, 1024, 2048, 4096)


@pytest.fixture(scope="session")
def shares() -> list[Share]:
    return [Share(WorkloadArgs("matmul", {"M": m, "N": 1024, "K": 1024}).workload(), 4096 / m) for m in SIZES]


@pytest.fixture(scope="session")
def recorded(shares: list[Share], device: DeviceSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("campaign")
    trials = [trial for share in shares for trial in synthetic_trials(share.workload, device)]
    save_recorded(trials, folder / "h100" / "matmul.parquet")
    return folder


@pytest.fixture
def file(shares: list[Share], tmp_path: Path) -> str:
    path = tmp_path / "workloads.jsonl"
    lines = ({"workload": share.workload.to_json(), "calls": share.calls} for share in shares)
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


@pytest.fixture
def fleet(recorded: Path) -> Iterator[Any]:
    made, _ = local_fleet("replay:h100", 3, recorded=recorded)
    yield made
    made.close()


def run_of(store: Store, fleet: Any, shares: list[Share], plan: Plan) -> CampaignRun:
    return CampaignRun(store, lambda: FleetRunner(fleet, "h100"), 3, shares, plan)


def done(run: CampaignRun) -> CampaignRun:
    run.start()
    assert run.wait(60)
    return run


TUNE = ["tune", "--device", "replay:h100", "--strategy", "random", "--worth", "0"]


def test_a_file_is_tuned_and_nothing_is_measured_again(cli: CommandLine, file: str, store: Store) -> None:
    told = cli.json(*TUNE, "--workloads", file, "--devices", "2", "--trials", "20")
    (first,) = told["devices"]
    assert [one["name"] for one in told["fleet"]] == ["replay:h100#0", "replay:h100#1"]
    assert all(one["calls"] > 0 and one["busy_s"] >= 0 for one in told["fleet"])
    assert first["hardware"] == "h100" and first["new_trials"] == 80 == len(list(store.trials()))
    assert first["step_us_now"] < first["step_us_before"] == 200.0 * sum(4096 / m for m in SIZES)
    assert all(w["trials"] == 20 and w["vendor_us"] == 200.0 and w["saved_us"] > 0 for w in first["workloads"])
    (again,) = cli.json(*TUNE, "--workloads", file, "--trials", "20")["devices"]
    assert again["new_trials"] == 0 and again["step_us_now"] == first["step_us_now"]
    (more,) = cli.json(*TUNE, "--workloads", file)["devices"]
    assert more["new_trials"] == 4 * 20 and len({t.key for t in store.trials()}) == 160


def test_for_people(cli: CommandLine, file: str) -> None:
    code, out, err = cli.run(*TUNE, "--workloads", file, "--trials", "16")
    assert code == 0 and "64 new trials; a step takes" in out and "saved" in out
    assert "16 trials, ours" in err


def test_a_model_is_tuned(cli: CommandLine, shares: list[Share], monkeypatch: pytest.MonkeyPatch) -> None:
    def collect(self: Any, target: str, timeout_s: float) -> Any:
        assert target == "model.py:make"
        return [{"workload": shares[0].workload.to_json(), "calls": 7}], ["mm_3: it runs on cpu"]

    monkeypatch.setattr("kernelwright.service.cli_fleet.ChildProcess.call", collect)
    (report,) = cli.json(*TUNE, "model.py:make", "--trials", "8")["devices"]
    assert [(w["calls"], w["trials"]) for w in report["workloads"]] == [(7, 8)]


def test_one_workload_on_several_devices(cli: CommandLine, shares: list[Share]) -> None:
    shape = ["matmul", "--shape", "M=512,N=1024,K=1024"]
    report = cli.json(*TUNE, *shape, "--trials", "24", "--devices", "3")
    assert report["run"]["new_trials"] == 24 and report["how"] == "measured"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["tune"], "needs an operator with --shape, a Python file with a model, or --workloads"),
        (["tune", "matmul"], "needs an operator with --shape"),
        (["tune", "--workloads", "no.jsonl"], "cannot be read"),
        (["tune", "matmul", "--shape", "M=1,N=1,K=1", "--workloads", "x"], "exclude each other"),
        (["tune", "--workloads", "-", "--runner", "slurm"], "runner must be one of local, ray, got 'slurm'"),
        (["tune", "--workloads", "-", "--device", "cpu"], "replay"),
    ],
)
def test_misuse_is_told(
    cli: CommandLine, argv: list[str], message: str, shares: list[Share], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", _Input(json.dumps(shares[0].workload.to_json())))
    code, out, err = cli.run(*argv)
    assert (code, out) == (2, "") and message in err


@dataclasses.dataclass
class _Input:
    text: str

    def read(self) -> str:
        return self.text


def test_one_that_cannot_be_tuned_leaves_the_others(store: Store, fleet: Any, shares: list[Share]) -> None:
    unknown = Share(WorkloadArgs("matmul", {"M": 5, "N": 5, "K": 5}).workload(), 1000)
    run = done(run_of(store, fleet, [unknown, *shares], Plan("random", trials=8, worth=0)))
    assert "nearest" in run.campaign.standings[0].failure
    assert [standing.trials for standing in run.campaign.standings[1:]] == [8] * 4


def test_stopped_midway_it_goes_on(store: Store, fleet: Any, shares: list[Share], monkeypatch: Any) -> None:
    plan = Plan("random", trials=16, worth=0)
    run = run_of(store, fleet, shares, plan)
    count = run._on_trial

    def stop_at_ten(trial: Any, progress: Any) -> None:
        if run.trials >= 10:
            run._stop.set()
        count(trial, progress)

    monkeypatch.setattr(run, "_on_trial", stop_at_ten)
    done(run)
    kept = len(list(store.trials()))
    assert 10 <= kept < 20 and run.trials == kept
    second = done(run_of(store, fleet, shares, plan))
    assert kept + second.trials == 64 == len({(t.workload, t.schedule) for t in store.trials()})


def test_the_budget_goes_where_most_is_to_be_saved(store: Store, fleet: Any, shares: list[Share]) -> None:
    heavy = dataclasses.replace(shares[2], calls=5000.0)
    run = run_of(store, fleet, [*shares[:2], heavy], Plan("random", worth=0))
    assert run.step(FleetRunner(fleet, "h100"))
    assert [standing.trials for standing in run.campaign.standings] == [0, 0, FIRST_ROUND]
    run.close()
    assert done(run_of(store, fleet, shares, Plan("random", worth=1e9))).trials == 0


class Started(FleetRunner):
    """A runner whose processes take some time to come up."""

    def warm_up(self) -> None:
        time.sleep(0.3)


def test_seconds_count_from_when_all_is_up_and_are_those_of_a_device(
    store: Store, fleet: Any, shares: list[Share]
) -> None:
    plan = Plan("random", trials=8, seconds=0.2, worth=0)
    run = CampaignRun(store, lambda: Started(fleet, "h100"), 1, shares, plan, side_by_side=4)
    began = time.monotonic()
    done(run)
    spent = time.monotonic() - began
    assert run.trials >= 8
    assert 0 < sum(standing.seconds for standing in run.campaign.standings) < spent - 0.3


def test_what_hangs_is_ended_some_time_after_the_budget(
    cli: CommandLine, file: str, store: Store, recorded: Path, monkeypatch: Any
) -> None:
    """A final round that does not come back must not hold up whoever waits for a run of so many seconds."""
    free = threading.Event()

    def hang(self: Any, workload: Workload, schedules: Any) -> Any:
        free.wait(60)
        raise DeviceLost("its child was ended")

    monkeypatch.setattr("kernelwright.search.replay_runner.ReplayRunner.finals", hang)
    monkeypatch.setattr("kernelwright.search.replay_runner.ReplayRunner.close", lambda self: free.set())
    monkeypatch.setattr("kernelwright.service.campaign.LATE_S", 0.2)
    began = time.monotonic()
    code, out, err = cli.run(*TUNE, "--workloads", file, "--seconds", "0.5", "--trials", "8")
    assert time.monotonic() - began < 30
    assert code == 0 and "new trials" in out
    assert "with searches under way: matmul[K=1024" in err
    assert len(list(store.trials())) >= 1


def test_spaces_are_looked_at_when_their_turn_comes(store: Store, fleet: Any, shares: list[Share]) -> None:
    asked: list[Workload] = []

    class Asked(FleetRunner):
        def space(self, workload: Workload) -> Space:
            asked.append(workload)
            return super().space(workload)

    run = CampaignRun(store, lambda: Asked(fleet, "h100"), 1, shares, Plan("model", worth=0))
    assert not asked
    assert run.step(Asked(fleet, "h100")) and set(asked) == {shares[0].workload}
    assert run.campaign.standings[0].most == 40 and run.campaign.standings[1].most is None
    run.close()


def test_the_same_winners_with_one_shared_model(store: Store, fleet: Any, shares: list[Share]) -> None:
    run = done(run_of(store, fleet, shares, Plan("model", trials=24, worth=0)))
    best: dict[Workload, float] = {}
    for standing in run.campaign.standings:
        assert standing.best_us is not None
        best[standing.share.workload] = standing.best_us
    assert all(time_us <= 150.0 for time_us in best.values())


def test_a_database_that_fails_ends_the_run(store: Store, fleet: Any, shares: list[Share], monkeypatch: Any) -> None:
    def refuse(trials: Any) -> None:
        raise DatabaseUnavailable("disk full")

    run = run_of(store, fleet, shares, Plan("random", trials=16, worth=0))
    monkeypatch.setattr(store, "add_trials", refuse)
    run.start()
    with pytest.raises(DatabaseUnavailable, match="disk full"):
        run.wait(60)


def test_a_lost_fleet_ends_the_run_and_keeps_the_trials(store: Store, fleet: Any, shares: list[Share]) -> None:
    run = run_of(store, fleet, shares, Plan("random", worth=0))
    fleet.close()
    run.start()
    with pytest.raises(Exception, match="no h100 is left to measure on"):
        run.wait(60)


def test_what_is_wrong_with_the_devices_is_told_while_a_model_is_looked_through(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(TARGETS)
    monkeypatch.setattr("kernelwright.service.cli_fleet._COLLECT", "kw_child_target:hang_on")
    for device in (["--device", "replay:b200"], ["--device", "cuda,replay:h100"], ["--runner", "slurm"]):
        began = time.monotonic()
        code, _, err = cli.run("tune", "model.py", *device)
        assert (code, "collect" in err) == (2, False) and err
        assert time.monotonic() - began < 20
