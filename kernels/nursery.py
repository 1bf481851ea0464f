"""A process that has imported what its children need, and forks them: a child is up at once, and they share memory.

Importing torch and triton takes seconds, and many times that when many processes do it together. The nursery does it
once. It must never touch a GPU: forks of a process that did cannot use one.
"""

from __future__ import annotations

import array
import contextlib
import errno
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

_END_S = 10.0
"""The most that killed children may take to be gone."""

_FDS = 5
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from kernelwright.kernels.nursery import nursery_main; nursery_main(int(sys.argv[2]), sys.argv[3])"
)


def _readable(fd: int, timeout_s: float | None) -> bool:
    """Whether there is something to read in time. `select.select` has no numbers above 1023."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))


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
            if not _readable(self._status, timeout):
                raise subprocess.TimeoutExpired(["a forked child"], timeout or 0.0)
            told = os.read(self._status, 64)
            os.close(self._status)
            # a nursery that is gone tells nothing
            self._code = int(told) if told else -signal.SIGKILL
        return self._code


class Nursery:
    """Starts with the first fork. preload: "module:function", called once before any fork. env: variables set in it.

    May be used by several threads. `close`, and the end of this process, end it and its children.
    """

    def __init__(self, preload: str, env: Mapping[str, str] | None = None) -> None:
        self._preload, self._env = preload, dict(env or {})
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._up = False
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
        """End the nursery and its children, from any thread; a `fork` under way, and every later one, raises
        ConnectionError. Closing twice is harmless."""
        self._closed = True
        process = self._process
        if process is not None and not self._up:
            # it imports, and has no children yet that only it can wait for
            process.kill()
        with self._lock:
            self._drop()
            self._end()

    def _end(self) -> None:
        """Wait until it has waited for its children, which it kills once nobody can ask it any more."""
        if self._process is not None:
            if not self._up:
                self._process.kill()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _start(self) -> None:
        self._drop()
        if self._closed:
            raise ConnectionError("the nursery is closed")
        ours, theirs = socket.socketpair()
        paths = json.dumps([os.fspath(path) for path in sys.path])
        ours.settimeout(_ANSWER_S)
        self._socket, self._up = ours, False
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
        self._up, pid = True, int(told)
        if pid < 0:
            raise ConnectionError(f"the nursery cannot fork: {os.strerror(-pid)}")
        return pid

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
    poll = select.poll()
    for fd in (asked_fd, wake_read):
        poll.register(fd, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poll.poll()]
        if wake_read in ready:
            os.read(wake_read, 4096)
            _tell_ended(waiting)
        if asked_fd in ready:
            request = _receive(asked)
            if request is None:
                _end_all(waiting)
                os._exit(0)
            environment, fds = request
            pid = _fork(environment, fds, [asked.fileno(), wake_read, wake_write, *waiting.values()])
            if pid > 0:
                waiting[pid] = fds[-1]
            with contextlib.suppress(ConnectionError):
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
    """The child's pid; minus the error's number, and nothing left open, where the machine allows no more processes."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        pid = os.fork()
    except OSError as error:
        pid = -(error.errno or errno.EAGAIN)
    if not pid:
        _be_child(environment, fds, not_theirs)
    # both do it, so that the group is there whoever is first
    with contextlib.suppress(OSError):
        if pid > 0:
            os.setpgid(pid, pid)
    for fd in fds[:-1] if pid > 0 else fds:
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


def _end_all(waiting: dict[int, int]) -> None:
    """Kill the children and wait for them: left alone, they would stay as zombies where the first process of a
    container waits for nobody."""
    for pid in waiting:
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
    _tell_ended(waiting, 0)


def _tell_ended(waiting: dict[int, int], options: int = os.WNOHANG) -> None:
    """Write the exit codes of children that ended where their parents read them."""
    while waiting:
        try:
            pid, status = os.waitpid(-1, options)
        except ChildProcessError:
            return
        if not pid:
            return
        fd = waiting.pop(pid, None)
        if fd is not None:
            with contextlib.suppress(OSError):
                os.write(fd, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(fd)
