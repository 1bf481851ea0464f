"""Jobs that share a GPU measure on it one at a time, while the others compile."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch._inductor.runtime import benchmarking


class Turns:
    """The turn on a GPU: a lock among the processes of this machine. A block within a block is one turn.

    waited_s: seconds that this process has waited for its turns so far.
    """

    def __init__(self, gpu: str | None = None) -> None:
        """gpu: the index; None for the GPUs that this process may see."""
        name = os.environ.get("CUDA_VISIBLE_DEVICES", "all") if gpu is None else gpu
        self.path = Path(tempfile.gettempdir()) / f"kernelwright-turn-{name.replace('/', '_')}"
        # a lock on a file holds off other processes, not other threads
        self._thread, self._depth, self.waited_s = threading.RLock(), 0, 0.0

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """No other process has its turn within the block."""
        with self._thread, contextlib.ExitStack() as stack:
            if self._depth == 0:
                file = stack.enter_context(self.path.open("a"))
                began = time.monotonic()
                try:
                    # closing the file gives it back
                    fcntl.flock(file, fcntl.LOCK_EX)
                finally:
                    self.waited_s += time.monotonic() - began
            self._depth += 1
            stack.callback(self._left)
            yield

    def _left(self) -> None:
        self._depth -= 1


@contextlib.contextmanager
def inductor_in_turns(turns: Turns) -> Iterator[None]:
    """Within the block, whatever Inductor measures on the GPU in this process it measures in its turn."""
    kind: Any = type(benchmarking.benchmarker)
    before = kind.benchmark_gpu

    @functools.wraps(before)
    def measured(*args: Any, **kwargs: Any) -> Any:
        with turns.taken():
            return before(*args, **kwargs)

    own = "benchmark_gpu" in vars(kind)
    kind.benchmark_gpu = measured
    try:
        yield
    finally:
        if own:
            kind.benchmark_gpu = before
        else:
            del kind.benchmark_gpu
