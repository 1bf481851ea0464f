"""Decides by times that were taken in place: of a piece of the graph as a whole, with our kernel in it and without."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from torch.fx import Node

from kernelwright.compiler.passes.candidate import Candidate
from kernelwright.compiler.passes.forms import Option
from kernelwright.compiler.passes.siblings import Siblings
from kernelwright.compiler.piece import Piece, piece_of
from kernelwright.compiler.pieces import Pieces, WantedPiece
from kernelwright.compiler.report import Decision
from kernelwright.errors import UsageError
from kernelwright.pieces import PieceTimes
from kernelwright.search.answer import Answer

NEAR = 1.1
"""What takes at most so many times as long as the vendor's call by itself is tried in its place."""

MOST_OPTIONS = 4
"""Forms of one operator that are tried: those that take in most."""

Promising = Iterable[tuple[Candidate, Answer]]

_log = logging.getLogger(__name__)


class InPlace:
    """What is known of the pieces of one graph at a time. pieces: None where nothing is known of any."""

    def __init__(self, pieces: Pieces | None) -> None:
        self._pieces = pieces
        self._times: dict[tuple[Node, ...], PieceTimes] = {}

    @property
    def knows_any(self) -> bool:
        """Whether any piece of the graph was timed."""
        return bool(self._times)

    def look(self, places: Callable[[], Iterable[Sequence[Node]]], wanted: Callable[[], list[WantedPiece]]) -> None:
        """Find the pieces of a graph that nothing was replaced in yet, after what is wanted was measured, if it is.
        places: the operators that make up each. A failure is logged, and leaves the records in charge."""
        self._times = {}
        if self._pieces is None:
            return
        try:
            self._pieces.measure(wanted)
            found = [(tuple(nodes), _piece(nodes)) for nodes in places()]
            times = {nodes: self._pieces(piece.key) for nodes, piece in found if piece is not None}
        except Exception as error:
            _log.warning("pieces of a graph are not looked at: %s", error, exc_info=True)
            return
        self._times = {nodes: known for nodes, known in times.items() if known is not None}

    def times(self, node: Node, answer: Answer) -> PieceTimes | None:
        """The times of the piece around a node, if what the answer says was tried there."""
        times = self._times.get((node,))
        option = _option(answer)
        return times if times is not None and option is not None and times.knows(option.key) else None

    def best(self, node: Node, promising: Promising) -> tuple[Candidate, Answer, PieceTimes] | None:
        """The form that made the piece around a node fastest; None where none did, or nothing was timed."""
        times = self._times.get((node,))
        if times is None:
            return None
        found = [(candidate, answer, option) for candidate, answer in promising if (option := _option(answer))]
        winners = [one for one in found if times.wins(one[2].key)]
        if not winners:
            return None
        candidate, answer, _ = min(winners, key=lambda one: times.ours_us[one[2].key])
        return candidate, answer, times

    def best_merged(self, group: Siblings, options: Iterable[Option]) -> tuple[Option, PieceTimes] | None:
        """The way of merging siblings that made their piece fastest; None where none did, or nothing was timed."""
        times = self._times.get(group.products)
        if times is None:
            return None
        winners = [option for option in options if times.wins(option.key)]
        return (min(winners, key=lambda one: times.ours_us[one.key]), times) if winners else None


def merged(name: str, option: Option, times: PieceTimes) -> Decision:
    """The decision to make one product of siblings."""
    how = "the library's" if option.schedule is None else "our"
    reason = f"measured in place ({times.text}): faster as one wider product by {how} kernel"
    us = (times.ours_us[option.key], times.theirs_us)
    return Decision(name, option.workload, True, reason, option.schedule, *us)


def judged(name: str, answer: Answer, times: PieceTimes, wins: bool) -> Decision:
    """The decision that the times of a piece lead to."""
    option = _option(answer)
    assert option is not None
    ours = times.ours_us.get(option.key)
    if ours is None:
        reason = f"measured in place: {times.failures[option.key]}"
    else:
        compared = "faster than Inductor's own" if wins else "no faster than Inductor's own"
        reason = f"measured in place ({times.text}): {compared}"
    return Decision(name, answer.workload, wins, reason, answer.schedule, ours, times.theirs_us or None)


def wanted_pieces(places: Iterable[tuple[Node, Promising]]) -> list[WantedPiece]:
    """The pieces that are worth timing, each once: where a kernel of ours takes in steps behind its operator that
    Inductor would fuse otherwise. A bare operator was compared with the same call already."""
    found: dict[Piece, dict[str, Option]] = {}
    calls: dict[Piece, int] = {}
    for node, promising in places:
        options = [option for _, answer in promising if _is_near(answer) and (option := _option(answer)) is not None]
        piece = _piece([node]) if any(option.workload.epilogue for option in options) else None
        if piece is not None:
            found.setdefault(piece, {}).update({option.key: option for option in options[:MOST_OPTIONS]})
            calls[piece] = calls.get(piece, 0) + 1
    return [WantedPiece(piece, options, calls[piece]) for piece, options in found.items()]


def _is_near(answer: Answer) -> bool:
    if answer.expected_us is None or answer.vendor_us is None:
        return answer.choice == "kernel"
    return answer.choice == "kernel" or answer.expected_us <= NEAR * answer.vendor_us


def _option(answer: Answer) -> Option | None:
    return None if answer.schedule is None else Option(answer.workload, answer.schedule, answer.device)


def wanted_groups(groups: Iterable[tuple[Siblings, list[Option]]]) -> list[WantedPiece]:
    """The pieces of siblings that could be merged, each once."""
    found: dict[Piece, WantedPiece] = {}
    for group, options in groups:
        piece = _piece(group.products) if options else None
        if piece is not None:
            calls = found[piece].calls + 1 if piece in found else 1
            found[piece] = WantedPiece(piece, {option.key: option for option in options}, calls)
    return list(found.values())


def _piece(nodes: Sequence[Node]) -> Piece | None:
    try:
        return piece_of(nodes)
    except UsageError as error:
        _log.debug("%s makes no piece: %s", nodes[0].name, error)
        return None
