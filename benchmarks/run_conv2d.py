"""Tune convolutions on the GPU here and compare each winner with cuDNN's fastest call, in turns in one final round.

    scripts/gpu-bench conv2d --out conv2d.json                    forward, of the core set
    scripts/gpu-bench conv2d --all --out conv2d.json              its gradients too
    scripts/gpu-bench conv2d --all --groups dgrad,wgrad --out conv2d.json --keep conv2d.json --resume

What a row says: tuned_rows.py. `kind` tells dense 3x3, pointwise, stem, depthwise and so on; the summary has both.
"""

from __future__ import annotations

import tuned_rows
from conv2d_problems import group, kind, load_conv2d
from problems import Entry

from kernelwright.kernels.conv2d.workload import DIRECTIONS
from kernelwright.types import Workload


def part_of(workload: Workload) -> tuple[str, ...]:
    """The kind of a forward convolution; the gradients of all kinds together."""
    direction = workload.attributes.get("direction", "forward")
    return (kind(workload),) if direction == "forward" else ("gradients",)


FAMILY = tuned_rows.Family("conv2d", group, part_of)


def chosen(everything: bool, only: str, groups: str = "") -> list[Entry]:
    """The entries to run: forward alone, or `everything`."""
    entries = load_conv2d("core", DIRECTIONS if everything or groups else DIRECTIONS[:1])
    return tuned_rows.named(list({entry.workload.key: entry for entry in entries}.values()), FAMILY, only, groups)


def main() -> None:
    """The command line."""
    description = (__doc__ or "").splitlines()[0]
    tuned_rows.run(FAMILY, lambda args: chosen(args.all, args.only, args.groups), description)


if __name__ == "__main__":
    main()
