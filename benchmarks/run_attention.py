"""Tune attentions on the GPU here and compare each winner with torch's fastest call, in turns in one final round.

    scripts/gpu-bench attention --out attention.json                 the core set
    scripts/gpu-bench attention --all --out attention.json           extra problems too: paged and packed
    scripts/gpu-bench attention --groups decode,backward --out attention.json --keep attention.json --resume

What a row says: tuned_rows.py.
"""

from __future__ import annotations

import tuned_rows
from attention_problems import group, load_attention
from problems import Entry

from kernelwright.types import Workload


def part_of(workload: Workload) -> tuple[str, ...]:
    """Forwards by the width of their heads; the other groups as they are."""
    return (f"d{workload.dims['D']}",) if group(workload) == "forward" else ()


FAMILY = tuned_rows.Family("attention", group, part_of)


def chosen(everything: bool, only: str, groups: str = "") -> list[Entry]:
    """The entries to run: the core set, or `everything`."""
    sets = ("core", "extra") if everything or groups else ("core",)
    entries = [entry for name in sets for entry in load_attention(name)]
    return tuned_rows.named(list({entry.workload.key: entry for entry in entries}.values()), FAMILY, only, groups)


def main() -> None:
    """The command line."""
    description = (__doc__ or "").splitlines()[0]
    tuned_rows.run(FAMILY, lambda args: chosen(args.all, args.only, args.groups), description)


if __name__ == "__main__":
    main()
