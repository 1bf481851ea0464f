"""Answers that say "ours" or not, a torch.compile backend that runs our pass without generating code, and children that
need not import it all."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from kernelwright.compiler import ops
from kernelwright.compiler.passes.replace import Replace
from kernelwright.compiler.report import Report
from kernelwright.kernels import get_operator
from kernelwright.kernels.child_process import ChildProcess
from kernelwright.kernels.device import named_device
from kernelwright.kernels.nursery import Nursery
from kernelwright.kernels.triton_adapter import current_toolchain
from kernelwright.search.answer import Answer
from kernelwright.search.timing import TIMER_VERSION
from kernelwright.types import Measurement, Schedule, Status, TuningRecord, Workload

with warnings.catch_warnings():
    # Inductor imports parts of torch that torch itself has deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch._inductor.compile_fx

SCHEDULE = Schedule(
    "pointer",
    {
        "block_m": 16,
        "block_n": 16,
        "block_k": 16,
        "num_warps": 4,
        "num_stages": 2,
        "group_m": 8,
        "split_k": 1,
        "precision": "ieee",
    },
)


@pytest.fixture(autouse=True)
def no_compile_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest captures every level, which makes torch write down each step of each compile."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing that dynamo remembers of other tests, nor anything for them."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def forked(own_environment: None) -> Iterator[Callable[..., ChildProcess]]:
    """Makes a child process as a fork of one that has imported the backend and Inductor, which takes ten seconds.
    Targets may be functions of this folder's files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        nursery = Nursery("child_imports:preload")
        yield functools.partial(ChildProcess, nursery=nursery)
        nursery.close()


@pytest.fixture(scope="session")
def two_ranks(forked: Callable[..., ChildProcess]) -> Callable[..., list[Any]]:
    """Runs a job of two ranks, children that the target starts, and gives what each answers to its number."""

    def run(target: str, **init: Any) -> list[Any]:
        with forked(target, init=init) as one, forked(target, init=init) as other, ThreadPoolExecutor() as threads:
            return list(threads.map(lambda child, rank: child.call(rank, 300.0), (one, other), range(2)))

    return run


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Epilogues of the calls that our operator of products gets."""
    seen: list[str] = []
    real = ops.by_torch

    def counted(*args: Any) -> torch.Tensor:
        seen.append(args[3])
        return real(*args)

    monkeypatch.setattr(ops, "by_torch", counted)
    return seen


class Recorder:
    """Answers every question in one way, and remembers the questions."""

    def __init__(self, accepts: Callable[[Workload], bool] = lambda workload: True) -> None:
        self.asked: list[Workload] = []
        self._accepts = accepts

    def __call__(self, workload: Workload) -> Answer:
        self.asked.append(workload)
        choice = "kernel" if self._accepts(workload) else "vendor"
        return Answer("measured", workload, named_device("h100"), SCHEDULE, choice, 10.0, "torch.mm", 20.0)


class Tried:
    """A model compiled with the pass forced on the CPU: numbers of both, and what the pass reported."""

    def __init__(self, answers: Recorder) -> None:
        self.answers = answers
        self.report = Report()
        self.graphs: list[torch.fx.Graph] = []
        self.ask(answers)

    def ask(self, answers: Callable[[Workload], Answer], **options: Any) -> None:
        """From now on the answers come from there. options: the pass's."""
        self._pass = Replace(answers, devices=("cpu",), report=self.report, **options)

    def compile(self, function: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
        """The function behind AOTAutograd with Inductor's decompositions and our pass, run as it stands."""
        torch._dynamo.reset()
        backend = aot_autograd(
            fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
            inference_compiler=lambda graph, _: make_boxed_func(self._passed(graph).forward),
            partition_fn=lambda joint, inputs, **more: min_cut_rematerialization_partition(
                self._passed(joint), inputs, **more
            ),
            decompositions=select_decomp_table(),
        )
        compiled: Callable[..., Any] = torch.compile(function, backend=backend, **kwargs)
        return compiled

    def _passed(self, module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        self._pass(module.graph)
        module.graph.lint()
        module.recompile()
        self.graphs.append(module.graph)
        return module

    def epilogues(self) -> list[tuple[str, ...]]:
        """Epilogues of the products that were replaced, in graph order."""
        return [decision.workload.epilogue for decision in self.report.replaced if decision.workload is not None]

    def targets(self) -> list[Any]:
        """What the graphs call."""
        return [node.target for graph in self.graphs for node in graph.nodes if node.op == "call_function"]


@pytest.fixture
def forced() -> Tried:
    """Every product is ours."""
    return Tried(Recorder())


@pytest.fixture
def tried_with() -> Callable[[Callable[[Workload], bool]], Tried]:
    """Only the workloads that the function accepts are ours."""
    return lambda accepts: Tried(Recorder(accepts))


@pytest.fixture
def recorder() -> Callable[..., Recorder]:
    """Makes a source of answers."""
    return Recorder


def _record(workload: Workload, *, ours_us: float = 50.0, vendor_us: float = 100.0) -> TuningRecord:
    device, operator = named_device("h100"), get_operator("matmul")
    schedule = operator.default_schedule(workload, device)
    return TuningRecord(
        workload,
        device,
        current_toolchain(TIMER_VERSION),
        schedule,
        Measurement(Status.OK, ours_us),
        operator.templates[schedule.template].fingerprint,
        "tune",
        "2026-01-01T00:00:00Z",
        vendor="torch.mm",
        vendor_us=vendor_us,
    )


@pytest.fixture(scope="session")
def record_of() -> Callable[..., TuningRecord]:
    """Makes a record of an H100, measured with the software that is here: twice as fast as the vendor by default."""
    return _record
