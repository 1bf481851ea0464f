"""run_conv2d: which convolutions it runs, and how they are summed up."""

from __future__ import annotations

from collections import Counter

import run_conv2d


def test_forward_alone_or_everything_is_chosen() -> None:
    forward, everything = run_conv2d.chosen(False, ""), run_conv2d.chosen(True, "")
    assert len(forward) == 39 and len({entry.id for entry in everything}) == len(everything) > 100
    groups = Counter(run_conv2d.group(entry.workload) for entry in everything)
    assert set(groups) == {"forward", "epilogue", "dgrad", "wgrad", "transposed"}
    kinds = Counter(name for entry in forward for name in run_conv2d.part_of(entry.workload))
    assert kinds["dense3x3"] == 12 and kinds["depthwise"] == 5 and kinds["stem"] == 4
    assert {run_conv2d.group(e.workload) for e in run_conv2d.chosen(False, "", "wgrad")} == {"wgrad"}
    assert [entry.tag for entry in run_conv2d.chosen(False, "31x31")] == ["depthwise 31x31"]
