"""Puts our matmul in the place of aten.mm and aten.addmm, with the bias and activation behind them, where it is faster.

The pass runs on the graphs that AOTAutograd made, forward and backward together, so gradients need no rules of ours;
and before Inductor pads unaligned operands, which would hide the shapes that the records know.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from kernelwright.compiler import operands, ops
from kernelwright.compiler.dispatch import Prepared
from kernelwright.compiler.operands import is_static, workload_of
from kernelwright.compiler.passes import pointwise
from kernelwright.compiler.passes.pointwise import Chain, find_activation, skip_views
from kernelwright.compiler.report import Decision, Report
from kernelwright.errors import UsageError
from kernelwright.search.answer import Answer
from kernelwright.types import Workload

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A piece of graph that one kernel could compute: product, the steps behind it, and what they amount to."""

    product: Node
    a: Node
    b: Node
    bias: Node | None
    activation: str
    steps: tuple[Node, ...] = ()

    @property
    def end(self) -> Node:
        """The node whose value the kernel gives."""
        return self.steps[-1] if self.steps else self.product

    @property
    def epilogue(self) -> tuple[str, ...]:
        """The workload's epilogue."""
        return (("bias",) if self.bias is not None else ()) + ((self.activation,) if self.activation else ())

    def workload(self) -> Workload:
        """What to look up; raises UsageError, with the reason, for what no kernel of ours computes."""
        bias = None if self.bias is None else self.bias.meta["val"]
        dtype = self.end.meta["val"].dtype
        return workload_of(self.a.meta["val"], self.b.meta["val"], bias, self.epilogue, dtype)


class ReplaceMatmul(CustomGraphPass):
    """The pass. `answers` says what is fastest for a workload; None means that nothing is known.

    how: the kinds of answer that are trusted (see `kernelwright.search.answer`). devices: torch device types.
    state: identifies everything that the answers depend on; None keeps compiled graphs out of Inductor's cache.
    """

    def __init__(
        self,
        answers: Callable[[Workload], Answer],
        *,
        how: Collection[str] = ("measured",),
        devices: Collection[str] = ("cuda",),
        state: str | None = None,
        report: Report | None = None,
    ) -> None:
        self._answers = answers
        self._how = tuple(how)
        self._devices = tuple(devices)
        self._state = state
        self._report = report or Report()

    def __call__(self, graph: Graph) -> None:
        """Replace what is faster; an error of ours leaves the rest of the graph as it is, and is logged."""
        try:
            products = [node for node in graph.nodes if node.target in PRODUCTS]
            self._prepare(products)
            for node in products:
                self._report.decisions.append(self._decide(graph, node))
        except Exception as error:
            self._report.warnings.append(str(error))
            _log.warning("matrix products are left to Inductor: %s", error, exc_info=True)

    def uuid(self) -> Any:
        """What the outcome depends on besides the graph."""
        if self._state is None:
            return None
        code = get_hash_for_files((__file__, pointwise.__file__, operands.__file__, ops.__file__))
        return ("kernelwright.replace_matmul", code, self._state, self._how, self._devices)

    def _prepare(self, products: list[Node]) -> None:
        """Tell the source of answers what it will be asked, if it wants to know."""
        if isinstance(self._answers, Prepared):
            workloads: list[Workload] = []
            for candidate in (c for product in products if not self.unfit(product) for c in candidates(product)):
                with contextlib.suppress(UsageError):
                    workloads.append(candidate.workload())
            self._answers.prepare(workloads)

    def _decide(self, graph: Graph, product: Node) -> Decision:
        unfit = self.unfit(product)
        if unfit:
            return Decision(product.name, None, False, unfit)
        decision = Decision(product.name, None, False, "no form of it fits a kernel")
        for candidate in candidates(product):
            try:
                workload = candidate.workload()
            except UsageError as error:
                decision = Decision(product.name, None, False, str(error))
                continue
            answer = self._answers(workload)
            decision = self._judge(product, answer)
            if decision.replaced:
                replace(graph, candidate, answer)
                break
        return decision

    def unfit(self, product: Node) -> str:
        """Why the product is not ours at all, or ""."""
        nodes = (product, *product.all_input_nodes)
        values = [value for node in nodes if isinstance(value := node.meta.get("val"), FakeTensor)]
        if len(values) < len(nodes):
            return "its shapes are not known"
        if not all(is_static(value) for value in values):
            return "its sizes are not known before it runs"
        devices = {value.device for value in values}
        if len(devices) > 1 or next(iter(devices)).type not in self._devices:
            return f"it runs on {', '.join(sorted(map(str, devices)))}"
        if not values[0].is_contiguous():
            return "its result is not row-major"
        if product.target is aten.addmm.default and any(product.kwargs.get(x, 1) != 1 for x in ("alpha", "beta")):
            return "addmm scales its operands"
        return ""

    def _judge(self, product: Node, answer: Answer) -> Decision:
        wins = answer.choice == "kernel" and answer.how in self._how and answer.schedule is not None
        if wins:
            reason = f"{answer.how}: faster than {answer.vendor or 'any library call'}"
        elif answer.choice == "kernel":
            reason = f"an answer that is {answer.how} is not trusted here"
        else:
            reason = answer.note or f"{answer.how}: {answer.vendor or 'the library call'} is as fast"
        return Decision(
            product.name, answer.workload, wins, reason, answer.schedule, answer.expected_us, answer.vendor_us
        )


