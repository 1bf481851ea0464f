"""Compiles the winners of a database into Triton's cache, ahead of the launches that would compile them one by one."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

from kernelwright.errors import KernelwrightError
from kernelwright.kernels.build import BuildPool
from kernelwright.kernels.built import is_built
from kernelwright.types import TuningRecord

BUILT, HELD, FAILED = "built", "held", "failed"
"""What may become of a winner: compiled now, held by the cache from before, or refused by the compiler."""


@dataclasses.dataclass(frozen=True)
class Built:
    """A winner and what became of it; detail: why not."""

    record: TuningRecord
    outcome: str
    detail: str = ""


def build_winners(
    records: Sequence[TuningRecord], processes: int, tell: Callable[[Built], None] = lambda one: None
) -> list[Built]:
    """Compile the kernels of these records, each workload's first one, in so many processes; needs no GPU.

    Launches on a GPU of the same kind find them, on this machine or wherever Triton's cache folder is carried, with the
    same Triton and assembler. tell: called as each is done. Raises MissingDependency without torch and triton.
    """
    newest: dict[str, TuningRecord] = {}
    for record in records:
        newest.setdefault(record.workload.key, record)
    done: list[Built] = []
    for one in _build([record for record in newest.values() if record.winner == "kernel"], processes):
        tell(one)
        done.append(one)
    return done


def _build(winners: Sequence[TuningRecord], processes: int) -> Iterator[Built]:
    new = []
    for one in winners:
        if is_built(one.workload, one.schedule, one.device):
            yield Built(one, HELD)
        else:
            new.append(one)
    workers = min(processes, len(new))
    if not workers:
        return
    with BuildPool(workers) as pool, contextlib.ExitStack() as stack:
        threads = ThreadPoolExecutor(workers, "kernelwright-build-winners")
        stack.callback(threads.shutdown, cancel_futures=True)
        futures: dict[Future[object], TuningRecord] = {
            threads.submit(pool.build, one.workload, one.schedule, one.device): one for one in new
        }
        for future in as_completed(futures):
            error = future.exception()
            if error is not None and not isinstance(error, KernelwrightError):
                raise error
            yield Built(futures[future], BUILT if error is None else FAILED, str(error or ""))
