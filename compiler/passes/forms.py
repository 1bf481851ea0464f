"""Putting one form of ours into a piece of a graph that stands by itself."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator, Sequence

from torch.fx import Graph, Node

from kernelwright.compiler.passes.attention import Attentions
from kernelwright.compiler.passes.candidate import Candidate, Finder
from kernelwright.compiler.passes.convolution import Convolutions
from kernelwright.compiler.passes.products import Products
from kernelwright.compiler.passes.siblings import Siblings
from kernelwright.errors import UsageError
from kernelwright.pieces import option_key
from kernelwright.search.answer import Answer
from kernelwright.types import DeviceSpec, Schedule, Workload

FINDERS: tuple[Finder, ...] = (Products(), Convolutions(), Attentions())
"""All that know a kind of operator."""

_log = logging.getLogger(__name__)

ONE, MERGED, GATED = "one", "merged", "gated"


@dataclasses.dataclass(frozen=True)
class Option:
    """A schedule of a workload that could take over a place, on a device.

    kind: ONE, an operator and the steps behind it; MERGED, sibling products as one; GATED, two of them as a SwiGLU.
    schedule: None for the library's product, where products are merged.
    """

    workload: Workload
    schedule: Schedule | None
    device: DeviceSpec
    kind: str = ONE

    @property
    def key(self) -> str:
        """The key that its time is filed under."""
        return option_key(self.kind, self.workload.key, "" if self.schedule is None else self.schedule.key)


def put_in(graph: Graph, anchors: Sequence[Node], option: Option) -> None:
    """Replace that form of the anchor which has the option's workload, or merge the anchors; UsageError where there is
    none."""
    if option.kind != ONE:
        Siblings(tuple(anchors)).replace(graph, option.schedule, option.kind == GATED, whole=False)
        return
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
            for _, forms in places_of(finder, node):
                yield from forms


def places_of(finder: Finder, node: Node) -> list[tuple[str, list[Candidate]]]:
    """`Finder.places`; none where they cannot be found by an error of ours, which costs no other node its kernel."""
    try:
        return [(name, list(forms)) for name, forms in finder.places(node)]
    except Exception as error:
        _log.warning("%s is left to Inductor by an error of ours: %s", node.name, error, exc_info=True)
        return []


def merging_options(group: Siblings, answers: Callable[[Workload], Answer], how: Collection[str]) -> list[Option]:
    """The ways to make one product of siblings: the library's, and ours by answers of the kinds that are trusted."""
    found = []
    for kind, workload in wider_workloads(group):
        answer = answers(workload)
        if kind == MERGED:
            found.append(Option(workload, None, answer.device, kind))
        if answer.schedule is not None and answer.how in how:
            found.append(Option(workload, answer.schedule, answer.device, kind))
    return found


def wider_workloads(group: Siblings) -> list[tuple[str, Workload]]:
    """What siblings come to as one product, by kind."""
    kinds = (MERGED, GATED) if group.gate() is not None else (MERGED,)
    try:
        return [(kind, group.workload(kind == GATED)) for kind in kinds]
    except UsageError:
        return []
