"""Decisions by times of whole pieces: they count before any estimate, are measured where missing, and are told."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from kernelwright.compiler import pieces
from kernelwright.compiler.passes.forms import Option
from kernelwright.compiler.piece_job import PieceJob, PieceReply
from kernelwright.compiler.pieces import PIECE_TIMEOUT_S, AgreedPieces, KnownPieces, MissingTimed, WantedPiece, timed
from kernelwright.db import Store
from kernelwright.errors import DeviceLost, UsageError
from kernelwright.kernels.child_process import ChildDied, ChildRaised, ChildTimeout
from kernelwright.kernels.device import named_device
from kernelwright.kernels.triton_adapter import current_toolchain
from kernelwright.pieces import PieceTimes
from kernelwright.search.device_guard import DeviceLock
from kernelwright.search.timing import TIMER_VERSION

H100, TOOLCHAIN = named_device("h100"), current_toolchain(TIMER_VERSION)


def tensor(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


def model(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.silu(functional.linear(x, w, b)) + y


ARGS = tensor(6, 8), tensor(12, 8), tensor(12), tensor(6, 12)

LONGEST, MIDDLE, SHORT = ("bias", "silu", "residual"), ("bias", "silu"), ("bias",)


class Meter:
    """Times by a function of the option."""

    def __init__(self, us_of: Callable[[Option], float | None], theirs_us: float = 10.0) -> None:
        self.device, self.toolchain = H100, TOOLCHAIN
        self.asked: list[WantedPiece] = []
        self._us_of, self._theirs_us = us_of, theirs_us

    def __call__(self, wanted: WantedPiece, timeout_s: float) -> PieceReply:
        self.asked.append(wanted)
        found = {key: self._us_of(option) for key, option in wanted.options.items()}
        times = {key: us for key, us in found.items() if us is not None}
        failures = {key: "result 0 differs by 1" for key, us in found.items() if us is None}
        return PieceReply(self._theirs_us, times, failures, 0.01)


def timed_with(meter: Meter, store: Store) -> MissingTimed:
    return MissingTimed(
        lambda: KnownPieces(store.pieces(H100.key, TOOLCHAIN.key)),
        lambda wanted: list(timed(wanted, meter, store)),
    )


def run(tried: Any, pieces: Any, function: Callable[..., Any] = model, args: Sequence[torch.Tensor] = ARGS) -> None:
    tried._pass._in_place._pieces = pieces
    with torch.no_grad():
        torch.testing.assert_close(tried.compile(function)(*args), function(*args), rtol=1e-4, atol=1e-4)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store.open(f"sqlite:///{tmp_path / 'pieces.db'}") as opened:
        yield opened


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({LONGEST: 5.0, MIDDLE: 6.0, SHORT: 7.0}, LONGEST),
        ({LONGEST: 8.0, MIDDLE: 6.0, SHORT: 7.0}, MIDDLE),
        ({LONGEST: 20.0, MIDDLE: 11.0, SHORT: 9.5}, SHORT),
        ({LONGEST: None, MIDDLE: 9.0, SHORT: 9.5}, MIDDLE),
        ({LONGEST: 20.0, MIDDLE: 9.95, SHORT: 10.0}, None),
        ({LONGEST: None, MIDDLE: None, SHORT: None}, None),
    ],
    ids=["all win", "a shorter one is faster", "only one wins", "one is wrong", "within the noise", "none is right"],
)
def test_fastest_form_in_its_place_is_chosen(forced: Any, store: Store, times: Any, chosen: Any) -> None:
    """By the records every form is twice as fast."""
    run(forced, timed_with(Meter(lambda option: times[option.workload.epilogue]), store))
    assert forced.epilogues() == ([] if chosen is None else [chosen])
    (decision,) = forced.report.decisions
    assert "measured in place" in decision.reason
    if chosen is not None:
        assert (decision.expected_us, decision.vendor_us) == (times[chosen], 10.0)


def test_times_bring_a_kernel_in_that_its_record_would_not(tried_with: Any, store: Store) -> None:
    tried = tried_with(lambda workload: workload.epilogue == SHORT)
    run(tried, timed_with(Meter(lambda option: 5.0 if option.workload.epilogue == LONGEST else 30.0), store))
    assert tried.epilogues() == [LONGEST]


def test_what_was_timed_once_is_not_timed_again(forced: Any, store: Store) -> None:
    meter = Meter(lambda option: 5.0)
    for _ in range(2):
        run(forced, timed_with(meter, store))
    assert len(meter.asked) == 1
    (known,) = store.pieces(H100.key, TOOLCHAIN.key)
    assert known.theirs_us == 10.0 and "silu" not in known.text and known.text.startswith("addmm+")


def test_a_piece_that_runs_often_is_timed_once_and_first(forced: Any, store: Store) -> None:
    def layers(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = torch.relu(x @ w).t()
        for _ in range(3):
            x = functional.silu(x @ y)
        return x

    meter = Meter(lambda option: 5.0)
    run(forced, timed_with(meter, store), layers, (tensor(8, 8), tensor(8, 8), tensor(8, 8)))
    assert [one.calls for one in meter.asked] == sorted((one.calls for one in meter.asked), reverse=True)
    assert sum(one.calls for one in meter.asked) == 4 > len(meter.asked)


def test_bare_operators_are_not_timed_again(forced: Any, store: Store) -> None:
    meter = Meter(lambda option: 5.0)
    run(forced, timed_with(meter, store), lambda a, b: torch.sin(a @ b), (tensor(8, 8), tensor(8, 8)))
    assert meter.asked == [] and forced.epilogues() == [()]


def test_other_schedules_are_judged_by_records(forced: Any, store: Store) -> None:
    """The times are those of kernels that nobody would take any more."""

    def forget(wanted: Sequence[WantedPiece]) -> None:
        others = [WantedPiece(one.piece, {key[::-1]: o for key, o in one.options.items()}) for one in wanted]
        list(timed(others, Meter(lambda option: 50.0), store))

    run(forced, MissingTimed(lambda: KnownPieces(store.pieces(H100.key, TOOLCHAIN.key)), forget))
    assert len(store.pieces(H100.key, TOOLCHAIN.key)) == 1
    assert forced.epilogues() == [LONGEST] and "in place" not in forced.report.decisions[0].reason


def test_piece_that_takes_its_process_down_is_stored_as_that(forced: Any, store: Store) -> None:
    class Dying(Meter):
        def __call__(self, wanted: WantedPiece, timeout_s: float) -> PieceReply:
            super().__call__(wanted, timeout_s)
            raise ChildDied(-11, "")

    meter = Dying(lambda option: 5.0)
    for _ in range(2):
        run(forced, timed_with(meter, store))
    assert len(meter.asked) == 1 and forced.epilogues() == []
    assert "SIGSEGV" in forced.report.decisions[0].reason


@pytest.mark.parametrize("error", [ChildRaised("OutOfMemoryError", "out of memory", ""), UsageError("no operator")])
def test_piece_that_does_not_run_by_itself_says_nothing_about_kernels(
    forced: Any, store: Store, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    class Raising(Meter):
        def __call__(self, wanted: WantedPiece, timeout_s: float) -> PieceReply:
            super().__call__(wanted, timeout_s)
            raise error

    meter = Raising(lambda option: 5.0)
    run(forced, timed_with(meter, store))
    assert len(meter.asked) == 1 and store.pieces(H100.key, TOOLCHAIN.key) == []
    assert forced.epilogues() == [LONGEST] and str(error) in caplog.text


def test_failure_to_measure_leaves_the_records_in_charge(forced: Any) -> None:
    def fail(wanted: Sequence[WantedPiece]) -> None:
        raise OSError("planted")

    run(forced, MissingTimed(lambda: KnownPieces([]), fail))
    assert forced.epilogues() == [LONGEST]


@pytest.mark.parametrize("at", ["measure", "__call__"])
def test_failure_to_look_leaves_the_records_in_charge(
    forced: Any, at: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: KnownPieces, asked: Any) -> None:
        raise KeyError("planted")

    monkeypatch.setattr(KnownPieces, at, fail)
    run(forced, KnownPieces([]))
    assert forced.epilogues() == [LONGEST] and "planted" in caplog.text


def test_time_that_is_over_ends_the_measuring(store: Store, forced: Any) -> None:
    meter = Meter(lambda option: 5.0)
    run(forced, MissingTimed(lambda: KnownPieces([]), lambda wanted: list(timed(wanted, meter, store, seconds=0.0))))
    assert meter.asked == [] and forced.epilogues() == [LONGEST]


@pytest.mark.parametrize(("seconds", "stored"), [(5.0, 0), (None, 1)])
def test_piece_that_the_budget_ends_is_timed_another_time(
    store: Store, forced: Any, seconds: float | None, stored: int
) -> None:
    class Slow(Meter):
        def __call__(self, wanted: WantedPiece, timeout_s: float) -> PieceReply:
            assert timeout_s == PIECE_TIMEOUT_S if seconds is None else 4.0 < timeout_s <= 5.0
            raise ChildTimeout(timeout_s, "")

    slow = Slow(lambda option: 5.0)
    run(forced, MissingTimed(lambda: KnownPieces([]), lambda wanted: list(timed(wanted, slow, store, seconds))))
    assert len(store.pieces(H100.key, TOOLCHAIN.key)) == stored


def test_ranks_take_the_times_of_the_first() -> None:
    from torch.distributed import HashStore

    times = PieceTimes("p" * 20, H100.key, TOOLCHAIN.key, "mm", 10.0, {"a" * 20: 5.0}, {}, 0.01)
    later = dataclasses.replace(times, ours_us={"a" * 20: 50.0})
    job = HashStore()
    first, second = (AgreedPieces(KnownPieces([one]), job, H100) for one in (times, later))
    assert first(times.piece) == second(times.piece) == times
    assert [rank.state for rank in (first, second)] == [KnownPieces([one]).state for one in (times, later)]
    assert first("q" * 20) is None and AgreedPieces(KnownPieces([later]), job, H100)("q" * 20) is None


def test_a_rank_that_cannot_time_pieces_takes_those_of_others(caplog: pytest.LogCaptureFixture) -> None:
    from torch.distributed import HashStore

    class Failing(KnownPieces):
        def measure(self, wanted: Callable[[], Sequence[WantedPiece]]) -> None:
            raise OSError("no room left")

    times = PieceTimes("p" * 20, H100.key, TOOLCHAIN.key, "mm", 10.0, {"a" * 20: 5.0}, {}, 0.01)
    job = HashStore()
    first, second = AgreedPieces(KnownPieces([times]), job, H100), AgreedPieces(Failing([]), job, H100)
    for rank in (first, second):
        rank.measure(list)
        assert rank(times.piece) == times
    assert "no room left" in caplog.text


def test_a_store_that_fails_leaves_every_rank_its_own() -> None:
    class Failing:
        def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
            raise RuntimeError("planted")

    times = PieceTimes("p" * 20, H100.key, TOOLCHAIN.key, "mm", 10.0, {"a" * 20: 5.0}, {}, 0.01)
    assert AgreedPieces(KnownPieces([times]), Failing(), H100)(times.piece) == times


def test_pieces_are_timed_in_a_process_of_their_own(forced: Any, store: Store, forked: Any) -> None:
    """The job and what comes of it go through pipes; here the process times on the CPU, and every option takes 1 us."""

    class InChild(Meter):
        def __call__(self, wanted: WantedPiece, timeout_s: float) -> PieceReply:
            super().__call__(wanted, timeout_s)
            with forked("child_pieces:start", init={"theirs_us": 2.0}) as child:
                reply: PieceReply = child.call(PieceJob(wanted.piece.text, wanted.options), timeout_s)
                return reply

    run(forced, timed_with(InChild(lambda option: None), store))
    (known,) = store.pieces(H100.key, TOOLCHAIN.key)
    assert known.theirs_us == 2.0 and set(known.ours_us.values()) == {1.0} and not known.failures
    assert len(forced.epilogues()) == 1


@pytest.fixture
def meter_of(forced: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a meter whose process a function of `child_pieces` starts, with a lock in tmp_path and a piece to time."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setattr(pieces, "present_device", lambda index: H100)
    monkeypatch.setattr(pieces, "gpu_uuid", lambda index: "a GPU for tests")
    monkeypatch.setattr(pieces, "DeviceLock", lambda name: DeviceLock(name, tmp_path))
    asked: list[WantedPiece] = []
    run(forced, MissingTimed(lambda: KnownPieces([]), asked.extend))

    def make(start: str) -> tuple[pieces.Meter, WantedPiece]:
        monkeypatch.setattr(pieces, "_START", f"child_pieces:{start}")
        return pieces.Meter(), asked[0]

    return make


def test_process_warms_up_beside_its_caller(meter_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller goes on while the process warms up, and a piece waits until it is warm."""
    monkeypatch.setenv("KW_NOTES", str(tmp_path))
    meter, piece = meter_of("start_noting")
    meter.warm_up()
    with ThreadPoolExecutor() as threads:
        reply = threads.submit(meter, piece, 240.0)
        (tmp_path / "gone on").touch()
        assert reply.result(300.0).theirs_us == 2.0
    assert (tmp_path / "notes").read_text().split("\n") == ["warming up", "warm", "timing", "timed", ""]
    meter.close()


