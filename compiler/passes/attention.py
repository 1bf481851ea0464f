"""Finds attention in the forms that torch's own dispatch gives it, forward and backward."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Iterator

import torch
from torch.fx import Graph, Node

from kernelwright.compiler.attention_operands import Call, workload_of
from kernelwright.compiler.kernel_call import Form
from kernelwright.compiler.passes import attention_variants as variants
from kernelwright.compiler.passes.attention_variants import Backward, Forward
from kernelwright.compiler.passes.candidate import (
    Candidate,
    check_nodes,
    emit,
    emit_call,
    is_known,
    item_of,
    value_of,
    worked_out_once,
)
from kernelwright.errors import InvalidWorkload
from kernelwright.search.answer import Answer
from kernelwright.types import Workload

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class AttentionForward:
    """The forward pass; its logarithms are computed where they are used."""

    node: Node
    found: Forward

    @property
    def end(self) -> Node:
        """See `Candidate`."""
        return self.node

    @worked_out_once
    def workload(self) -> Workload:
        """See `Candidate`."""
        out = item_of(self.node, 0)
        if out is None or not out.users:
            raise InvalidWorkload("nobody uses its result")
        f, mask = self.found, _mask_value(self.found)
        tensors = {"q": value_of(f.q), "k": value_of(f.k), "v": value_of(f.v), "out": value_of(out)}
        call = Call(f.causal, f.scale, lse=self._wants_lse(), lower_right=f.lower_right)
        workload = workload_of(tensors | mask, call)
        return check_nodes(workload, {"q": f.q, "k": f.k, "v": f.v}, _forms_of(mask))

    def obstacle(self) -> str:
        """See `Candidate`."""
        others = [user for user in self.node.users if user.users and _place(user) not in (0, 1)]
        if others:
            return "torch's backward pass needs what torch's forward pass leaves"
        lse = item_of(self.node, 1)
        if lse is not None and lse.users and not _is_logs(value_of(lse), value_of(self.found.q)):
            return "the logarithms of its sums are wanted in a form of torch's own"
        return ""

    def replace(self, graph: Graph, answer: Answer) -> None:
        """See `Candidate`."""
        f, workload = self.found, self.workload()
        # workload() refuses one whose output nobody takes
        kept = [item for place in (0, 1) if (item := item_of(self.node, place)) is not None and item.users]
        with graph.inserting_before(self.node):
            operands = {"q": f.q, "k": f.k, "v": f.v, **_mask_node(graph, f)}
            out, *logs = (value_of(item) for item in kept)
            rows = value_of(f.q).shape[:3]
            results = [out, *(log.new_empty(rows) for log in logs)]
            nodes = emit_call(graph, workload, answer, operands, results, self.node)
            if logs and logs[0].dim() == 4:
                nodes[1] = emit(graph, aten.view.default, (nodes[1], list(logs[0].shape)), nodes[1])
        for item, node in zip(kept, nodes, strict=True):
            item.replace_all_uses_with(node)
        for user in list(self.node.users):
            graph.erase_node(user)
        graph.erase_node(self.node)

    def _wants_lse(self) -> bool:
        lse = item_of(self.node, 1)
        return lse is not None and bool(lse.users)


@dataclasses.dataclass(frozen=True)
class AttentionBackward:
    """The gradients of q, k and v. With a mask that needs a gradient it stays torch's."""

    node: Node
    found: Backward

    @property
    def end(self) -> Node:
        """See `Candidate`."""
        return self.node

    @worked_out_once
    def workload(self) -> Workload:
        """See `Candidate`."""
        f, mask = self.found, _mask_value(self.found.forward)
        q, k, v = f.forward.q, f.forward.k, f.forward.v
        tensors = {"q": value_of(q), "k": value_of(k), "v": value_of(v), "out": value_of(f.out)}
        call = Call(f.forward.causal, f.forward.scale, backward=True, lower_right=f.forward.lower_right)
        workload = workload_of(tensors | mask, call)
        if item_of(self.node, 3) is not None:
            raise InvalidWorkload("the gradient of a mask is left to torch")
        operands = {"q": q, "k": k, "v": v, "out": f.out, "d_out": f.d_out}
        lse = value_of(f.lse)
        if not _is_logs(lse, value_of(q)):
            raise InvalidWorkload(f"the logarithms of the forward pass come as {list(lse.shape)}")
        flat = lse.new_empty(value_of(q).shape[:3])
        return check_nodes(workload, operands, _forms_of({"lse": flat, **mask}))

    def obstacle(self) -> str:
        """See `Candidate`."""
        return ""

    def replace(self, graph: Graph, answer: Answer) -> None:
        """See `Candidate`."""
        f, workload = self.found, self.workload()
        q, k, v = f.forward.q, f.forward.k, f.forward.v
        with graph.inserting_before(self.node):
            lse = _flat_logs(graph, f.lse)
            operands = {"q": q, "k": k, "v": v, **_mask_node(graph, f.forward)}
            operands |= {"out": f.out, "lse": lse, "d_out": f.d_out}
            items = [item_of(self.node, place) for place in range(3)]
            like = (q, k, v)
            results = [value_of(item or like[place]) for place, item in enumerate(items)]
            nodes = emit_call(graph, workload, answer, operands, results, self.node)
        for item, node in zip(items, nodes, strict=True):
            if item is not None:
                item.replace_all_uses_with(node)
                graph.erase_node(item)
        graph.erase_node(self.node)


