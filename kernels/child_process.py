"""A worker in a process of its own: it may abort, hang or print without harm to the caller.

Compilers and GPU kernels can take a whole process down, so they run here. The child gets its jobs as pickles over
pipes of its own (its stdout and stderr go to a file whose tail the errors quote), has its own process group, and dies
with its parent. It does not import the caller's `__main__`, so it works from scripts, pytest, stdin and `python -c`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import IO, Any

from kernelwright.errors import KernelwrightError
from kernelwright.kernels import steps
from kernelwright.kernels.nursery import Forked, Nursery

Handler = Callable[[Any], Any]

_TAIL_BYTES = 4000
_SCANNED_BYTES = 1 << 20
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from kernelwright.kernels.child_process import child_main; child_main(*map(int, sys.argv[2:]))"
)


class ChildError(KernelwrightError):
    """A job in a child process came to nothing. stderr: the last of what the child printed."""

    stderr: str = ""


class ChildDied(ChildError):
    """The process ended during a job. exit_code: as in subprocess, minus the signal's number when killed."""

    def __init__(self, exit_code: int | None, stderr: str) -> None:
        super().__init__(exit_code, stderr)
        self.exit_code, self.stderr = exit_code, stderr

    def __str__(self) -> str:
        how = f"exited with code {self.exit_code}"
        if self.exit_code is not None and self.exit_code < 0:
            how = f"was killed by {signal.Signals(-self.exit_code).name}"
        return f"the child process {how}" + (f"; its last words:\n{self.stderr}" if self.stderr else "")


class ChildTimeout(ChildError):
    """The job took longer than it was given; the process was killed."""

    def __init__(self, timeout_s: float, stderr: str) -> None:
        super().__init__(timeout_s, stderr)
        self.timeout_s, self.stderr = timeout_s, stderr

    def __str__(self) -> str:
        words = f"; its last words:\n{self.stderr}" if self.stderr else ""
        return f"the child process was killed after {self.timeout_s:g} s without a result{words}"


class ChildRaised(ChildError):
    """The job raised an exception that is not a KernelwrightError (those are raised again as they are)."""

    def __init__(self, type_name: str, message: str, trace: str, stderr: str = "") -> None:
        super().__init__(type_name, message, trace, stderr)
        self.type_name, self.message, self.trace, self.stderr = type_name, message, trace, stderr

    def __str__(self) -> str:
        return f"{self.type_name}: {self.message}"


