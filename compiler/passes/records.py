"""What records say of a place in a graph: whether a kernel of ours takes it over, and in which form."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable

from torch.fx import Node

from kernelwright.compiler.passes.candidate import Candidate
from kernelwright.compiler.passes.in_place import InPlace, judged
from kernelwright.compiler.passes.rival import behind_us, rival_us, shorter_forms
from kernelwright.compiler.report import Decision
from kernelwright.errors import UsageError
from kernelwright.search.answer import Answer
from kernelwright.types import Workload

ENOUGH = 0.99
"""Our time must be below this share of the rival's: what is equal stays as it is."""

TIMED = ("measured", "stale")
"""Kinds of answer whose time was taken on the workload itself."""


class Records:
    """Judges by records. how: the kinds of answers that are trusted. in_place: what was timed in its place, and lost
    there, is out."""

    def __init__(self, answers: Callable[[Workload], Answer], how: Collection[str], in_place: InPlace) -> None:
        self._answers, self._how, self._in_place = answers, how, in_place

    def best(
        self, node: Node, name: str, forms: Iterable[Candidate]
    ) -> tuple[Decision, tuple[Candidate, Answer] | None]:
        """What records say of a place, with the form that a kernel of ours takes over: of those that win the longest,
        or, where it was timed, of all that were the one with which all its steps are done soonest."""
        decision = Decision(name, None, False, "no form of it fits a kernel")
        winners: list[tuple[Candidate, Answer, Decision]] = []
        longest: tuple[Workload, Node] | None = None
        for candidate in forms:
            try:
                workload = candidate.workload()
            except UsageError as error:
                decision = Decision(name, None, False, str(error)) if decision.workload is None else decision
                continue
            longest = longest or (workload, candidate.end)
            answer = self._answers(workload)
            lost = self._in_place.times(node, answer)
            if lost is not None:
                decision = judged(name, answer, lost, False)
                continue
            decision = self.judge(name, answer, candidate.end)
            obstacle = candidate.obstacle() if decision.replaced else ""
            if obstacle:
                decision = dataclasses.replace(decision, replaced=False, reason=obstacle)
            if decision.replaced:
                winners.append((candidate, answer, decision))
        if not winners or longest is None:
            return decision, None
        whole, end = longest

        def done_us(one: tuple[Candidate, Answer, Decision]) -> float:
            _, answer, _ = one
            own = answer.expected_us if answer.expected_us is not None and answer.how in TIMED else math.inf
            return own + behind_us(answer.workload, whole, end, answer.device)

        best = winners[0] if math.isinf(done_us(winners[0])) else min(winners, key=done_us)
        candidate, answer, decision = best
        return decision, (candidate, answer)

    def judge(self, name: str, answer: Answer, end: Node) -> Decision:
        """Whether an answer's kernel is worth its place, where it gives the value of `end`."""
        rival = self._rival_us(answer, end)
        wins = answer.choice == "kernel" and answer.how in self._how and answer.schedule is not None
        if wins and rival is not None and answer.expected_us is not None and answer.expected_us > ENOUGH * rival:
            wins, reason = False, f"{answer.how}: faster than {answer.vendor}, but not than what Inductor makes of it"
        elif wins:
            reason = f"{answer.how}: faster than {answer.vendor or 'any library call'}"
        elif answer.choice == "kernel":
            reason = f"an answer that is {answer.how} is not trusted here"
        else:
            reason = answer.note or f"{answer.how}: {answer.vendor or 'the library call'} is as fast"
        return Decision(name, answer.workload, wins, reason, answer.schedule, answer.expected_us, rival)

    def _rival_us(self, answer: Answer, end: Node) -> float | None:
        """Microseconds of what would run instead of our kernel, which gives the value of `end`."""
        asked = shorter_forms(answer.workload) if answer.choice == "kernel" else []
        shorter = [one for one in map(self._answers, asked) if one.how in self._how]
        return rival_us(answer, end, shorter)