@pytest.mark.parametrize("start", ["start_hanging", "start_dying"])
def test_a_process_that_does_not_come_up_is_no_fault_of_a_piece(meter_of: Any, store: Store, start: str) -> None:
    meter, piece = meter_of(start)
    meter.warm_up()
    with pytest.raises(DeviceLost, match="process that times pieces"):
        meter(piece, 0.5 if start == "start_hanging" else 120.0)
    meter.close()
    with contextlib.closing(meter_of("start_dying")[0]) as another:
        assert list(timed([piece, piece], another, store)) == []
    assert store.pieces(H100.key, TOOLCHAIN.key) == []


def test_a_gpu_that_others_hold_is_no_fault_of_a_piece(
    meter_of: Any, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter, piece = meter_of("start_warm")
    monkeypatch.setattr(pieces, "PIECE_TIMEOUT_S", 0.5)
    with DeviceLock("a GPU for tests", tmp_path).held():
        with pytest.raises(DeviceLost, match="another process has measured"):
            meter(piece, 0.5)
        assert list(timed([piece], meter, store)) == []
    # a wait that leaves a part of its time only
    monkeypatch.setattr(pieces, "WAITED_S", -1.0)
    with pytest.raises(DeviceLost, match="on the GPU"):
        meter(piece, 0.5)
    monkeypatch.setattr(pieces, "WAITED_S", 1.0)
    assert store.pieces(H100.key, TOOLCHAIN.key) == []
    # by itself
    assert [len(times.failures) for times in timed([piece], meter, store)] == [len(piece.options)]
    meter.close()


def test_state_follows_what_is_known() -> None:
    times = PieceTimes("p" * 20, H100.key, TOOLCHAIN.key, "mm", 10.0, {"a" * 20: 5.0}, {}, 0.01)
    states = {KnownPieces(known).state for known in ([], [times], [dataclasses.replace(times, theirs_us=9.0)])}
    assert len(states) == 3 and KnownPieces([times]).state in states
