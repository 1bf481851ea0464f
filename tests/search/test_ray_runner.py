"""A real Ray cluster of several nodes on this machine, with recorded devices: what is lost is done again elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kernelwright.errors import DeviceLost, NothingRecorded, UnknownDevice
from kernelwright.search import Budget, Session, make_strategy, ray_runner
from kernelwright.search.fleet import Rules
from kernelwright.search.fleet_runner import FleetRunner
from kernelwright.search.ray_runner import RayRunner, placements, ray_fleet
from kernelwright.search.recorded import load_recorded, save_recorded
from kernelwright.search.replay_runner import ReplayRunner
from kernelwright.search.runner import Runner
from kernelwright.types import Schedule, Workload
from tests.contracts.runner_contract import RunnerContract
from tests.search.fakes import DEVICE, WORKLOAD, fake_space, trial, vendor, workload

ray = pytest.importorskip("ray")

MEMBERS = list(fake_space())
QUICK = Rules(retry_s=0.1, losses=4, grace_s=60.0)
PACE = 0.25
SPEC = "replay:h100"
SMALL = 80 * 2**20


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    save_recorded([*map(trial, MEMBERS), vendor(110.0)], folder / "h100" / "matmul.parquet")
    return folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three nodes: a head without devices, and two with two replays each."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **quiet()})
    for _ in range(2):
        made.add_node(num_cpus=1, resources={SPEC: 2}, **quiet())
    ray_runner.connect(made.address)
    yield made
    ray.shutdown()
    made.shutdown()


def quiet() -> dict[str, Any]:
    return {"include_dashboard": False, "object_store_memory": SMALL}


@pytest.fixture(scope="module")
def whole_cluster(cluster: Any, recorded: Path) -> Iterator[Runner]:
    runner = RayRunner(SPEC, recorded=recorded)
    yield runner
    runner.close()


class TestRayRunner(RunnerContract):
    @pytest.fixture
    def workload(self) -> Workload:
        return WORKLOAD

    @pytest.fixture
    def runner(self, whole_cluster: Runner) -> Runner:
        return whole_cluster


def test_an_actor_killed_midway_loses_no_trial(cluster: Any, recorded: Path) -> None:
    fleet, _ = ray_fleet(SPEC, recorded=recorded, pace=PACE, rules=QUICK)
    victim = fleet.members()[0].about
    assert victim is not None and len({member.about.pid for member in fleet.members() if member.about}) == 4
    got = []
    for pair in FleetRunner(fleet, "h100", width=4).measure(WORKLOAD, MEMBERS):
        got.append(pair)
        if len(got) == 12:
            os.kill(victim.pid, signal.SIGKILL)
    fleet.close()
    check_all(got)
    assert fleet.members()[0].losses or fleet.members()[0].about != victim


def test_a_node_killed_midway_loses_no_trial(cluster: Any, recorded: Path) -> None:
    node = cluster.add_node(num_cpus=1, resources={SPEC: 2}, **quiet())
    fleet, _ = ray_fleet(SPEC, recorded=recorded, pace=PACE, rules=QUICK)
    assert len(fleet.members()) == 6
    got = []
    for pair in FleetRunner(fleet, "h100", width=6).measure(WORKLOAD, MEMBERS):
        got.append(pair)
        if len(got) == 12:
            cluster.remove_node(node, allow_graceful=False)
    cluster.wait_for_nodes()
    states = [member.state for member in fleet.members()]
    fleet.close()
    check_all(got)
    assert states.count("idle") >= 4 and {"lost", "aside"} & {*states}


def test_the_same_winner_as_here_with_the_same_budget(cluster: Any, recorded: Path) -> None:
    def search(runner: Runner) -> tuple[Schedule, list[Schedule]]:
        strategy = make_strategy("bayesian", WORKLOAD, runner.device, runner.space(WORKLOAD), 5)
        session = Session(WORKLOAD, runner, strategy, Budget(trials=32))
        trials = [trial.schedule for trial in session]
        return session.record.schedule, trials

    fleet, _ = ray_fleet(SPEC, recorded=recorded)
    here = ReplayRunner(load_recorded(recorded / "h100" / "matmul.parquet"), DEVICE)
    there = FleetRunner(fleet, "h100")
    assert search(there) == search(here)
    with pytest.raises(NothingRecorded, match="nearest"):
        there.space(workload(m=5))
    fleet.close()


DRIVER = """
import sys
from pathlib import Path
from kernelwright.db import Store
from kernelwright.search import Budget
from kernelwright.search.fleet_runner import FleetRunner
from kernelwright.search.ray_runner import ray_fleet
from kernelwright.service.tuning import TuneRequest, tune_and_store
from tests.search.fakes import WORKLOAD

