"""Finds the chain of pointwise steps behind a tensor of a graph, and tells which activation it computes.

Inductor has taken activations apart by the time a pass sees them, and spells them differently from release to release,
so a chain is known by its numbers: it is run on test points in fp64 and compared with the activations that a kernel
can do. Casts between floating types change nothing there: a fused kernel keeps fp32 up to the last step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from kernelwright.compiler.operands import is_static

aten = torch.ops.aten

VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
"""Steps that only rename the dimensions of a row-major tensor."""

CASTS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)
CONSTANTS = (aten.full.default, aten.scalar_tensor.default)
Activations = Mapping[str, Callable[[torch.Tensor], torch.Tensor]]

LONGEST = 24
"""Steps looked at behind one product; gelu_tanh, the longest activation, takes about 12."""


@dataclasses.dataclass(frozen=True)
class Chain:
    """Steps in graph order that turn `start` into steps[-1]; nothing outside uses what they replace."""

    start: Node
    steps: tuple[Node, ...]

    @property
    def end(self) -> Node:
        """The step whose value the chain computes."""
        return self.steps[-1]


def find_activation(start: Node, activations: Activations) -> tuple[Chain, str] | None:
    """The longest chain behind `start` that is one of the activations, with its name; None if there is none."""
    for chain in reversed(list(chains(start))):
        name = recognise(chain, activations)
        if name:
            return chain, name
    return None


def chains(start: Node) -> Iterator[Chain]:
    """Every chain behind `start` that could be replaced as a whole, shortest first."""
    region = _region(start)
    for end in region[1:]:
        inside = _ancestors(end, region)
        if all(user in inside for node in inside if node is not end for user in node.users):
            yield Chain(start, tuple(node for node in region if node in inside and node is not start))


def skip_views(start: Node) -> tuple[Node, ...]:
    """The views behind `start` as long as each is its input's only user."""
    views: list[Node] = []
    node = start
    while len(node.users) == 1 and (user := next(iter(node.users))).target in VIEWS:
        views.append(user)
        node = user
    return tuple(views)


def recognise(chain: Chain, activations: Activations) -> str | None:
    """The name of the activation that the chain computes, or None."""
    with _disable_current_modes(), torch.no_grad():
        points = _points()
        try:
            values = _evaluate(chain, points)
        except Exception:
            # steps may be anybody's operators
            return None
        if values.dtype is not points.dtype:
            # comparisons, and what is counted of them
            return None
        known = _values_of(tuple(activations.values()))
        # torch 2.11's isclose does not broadcast its first argument with equal_nan
        same = torch.isclose(values.expand_as(known), known, rtol=1e-6, atol=1e-9, equal_nan=True).all(1).tolist()
    return next((name for name, found in zip(activations, same, strict=True) if found), None)


@functools.cache
def _values_of(functions: tuple[Callable[[torch.Tensor], torch.Tensor], ...]) -> torch.Tensor:
    """What each of the functions is at the points [function, point]."""
    return torch.stack([function(_points()) for function in functions])


@functools.cache
def _points() -> torch.Tensor:
    """Where functions are compared: densely around zero, sparsely as far as fp32 goes, and at NaN."""
    near = torch.linspace(-12, 12, 193, dtype=torch.float64, device="cpu")
    far = torch.logspace(1, 38, 149, dtype=torch.float64, device="cpu")
    small = torch.logspace(-6, -2, 9, dtype=torch.float64, device="cpu")
    return torch.cat([near, far, -far, small, -small, near.new_full((1,), float("nan"))])


def _region(start: Node) -> list[Node]:
    """`start` and the pointwise steps that depend on it alone, in graph order, LONGEST at most."""
    region = [start]
    waiting = list(start.users)
    while waiting and len(region) <= LONGEST:
        node = min(waiting)
        waiting = [other for other in waiting if other is not node]
        if is_step(node, start) and all(n in region or n.target in CONSTANTS for n in node.all_input_nodes):
            region.append(node)
            waiting += node.users
    return region


def _ancestors(end: Node, region: list[Node]) -> set[Node]:
    """`end` and the members of the region that it is computed from."""
    found = {end}
    waiting = [end]
    while waiting:
        for node in waiting.pop().all_input_nodes:
            if node in region and node not in found:
                found.add(node)
                waiting.append(node)
    return found


def is_step(node: Node, start: Node) -> bool:
    """Whether a node is a pointwise step of the same size as `start`, which may be computed together with it. Sizes of
    `start` are known; to compare an open one with them would bind it."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not is_static(value) or value.numel() != start.meta["val"].numel():
        return False
    # Steps that are recomputed or scheduled apart from the product must stay apart from it.
    if any(node.meta.get(key) != start.meta.get(key) for key in ("recompute", "partitioner_tag")):
        return False
    if node.target in VIEWS:
        return True
    if node.target in CASTS:
        # one to 8 bits is there for what it rounds away
        return value.dtype.is_floating_point and value.dtype.itemsize > 1
    tags, schema = node.target.tags, node.target._schema
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags and not schema.is_mutable


def _evaluate(chain: Chain, points: torch.Tensor) -> torch.Tensor:
    values: dict[Node, Any] = {chain.start: points}
    for node in chain.steps:
        for constant in node.all_input_nodes:
            if constant not in values:
                values[constant] = points.new_tensor(_fill_value(constant))
        values[node] = _value(node, values)
    result: torch.Tensor = values[chain.end]
    return result


def _value(node: Node, values: Mapping[Node, Any]) -> Any:
    if node.target in VIEWS or node.target in CASTS:
        return values[node.all_input_nodes[0]]
    look_up = functools.partial(_looked_up, values)
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), look_up)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _looked_up(values: Mapping[Node, Any], node: Node) -> Any:
    return values[node]


def _fill_value(constant: Node) -> Any:
    return constant.args[1 if constant.target is aten.full.default else 0]
