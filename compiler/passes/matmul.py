"""Finds aten.mm and aten.addmm, with the bias and activation behind them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from kernelwright.compiler import ops
from kernelwright.compiler.operands import workload_of, written_dtype
from kernelwright.compiler.passes.candidate import emit, hold, worked_out_once
from kernelwright.compiler.passes.pointwise import Chain, find_activation, skip_views
from kernelwright.kernels.matmul.reference import activations
from kernelwright.search.answer import Answer
from kernelwright.types import Workload

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Product:
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

    @worked_out_once
    def workload(self) -> Workload:
        """What to look up; raises UsageError, with the reason, for what no kernel of ours computes."""
        bias = None if self.bias is None else self.bias.meta["val"]
        dtype = self.end.meta["val"].dtype
        return workload_of(self.a.meta["val"], self.b.meta["val"], bias, self.epilogue, dtype)

    def obstacle(self) -> str:
        """See `Candidate`."""
        return ""

    def replace(self, graph: Graph, answer: Answer) -> None:
        """See `Candidate`."""
        replace(graph, self, answer)


def candidates(product: Node) -> Iterator[Product]:
    """The forms in which a kernel could take over a product, the most inclusive first."""
    if product.target is aten.addmm.default:
        bias, a, b = product.args
        yield from _with_activation(Product(product, a, b, bias, ""))  # type: ignore[arg-type]
        return
    a, b = product.args
    plain = Product(product, a, b, None, "")  # type: ignore[arg-type]
    biased = _with_bias(plain)
    if biased is not None:
        yield from _with_activation(biased)
    yield from _with_activation(plain)


def _with_activation(candidate: Product) -> Iterator[Product]:
    found = find_activation(candidate.end, activations())
    if found is not None and _dense(found[0]):
        chain, activation = found
        yield dataclasses.replace(candidate, steps=candidate.steps + chain.steps, activation=activation)
    yield candidate


def _with_bias(candidate: Product) -> Product | None:
    """The product with the vector that is added to its rows right behind it, if there is one."""
    views = skip_views(candidate.product)
    last = views[-1] if views else candidate.product
    user = next(iter(last.users)) if len(last.users) == 1 else None
    if user is None or user.target is not aten.add.Tensor or user.kwargs.get("alpha", 1) != 1:
        return None
    bias = user.args[1] if user.args[0] is last else user.args[0]
    if (
        not isinstance(bias, Node)
        or not _is_row(bias, candidate.product)
        or not _dense(Chain(candidate.product, (user,)))
    ):
        return None
    return dataclasses.replace(candidate, bias=bias, steps=(*views, user))


def _is_row(bias: Node, matrix: Node) -> bool:
    """Whether a vector has one number for each column of a product, however that is viewed when they are added."""
    value, rows = bias.meta.get("val"), matrix.meta["val"]
    return isinstance(value, FakeTensor) and value.device == rows.device and value.shape == rows.shape[-1:]


def _dense(chain: Chain) -> bool:
    """Whether the chain's value lies in memory as the product does."""
    end, start = chain.end.meta["val"], chain.start.meta["val"]
    return bool(end.is_contiguous()) and end.numel() == start.numel()


def replace(graph: Graph, candidate: Product, answer: Answer) -> None:
    """Let our operator compute the candidate's value, and take out what did before."""
    assert answer.schedule is not None
    product, end = candidate.product, candidate.end
    sizes, dtype = product.meta["val"].shape, written_dtype(end.meta["val"].dtype)
    schedule = json.dumps(answer.schedule.to_json(), sort_keys=True)
    args = (candidate.a, candidate.b, candidate.bias, ",".join(candidate.epilogue), schedule, dtype)
    with graph.inserting_before(end):
        result = hold(emit(graph, ops.MATMUL, args, product))
        if end.meta["val"].shape != sizes:
            shape = list(end.meta["val"].shape)
            result = graph.call_function(aten.view.default, (result, shape))
            result.meta = dict(end.meta)
    end.replace_all_uses_with(result)
    for node in (*reversed(candidate.steps), product):
        graph.erase_node(node)