address, recorded, db, pace = sys.argv[1:]
fleet, _ = ray_fleet("replay:h100", address=address, recorded=Path(recorded), pace=float(pace))
request = TuneRequest(WORKLOAD, "random", Budget(trials=40))
with Store.open(db) as store:
    on_trial = lambda trial, progress: print(progress.trials, flush=True)
    result = tune_and_store(store, FleetRunner(fleet, "h100"), request, on_trial)
print("known", result.known_trials, "new", result.new_trials, flush=True)
"""


def test_a_killed_driver_goes_on_where_it_stopped(cluster: Any, recorded: Path, tmp_path: Path) -> None:
    db = f"sqlite:///{tmp_path}/t.db"
    paths = os.pathsep.join(sys.path)

    def start(pace: float) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", DRIVER, cluster.address, str(recorded), db, str(pace)]
        environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}{os.pathsep}{paths}"}
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    with start(pace=2.0) as first:
        assert first.stdout is not None
        for line in first.stdout:
            if int(line) == 6:
                first.kill()
                break
        told = 6 + len(first.stdout.readlines())
    with start(pace=0.0) as second:
        out, _ = second.communicate(timeout=60)
    words = out.splitlines()[-1].split()
    known, new = int(words[1]), int(words[3])
    assert told <= known <= told + 1 and known + new == 40


def check_all(pairs: list[Any]) -> None:
    """Every schedule once, all with the time of the recording."""
    assert len(pairs) == len(MEMBERS) == len({schedule for schedule, _ in pairs})
    assert all(measurement.ok for _, measurement in pairs)


def test_gpus_are_placed_by_their_type() -> None:
    nodes = [
        {"CPU": 16.0, "GPU": 2.0, "accelerator_type:H100": 1.0},
        {"CPU": 8.0, "GPU": 1.0, "accelerator_type:A100": 1.0},
        {"CPU": 8.0, "GPU": 1.0},
        {"CPU": 64.0, "replay:h100": 3.0},
    ]
    h100 = {"num_cpus": 0, "num_gpus": 1, "accelerator_type": "H100"}
    assert placements(nodes, "h100", None) == [h100, h100]
    assert placements(nodes, "h100", 1) == [h100]
    assert [o.get("accelerator_type") for o in placements(nodes, "cuda", None)] == ["H100", "H100", "A100", None]
    assert placements(nodes, "a100-80gb", None) == [{**h100, "accelerator_type": "A100"}]
    assert placements(nodes, "replay:h100", None) == [{"num_cpus": 0, "resources": {"replay:h100": 1}}] * 3
    assert placements(nodes, "replay:l4", 2) == [{"num_cpus": 0}] * 2
    with pytest.raises(UnknownDevice, match="has no 'b200'; its accelerators: A100, H100"):
        placements(nodes, "b200", None)


def test_a_cluster_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: Any) -> None:
        raise ConnectionError("refused")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(DeviceLost, match=r"Ray cluster at 10\.0\.0\.1:6379 does not answer: refused"):
        ray_runner.connect("10.0.0.1:6379")
