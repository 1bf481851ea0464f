"""What finders give to the pass: pieces of a graph that one kernel could compute, and how such a piece is replaced."""

from __future__ import annotations

import functools
import json
import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from kernelwright.compiler.kernel_call import CALL, Form, check_operands, written_forms
from kernelwright.errors import InvalidWorkload, UsageError
from kernelwright.search.answer import Answer
from kernelwright.types import Workload

aten = torch.ops.aten

C = TypeVar("C")

_log = logging.getLogger(__name__)

HELD = "kernelwright_operands"
"""Where a call of ours keeps the fake tensors of its operands, to whose strides `compiler.lowering` holds them."""

OWN = ("tensor_meta", "eager_input_vals", HELD)
"""Annotations of a node that no other takes over."""


class Candidate(Protocol):
    """A form in which a kernel could take over a place of a graph."""

    @property
    def end(self) -> Node:
        """The node whose value our kernel would give, or one of them."""
        ...

    def workload(self) -> Workload:
        """What to look up; raises UsageError, with the reason, for what no kernel of ours computes."""
        ...

    def obstacle(self) -> str:
        """Why it could not be put in as the graph is now, however fast it is, or ""."""
        ...

    def replace(self, graph: Graph, answer: Answer) -> None:
        """Let our kernel compute it, and take out what did before."""
        ...


class Finder(Protocol):
    """Knows one kind of operator."""

    @property
    def targets(self) -> tuple[tuple[Any, ...], ...]:
        """Groups of operators; all of the first group are decided before any of the second."""
        ...

    def unfit(self, node: Node) -> str:
        """Why a node with one of the targets is not ours at all, or ""; its tensors are known and on one device."""
        ...

    def places(self, node: Node) -> Iterator[tuple[str, Iterable[Candidate]]]:
        """What can be decided by itself (a product; either gradient of a convolution): its name, and the forms in
        which a kernel could take it over, the most inclusive first."""
        ...


def value_of(node: Any) -> torch.Tensor:
    """The fake tensor of a node."""
    value: torch.Tensor = node.meta["val"]
    return value


def has_gradients(graph: Graph) -> bool:
    """Whether a graph is forward and backward together, which torch takes apart later."""
    return any(node.op == "placeholder" and node.name.startswith("tangents") for node in graph.nodes)


def item_of(node: Node, place: int) -> Node | None:
    """The node that takes result number `place` of one with several results; None where nobody does."""
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == place:
            return user
    return None


def emit(graph: Graph, target: Any, args: tuple[Any, ...], like: Node, kwargs: dict[str, Any] | None = None) -> Node:
    """A new node at the graph's insertion point, annotated as `like` is, with its value worked out."""
    node = graph.call_function(target, args, kwargs)
    node.meta = {name: value for name, value in like.meta.items() if name not in OWN}
    node.meta["val"] = target(*torch.fx.node.map_arg(args, lambda one: one.meta["val"]), **(kwargs or {}))
    return node


def hold(call: Node) -> Node:
    """The call of an operator of ours, whose operands from now on lie in memory as they do here."""
    call.meta[HELD] = torch.fx.node.map_arg(call.args, lambda node: node.meta["val"])
    return call


def emit_call(
    graph: Graph,
    workload: Workload,
    answer: Answer,
    operands: Mapping[str, Node],
    results: Sequence[torch.Tensor],
    like: Node,
) -> list[Node]:
    """Nodes of our kernel's results, which lie as the fake tensors `results` do, at the insertion point. like: the
    operator that it takes over, whose annotations say where it runs, and whether it is computed again."""
    assert answer.schedule is not None
    names = tuple(operands)
    forms = written_forms([Form.of(result) for result in results])
    texts = (json.dumps(part.to_json(), sort_keys=True) for part in (workload, answer.schedule))
    args: Any = ([operands[name] for name in names], ",".join(names), *texts, forms)
    call = hold(emit(graph, CALL, args, like))
    return [emit(graph, operator.getitem, (call, place), call) for place in range(len(results))]


def check_nodes(workload: Workload, operands: Mapping[str, Node], others: Mapping[str, Form] = {}) -> Workload:
    """The workload, when these nodes are its operands, and `others` those that are not in the graph yet."""
    check_operands(workload, {name: Form.of(value_of(node)) for name, node in operands.items()} | dict(others))
    return workload


def worked_out_once(workload: Callable[[C], Workload]) -> Callable[[C], Workload]:
    """For `Candidate.workload`: a candidate keeps it, since a graph stays as it is until one of its forms is put in.
    Whatever fails is told as InvalidWorkload."""

    @functools.wraps(workload)
    def kept(candidate: C) -> Workload:
        known = vars(candidate)
        if "_workload" not in known:
            try:
                known["_workload"] = workload(candidate)
            except UsageError:
                raise
            except Exception as error:
                # one form less, where the rest of the graph would be left to Inductor, too
                _log.warning("a form is left to Inductor by an error of ours: %s", error, exc_info=True)
                raise InvalidWorkload(f"an error of ours: {error}") from error
        found: Workload = known["_workload"]
        return found

    return kept


def is_known(node: Any) -> bool:
    """Whether a node's tensor is known."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), FakeTensor)