@dataclasses.dataclass(frozen=True)
class _Live:
    """A running child: its process, the parent's ends of the pipes, and the file that it prints to."""

    process: subprocess.Popen[bytes] | Forked
    jobs: Connection
    results: Connection
    lifeline: Connection
    log: IO[bytes]

    def has_ended(self) -> bool:
        """Whether the child is gone; to be asked between jobs, when it has nothing to say. Its pipe ends before one can
        wait for it."""
        return self.process.poll() is not None or self.results.poll(0)

    def last_words(self) -> str:
        """The end of what it printed, after the first lines that say "error:" if those lie before."""
        size = self.log.seek(0, os.SEEK_END)
        self.log.seek(0)
        before = self.log.read(min(_SCANNED_BYTES, max(0, size - _TAIL_BYTES))).splitlines(keepends=True)
        errors = [line[:_TAIL_BYTES] for line in before if b"error:" in line][:3]
        self.log.seek(max(0, size - _TAIL_BYTES))
        return b"".join([*errors, self.log.read()]).decode(errors="replace").strip()

    def end(self) -> int:
        """Kill the child and whatever it started; the exit code of a child that had ended by itself is kept."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        for end in (self.jobs, self.results, self.lifeline, self.log):
            end.close()
        return code


class ChildProcess:
    """Does jobs one by one in a process that is started when needed and replaced when it died.

    target: "module:function"; the function gets a payload and returns a result, both picklable. With `init`, it is
    called once in every fresh process as `function(**init)` and returns the function that does the jobs.
    env: environment variables set in the child before the target's module is imported. nursery: forks it, in place of
    a fresh interpreter.
    start_timeout_s: how long importing (and init) may take.

    One job at a time: not for use by several threads at once, save `abandon` and, after that, `close`.
    """

    def __init__(
        self,
        target: str,
        *,
        init: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        start_timeout_s: float = 120.0,
        nursery: Nursery | None = None,
    ) -> None:
        self._nursery = nursery
        self._target, self._init, self._env = target, None if init is None else dict(init), dict(env or {})
        self._start_timeout_s = start_timeout_s
        self._live: _Live | None = None
        self._abandoned = False
        self._in_use = threading.RLock()

    @property
    def pid(self) -> int | None:
        """The running child's process id; None when there is none."""
        return self._live.process.pid if self._live else None

    def call(self, payload: Any, timeout_s: float | None = None) -> Any:
        """The result of one job; timeout_s counts from when the child is ready.

        Raises ChildDied, ChildTimeout (both leave no process; the next call starts one), ChildRaised, or the
        KernelwrightError that the job raised.
        """
        with self._in_use:
            live = self.start()
            live.log.truncate(0)
            return self._exchange(live, payload, timeout_s)

    def start(self) -> _Live:
        """Make sure that a child is running and ready; the errors of `call` when it cannot be."""
        with self._in_use:
            if self._live is not None and self._live.has_ended():
                self.kill()
            if self._live is None:
                self._refuse_if_abandoned()
                with steps.step(f"start {self._target}"):
                    self._live = self._spawned()
                    self._greet(self._live)
            return self._live

    def _greet(self, live: _Live) -> None:
        hello = (self._target, self._init, self._env, steps.listening())
        try:
            self._exchange(live, hello, self._start_timeout_s)
        except KernelwrightError:
            self.kill()
            raise

    def _spawned(self) -> _Live:
        try:
            return _spawn(self._nursery)
        except OSError as error:
            # no nursery, or no more processes or open files for this one
            raise ChildDied(None, str(error)) from error

    def kill(self) -> None:
        """End the child and everything it started, at once; the next call starts a fresh one."""
        if self._live is not None:
            live, self._live = self._live, None
            live.end()

    def abandon(self) -> None:
        """Kill the child for good, from any thread: a `call` under way, and every later one, raises ChildDied."""
        self._abandoned = True
        live = self._live
        if live is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(live.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Same as `kill`: the child holds nothing that must be saved. Waits for a `call` of another thread, which
        `abandon` ends."""
        with self._in_use:
            self.kill()

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchange(self, live: _Live, payload: Any, timeout_s: float | None) -> Any:
        self._refuse_if_abandoned()
        try:
            live.jobs.send(payload)
            if not live.results.poll(timeout_s):
                stderr = live.last_words()
                self.kill()
                raise ChildTimeout(timeout_s or 0.0, stderr)
            ok, value, told = live.results.recv()
        except (EOFError, ConnectionError):
            raise self._death(live) from None
        except BaseException:
            # An interrupted or half-read exchange would hand this job's result to the next one.
            self.kill()
            raise
        steps.tell(told)
        if ok:
            return value
        if isinstance(value, ChildRaised):
            value.stderr = live.last_words()
        raise value

    def _refuse_if_abandoned(self) -> None:
        if self._abandoned:
            self.kill()
            raise ChildDied(-signal.SIGKILL, "")

    def _death(self, live: _Live) -> ChildDied:
        with contextlib.suppress(subprocess.TimeoutExpired):
            live.process.wait(2.0)
        stderr = live.last_words()
        self._live = None
        return ChildDied(live.end(), stderr)


def _spawn(nursery: Nursery | None = None) -> _Live:
    """A fresh process with its pipes, waiting for its hello; OSError, and nothing left open, when there cannot be one;
    ConnectionError of those when the nursery cannot fork it."""
    with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
        fds, ends = [], []
        for writes in (True, False, True):
            read, write = os.pipe()
            given, kept = (read, write) if writes else (write, read)
            theirs.callback(os.close, given)
            fds.append(given)
            ends.append(ours.enter_context(Connection(kept, readable=not writes, writable=writes)))
        log = ours.enter_context(tempfile.TemporaryFile(buffering=0))
        # Whoever writes next must write at the end, also after the parent has emptied the file or read in it.
        fcntl.fcntl(log, fcntl.F_SETFL, fcntl.fcntl(log, fcntl.F_GETFL) | os.O_APPEND)
        process = _popen(fds, log) if nursery is None else nursery.fork(fds, log.fileno())
        ours.pop_all()
        jobs, results, lifeline = ends
        return _Live(process, jobs, results, lifeline, log)


def _popen(theirs: Sequence[int], log: IO[bytes]) -> subprocess.Popen[bytes]:
    paths = json.dumps([os.fspath(path) for path in sys.path])
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _BOOT, paths, *map(str, theirs)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=theirs,
        start_new_session=True,
    )


def child_main(jobs_fd: int, results_fd: int, lifeline_fd: int) -> None:
    """What the child runs: take a hello, then jobs, until the parent closes the pipe."""
    for fd in (jobs_fd, results_fd, lifeline_fd):
        os.set_inheritable(fd, False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.Thread(target=_die_with_parent, args=(lifeline_fd,), daemon=True).start()
    jobs, results = Connection(jobs_fd, writable=False), Connection(results_fd, readable=False)
    target, init, env, told = jobs.recv()
    os.environ.update(env)
    collector = steps.Collector()
    if told:
        collector.attach()
    made: list[Handler] = []
    results.send_bytes(_answer(lambda _: made.append(_resolve(target, init)), None, collector))
    with contextlib.suppress(EOFError):
        while True:
            results.send_bytes(_answer(made[0], jobs.recv(), collector))


def _die_with_parent(lifeline_fd: int) -> None:
    """Kill this process group when the parent's end of the pipe closes, however the parent ended."""
    os.read(lifeline_fd, 1)
    os.killpg(0, signal.SIGKILL)


def _resolve(target: str, init: Mapping[str, Any] | None) -> Handler:
    module, _, name = target.partition(":")
    with steps.step(f"import {module}"):
        function = getattr(importlib.import_module(module), name)
    handler: Handler = function if init is None else function(**init)
    return handler


def _answer(handler: Handler, payload: Any, collector: steps.Collector) -> bytes:
    """The pickled (True, result, steps) or (False, exception, steps) of one job."""
    try:
        return pickle.dumps((True, handler(payload), collector.take()))
    except Exception as error:
        return pickle.dumps((False, _portable(error), collector.take()))


def _portable(error: Exception) -> KernelwrightError:
    """The error itself if it is ours and survives pickling, else what it said."""
    if isinstance(error, KernelwrightError):
        with contextlib.suppress(Exception):
            copy: KernelwrightError = pickle.loads(pickle.dumps(error))
            return copy
    trace = "".join(traceback.format_exception(error))
    return ChildRaised(type(error).__name__, str(error), trace)
