"""A piece of a graph by itself: operators that our kernels could compute, with the pointwise steps and reductions
around them that Inductor may fuse, as text that another process can make a graph of again.

What enters a piece is an input, however it is computed. A step belongs to it only if nothing that it reads comes from
the piece by a way round it: such a step could not run in one pass with the rest.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from kernelwright.compiler import side_by_side
from kernelwright.compiler.kernel_call import Form, read_forms, written_forms
from kernelwright.compiler.passes.pointwise import CASTS, CONSTANTS, VIEWS
from kernelwright.compiler.passes.rival import is_fused
from kernelwright.errors import UsageError
from kernelwright.types import canonical_json, digest

aten = torch.ops.aten

MOST_STEPS = 48
"""Steps of a piece behind its operators: enough for a residual and a layer norm."""

FAR = 256
"""Nodes of a graph after the last of a piece that are looked at: what comes later runs by itself."""

RENAMING = (*VIEWS, aten.permute.default, aten.t.default, aten.transpose.int, aten.unsqueeze.default)
"""Steps whose result is the same memory, all of it, in another form."""

SHAPES = (
    *VIEWS,
    aten.permute.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.slice.Tensor,
    aten.select.int,
    aten.expand.default,
    aten.split_with_sizes.default,
    aten.clone.default,
)
"""Steps that say where numbers lie; Inductor folds them into its passes."""

_KINDS: Mapping[str, type] = {"dtype": torch.dtype, "memory_format": torch.memory_format, "layout": torch.layout}


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece. text: canonical JSON of `inputs` (forms), `steps` (target, args, kwargs), `outputs`, `anchors` (places
    of the operators that make it up) and `beside` (inputs that lie side by side in memory); a value is numbered by its
    place among inputs and steps."""

    text: str

    @property
    def key(self) -> str:
        """Digest by which it is known."""
        return digest(self.text)

    def __str__(self) -> str:
        names = [step[0].split(".")[1] if "." in step[0] else step[0] for step in json.loads(self.text)["steps"]]
        return "+".join(names)

    def graph(self, device: str) -> tuple[GraphModule, list[Node]]:
        """A graph module that computes it on a device, its values worked out, and the operators that make it up."""
        body = json.loads(self.text)
        graph, nodes = Graph(), []
        with FakeTensorMode():
            for number, form in enumerate(read_forms(json.dumps(body["inputs"]))):
                nodes.append(graph.placeholder(f"input_{number}"))
                nodes[-1].meta["val"] = form.empty(torch.device(device))
            for target, args, kwargs in body["steps"]:
                args = _decoded(tuple(args), nodes, device)
                kwargs = {name: _decoded(part, nodes, device) for name, part in kwargs.items()}
                node = graph.call_function(_target(target), args, kwargs)
                values = torch.fx.node.map_arg((args, kwargs), lambda one: one.meta["val"])
                node.meta["val"] = node.target(*values[0], **values[1])  # type: ignore[operator]
                nodes.append(node)
        graph.output(tuple(nodes[place] for place in body["outputs"]))
        graph.lint()
        return GraphModule({}, graph), [nodes[place] for place in body["anchors"]]

    def inputs(self, device: str, seed: int) -> list[torch.Tensor]:
        """Operands with random numbers small enough for any product of the piece to stay in range."""
        generator = torch.Generator(device).manual_seed(seed)
        body = json.loads(self.text)
        found = [_drawn(form, device, generator) for form in read_forms(json.dumps(body["inputs"]))]
        together = side_by_side.joined([found[place] for place in body["beside"]]) if body["beside"] else None
        start = 0
        for place in body["beside"]:
            columns = found[place].shape[1]
            found[place] = together[:, start : start + columns]  # type: ignore[index]
            start += columns
        return found


def piece_of(anchors: Sequence[Node]) -> Piece:
    """The piece around operators of one graph; UsageError where it cannot be written down."""
    inside = _region(anchors)
    numbers: dict[Node, int] = {}
    forms: list[Form] = []
    same: dict[tuple[Any, ...], int] = {}
    for node in inside:
        for before in node.all_input_nodes:
            if before not in inside and before not in numbers:
                form = _form(before)
                # two views of one tensor that say the same are one input
                kind = (source_of(before), form, before.meta["val"].storage_offset())
                numbers[before] = same.setdefault(kind, len(forms))
                if numbers[before] == len(forms):
                    forms.append(form)
    for number, node in enumerate(inside, len(forms)):
        numbers[node] = number
    steps = [[_name(node), _encoded(node.args, numbers), _encoded(dict(node.kwargs), numbers)] for node in inside]
    outputs = [numbers[node] for node in inside if any(user not in inside for user in node.users)]
    body = {
        "inputs": json.loads(written_forms(forms)),
        "steps": steps,
        "outputs": outputs,
        "anchors": [numbers[anchor] for anchor in anchors],
        "beside": _beside(anchors, numbers),
    }
    return Piece(canonical_json(body))