class Attentions:
    """See `kernelwright.compiler.passes.candidate.Finder`. Backward passes are decided first: a forward pass can only
    be ours where its backward pass does not need torch's own."""

    targets = (variants.BACKWARD, variants.FORWARD)

    def unfit(self, node: Node) -> str:
        """See `Finder`."""
        found = variants.read(node)
        return "" if found is not None else "it drops out, or has a form that no kernel of ours has"

    def places(self, node: Node) -> Iterator[tuple[str, Iterable[Candidate]]]:
        """See `Finder`."""
        found = variants.read(node)
        if isinstance(found, Backward):
            yield node.name, [AttentionBackward(node, found)]
        elif found is not None:
            yield node.name, [AttentionForward(node, found)]


def _place(user: Node) -> object:
    return user.args[1] if user.target is operator.getitem else None


def _is_logs(lse: torch.Tensor, q: torch.Tensor) -> bool:
    """Whether logarithms come as [B, Hq, Sq], or as [B, Hq, Sq, 1]."""
    return tuple(lse.shape) in (tuple(q.shape[:3]), (*q.shape[:3], 1))


def _flat_logs(graph: Graph, lse: Node) -> Node:
    """Logarithms as a dense [B, Hq, Sq]."""
    if not value_of(lse).is_contiguous():
        lse = emit(graph, aten.clone.default, (lse,), lse, {"memory_format": torch.contiguous_format})
    if value_of(lse).dim() == 4:
        lse = emit(graph, aten.view.default, (lse, list(value_of(lse).shape[:3])), lse)
    return lse


def _forms_of(tensors: dict[str, torch.Tensor]) -> dict[str, Form]:
    return {name: Form.of(tensor) for name, tensor in tensors.items()}


def _mask_value(found: Forward) -> dict[str, torch.Tensor]:
    """The mask as a kernel gets it, spread to all scores; nothing where there is none."""
    if found.mask is None:
        return {}
    if not is_known(found.mask):
        raise InvalidWorkload("its mask is not known")
    return {"mask": value_of(found.mask).expand(_scores(found))}


def _mask_node(graph: Graph, found: Forward) -> dict[str, Node]:
    if found.mask is None:
        return {}
    return {"mask": emit(graph, aten.expand.default, (found.mask, list(_scores(found))), found.mask)}


def _scores(found: Forward) -> tuple[int, ...]:
    q, k = value_of(found.q), value_of(found.k)
    return (*q.shape[:3], k.shape[2])
