"""Building without a GPU: resources of good kernels, and every failure told and survived."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

from kernelwright.errors import BuildFailed, MissingDependency, OutOfResources
from kernelwright.kernels import build as build_module
from kernelwright.kernels import get_operator, triton_adapter
from kernelwright.kernels.build import BuildJob, BuildPool, BuildReport, build
from kernelwright.kernels.built import is_built
from kernelwright.kernels.child_process import ChildDied, ChildProcess
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.kernels.nursery import Nursery
from kernelwright.types import FrozenMap, Schedule, Workload

BAD = Path(__file__).parents[1] / "assets" / "bad_templates"
H100 = named_device("h100")
ANY_WORKLOAD = Workload("planted", FrozenMap({"N": 1}), FrozenMap({"x": "fp16"}))


def fault(name: str) -> Schedule:
    return Schedule("planted", FrozenMap({"fault": name}))


@pytest.fixture(scope="module")
def forking() -> Iterator[Callable[..., BuildPool]]:
    """Makes a pool of one compiler that is a fork, as those of larger pools are: many a test here ends its compiler,
    and the next one need not import torch and triton again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BAD)
        nursery = Nursery("kernelwright.kernels.build:builder", build_module._CHILD_ENV)

        def fork(*args: Any, **options: Any) -> ChildProcess:
            return ChildProcess(*args, **{**options, "nursery": nursery})

        def make(**options: Any) -> BuildPool:
            with pytest.MonkeyPatch.context() as children:
                children.setattr(build_module, "ChildProcess", fork)
                return BuildPool(1, planner="kw_bad_template:plan", **options)

        yield make
        nursery.close()


@pytest.fixture(scope="module")
def pool(forking: Callable[..., BuildPool], tmp_path_factory: pytest.TempPathFactory) -> Iterator[BuildPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        with forking(timeout_s=20.0) as pool:
            yield pool


def test_resources_of_several_kernels_are_put_together(pool: BuildPool) -> None:
    one = pool.build(ANY_WORKLOAD, fault("none"), H100)
    two = pool.build(ANY_WORKLOAD, fault("two_kernels"), H100, keep_artifact=True)
    assert one.shared_bytes < two.shared_bytes
    assert 0 < one.registers < two.registers <= 255
    assert (one.artifact, two.spills) == ({}, 0)
    assert {"copy_tile.cubin", "matmul_tile.cubin", "matmul_tile.ptx"} <= set(two.artifact)
    assert ".target sm_90a" in str(two.artifact["matmul_tile.ptx"])


def test_one_child_builds_for_several_targets(pool: BuildPool) -> None:
    amd = pool.build(ANY_WORKLOAD, fault("two_kernels"), named_device("mi300x"), keep_artifact=True)
    old = pool.build(ANY_WORKLOAD, fault("two_kernels"), named_device("a100"), keep_artifact=True)
    assert "gfx942" in str(amd.artifact["matmul_tile.amdgcn"])
    assert amd.registers > 8
    assert ".target sm_80" in str(old.artifact["matmul_tile.ptx"])
    assert is_built(ANY_WORKLOAD, fault("two_kernels"), named_device("a100"))
    assert not is_built(ANY_WORKLOAD, fault("two_kernels"), named_device("b200"))


def test_all_compilers_start_before_there_is_work() -> None:
    with BuildPool(2) as pool:
        assert not pool.wait_until_up(0.0)
        assert pool.wait_until_up(60.0, 1) and pool.wait_until_up(60.0)
        assert all(child.pid is not None for child in pool._children)
        loaded = [Path(f"/proc/{child.pid}/maps").read_text() for child in pool._children]
    assert all("libtriton" in maps and "libtorch" in maps for maps in loaded)


def test_a_pool_is_fed_while_it_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def run(pool: BuildPool, job: BuildJob) -> BuildReport:
        if job.schedule == fault("slow"):
            assert release.wait(20.0)
        return BuildReport(16, 0, 0, 0.0, {})

    monkeypatch.setattr(BuildPool, "_run", run)
    monkeypatch.setattr(build_module.ChildProcess, "start", lambda child: None)
    asked: list[None] = []

    def feed() -> list[Schedule]:
        asked.append(None)
        return [fault("added")] if len(asked) == 1 else []

    with BuildPool(2) as pool:
        builds = pool.build_all(ANY_WORKLOAD, [fault("slow"), fault("quick")], H100, None, feed)
        assert [next(builds)[0], next(builds)[0]] == [fault("quick"), fault("added")]
        release.set()
        assert [schedule for schedule, _ in builds] == [fault("slow")]
    assert len(asked) == 3


def test_a_pool_that_is_closed_while_compilers_start_keeps_nobody_waiting() -> None:
    pool = BuildPool(6)

    def ask() -> None:
        with contextlib.suppress(CancelledError, BuildFailed):
            pool.build(ANY_WORKLOAD, fault("none"), H100)

    asking = [threading.Thread(target=ask, daemon=True) for _ in range(12)]
    for thread in asking:
        thread.start()
    while pool._threads._work_queue.qsize() < 6:
        time.sleep(0.01)
    begin = time.monotonic()
    pool.close()
    for thread in asking:
        thread.join(60.0)
    assert not any(thread.is_alive() for thread in asking) and time.monotonic() - begin < 60.0


def test_a_process_that_cannot_be_made_fails_the_build_and_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(child: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(build_module.ChildProcess, "start", refuse)
    with BuildPool(1) as pool:
        found = list(pool.build_all(ANY_WORKLOAD, [fault("none")], H100, time.monotonic() + 20))
    assert [str(outcome) for _, outcome in found] == ["no more processes"]


def test_a_compiler_that_cannot_start_fails_the_build_and_tells_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "__name__", "kernelwright.no_such_module")
    with BuildPool(1) as pool, pytest.raises(BuildFailed, match="no_such_module"):
        pool.build(ANY_WORKLOAD, fault("none"), H100)


def test_more_shared_memory_than_the_device_has(pool: BuildPool) -> None:
    with pytest.raises(OutOfResources, match=r"needs \d+ bytes of shared memory, NVIDIA L4 has 101376"):
        pool.build(ANY_WORKLOAD, fault("shared_memory"), named_device("l4"))
    assert pool.build(ANY_WORKLOAD, fault("shared_memory"), H100).shared_bytes > 101376


def test_more_threads_than_a_block_may_have(pool: BuildPool) -> None:
    with pytest.raises(BuildFailed):
        pool.build(ANY_WORKLOAD, fault("threads"), H100)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("abort", r"died on planted\(fault=abort\).*SIGABRT.*UNREACHABLE executed at Lowering.cpp:42"),
        ("raise", r"ValueError: no tile fits"),
        ("syntax", r"SyntaxError.*kw_bad_syntax"),
        ("code", r"CompilationError.*at \d+:\d+"),
    ],
)
def test_failures_are_told_and_survived(pool: BuildPool, name: str, words: str) -> None:
    with pytest.raises(BuildFailed, match=f"(?s){words}"):
        pool.build(ANY_WORKLOAD, fault(name), H100)
    assert pool.build(ANY_WORKLOAD, fault("none"), H100).registers > 0


