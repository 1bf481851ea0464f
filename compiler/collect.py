"""What a model computes that kernels of ours could: its workloads and how often a step runs each, as the backend's pass
finds them.

Nothing is compiled or replaced, and no GPU is needed: a model on the meta device will do.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._inductor.lowering
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import default_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph

from kernelwright.compiler.meta_device import as_on_a_gpu, empty_results, fuse_attention
from kernelwright.compiler.passes.replace import Replace
from kernelwright.compiler.passes.rival import TENSOR_STEPS, shorter_forms
from kernelwright.compiler.passes.traced_mask import simplify_traced_masks
from kernelwright.compiler.report import Report
from kernelwright.errors import UsageError
from kernelwright.kernels.device import named_device
from kernelwright.search.answer import Answer
from kernelwright.types import FrozenMap, Schedule, Workload

DEVICES = ("cuda", "cpu", "meta")
"""Device types on which the pass looks for products while it collects."""


def visit(
    model: Callable[..., Any], inputs: Sequence[Any], keywords: Mapping[str, Any] | None, look: Callable[[Graph], None]
) -> None:
    """Run one step of the model (forward, and backward where it takes gradients) as it is, and show `look` each graph
    that the backend's pass would see, forward and backward together."""
    torch._dynamo.reset()
    without_data = any(tensor.is_meta for tensor in _tensors(model, inputs, keywords))
    with as_on_a_gpu() if without_data else contextlib.nullcontext():
        result = torch.compile(model, backend=_backend(look, without_data), dynamic=False)(*inputs, **(keywords or {}))
        if isinstance(result, torch.Tensor) and result.requires_grad:
            result.sum().backward()


def _tensors(
    model: Callable[..., Any], inputs: Sequence[Any], keywords: Mapping[str, Any] | None
) -> Iterator[torch.Tensor]:
    """All tensors of a model and its inputs, however deep they lie in lists and dicts."""
    leaves = torch.utils._pytree.tree_leaves((list(inputs), dict(keywords or {})))
    yield from (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    if isinstance(model, torch.nn.Module):
        yield from itertools.chain(model.parameters(), model.buffers())


def collect_workloads(
    model: Callable[..., Any], inputs: Sequence[Any], keywords: Mapping[str, Any] | None = None
) -> tuple[Counter[Workload], list[str]]:
    """Calls by workload in one step of the model, and why the other products have none."""
    found: Counter[Workload] = Counter()
    left_out: list[str] = []
    visit(model, inputs, keywords, lambda graph: _count(graph, found, left_out))
    return found, left_out


def collect_file(target: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The same of a Python file (see `load_model`), as entries of a list of workloads with their calls."""
    found, left_out = collect_workloads(*load_model(target))
    return [{"workload": workload.to_json(), "calls": calls} for workload, calls in found.items()], left_out


_NUMBERS = itertools.count(1)


def load_model(target: str) -> tuple[Callable[..., Any], Sequence[Any]]:
    """A model and its inputs from "model.py", which has `model` and `inputs` (a tensor, a tuple of them, or a dict of
    them by name), or "model.py:make", a function that returns both. UsageError when it has not."""
    path, _, name = target.partition(":")
    model, inputs = _load(Path(path), name)
    if isinstance(inputs, Mapping):
        return _ByName(model, list(inputs)), list(inputs.values())
    return model, inputs if isinstance(inputs, tuple | list) else (inputs,)


class _ByName(torch.nn.Module):
    """A model that takes its inputs by name, for those that have them in order."""

    def __init__(self, model: Callable[..., Any], names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, tuple(names)

    def forward(self, *inputs: Any) -> Any:
        return self.model(**dict(zip(self.names, inputs, strict=True)))


def _load(path: Path, name: str) -> tuple[Callable[..., Any], Any]:
    if not path.is_file():
        raise UsageError(f"the model must be a Python file, got {path}, which is none")
    sys.path.insert(0, str(path.resolve().parent))
    # a name of its own: torch's tracing remembers modules by name
    spec = importlib.util.spec_from_file_location(f"kernelwright_collected_{next(_NUMBERS)}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"the model must be a Python file, whose name ends in .py, got {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with _blamed(path):
        spec.loader.exec_module(module)
    missing = [wanted for wanted in ([name] if name else ["model", "inputs"]) if not hasattr(module, wanted)]
    if missing:
        raise UsageError(
            f"{path} must define `model` and `inputs`, or a function that returns both, named as in {path.name}:make; "
            f"it has no {' and no '.join(missing)}"
        )
    if not name:
        return _callable(path, "`model`", module.model), module.inputs
    with _blamed(path):
        made = _callable(path, name, getattr(module, name))()
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise UsageError(f"{path}: {name} must return a model and its inputs, got {_shown(made)}")
    return _callable(path, f"the model of {name}", made[0]), made[1]


@contextlib.contextmanager
def _blamed(path: Path) -> Iterator[None]:
    """Tells in which line of the file an error came up. The file sees no arguments of the command line."""
    try:
        with mock.patch.object(sys, "argv", [str(path)]):
            yield
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
        place = f"{path}, line {lines[-1]}" if lines else str(path)
        said = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise UsageError(
            f"the file of a model must import without an error and without arguments, but {place} raised {said}"
        ) from error


def _callable(path: Path, what: str, value: object) -> Callable[..., Any]:
    if not callable(value):
        raise UsageError(f"{path}: {what} must be something that can be called, got {_shown(value)}")
    return value


def _shown(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:80]}"


def _backend(look: Callable[[Graph], None], without_data: bool) -> Callable[..., Any]:
    """A backend that runs graphs as they are, after it has shown forward and backward together; without data it only
    makes results of the right sizes."""

    def run(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return make_boxed_func(functools.partial(empty_results, graph.graph) if without_data else graph.forward)

    def inference(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        look(graph.graph)
        return run(graph, inputs)

    def partition(joint: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        look(joint.graph)
        return default_partition(joint, inputs, **options)

    table = select_decomp_table()
    behind = aot_autograd(
        fw_compiler=run, bw_compiler=run, inference_compiler=inference, partition_fn=partition, decompositions=table
    )

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        simplify_traced_masks(graph)
        if without_data:
            fuse_attention(graph)
        return behind(graph, inputs)

    return backend


def _count(graph: Graph, found: Counter[Workload], left_out: list[str]) -> None:
    """Count what the pass would replace if every kernel of ours were faster, on a copy of the graph."""
    report = Report()
    judge = Replace(_ours, devices=DEVICES, report=report)
    simple = copied(graph)
    judge.simplify(simple)
    found.update(judge.wider_workloads(simple))
    judge(simple)
    for decision in report.decisions:
        if decision.replaced and decision.workload is not None:
            found[decision.workload] += 1
            found.update(_without_matrices(decision.workload))
        else:
            left_out.append(f"{decision.node}: {decision.reason}")
    if report.warnings:
        raise RuntimeError(f"a graph could not be looked through: {'; '.join(report.warnings)}")


def _without_matrices(workload: Workload) -> list[Workload]:
    """The longest form of a product or a convolution that reads no tensor of the result's size besides, where that is
    another one: what Inductor adds to in a pass that it may have to make anyway."""
    return shorter_forms(workload)[-1:] if any(step in TENSOR_STEPS for step in workload.epilogue) else []


def copied(graph: Graph) -> Graph:
    """A graph of its own with the same nodes; what they are annotated with is shared."""
    found = Graph()
    found.output(found.graph_copy(graph, {}))
    return found


def _ours(workload: Workload) -> Answer:
    return Answer("measured", workload, named_device("h100"), Schedule("any", FrozenMap({})), "kernel")
