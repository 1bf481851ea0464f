"""Tune matmuls on the GPU here and compare each winner with the vendor call, in turns in one final round.

    scripts/gpu-bench matmul --out matmul.json                             the sixteen of the spine
    scripts/gpu-bench matmul --all --trials 32 --out matmul.json           everything in core and extra
    scripts/gpu-bench matmul --all --inductor 60 --out matmul.json --keep matmul.json --resume    what is missing
    python benchmarks/run_matmul.py --plot matmul.json matmul_roofline.svg     the plot again

What a row says: tuned_rows.py.
"""

from __future__ import annotations

import tuned_rows
from inductor_job import comparable
from problems import Entry, group, load_matmul

from kernelwright.types import Workload

QUANTISED = ("fp8", "int8", "w4a16")
"""Groups that are not part of "float" in the summary."""

SIXTEEN = (
    "square 4096",
    "prefill up/gate, compute bound",
    "70B down proj",
    "synthetic square 8192",
    "decode M=1",
    "decode M=1 lm_head",
    "decode M=8",
    "llama70b tp8 qkv T16",
    "router",
    "gpt2 vocab unpadded",
    "odd all dims",
    "odd K",
    "odd N",
    "vocab 30522",
    "tall K",
    "tall K tiny",
)
"""Tags of the workloads that the spine is judged by: compute-bound, skinny, unaligned, tall K."""


def part_of(workload: Workload) -> tuple[str, ...]:
    """ "float" for what is not quantised."""
    return () if group(workload) in QUANTISED else ("float",)


FAMILY = tuned_rows.Family("matmul", group, part_of, comparable)


def chosen(everything: bool, only: str, groups: str = "") -> list[Entry]:
    """The entries to run, those of the spine first."""
    found = {entry.workload.key: entry for name in ("core", "extra") for entry in load_matmul(name)}
    entries = sorted(found.values(), key=lambda e: SIXTEEN.index(e.tag) if e.tag in SIXTEEN else len(SIXTEEN))
    if only or groups:
        return tuned_rows.named(entries, FAMILY, only, groups)
    return entries if everything else [entry for entry in entries if entry.tag in SIXTEEN]


def main() -> None:
    """The command line."""
    description = (__doc__ or "").splitlines()[0]
    tuned_rows.run(FAMILY, lambda args: chosen(args.all, args.only, args.groups), description)


if __name__ == "__main__":
    main()