def candidates(product: Node) -> Iterator[Candidate]:
    """The forms in which a kernel could take over a product, the most inclusive first."""
    if product.target is aten.addmm.default:
        bias, a, b = product.args
        yield from _with_activation(Candidate(product, a, b, bias, ""))  # type: ignore[arg-type]
        return
    a, b = product.args
    plain = Candidate(product, a, b, None, "")  # type: ignore[arg-type]
    biased = _with_bias(plain)
    if biased is not None:
        yield from _with_activation(biased)
    yield from _with_activation(plain)


def _with_activation(candidate: Candidate) -> Iterator[Candidate]:
    found = find_activation(candidate.end)
    if found is not None and _dense(found[0]):
        chain, activation = found
        yield dataclasses.replace(candidate, steps=candidate.steps + chain.steps, activation=activation)
    yield candidate


def _with_bias(candidate: Candidate) -> Candidate | None:
    """The product with the vector that is added to its rows right behind it, if there is one."""
    views = skip_views(candidate.product)
    last = views[-1] if views else candidate.product
    user = next(iter(last.users)) if len(last.users) == 1 else None
    if user is None or user.target is not aten.add.Tensor or user.kwargs.get("alpha", 1) != 1:
        return None
    bias = user.args[1] if user.args[0] is last else user.args[0]
    if not isinstance(bias, Node) or not _is_row(bias, last) or not _dense(Chain(candidate.product, (user,))):
        return None
    return dataclasses.replace(candidate, bias=bias, steps=(*views, user))


def _is_row(bias: Node, matrix: Node) -> bool:
    """Whether the last dimensions of both agree with those of the product, so that the vector is added to each row."""
    value, rows = bias.meta.get("val"), matrix.meta["val"]
    return isinstance(value, FakeTensor) and value.device == rows.device and value.shape == rows.shape[-1:]


def _dense(chain: Chain) -> bool:
    """Whether the chain's value lies in memory as the product does."""
    end, start = chain.end.meta["val"], chain.start.meta["val"]
    return bool(end.is_contiguous()) and end.numel() == start.numel()


def replace(graph: Graph, candidate: Candidate, answer: Answer) -> None:
    """Let our operator compute the candidate's value, and take out what did before."""
    assert answer.schedule is not None
    product, end = candidate.product, candidate.end
    out = product.meta["val"].new_empty(product.meta["val"].shape, dtype=end.meta["val"].dtype)
    schedule = json.dumps(answer.schedule.to_json(), sort_keys=True)
    args = (candidate.a, candidate.b, candidate.bias, ",".join(candidate.epilogue), schedule, out.dtype)
    values = torch.fx.node.map_arg(args, lambda node: node.meta["val"])
    with graph.inserting_before(end):
        result = graph.call_function(ops.MATMUL, args)
        # Inductor holds operands to the strides that it finds here.
        result.meta = {**product.meta, "val": out, "eager_input_vals": (values, {})}
        result.meta.pop("tensor_meta", None)
        if end.meta["val"].shape != out.shape:
            shape = list(end.meta["val"].shape)
            result = graph.call_function(aten.view.default, (result, shape))
            result.meta = dict(end.meta)
    end.replace_all_uses_with(result)
    for node in (*reversed(candidate.steps), product):
        graph.erase_node(node)
