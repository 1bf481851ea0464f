"""Guards a GPU's times against neighbours, throttled clocks and machines that are not like their kind."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import re
import statistics
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

SLOWDOWNS: Mapping[int, str] = {
    0x8: "hardware slowdown",
    0x20: "too hot (driver)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}
"""Bits of NVIDIA's clock event reasons that make times useless. The power cap (0x4) is none: a busy H100 runs at it."""

PROBE_BAND = 0.05
"""A machine whose probe differs from its kind's median by more than this share is not like its kind."""

_QUERY_TIMEOUT_S = 10.0
_TOLD_S = 30.0
"""So long a wait for another process is told."""


@dataclasses.dataclass(frozen=True)
class Clocks:
    """What the driver says: SM clock now and at most, in MHz, and why it is held down (empty: by nothing bad)."""

    sm_mhz: float
    most_mhz: float
    held_down: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Probe:
    """How a device does a common piece of work: microseconds of a fixed large product, which shows its clocks under
    load, and of a fixed large copy, which shows its memory. clocks: None where no driver tells."""

    product_us: float
    copy_us: float
    clocks: Clocks | None = None


def read_clocks(index: str) -> Clocks | None:
    """The clocks of a GPU by its number or UUID, from nvidia-smi; None where that cannot be asked."""
    fields = "clocks.sm,clocks.max.sm,clocks_throttle_reasons.active"
    command = ["nvidia-smi", f"--id={index}", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_QUERY_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_clocks(done.stdout)


def parse_clocks(text: str) -> Clocks | None:
    """Clocks from a line such as "1980, 1980, 0x0000000000000004"; None for anything else."""
    found = re.fullmatch(r"\s*([\d.]+),\s*([\d.]+),\s*(0x[0-9a-fA-F]+)\s*", text)
    if found is None:
        return None
    bits = int(found[3], 16)
    return Clocks(float(found[1]), float(found[2]), tuple(name for bit, name in SLOWDOWNS.items() if bits & bit))


def why_unfit(probe: Probe, peers: Mapping[str, Probe], band: float = PROBE_BAND) -> str:
    """Why a device must not be measured on, or "". peers: probes of devices of its kind by name, itself included."""
    if probe.clocks is not None and probe.clocks.held_down:
        clocks = probe.clocks
        return f"its clocks are held down ({', '.join(clocks.held_down)}): {clocks.sm_mhz:g} of {clocks.most_mhz:g} MHz"
    # Of two that differ nothing says which is wrong.
    if len(peers) < 3:
        return ""
    for name in ("product_us", "copy_us"):
        usual = statistics.median(getattr(peer, name) for peer in peers.values())
        ours = getattr(probe, name)
        if abs(ours / usual - 1) > band:
            what = name.removesuffix("_us")
            return f"its probe {what} takes {ours:.1f} us, {usual:.1f} us on {len(peers)} devices of its kind"
    return ""


class DeviceLock:
    """Lets one process of this machine measure on a GPU at a time, whoever started it: they take turns, trial by trial.

    name: what identifies the GPU on this machine, such as its UUID. folder: for tests; by default one that all users of
    the machine share. Where no such file can be opened nothing is locked. One thread at a time, save `close`.
    """

    def __init__(self, name: str, folder: Path | None = None) -> None:
        folder = folder or Path(tempfile.gettempdir()) / "kernelwright-devices"
        self._file = _open_shared(folder / f"{re.sub(r'[^A-Za-z0-9.-]', '_', name)}.lock")
        self._waits: set[threading.Event] = set()

    @contextlib.contextmanager
    def held(self, timeout_s: float | None = None) -> Iterator[None]:
        """Inside, nobody else measures; waits for whoever does, or until this lock is closed. TimeoutError where that
        takes longer than it may."""
        file = self._file
        if file is None:
            yield
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._wait_for(file, timeout_s)
        try:
            yield
        finally:
            # closed by another thread, it locks nothing any more
            if self._file == file:
                fcntl.flock(file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file, from any thread; nothing is locked afterwards, and whoever waits goes on."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
        for wait in tuple(self._waits):
            wait.set()

    def _wait_for(self, file: int, timeout_s: float | None) -> None:
        """Wait in a thread of its own, since nothing ends the kernel's wait: the other process may be stopped."""
        turn, left, guard = threading.Event(), threading.Event(), threading.Lock()
        # the same lock, and a number that nobody else gets when the file is closed
        own = os.dup(file)

        def take() -> None:
            fcntl.flock(own, fcntl.LOCK_EX)
            with guard:
                if left.is_set():
                    fcntl.flock(own, fcntl.LOCK_UN)
                turn.set()
            os.close(own)

        self._waits.add(turn)
        try:
            threading.Thread(target=take, name="kernelwright-turn", daemon=True).start()
            told_s = _TOLD_S if timeout_s is None else min(_TOLD_S, timeout_s)
            if self._file == file and not turn.wait(told_s):
                logger.warning("another process measures on this GPU; waiting for it")
                if not turn.wait(None if timeout_s is None else timeout_s - told_s):
                    raise TimeoutError(f"another process has measured on this GPU for {timeout_s:g} s")
        except BaseException:
            with guard:
                left.set()
                if turn.is_set() and self._file == file:
                    fcntl.flock(file, fcntl.LOCK_UN)
            raise
        finally:
            self._waits.discard(turn)


def _open_shared(path: Path) -> int | None:
    """The file open for locking, made for all users if need be; None when that is not allowed."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            path.parent.chmod(0o777)
        # A file of another user in a shared folder must not be opened with O_CREAT: Linux refuses that.
        for flags in (os.O_RDONLY, os.O_RDONLY | os.O_CREAT):
            with contextlib.suppress(OSError):
                return os.open(path, flags | os.O_CLOEXEC, 0o666)
    return None
