"""Where the times of pieces come from while a model is compiled, and the process that measures what is missing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from kernelwright.compiler.agreement import KeyValueStore
from kernelwright.compiler.dispatch import device_of, opened
from kernelwright.compiler.passes.forms import Option
from kernelwright.compiler.piece import Piece
from kernelwright.compiler.piece_job import PieceJob, PieceReply
from kernelwright.db.store import Store
from kernelwright.errors import DeviceLost, KernelwrightError
from kernelwright.kernels.child_process import ChildDied, ChildProcess, ChildTimeout
from kernelwright.kernels.device import gpu_uuid, present_device
from kernelwright.kernels.triton_adapter import current_toolchain
from kernelwright.pieces import PieceTimes
from kernelwright.search.device_guard import DeviceLock
from kernelwright.search.timing import TIMER_VERSION
from kernelwright.types import DeviceSpec, Toolchain, digest

PIECE_TIMEOUT_S = 180.0
"""How long a piece may take: Inductor compiles it once for each way."""

WAITED_S = 1.0
"""What a piece may wait for the GPU and still be blamed for what took too long."""

_START = "kernelwright.compiler.piece_job:start"

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class WantedPiece:
    """A piece of a graph and what could be put in; calls: how often a step runs it."""

    piece: Piece
    options: Mapping[str, Option]
    calls: int = 1


class Pieces(Protocol):
    """A source of times of pieces whose present state can be told."""

    @property
    def state(self) -> str | None:
        """Digest of all that is known; None where a compiled graph must not be kept for another time."""
        ...

    def __call__(self, key: str) -> PieceTimes | None:
        """The times of a piece by its key; None where it was not timed."""
        ...

    def measure(self, wanted: Callable[[], Sequence[WantedPiece]]) -> None:
        """Time pieces that are not known, where this source does so; only then it asks which are wanted."""
        ...


class KnownPieces:
    """Times of pieces, from a list."""

    def __init__(self, times: Sequence[PieceTimes]) -> None:
        self._times = {one.piece: one for one in times}

    @property
    def state(self) -> str:
        """See `Pieces`."""
        return digest([self._times[key].to_json() for key in sorted(self._times)])

    def __len__(self) -> int:
        return len(self._times)

    def __call__(self, key: str) -> PieceTimes | None:
        """See `Pieces`."""
        return self._times.get(key)

    def measure(self, wanted: Callable[[], Sequence[WantedPiece]]) -> None:
        """Nothing: what is not known stays so."""


class MissingTimed:
    """Times of pieces that are measured where they are missing. read: what is known; time_pieces: measures, and stores
    what it found."""

    def __init__(self, read: Callable[[], KnownPieces], time_pieces: Callable[[Sequence[WantedPiece]], object]) -> None:
        self._read, self._time = read, time_pieces
        self._known = read()

    @property
    def state(self) -> str:
        """See `Pieces`."""
        return f"{self._known.state}/timed"

    def __call__(self, key: str) -> PieceTimes | None:
        """See `Pieces`."""
        return self._known(key)

    def measure(self, wanted: Callable[[], Sequence[WantedPiece]]) -> None:
        """See `Pieces`; a failure is logged and changes nothing."""
        missing = unknown(wanted(), self._known)
        if not missing:
            return
        try:
            self._time(missing)
        except Exception as error:
            _log.warning("pieces of a graph could not be timed: %s", error)
        self._known = self._read()


class AgreedPieces:
    """The times that the first rank with this GPU had of a piece, for all ranks of a job."""

    def __init__(self, source: Pieces, store: KeyValueStore, device: DeviceSpec) -> None:
        self._source, self._store, self._device = source, store, device

    @property
    def state(self) -> str | None:
        """See `Pieces`: what this rank knows."""
        return self._source.state

    def __call__(self, key: str) -> PieceTimes | None:
        """See `Pieces`."""
        own = self._source(key)
        text = self._first(key, json.dumps(None if own is None else own.to_json()))
        if text is None:
            return own
        said = json.loads(text)
        return None if said is None else PieceTimes.from_json(said)

    def measure(self, wanted: Callable[[], Sequence[WantedPiece]]) -> None:
        """See `Pieces`: every rank measures on its own GPU, and the first times count. One that fails takes those of
        the others."""
        try:
            self._source.measure(wanted)
        except Exception as error:
            _log.warning("pieces of a graph could not be timed on this rank: %s", error)

    def _first(self, key: str, value: str) -> str | None:
        """The value that was given first under a key; None where the store cannot be asked."""
        try:
            return self._store.compare_set(f"kernelwright/pieces/{self._device.key}/{key}", "", value).decode()
        except Exception as error:
            _log.warning("ranks may choose different kernels, the store of the job failed: %s", error)
            return None


def local_pieces(url: str | None, device: str | None, toolchain: Toolchain | None = None) -> KnownPieces:
    """The times in the database at `url` (None: the user's own) for a GPU by name (None: the present one) with this
    software (None: what is here). Raises as `kernelwright.compiler.dispatch.local_answers` does."""
    with opened(url) as store:
        spec = device_of(device)
        return KnownPieces(store.pieces(spec.key, (toolchain or current_toolchain(TIMER_VERSION)).key))


def unknown(wanted: Sequence[WantedPiece], known: Callable[[str], PieceTimes | None]) -> list[WantedPiece]:
    """Those of which something was not tried yet, the most frequent first."""

    def is_known(one: WantedPiece) -> bool:
        times = known(one.piece.key)
        return times is not None and all(times.knows(key) for key in one.options)

    return sorted((one for one in wanted if not is_known(one)), key=lambda one: -one.calls)


class Meter:
    """Times pieces on a GPU of this machine, in a process of its own."""

    def __init__(self, device_index: int = 0) -> None:
        self.device: DeviceSpec = present_device(device_index)
        self.toolchain: Toolchain = current_toolchain(TIMER_VERSION)
        self._child = ChildProcess(_START, init={"device_index": device_index, "l2_bytes": self.device.l2_bytes})
        self._lock = DeviceLock(gpu_uuid(device_index) or f"gpu{device_index}")
        self._warming: threading.Thread | None = None

    def warm_up(self) -> None:
        """Let the process start and Inductor with it, while the caller does something else."""
        self._warming = threading.Thread(target=self._warm_up, name="kernelwright-warm-up", daemon=True)
        self._warming.start()

    def _warm_up(self) -> None:
        try:
            self._child.call(None, PIECE_TIMEOUT_S)
        except KernelwrightError as error:
            # the first piece meets it again
            _log.info("pieces begin cold: %s", error)

    def __call__(self, wanted: WantedPiece, timeout_s: float) -> PieceReply:
        """The times of a piece; ChildDied or ChildTimeout where the process did not live through it, DeviceLost where
        it did not get as far, KernelwrightError where it could not be timed."""
        end = time.monotonic() + timeout_s
        self._be_up(timeout_s)
        try:
            with self._lock.held(max(0.0, end - time.monotonic())):
                left = max(0.0, end - time.monotonic())
                try:
                    reply: PieceReply = self._child.call(PieceJob(wanted.piece.text, wanted.options), left)
                except ChildTimeout as error:
                    if left < timeout_s - WAITED_S:
                        raise DeviceLost(f"a piece got {left:.0f} of {timeout_s:.0f} s on the GPU") from error
                    raise
                return reply
        except TimeoutError as error:
            raise DeviceLost(str(error)) from error

    def _be_up(self, timeout_s: float) -> None:
        """Have the process there and warmed up; one that is not has done nothing with the piece yet."""
        if self._warming is not None:
            self._warming.join(timeout_s)
            if self._warming.is_alive():
                raise DeviceLost(f"the process that times pieces was not up in {timeout_s:.0f} s")
        try:
            self._child.start()
        except KernelwrightError as error:
            raise DeviceLost(f"the process that times pieces does not start: {error}") from error

    def close(self) -> None:
        """End the process."""
        self._child.abandon()
        if self._warming is not None:
            self._warming.join()
        self._child.close()
        self._lock.close()


def time_pieces(wanted: Sequence[WantedPiece], db: str | None, seconds: float | None, device_index: int = 0) -> int:
    """Time pieces on a GPU until the seconds are over, and store what was found; returns how many were timed."""
    with contextlib.closing(Meter(device_index)) as meter, Store.open(db) as store:
        return sum(1 for _ in timed(wanted, meter, store, seconds))


def timed(
    wanted: Sequence[WantedPiece], meter: Any, store: Store, seconds: float | None = None
) -> Iterator[PieceTimes]:
    """Time pieces, those that run most often first, until the seconds are over; each is stored as it comes."""
    end = None if seconds is None else time.monotonic() + seconds
    known = KnownPieces(store.pieces(meter.device.key, meter.toolchain.key))
    for one in unknown(wanted, known):
        left = PIECE_TIMEOUT_S if end is None else min(PIECE_TIMEOUT_S, end - time.monotonic())
        if left <= 0:
            return
        try:
            reply = meter(one, left)
        except DeviceLost as error:
            _log.warning("pieces are timed another time: %s", error)
            return
        except KernelwrightError as error:
            if isinstance(error, ChildTimeout) and left < PIECE_TIMEOUT_S:
                # the budget is over, which says nothing about the piece
                return
            if not isinstance(error, ChildDied | ChildTimeout):
                # it does not run by itself, or not now, which says nothing about our kernels
                _log.warning("the piece %s was not timed: %s", one.piece, error)
                continue
            # what takes the process down once is not tried again
            told = str(error).splitlines()[0]
            reply = PieceReply(0.0, {}, dict.fromkeys(one.options, told), 0.0)
        place = (one.piece.key, meter.device.key, meter.toolchain.key)
        times = PieceTimes(*place, str(one.piece), reply.theirs_us, reply.ours_us, reply.failures, reply.noise)
        store.put_piece(times)
        yield times
