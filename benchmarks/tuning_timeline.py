"""Where the seconds of a search go: the steps that its processes told, as lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from kernelwright.kernels.steps import Step


def lines(steps: Iterable[Step], began: float, ended: float, parent: int) -> list[str]:
    """One line a step, by when it began: from, to, seconds, where, what. Times count from `began`.

    parent: the process that searches; the others are numbered as they come up. Steps overlap, also within a process.
    """
    inside = sorted((step for step in steps if step.ended >= began and step.began <= ended), key=lambda s: s.began)
    numbers = {parent: "search"}
    found = ["  from     to  seconds  process     step"]
    for step in inside:
        where = numbers.setdefault(step.process, f"child {len(numbers)}")
        at, to = step.began - began, step.ended - began
        found.append(f"{at:6.2f} {to:6.2f} {to - at:8.3f}  {where:10}  {step.name}")
    return [*found, f"{ended - began:6.2f}  stored"]


def summary(steps: Iterable[Step], began: float, ended: float) -> list[str]:
    """One line a kind of step: how often, the longest, all together, and when the last one ended."""
    groups: dict[str, list[Step]] = {}
    for step in steps:
        if step.ended >= began and step.began <= ended:
            groups.setdefault(step.name, []).append(step)
    found = ["  last  longest     all  count  step"]
    for name, group in sorted(groups.items(), key=lambda pair: max(step.ended for step in pair[1])):
        spans = [step.ended - step.began for step in group]
        last = max(step.ended for step in group) - began
        found.append(f"{last:6.2f} {max(spans):8.3f} {sum(spans):7.2f} {len(group):6}  {name}")
    return [*found, f"{ended - began:6.2f}  stored"]


def tell(path: Path, title: str, steps: Sequence[Step], began: float, ended: float, parent: int) -> None:
    """Print the summary, and add all steps to a file."""
    print("\n".join([title, *summary(steps, began, ended)]), flush=True)
    with path.open("a", encoding="utf-8") as file:
        file.write("\n".join([title, *lines(steps, began, ended, parent), "", ""]))
