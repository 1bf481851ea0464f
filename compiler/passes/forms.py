"""Putting one form of ours into a piece of a graph that stands by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from torch.fx import Graph, Node

from kernelwright.compiler.passes.attention import Attentions
from kernelwright.compiler.passes.candidate import Candidate, Finder
from kernelwright.compiler.passes.convolution import Convolutions
from kernelwright.compiler.passes.products import Products
from kernelwright.errors import UsageError
from kernelwright.pieces import option_key
from kernelwright.search.answer import Answer
from kernelwright.types import DeviceSpec, Schedule, Workload

FINDERS: tuple[Finder, ...] = (Products(), Convolutions(), Attentions())
"""All that know a kind of operator."""


@dataclasses.dataclass(frozen=True)
class Option:
    """A schedule of a workload that could take over a place, on a device."""

    workload: Workload
    schedule: Schedule
    device: DeviceSpec
    kind: str = "one"

    @property
    def key(self) -> str:
        """The key that its time is filed under."""
        return option_key(self.kind, self.workload.key, self.schedule.key)


def put_in(graph: Graph, anchors: Sequence[Node], option: Option) -> None:
    """Replace that form of the anchor which has the option's workload; UsageError where there is none."""
    for candidate in forms_of(anchors[0]):
        try:
            workload = candidate.workload()
        except UsageError:
            continue
        if workload == option.workload and not candidate.obstacle():
            answer = Answer("measured", workload, option.device, option.schedule, "kernel")
            candidate.replace(graph, answer)
            return
    raise UsageError(f"the piece has no form that is {option.workload}")


def forms_of(node: Node) -> Iterator[Candidate]:
    """All forms in which kernels could take over an operator."""
    for finder in FINDERS:
        if any(node.target in group for group in finder.targets):
            for _, forms in finder.places(node):
                yield from forms
