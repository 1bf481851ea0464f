"""tune="missing" and tune="background": what is tuned, within what, and what becomes of the compiled graph."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import platformdirs
import pytest
import torch

from kernelwright.compiler import backend as backend_module
from kernelwright.compiler import improving, tuning
from kernelwright.compiler.backend import Options
from kernelwright.compiler.backend import kernelwright as backend
from kernelwright.compiler.dispatch import RecordedAnswers, local_answers
from kernelwright.db.store import Store
from kernelwright.errors import DatabaseUnavailable, UsageError
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.kernels.triton_adapter import current_toolchain
from kernelwright.search.timing import TIMER_VERSION
from kernelwright.types import Workload

H100 = named_device("h100")
WORKLOAD = matmul_workload(64, 64, 64)
OTHER = matmul_workload(64, 64, 128)
Maker = Callable[..., Any]


@pytest.fixture(autouse=True)
def nothing_tried(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None, tmp_path: Path) -> None:
    monkeypatch.setattr(tuning, "_tried", {})
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: tmp_path / "cache")


class Tuner:
    """In place of the child process: puts a winning record of each workload into the database."""

    def __init__(self, url: str, record_of: Maker) -> None:
        self.url, self.record_of = url, record_of
        self.asked: list[tuple[dict[Workload, int], float]] = []
        self.may_begin = threading.Event()
        self.may_begin.set()

    def __call__(self, calls: tuning.Calls, db: str | None, seconds: float) -> bool:
        assert db == self.url and self.may_begin.wait(60)
        self.asked.append((dict(calls), seconds))
        with Store.open(self.url) as store:
            for workload in calls:
                store.put_winner(self.record_of(workload))
        return True


@pytest.fixture
def tuner(tmp_path: Path, record_of: Maker, monkeypatch: pytest.MonkeyPatch) -> Tuner:
    found = Tuner(f"sqlite:///{tmp_path / 'tuned.db'}", record_of)
    monkeypatch.setattr(tuning, "tune_in_child", found)
    # there is no GPU here: the answers are those for an H100, and products on the CPU are replaced
    monkeypatch.setattr(backend_module, "device_of", lambda name: H100)
    monkeypatch.setattr(backend_module, "local_answers", lambda db, device, toolchain: local_answers(db, "h100"))
    return found


def compiled(tuner: Tuner, model: Any, **options: Any) -> Any:
    given = {"db": tuner.url, "devices": ("cpu",), **options}
    return torch.compile(model, backend=backend, options=given)


def test_missing_is_tuned_before_the_graph_is_compiled(tuner: Tuner, calls: list[str]) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.ReLU())
    x = torch.randn(4, 8)
    with torch.no_grad():
        run = compiled(tuner, layers, tune="missing", tune_seconds=7)
        torch.testing.assert_close(run(x), layers(x))
    ((counts, seconds),) = tuner.asked
    assert seconds == 7 and calls == ["bias,relu", "bias,relu"]
    assert list(counts.values()) == [2] and next(iter(counts)).epilogue == ("bias", "relu")


def test_what_is_measured_is_not_tuned(tuner: Tuner, calls: list[str]) -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    for _ in range(2):
        torch._dynamo.reset()
        torch.testing.assert_close(compiled(tuner, torch.mm, tune="missing")(x, w), x @ w)
    assert len(tuner.asked) == 1 and calls == ["", ""]


def test_a_graph_whose_tuning_failed_is_tuned_by_the_next_process(
    tuner: Tuner, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[bool] = []

    def fail(calls: tuning.Calls, db: str | None, seconds: float) -> bool:
        outcomes.append(False)
        return False

    x, w = torch.randn(4, 24), torch.randn(24, 8)
    Store.open(tuner.url).close()
    for tune, tried in ((fail, 1), (fail, 2), (tuner, 2), (tuner, 2)):
        torch._dynamo.reset()
        monkeypatch.setattr(tuning, "tune_in_child", tune)
        torch.testing.assert_close(compiled(tuner, torch.mm, tune="missing")(x, w), x @ w)
        assert len(outcomes) == tried
    assert len(tuner.asked) == 1 and calls == ["", ""]


def test_failures_are_counted_by_database_wherever_a_folder_can_be_written(tmp_path: Path) -> None:
    for _ in range(2):
        tuning.Failures("sqlite:///a.db", tmp_path / "new").add()
    assert tuning.Failures("sqlite:///a.db", tmp_path / "new").count == 2
    assert tuning.Failures("sqlite:///b.db", tmp_path / "new").count == 0
    (tmp_path / "file").touch()
    nowhere = tuning.Failures(None, tmp_path / "file" / "folder")
    nowhere.add()
    assert nowhere.count == 0


def test_never_tunes_nothing(tuner: Tuner, calls: list[str]) -> None:
    Store.open(tuner.url).close()
    compiled(tuner, torch.mm)(torch.randn(4, 8), torch.randn(8, 8))
    assert tuner.asked == [] and calls == []


def test_background_serves_at_once_and_swaps_between_calls(tuner: Tuner, calls: list[str]) -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    tuner.may_begin.clear()
    run = compiled(tuner, torch.mm, tune="background", tune_seconds=5)
    torch.testing.assert_close(run(x, w), x @ w)
    assert tuner.asked == [] and calls == []
    tuner.may_begin.set()
    until(lambda: bool(run(x, w) is not None and calls))
    torch.testing.assert_close(run(x, w), x @ w)
    assert [seconds for _, seconds in tuner.asked] == [5]


def test_background_trains_with_the_new_graph(tuner: Tuner, calls: list[str]) -> None:
    model, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    run = compiled(tuner, model, tune="background")

    def gradients(call: Any) -> list[torch.Tensor]:
        return list(torch.autograd.grad(call(x).square().sum(), list(model.parameters())))

    want = gradients(model)
    until(lambda: bool(gradients(run) and calls))
    torch.testing.assert_close(gradients(run), want)
    # forward, and the weight's gradient
    assert sorted(set(calls)) == ["", "bias"]


def test_symbolic_sizes_stay_as_they_are(tuner: Tuner) -> None:
    Store.open(tuner.url).close()
    run = torch.compile(
        torch.mm,
        backend=backend,
        dynamic=True,
        options={"db": tuner.url, "devices": ("cpu",), "tune": "background"},
    )
    for rows in (4, 6):
        x, w = torch.randn(rows, 8), torch.randn(8, 8)
        torch.testing.assert_close(run(x, w), x @ w)
    assert tuner.asked == []


def until(done: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def graph_of(function: Callable[..., Any]) -> torch.fx.GraphModule:
    return torch.fx.symbolic_trace(function)


def test_a_graph_that_cannot_be_compiled_again_stays(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no")

    found = improving.Improving(lambda x: x + 1, graph_of(lambda x: x + 1), lambda: True, refuse)
    found.work()
    assert [found(1), found(2)] == [2, 3] and "stays as it was compiled: no" in caplog.text


@pytest.mark.parametrize("outcome", [False, RuntimeError("no GPU")])
def test_a_graph_stays_when_tuning_failed(outcome: Any) -> None:
    def tune() -> bool:
        if isinstance(outcome, Exception):
            raise outcome
        return bool(outcome)

    found = improving.Improving(lambda x: x + 1, graph_of(lambda x: x + 1), tune, lambda *given: pytest.fail("again"))
    found.work()
    assert found(1) == 2


def test_nothing_changes_while_cuda_records(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = [True]
    monkeypatch.setattr(improving, "_is_recorded", lambda: recorded[0])
    found = improving.Improving(lambda x: "old", graph_of(lambda x: x), lambda: True, lambda *given: lambda x: "new")
    found.work()
    assert found(1) == "old"
    recorded[0] = False
    assert found(1) == "new"


def test_two_threads_compile_a_graph_again_once() -> None:
    begun: list[int] = []
    inside, go_on = threading.Event(), threading.Event()

    def again(*given: Any) -> Any:
        begun.append(1)
        inside.set()
        assert go_on.wait(60)
        return lambda x: "new"

    found = improving.Improving(lambda x: "old", graph_of(lambda x: x), lambda: True, again)
    found.work()
    given: list[Any] = []
    first = threading.Thread(target=lambda: given.append(found(1)))
    first.start()
    # the other one does not wait for it
    assert inside.wait(60) and found(1) == "old"
    go_on.set()
    first.join()
    assert given == ["new"] and found(1) == "new" and begun == [1]


def test_the_child_is_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def run(command: list[str], **options: Any) -> Any:
        seen.append((command, options, Path(command[command.index("--workloads") + 1]).read_text()))

    monkeypatch.setattr(subprocess, "run", run)
    assert tuning.tune_in_child({WORKLOAD: 3}, "sqlite:///x.db", 12)
    # what was tried is not tried again, what is new is
    assert tuning.tune_in_child({WORKLOAD: 3}, "sqlite:///x.db", 12) and len(seen) == 1
    assert tuning.tune_in_child({WORKLOAD: 3, OTHER: 1}, "sqlite:///x.db", 12) and len(seen) == 2
    command, options, listed = seen[0]
    assert command[command.index("--seconds") + 1] == "12" and command[-2:] == ["--db", "sqlite:///x.db"]
    assert options["timeout"] == 12 + tuning.GRACE_S and '"calls": 3' in listed


def test_the_child_reads_our_list(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # without a GPU the command line must say so, and nothing else
    if torch.cuda.is_available():
        pytest.skip("would tune")
    assert not tuning.tune_in_child({WORKLOAD: 1}, f"sqlite:///{tmp_path / 'x.db'}", 1)
    assert "tuning failed" in caplog.text and "GPU" in caplog.text
    # it is not run again, and has not gone well for that
    assert not tuning.tune_in_child({WORKLOAD: 1}, f"sqlite:///{tmp_path / 'x.db'}", 1)
    assert caplog.text.count("tuning failed") == 1


def test_the_child_tunes_and_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.run

    def replayed(command: list[str], **options: Any) -> Any:
        return real([*command, "--device", "replay:h100"], **options)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(subprocess, "run", replayed)
    url, workload = f"sqlite:///{tmp_path / 'x.db'}", matmul_workload(2048, 4096, 4096)
    assert tuning.tune_in_child({workload: 2}, url, 20)
    with Store.open(url) as store:
        assert [record.workload for record in store.records(device_key=H100.key, limit=None)] == [workload]


@pytest.mark.parametrize(
    ("error", "went"), [(subprocess.TimeoutExpired("tune", 1), True), (OSError("no python"), False)], ids=str
)
def test_a_child_that_hangs_is_no_error(monkeypatch: pytest.MonkeyPatch, error: Exception, went: bool) -> None:
    def run(*given: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    assert tuning.tune_in_child({WORKLOAD: 1}, None, 1) == went


@pytest.mark.parametrize("went", [True, False], ids=["done", "failed in the end"])
def test_without_a_database_nothing_is_known_yet(record_of: Maker, went: bool) -> None:
    recorded: list[Any] = []
    toolchain = current_toolchain(TIMER_VERSION)

    def read() -> RecordedAnswers:
        if not recorded:
            raise DatabaseUnavailable("there is none")
        return RecordedAnswers(recorded, H100, toolchain)

    def tune(calls: tuning.Calls, seconds: float) -> bool:
        recorded.extend(record_of(workload) for workload in calls)
        return went

    answers = tuning.MissingTuned(read, RecordedAnswers([], H100, toolchain), tune, 5, tuning.Failures(None))
    before = answers.state
    assert answers(WORKLOAD).how == "vendor"
    answers.tune({WORKLOAD: 1})
    assert answers(WORKLOAD).choice == "kernel" and answers.state != before


@pytest.mark.parametrize(
    "options",
    [{"tune": "always"}, {"tune": "missing", "device": "h100"}, {"tune": "missing", "tune_seconds": 0}],
    ids=str,
)
def test_misuse_is_told(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="option tune"):
        Options(**options)
