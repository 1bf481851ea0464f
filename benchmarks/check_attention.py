"""Is every attention template right on the GPU here? Sampled schedules of many workloads against fp64.

    scripts/gpu-bench check-attention --out check.json                            everything that an attention can have
    scripts/gpu-bench check-attention --templates forward_warp_specialized --only ragged,window
    scripts/gpu-bench check-attention --sets core,extra,awkward --per-template 20 --time

Prints and ends as check_matmul.py does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from attention_cases import coverage
from attention_problems import load_attention
from check_matmul import main
from verify_job import Case

SETS = ("coverage", "core", "extra", "awkward", "smoke")


def cases_of(sets: Sequence[str], only: str) -> list[Case]:
    """The cases of the sets whose id, tag or text has one of the words in it, each workload once."""
    found: list[Case] = []
    for name in sets:
        if name == "coverage":
            found += coverage()
            continue
        for entry in load_attention(name):
            tensors = entry.tensors or {}
            fills = {side: "large" for side, tensor in tensors.items() if tensor["fill"] == "large"}
            found.append(Case(entry.id, entry.tag, entry.workload, fills))
    words = [word for word in only.split(",") if word]
    texts = {case.id: f"{case.id} {case.tag} {case.workload}" for case in found}
    kept = [case for case in found if not words or any(word in texts[case.id] for word in words)]
    return list({(case.workload.key, bool(case.fills)): case for case in reversed(kept)}.values())[::-1]


if __name__ == "__main__":
    sys.exit(main("attention", SETS, cases_of))
