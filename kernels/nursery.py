"""A process that has imported what its children need, and forks them: a child is up at once, and they share memory.

Importing torch and triton takes seconds, and many times that when many processes do it together. The nursery does it
once. It must never touch a GPU: forks of a process that did cannot use one.
"""

from __future__ import annotations

import array
import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import NoReturn

_MOST_BYTES = 1 << 20
_LENGTH = 8
_ANSWER_S = 120.0
"""The most that imports and one fork may take."""

_FDS = 5
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from kernelwright.kernels.nursery import nursery_main; nursery_main(int(sys.argv[2]), sys.argv[3])"
)


class Forked:
    """A child of the nursery, with what `subprocess.Popen` offers. status: where its exit code will be read."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self._status = status
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, None while it runs; minus the signal's number when killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; subprocess.TimeoutExpired when it does not come in time."""
        if self._code is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(["a forked child"], timeout or 0.0)
            told = os.read(self._status, 64)
            os.close(self._status)
            # a nursery that is gone tells nothing
            self._code = int(told) if told else -signal.SIGKILL
        return self._code


class Nursery:
    """Starts with the first fork. preload: "module:function", called once before any fork. env: variables set in it.

    May be used by several threads. After `close`, `fork` raises ConnectionError; children that run go on.
    """

    def __init__(self, preload: str, env: Mapping[str, str] | None = None) -> None:
        self._preload, self._env = preload, dict(env or {})
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._closed = False

    def fork(self, fds: Sequence[int], log: int) -> Forked:
        """A child that runs `child_main` on its three ends of pipes and prints to `log`. ConnectionError, in which
        there is no child, when the nursery is gone."""
        status_read, status_write = os.pipe()
        try:
            with self._lock:
                if self._socket is None or self._process is None or self._process.poll() is not None:
                    self._start()
                try:
                    pid = self._ask([*fds, log, status_write])
                except TimeoutError:
                    assert self._process is not None
                    self._process.kill()
                    self._process.wait()
                    raise ConnectionError("the nursery does not answer") from None
        except BaseException:
            os.close(status_read)
            raise
        finally:
            os.close(status_write)
        return Forked(pid, status_read)

    def close(self) -> None:
        """End the nursery, from any thread; a `fork` under way fails. Closing twice is harmless."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
            process.wait()
        with self._lock:
            self._drop()

    def _start(self) -> None:
        self._drop()
        if self._closed:
            raise ConnectionError("the nursery is closed")
        ours, theirs = socket.socketpair()
        paths = json.dumps([os.fspath(path) for path in sys.path])
        ours.settimeout(_ANSWER_S)
        self._socket = ours
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, paths, str(theirs.fileno()), self._preload],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **self._env},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def _ask(self, fds: list[int]) -> int:
        """The pid of a fork that got the descriptors."""
        assert self._socket is not None
        if self._closed:
            raise ConnectionError("the nursery is closed")
        environment = json.dumps({**os.environ, **self._env}).encode()
        self._socket.sendmsg(
            [len(environment).to_bytes(_LENGTH, "big")],
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))],
        )
        self._socket.sendall(environment)
        told = self._socket.recv(64)
        if not told:
            raise ConnectionError("the nursery is gone")
        return int(told)

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None


def nursery_main(asked_fd: int, preload: str) -> NoReturn:
    """What the nursery runs: fork when asked, tell exit codes, and end with its parent."""
    asked = socket.socket(fileno=asked_fd)
    asked.set_inheritable(False)
    wake_read, wake_write = os.pipe()
    for fd in (wake_read, wake_write):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    # a child whose imports fail tells why
    with contextlib.suppress(Exception):
        module, _, name = preload.partition(":")
        getattr(importlib.import_module(module), name)()
    waiting: dict[int, int] = {}
    while True:
        ready = select.select([asked_fd, wake_read], [], [])[0]
        if wake_read in ready:
            os.read(wake_read, 4096)
            _tell_ended(waiting)
        if asked_fd in ready:
            request = _receive(asked)
            if request is None:
                os._exit(0)
            environment, fds = request
            pid = _fork(environment, fds, [asked.fileno(), wake_read, wake_write, *waiting.values()])
            waiting[pid] = fds[-1]
            asked.sendall(str(pid).encode())


def _receive(asked: socket.socket) -> tuple[dict[str, str], list[int]] | None:
    """The next request: environment and descriptors; None when the parent is gone."""
    head, fds, _, _ = socket.recv_fds(asked, _LENGTH, _FDS)
    if not head:
        return None
    size, got = int.from_bytes(head, "big"), b""
    while len(got) < size:
        part = asked.recv(min(_MOST_BYTES, size - len(got)))
        if not part:
            return None
        got += part
    return json.loads(got), list(fds)


def _fork(environment: dict[str, str], fds: list[int], not_theirs: list[int]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        _be_child(environment, fds, not_theirs)
    # both do it, so that the group is there whoever is first
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    for fd in fds[:-1]:
        os.close(fd)
    return pid


def _be_child(environment: dict[str, str], fds: list[int], not_theirs: list[int]) -> NoReturn:
    from kernelwright.kernels.child_process import child_main

    code = 1
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        *pipes, log, status = fds
        os.dup2(log, 1)
        os.dup2(log, 2)
        for fd in (log, status, *not_theirs):
            os.close(fd)
        os.environ.clear()
        os.environ.update(environment)
        child_main(*pipes)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _tell_ended(waiting: dict[int, int]) -> None:
    """Write the exit codes of children that ended where their parents read them."""
    while waiting:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        fd = waiting.pop(pid, None)
        if fd is not None:
            with contextlib.suppress(OSError):
                os.write(fd, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(fd)
