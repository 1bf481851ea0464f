"""Puts our kernels in the place of products, convolutions and attentions, with the pointwise steps behind them, where
they are faster.

The pass runs on the graphs that AOTAutograd made, forward and backward together, so gradients of products need no rules
of ours; and before Inductor pads unaligned operands, which would hide the shapes that the records know.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from kernelwright.compiler import lowering
from kernelwright.compiler.dispatch import Prepared
from kernelwright.compiler.operands import is_static
from kernelwright.compiler.passes import dynamic_rows, open_sizes
from kernelwright.compiler.passes.candidate import Candidate, Finder, value_of
from kernelwright.compiler.passes.constant_mask import simplify_masks
from kernelwright.compiler.passes.copies import drop_copies
from kernelwright.compiler.passes.folds import gather_folds
from kernelwright.compiler.passes.forms import (
    FINDERS,
    GATED,
    Option,
    forms_of,
    merging_options,
    places_of,
    wider_workloads,
)
from kernelwright.compiler.passes.in_place import InPlace, judged, merged, wanted_groups, wanted_pieces
from kernelwright.compiler.passes.records import Records
from kernelwright.compiler.passes.rival import shorter_forms
from kernelwright.compiler.passes.siblings import Siblings, siblings
from kernelwright.compiler.pieces import Pieces, WantedPiece
from kernelwright.compiler.report import Decision, Report
from kernelwright.compiler.tuning import Tuning
from kernelwright.errors import UsageError
from kernelwright.search.answer import Answer
from kernelwright.types import Workload

CPP_WRAPPER = "torch's C++ wrapper takes neither quotes in what an operator is told nor a list of one result"

OPEN_SIZES = "its sizes are not known before it runs"

_log = logging.getLogger(__name__)


class Replace(CustomGraphPass):
    """The pass. `answers` says what is fastest for a workload; None means that nothing is known.

    how: the kinds of answer that are trusted (see `kernelwright.search.answer`). devices: torch device types.
    state: identifies everything that the answers depend on; None keeps compiled graphs out of Inductor's cache.
    chosen: told the answers whose kernels a graph got.
    """

    def __init__(
        self,
        answers: Callable[[Workload], Answer],
        *,
        how: Collection[str] = ("measured",),
        devices: Collection[str] = ("cuda",),
        state: str | None = None,
        report: Report | None = None,
        pieces: Pieces | None = None,
        chosen: Callable[[Sequence[Answer]], object] | None = None,
    ) -> None:
        self._answers = answers
        self._tell = chosen
        self._chosen: list[Answer] = []
        self._how = tuple(how)
        self._devices = tuple(devices)
        self._state = state
        self._report = report or Report()
        self._in_place = InPlace(pieces)
        self._records = Records(answers, self._how, self._in_place)

    def __call__(self, graph: Graph) -> None:
        """Replace what is faster; an error of ours leaves the rest of the graph as it is, and is logged."""
        if inductor_config.cpp_wrapper and not V.aot_compilation:
            self._report.warnings.append(CPP_WRAPPER)
            _log.warning("products are left to Inductor: %s", CPP_WRAPPER)
            return
        try:
            lowering.register()
            self.simplify(graph)
            self._prepare(graph)
            self._in_place.look(lambda: self._places(graph), lambda: self.pieces(graph))
            self._merge(graph)
            for finder in FINDERS:
                for node in found_by(finder, graph):
                    self._report.decisions += self._decide(graph, finder, node)
            gather_folds(graph)
            if self._tell is not None:
                self._tell(self._chosen)
        except Exception as error:
            self._report.warnings.append(str(error))
            _log.warning("products are left to Inductor: %s", error, exc_info=True)

    def simplify(self, graph: Graph) -> None:
        """What is done to a graph before anything is looked for in it."""
        drop_copies(graph)
        simplify_masks(graph, self._devices)

    def __deepcopy__(self, memo: dict[int, Any]) -> Replace:
        """Itself: a copy that Inductor makes of its settings reports to the same place."""
        return self

    def uuid(self) -> Any:
        """What the outcome depends on besides the graph."""
        if self._state is None:
            return None
        # Whatever decides or runs what stands in a graph lies in this package.
        sources = sorted(str(path) for path in Path(__file__).resolve().parents[1].rglob("*.py"))
        return ("kernelwright.replace", get_hash_for_files(tuple(sources)), self._state, self._how, self._devices)

    def workloads(self, graph: Graph) -> Iterator[tuple[str, list[Workload], str]]:
        """Each place of a graph by name, with the workloads of its forms, the most inclusive first, and why there are
        none (or "")."""
        for finder in FINDERS:
            for node in found_by(finder, graph):
                reason = self.unfit(finder, node)
                if reason:
                    yield node.name, [], reason
                    continue
                for name, forms in places_of(finder, node):
                    yield name, *_workloads(forms)

    def pieces(self, graph: Graph) -> list[WantedPiece]:
        """The pieces of a simplified graph whose times would decide whether a kernel of ours belongs there."""
        places = (
            (node, (one for _, forms in places_of(finder, node) for one in self._promising(forms)))
            for finder in FINDERS
            for node in found_by(finder, graph)
            if not self.unfit(finder, node)
        )
        groups = ((group, self._merging(group)) for group in self.siblings(graph))
        return wanted_pieces(places) + wanted_groups(groups)

    def siblings(self, graph: Graph) -> list[Siblings]:
        """Products that could be one wider one. With freezing on, Inductor merges them itself; a package of
        AOTInductor holds every weight in a place of its own."""
        if inductor_config.freezing or V.aot_compilation:
            return []
        return siblings(graph, list(self._nodes(graph)))

    def wider_workloads(self, graph: Graph) -> list[Workload]:
        """The workloads of products that siblings could be."""
        return [workload for group in self.siblings(graph) for _, workload in wider_workloads(group)]

    def _merging(self, group: Siblings) -> list[Option]:
        return merging_options(group, self._answers, self._how)

    def _places(self, graph: Graph) -> list[Sequence[Node]]:
        """The operators that make up the pieces of a graph."""
        return [*((node,) for node in self._nodes(graph)), *(group.products for group in self.siblings(graph))]

    def _merge(self, graph: Graph) -> None:
        """Make one product of siblings where that was timed, and saves more than kernels of ours for each of them."""
        if not self._in_place.knows_any:
            return
        for group in self.siblings(graph):
            best = self._in_place.best_merged(group, self._merging(group))
            if best is None:
                continue
            option, times = best
            if times.theirs_us - times.ours_us[option.key] <= sum(map(self._saved_us, group.products)):
                continue
            try:
                group.replace(graph, option.schedule, option.kind == GATED)
            except UsageError as error:
                _log.debug("siblings stay apart: %s", error)
                continue
            name = "+".join(product.name for product in group.products)
            self._report.decisions.append(merged(name, option, times))
            self._chosen += [self._answers(option.workload)] if option.schedule is not None else []

    def _saved_us(self, product: Node) -> float:
        """What the best kernel of ours saves at a product by itself."""
        best = self._in_place.best(product, self._forms_of(product))
        if best is not None:
            _, answer, times = best
            return times.theirs_us - judged("", answer, times, True).expected_us  # type: ignore[operator]
        decision, winner = self._records.best(product, "", forms_of(product))
        known = winner is not None and decision.vendor_us is not None and decision.expected_us is not None
        return decision.vendor_us - decision.expected_us if known else 0.0  # type: ignore[operator]

    def _forms_of(self, node: Node) -> Iterator[tuple[Candidate, Answer]]:
        return self._promising(forms_of(node))

    def _promising(self, forms: Iterable[Candidate]) -> Iterator[tuple[Candidate, Answer]]:
        """The forms that a kernel of ours could take over by an answer that is trusted, with these answers."""
        for candidate in forms:
            try:
                answer = self._answers(candidate.workload())
            except UsageError:
                continue
            if answer.schedule is not None and answer.how in self._how and not candidate.obstacle():
                yield candidate, answer

    def _nodes(self, graph: Graph) -> Iterator[Node]:
        """The nodes that kernels of ours might take over."""
        return (n for finder in FINDERS for n in found_by(finder, graph) if not self.unfit(finder, n))

    def unfit(self, finder: Finder, node: Node) -> str:
        """Why a node is not ours at all, or ""."""
        nodes = (node, *node.all_input_nodes)
        values = [value for one in nodes for value in _tensors(one)]
        known = sum(bool(_tensors(one)) for one in nodes)
        if known < len(nodes):
            return "its shapes are not known"
        if not all(is_static(value) for value in values):
            return OPEN_SIZES
        devices = {value.device for value in values}
        if len(devices) > 1 or next(iter(devices)).type not in self._devices:
            return f"it runs on {', '.join(sorted(map(str, devices)))}"
        return finder.unfit(node)

    def _prepare(self, graph: Graph) -> None:
        """Tell the source of answers what it will be asked, if it wants to know, and what is to be tuned: of each place
        the form that takes in most."""
        if not isinstance(self._answers, Prepared | Tuning):
            return
        places = [forms for _, forms, _ in self.workloads(graph) if forms]
        wider = self.wider_workloads(graph)
        if isinstance(self._answers, Prepared):
            asked = [workload for forms in (*places, *self._open(graph), wider) for workload in forms]
            asked += [shorter for workload in asked for shorter in shorter_forms(workload)]
            self._answers.prepare(list(dict.fromkeys(asked)))
        if isinstance(self._answers, Tuning):
            self._answers.tune(Counter([*(forms[0] for forms in places), *wider]))

    def _open(self, graph: Graph) -> Iterator[list[Workload]]:
        """What will be asked of each place whose sizes only a call tells."""
        for finder in FINDERS:
            for node in found_by(finder, graph):
                if self.unfit(finder, node) == OPEN_SIZES:
                    place = open_sizes.place_of(node)
                    rows = dynamic_rows.has_open_rows(node)
                    yield dynamic_rows.workloads(node) if rows else place.workloads() if place is not None else []

    def _decide(self, graph: Graph, finder: Finder, node: Node) -> list[Decision]:
        unfit = self.unfit(finder, node)
        if unfit == OPEN_SIZES and dynamic_rows.has_open_rows(node):
            return [self._decide_rows(graph, node)]
        place = open_sizes.place_of(node) if unfit == OPEN_SIZES else None
        if place is not None:
            return [self._decide_open(graph, place)]
        if unfit:
            return [Decision(node.name, None, False, unfit)]
        return [self._decide_place(graph, node, name, forms) for name, forms in places_of(finder, node)]

    def _decide_rows(self, graph: Graph, node: Node) -> Decision:
        """A product whose rows only a call counts; it is ours for those numbers of rows at which ours wins."""
        if value_of(node).device.type not in self._devices:
            return Decision(node.name, None, False, f"it runs on {value_of(node).device}")
        answers = [self._answers(workload) for workload in dynamic_rows.workloads(node)]
        decisions = [self._records.judge(node.name, answer, node) for answer in answers]
        wins = [answer for answer, decision in zip(answers, decisions, strict=True) if decision.replaced]
        if not wins:
            return Decision(node.name, None, False, f"{OPEN_SIZES}, and no number of rows is known to be faster")
        dynamic_rows.replace(graph, node, wins)
        self._chosen += wins
        rows = ", ".join(str(answer.workload.dims["M"]) for answer in wins)
        best = next(decision for decision in decisions if decision.replaced)
        # a time saved cannot be told before the sizes are known
        return dataclasses.replace(best, reason=f"faster around {rows} rows", expected_us=None, vendor_us=None)

    def _decide_open(self, graph: Graph, place: open_sizes.Place) -> Decision:
        """An operator with a size that only a call tells; it is ours near those sizes at which ours wins."""
        name, value = place.node.name, value_of(place.value)
        if value.device.type not in self._devices:
            return Decision(name, None, False, f"it runs on {value.device}")
        answers = [self._answers(workload) for workload in place.workloads()]
        decisions = [self._records.judge(name, answer, place.value) for answer in answers]
        wins = [answer for answer, decision in zip(answers, decisions, strict=True) if decision.replaced]
        if not wins:
            return Decision(name, None, False, f"{OPEN_SIZES}, and no size is known to be faster")
        place.replace(graph, wins)
        self._chosen += wins
        best = next(decision for decision in decisions if decision.replaced)
        sizes = " and ".join(_differing(answer.workload, [one.workload for one in answers]) for answer in wins)
        return dataclasses.replace(best, reason=f"faster around {sizes}", expected_us=None, vendor_us=None)

    def _decide_place(self, graph: Graph, node: Node, name: str, forms: Sequence[Candidate]) -> Decision:
        """What was timed in its place counts, and where nothing was, or only of other kernels, what can be worked out
        from records."""
        best = self._in_place.best(node, self._promising(forms))
        if best is not None:
            candidate, answer, times = best
            candidate.replace(graph, answer)
            self._chosen.append(answer)
            return judged(name, answer, times, True)
        decision, winner = self._records.best(node, name, forms)
        if winner is not None:
            candidate, answer = winner
            candidate.replace(graph, answer)
            self._chosen.append(answer)
        return decision


def found_by(finder: Finder, graph: Graph) -> list[Node]:
    """The nodes that a finder knows: one group of its targets after the other, in the graph's order."""
    return [node for group in finder.targets for node in graph.nodes if node.target in group]


def _differing(workload: Workload, others: Sequence[Workload]) -> str:
    """The sizes of a workload that are not the same in all others, as text."""
    names = [name for name, size in workload.dims.items() if any(other.dims[name] != size for other in others)]
    return ", ".join(f"{name} {workload.dims[name]}" for name in names or workload.dims)


def _workloads(forms: Iterable[Candidate]) -> tuple[list[Workload], str]:
    found, reason = [], ""
    for candidate in forms:
        try:
            found.append(candidate.workload())
        except UsageError as error:
            reason = str(error)
    return found, "" if found else reason or "no form of it fits a kernel"


def _tensors(node: Node) -> list[FakeTensor]:
    """The fake tensors among a node's values; none where anything of it is not known."""
    value = node.meta.get("val")
    return [one for one in (value if isinstance(value, tuple | list) else (value,)) if isinstance(one, FakeTensor)]
