"""Is every conv2d template right on the GPU here? Sampled schedules of many workloads against fp64.

    scripts/gpu-bench check-conv2d --out check.json                         everything that a convolution can have
    scripts/gpu-bench check-conv2d --templates pointwise --only chain,fp32  one template, some workloads
    scripts/gpu-bench check-conv2d --sets core,core_gradients --per-template 40 --time

Prints and ends as check_matmul.py does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from check_matmul import main
from conv2d_cases import coverage
from conv2d_problems import load_conv2d
from verify_job import Case

SETS = ("coverage", "core", "core_gradients", "awkward", "awkward_gradients", "smoke")


def cases_of(sets: Sequence[str], only: str) -> list[Case]:
    """The cases of the sets whose id, tag or text has one of the words in it, each workload once."""
    found: list[Case] = []
    for name in sets:
        if name == "coverage":
            found += coverage()
            continue
        problems, _, gradients = name.partition("_")
        directions = ("input_gradient", "weight_gradient") if gradients else ("forward",)
        found += [Case(entry.id, entry.tag, entry.workload) for entry in load_conv2d(problems, directions)]
    words = [word for word in only.split(",") if word]
    texts = {case.id: f"{case.id} {case.tag} {case.workload}" for case in found}
    kept = [case for case in found if not words or any(word in texts[case.id] for word in words)]
    return list({case.workload.key: case for case in reversed(kept)}.values())[::-1]


if __name__ == "__main__":
    sys.exit(main("conv2d", SETS, cases_of))
