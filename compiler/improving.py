"""tune="background": a graph runs at once with what is known, what it misses is tuned in a child process meanwhile, and
once that is done, the graph is compiled again at its next call and runs so from then on.

One graph after another is tuned. Graphs with symbolic sizes stay as they were compiled first, and no graph changes
while CUDA records what it launches.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

_log = logging.getLogger(__name__)

Compile = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]


class Improving:
    """A compiled graph. tune: does the work of the child process, and says whether it went well; again: compiles with
    what is known then."""

    def __init__(
        self, run: Callable[..., Any], graph: torch.fx.GraphModule, tune: Callable[[], bool], again: Compile
    ) -> None:
        self._run, self._graph, self._again = run, graph, again
        self._tune = tune
        self._ready = threading.Event()
        self._swap = threading.Lock()

    def work(self) -> None:
        """Tune; called in a thread of its own."""
        try:
            if self._tune():
                self._ready.set()
        except Exception as error:
            _log.warning("a graph stays as it was compiled: %s", error)

    def __call__(self, *args: Any) -> Any:
        """The graph's results."""
        if self._ready.is_set() and not _is_recorded() and self._swap.acquire(blocking=False):
            # one thread compiles, once; others run what there is meanwhile
            try:
                if self._ready.is_set():
                    self._ready.clear()
                    self._improve(args)
            finally:
                self._swap.release()
        return self._run(*args)

    def _improve(self, args: Sequence[Any]) -> None:
        try:
            self._run = self._again(self._graph, args)
        except Exception as error:
            _log.warning("a graph stays as it was compiled: %s", error)


def improving(
    run: Callable[..., Any], graph: torch.fx.GraphModule, tune: Callable[[], bool], again: Compile
) -> Improving:
    """A compiled graph that is tuned from now on; it takes its place in the line."""
    found = Improving(run, graph, tune, again)
    _line().put(found)
    return found


def kept(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A graph module that compiling the first one leaves alone; weights are shared."""
    nodes = torch.fx.Graph()
    nodes.output(nodes.graph_copy(graph.graph, {}))
    return torch.fx.GraphModule(graph, nodes)


def is_static(inputs: Sequence[Any]) -> bool:
    """Whether all sizes of a graph's inputs are known."""
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    sizes = [size for tensor in tensors for size in (*tensor.shape, *tensor.stride())]
    return not any(isinstance(value, torch.SymInt) for value in (*inputs, *sizes))


def _is_recorded() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@functools.cache
def _line() -> queue.SimpleQueue[Improving]:
    """Where graphs wait, and the thread that serves them."""
    line: queue.SimpleQueue[Improving] = queue.SimpleQueue()

    def serve() -> None:
        while True:
            line.get().work()

    threading.Thread(target=serve, daemon=True, name="kernelwright-tune").start()
    return line