def _beside(anchors: Sequence[Node], numbers: Mapping[Node, int]) -> list[int]:
    """The inputs that are weights of several products and lie side by side in memory."""
    weights = [anchor.args[-1] for anchor in anchors] if len(anchors) > 1 else []
    values = [weight.meta["val"] for weight in weights]  # type: ignore[union-attr]
    return [numbers[weight] for weight in weights] if values and side_by_side.beside(values) else []  # type: ignore[index]


def _region(anchors: Sequence[Node]) -> dict[Node, None]:
    """The nodes of a piece, in the graph's order."""
    inside: dict[Node, None] = {}
    round_about: set[Node] = set()
    most = len(anchors) + MOST_STEPS
    first = node = min(anchors)
    waiting, idle = set(anchors), 0
    while node.op not in ("output", "root") and (waiting or idle < FAR):
        before, known = node.all_input_nodes, len(inside)
        if node in anchors:
            inside |= dict.fromkeys(_made_for(node))
            inside[node] = None
            waiting.discard(node)
        elif any(one in round_about for one in before):
            round_about.add(node)
        elif any(one in inside for one in before):
            if len(inside) < most and _belongs(node, first):
                inside |= dict.fromkeys(one for one in before if one.target in CONSTANTS)
                inside[node] = None
            else:
                round_about.add(node)
        idle = idle + 1 if len(inside) == known else 0
        node = node.next
    return inside


def _belongs(node: Node, first: Node) -> bool:
    if any(node.meta.get(key) != first.meta.get(key) for key in ("recompute", "partitioner_tag")):
        return False
    if node.target is operator.getitem:
        return True
    return node.target in SHAPES or node.target in CASTS or (is_fused(node) and not node.target._schema.is_mutable)  # type: ignore[union-attr]


def _made_for(anchor: Node) -> list[Node]:
    """The pointwise step that computes the image of a convolution for it alone: Inductor writes it in any order."""
    if anchor.target is not aten.convolution.default:
        return []
    image = anchor.args[0]
    alone = isinstance(image, Node) and len(image.users) == 1 and is_fused(image)
    return [image] if alone else []  # type: ignore[list-item]


def source_of(node: Any) -> Any:
    """The node that a chain of other forms of the same memory begins with."""
    while isinstance(node, Node) and node.target in RENAMING:
        node = node.args[0]
    return node


def _form(node: Node) -> Form:
    value = node.meta.get("val")
    if not isinstance(value, FakeTensor):
        raise UsageError(f"{node.name} is no tensor of known sizes")
    form = Form.of(value)
    if not all(isinstance(number, int) for number in (*form.sizes, *form.strides)):
        raise UsageError(f"the sizes of {node.name} are not known before it runs")
    return form


def _name(node: Node) -> str:
    if node.target is operator.getitem:
        return "getitem"
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("aten", "prims"):
        return str(node.target)
    raise UsageError(f"{node.name} is no operator of torch's own")


def _target(name: str) -> Callable[..., Any]:
    if name == "getitem":
        return operator.getitem
    namespace, operation, overload = name.split(".")
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), operation), overload)
    return found


def _encoded(value: Any, numbers: Mapping[Node, int]) -> Any:
    """An argument as JSON."""
    if isinstance(value, Node):
        return {"node": numbers[value]}
    if isinstance(value, list | tuple):
        return [_encoded(one, numbers) for one in value]
    if isinstance(value, dict):
        return {name: _encoded(one, numbers) for name, one in value.items()}
    for kind, of in _KINDS.items():
        if isinstance(value, of):
            return {kind: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": None}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError(f"an argument of type {type(value).__name__} cannot be written down")


def _decoded(value: Any, nodes: Sequence[Node], device: str) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_decoded(one, nodes, device) for one in value)
    if not isinstance(value, dict):
        return value
    kind: str = next(iter(value)) if len(value) == 1 else ""
    of: Any = value.get(kind)
    if kind == "node":
        return nodes[of]
    if kind in _KINDS:
        return getattr(torch, of)
    if kind == "device":
        return torch.device(device)
    if kind == "float":
        return float(of)
    return {name: _decoded(one, nodes, device) for name, one in value.items()}


def _drawn(form: Form, device: str, generator: torch.Generator) -> torch.Tensor:
    places = 1 + sum((size - 1) * stride for size, stride in zip(form.sizes, form.strides, strict=True))
    if form.dtype.is_floating_point:
        flat = torch.randn(places, generator=generator, device=device).mul_(0.1).to(form.dtype)
    else:
        flat = torch.randint(0, 2, (places,), generator=generator, device=device).to(form.dtype)
    return flat.as_strided(form.sizes, form.strides)