def test_results_come_as_they_finish_each_once(pool: BuildPool) -> None:
    wanted = {"raise": BuildFailed, "none": BuildReport, "code": BuildFailed, "two_kernels": BuildReport}
    outcomes = list(pool.build_all(ANY_WORKLOAD, [fault(name) for name in wanted], H100))
    assert len(outcomes) == len(wanted)
    assert {schedule.knobs["fault"]: type(outcome) for schedule, outcome in outcomes} == wanted


def test_closing_the_iterator_drops_the_rest(pool: BuildPool) -> None:
    results = pool.build_all(ANY_WORKLOAD, [fault("none"), *[fault("abort")] * 50], H100)
    assert isinstance(next(results)[1], BuildReport)
    results.close()  # type: ignore[attr-defined]
    assert pool.build(ANY_WORKLOAD, fault("none"), H100).registers > 0


def test_a_compiler_that_hangs_is_stopped_by_the_clock_or_by_closing(forking: Callable[..., BuildPool]) -> None:
    pool = forking(timeout_s=0.5)
    with pytest.raises(BuildFailed, match=r"stopped after 0.5 s on planted\(fault=hang\)"):
        pool.build(ANY_WORKLOAD, fault("hang"), H100)
    results = pool.build_all(ANY_WORKLOAD, [fault("hang")] * 50, H100)
    assert isinstance(next(results)[1], BuildFailed)
    pool.close()
    pool.close()


def test_a_matmul_is_built_for_a_gpu_that_is_not_here() -> None:
    workload = matmul_workload(256, 256, 256)
    operator = get_operator("matmul")
    schedule = operator.default_schedule(workload, H100)
    report = build(workload, schedule, H100)
    assert "matmul_pointer.cubin" in report.artifact
    assert 0 < report.shared_bytes <= H100.shared_memory_bytes
    assert report.seconds > 0


def test_without_triton_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_adapter.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"needs torch and triton.*kernelwright\[torch\]"):
        BuildPool(1)


@pytest.mark.parametrize("room", [0, 2, 4])
def test_children_for_which_there_is_no_room_are_left_out(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No schedule is to blame for them; without any, each build tells why."""
    up: list[Any] = []

    class Crowded(ChildProcess):
        def start(self) -> Any:
            with lock:
                if self not in up and len(up) == room:
                    raise ChildDied(None, "no more processes")
                up.append(self)

        def call(self, payload: Any, timeout_s: float | None = None) -> Any:
            self.start()
            return BuildReport(1, 0, 0, 0.0, {})

    lock = threading.Lock()
    monkeypatch.setattr(build_module, "ChildProcess", Crowded)
    with BuildPool(4) as pool:
        assert pool.wait_until_up(10)
        for _ in range(3):
            found = [outcome for _, outcome in pool.build_all(ANY_WORKLOAD, [fault("a"), fault("b"), fault("c")], H100)]
            assert all(isinstance(one, BuildFailed if not room else BuildReport) for one in found)
            assert all("no more processes" in str(one) for one in found if not room)
