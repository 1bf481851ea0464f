"""The workloads of models of benchmarks/models as one list for `kernelwright tune --workloads`.

    python benchmarks/list_workloads.py llama_block gpt2 resnet50 bert:training > all.jsonl
    kernelwright tune --workloads all.jsonl --device cuda --devices 4 --seconds 140 --worth 0 --db sqlite:///models.db

Each model weighs the same, a training step TRAINING of that; a workload of several models counts for all of them.
Models are looked through without data (hide the GPU by CUDA_VISIBLE_DEVICES="").
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from model_run import target_of

from kernelwright.compiler.collect import collect_file
from kernelwright.errors import UsageError
from kernelwright.kernels import get_operator
from kernelwright.kernels.device import named_device
from kernelwright.kernels.operator import roofline_us
from kernelwright.types import DeviceSpec, Workload

TRAINING = 0.4
STEP_US = 1e4
"""What a step of each model is taken to last, in microseconds."""

LAUNCH_US = 4.0
"""The least that a kernel takes."""

ROOFLINE_SHARE = 0.6


def listed(names: Sequence[str], device: DeviceSpec) -> list[dict[str, Any]]:
    """Entries {"workload", "calls"} of all models, calls as weights."""
    entries: dict[str, dict[str, Any]] = {}
    for name in names:
        found, _ = collect_file(target_of(name))
        times = [entry["calls"] * expected_us(Workload.from_json(entry["workload"]), device) for entry in found]
        scale = STEP_US / sum(times) * (TRAINING if name.endswith(":training") else 1.0)
        for entry in found:
            key = Workload.from_json(entry["workload"]).key
            kept = entries.setdefault(key, {"workload": entry["workload"], "calls": 0.0})
            kept["calls"] = round(kept["calls"] + entry["calls"] * scale, 4)
    return list(entries.values())


def expected_us(workload: Workload, device: DeviceSpec) -> float:
    """About what a call takes."""
    try:
        return max(LAUNCH_US, roofline_us(get_operator(workload.operator), workload, device) / ROOFLINE_SHARE)
    except UsageError:
        return 2 * LAUNCH_US


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", help="in benchmarks/models; NAME:FUNCTION for a variant")
    parser.add_argument("--hardware", default="h200", help="name of the GPU that they are weighed for")
    args = parser.parse_args()
    for entry in listed(args.models, named_device(args.hardware)):
        print(json.dumps(entry))


if __name__ == "__main__":
    main()
