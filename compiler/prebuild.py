"""Compiles the kernels that a graph was given, in parallel child processes, while Inductor compiles the rest of it.

Launches would compile them one after the other. That costs nothing where they lie in Triton's cache, as on the machine
that tuned them; but records also come from elsewhere, and a model has dozens of kernels of some seconds each.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

from kernelwright.kernels.build import BUILD_TIMEOUT_S, BuildPool
from kernelwright.kernels.built import is_built
from kernelwright.kernels.cores import compilers
from kernelwright.kernels.triton_adapter import hash_triton
from kernelwright.search.answer import Answer
from kernelwright.types import DeviceSpec, Schedule, Workload

FEWEST = 3
"""Fewer kernels than this are compiled sooner than child processes are up."""

MOST_CHILDREN = 8
START_TIMEOUT_S = 120.0

_log = logging.getLogger(__name__)

_Job = tuple[Workload, Schedule, DeviceSpec]
_pending: dict[tuple[str, str], Future[None]] = {}
_guard = threading.Lock()


def build_ahead(answers: Sequence[Answer]) -> int:
    """Begin to compile those schedules that Triton's cache here does not hold, and return how many these are.

    Whatever goes wrong is left to the launch, which meets it again and knows what to do.
    """
    chosen = [(a.workload, a.schedule, a.device) for a in answers if a.schedule is not None]
    if chosen:
        hashing()
    jobs: dict[tuple[str, str], _Job] = {_key(w, s): (w, s, d) for w, s, d in chosen}
    with _guard:
        new = {key: job for key, job in jobs.items() if key not in _pending and not is_built(*job)}
        if len(new) < FEWEST:
            return 0
        workers = min(len(new), MOST_CHILDREN, compilers())
        pool, threads = BuildPool(workers), ThreadPoolExecutor(workers, "kernelwright-ahead")
        futures = {key: threads.submit(_build, pool, *job) for key, job in new.items()}
        _pending.update(futures)
    closing = (pool, threads, list(futures.values()))
    threading.Thread(target=_close_after, args=closing, name="kernelwright-ahead", daemon=True).start()
    return len(new)


@functools.cache
def hashing() -> threading.Thread:
    """Begins, once in a process, what its first launch would take besides the kernel."""
    thread = threading.Thread(target=hash_triton, name="kernelwright-hash", daemon=True)
    thread.start()
    return thread


def wait_for(workload: Workload, schedule: Schedule) -> None:
    """Before a first launch: wait for a kernel that is being compiled. One whose turn has not come yet is left to the
    caller."""
    future = _pending.pop(_key(workload, schedule), None) if _pending else None
    if future is not None and not future.cancel():
        with contextlib.suppress(TimeoutError):
            future.result(START_TIMEOUT_S + BUILD_TIMEOUT_S)


def _key(workload: Workload, schedule: Schedule) -> tuple[str, str]:
    return workload.key, schedule.key


def _build(pool: BuildPool, workload: Workload, schedule: Schedule, device: DeviceSpec) -> None:
    try:
        pool.build(workload, schedule, device)
    except Exception as error:
        # a process that ends, a compiler that refuses: the launch will tell
        _log.info("not compiled ahead: %s", error)


def _close_after(pool: BuildPool, threads: ThreadPoolExecutor, futures: Sequence[Future[None]]) -> None:
    for future in futures:
        with contextlib.suppress(CancelledError):
            future.result()
    threads.shutdown()
    pool.close()
