"""The convolutions of the problem sets under workloads/, read as Workloads.

Command line: `python benchmarks/conv2d_problems.py core` lists a set, and what was left out of it and why; with
`--directions forward,input_gradient,weight_gradient` also the gradients of its convolutions.
`python benchmarks/conv2d_problems.py core --jsonl | kernelwright record --workloads -` records them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from problems import FLOATS, NOT_AT_INFERENCE, Entry, Skipped

from kernelwright.errors import InvalidWorkload
from kernelwright.kernels.conv2d.layout import Sizes, dense_strides
from kernelwright.kernels.conv2d.workload import DIRECTIONS, conv2d_workload, problem_of
from kernelwright.types import Workload

FOLDER = Path(__file__).resolve().parent / "workloads"

SETS = ("core", "awkward", "smoke")

STEPS: Mapping[str, tuple[str, ...]] = {"bn": ("scale_vec", "bias"), "residual_add": ("residual",)}
"""Epilogue steps that the files call otherwise than workloads do; a batch norm is folded."""

TRACED_GRADIENTS = {"conv2d_bwd_data": "input_gradient", "conv2d_bwd_weight": "weight_gradient"}

LAYOUTS = {"channels_last": "nhwc", "either": "nhwc", "nchw": "nchw"}

LARGE_KERNEL = 7
"""Taps along one axis from which a kernel counts as large, and strides of a stem."""


def load_conv2d(name: str, directions: Sequence[str] = ("forward",)) -> list[Entry]:
    """The convolutions of the set `name`, in the file's order, in each of the directions; transposed ones forward."""
    return [entry for entry in _read_all(name, directions) if isinstance(entry, Entry)]


def skipped_conv2d(name: str) -> list[Skipped]:
    """Those convolutions of the set that cannot be run, each with the reason."""
    return [entry for entry in _read_all(name, ("forward",)) if isinstance(entry, Skipped)]


def group(workload: Workload) -> str:
    """The group under which results are summed up: dgrad, wgrad, transposed, epilogue or forward."""
    p = problem_of(workload)
    if p.direction != "forward":
        return {"input_gradient": "dgrad", "weight_gradient": "wgrad"}[p.direction]
    return "transposed" if p.transposed else "epilogue" if p.epilogue else "forward"


def kind(workload: Workload) -> str:
    """What sort of convolution it is; the first that fits of depthwise, grouped, stem (C up to 4), dilated, pointwise,
    large_kernel, dense3x3, dense."""
    p = problem_of(workload)
    kinds = {
        "depthwise": p.depthwise,
        "grouped": p.groups > 1,
        "stem": p.c <= 4,
        "dilated": max(p.dilation) > 1,
        "pointwise": (p.r, p.s) == (1, 1),
        "large_kernel": max(p.r, p.s) >= LARGE_KERNEL,
        "dense3x3": (p.r, p.s) == (3, 3),
    }
    return next((name for name, fits in kinds.items() if fits), "dense")


def _read_all(name: str, directions: Sequence[str]) -> list[Entry | Skipped]:
    if name not in SETS:
        raise ValueError(f"problem set must be one of {', '.join(SETS)}, got {name!r}")
    data = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    rows = [problem for problem in data["problems"] if problem["family"] == "conv2d"]
    return [_read(problem, direction) for problem in rows for direction in _directions(problem, directions)]


def _directions(problem: Mapping[str, Any], wanted: Sequence[str]) -> Sequence[str]:
    """A gradient that was traced is read as that; of a transposed convolution there is only the forward direction."""
    if problem["op"] in TRACED_GRADIENTS:
        return [TRACED_GRADIENTS[problem["op"]]]
    return [direction for direction in wanted if direction == "forward" or not problem["transposed"]]


def _read(problem: Mapping[str, Any], direction: str) -> Entry | Skipped:
    id, tag = problem["id"], problem.get("tag") or problem["why"]
    steps = problem.get("epilogue", []) if direction == "forward" else []
    epilogue = tuple(part for step in steps if step not in NOT_AT_INFERENCE for part in STEPS.get(step, (step,)))
    dropped = tuple(step for step in steps if step in NOT_AT_INFERENCE)
    try:
        workload = conv2d_workload(
            (problem["N"], problem["C"], problem["H"], problem["W"]),
            problem["K"],
            (problem["R"], problem["S"]),
            FLOATS[problem["dtype"]],
            epilogue=epilogue,
            stride=tuple(problem["stride"]),
            padding=tuple(problem["padding"]),
            dilation=tuple(problem["dilation"]),
            groups=problem["groups"],
            transposed=problem["transposed"],
            output_padding=tuple(problem["output_padding"]),
            direction=direction,
            layouts=_layouts(problem, direction),
        )
    except InvalidWorkload as error:
        return Skipped(id, tag, str(error))
    suffix = "" if direction == "forward" or problem["op"] in TRACED_GRADIENTS else f"_{direction}"
    return Entry(id + suffix, tag, workload, dropped, problem.get("tensors"))


def _layouts(problem: Mapping[str, Any], direction: str) -> dict[str, str]:
    """Layouts of x, w and out; out is channels_last where x or w is, as cuDNN writes it."""
    found = {}
    for name, side in (("x", "in"), ("w", "w")):
        named = problem[f"{side}_layout"]
        tensor = (problem.get("tensors") or {}).get(name)
        strides = tensor["stride"] if tensor else problem.get(f"{name}_stride")
        if tensor or named == "strided":
            found[name] = layout_of(_sizes(problem, name), strides, tensor["offset"] if tensor else 0)
        else:
            found[name] = LAYOUTS[named]
    if direction == "input_gradient" and found["x"].startswith("strided:0"):
        # a gradient needs a place of its own for every image
        found["x"] = "nhwc"
    last = any(text.startswith("nhwc") or text.split(",")[1:2] == ["1"] for text in found.values())
    return {**found, "out": "nhwc" if last else "nchw"}


def _sizes(problem: Mapping[str, Any], name: str) -> Sizes:
    if problem.get("tensors"):
        first, second, third, fourth = problem["tensors"][name]["shape"]
        return first, second, third, fourth
    return problem["N"], problem["C"], problem["H"], problem["W"]


def layout_of(sizes: Sizes, strides: Sequence[int], offset: int) -> str:
    """The layout's text for a 16-bit tensor with these strides whose base is `offset` elements into its buffer."""
    misses = f"+{offset % 8}" if offset % 8 else ""
    for order in ("nhwc", "nchw"):
        pairs = zip(sizes, strides, dense_strides(order, sizes), strict=True)
        if all(size == 1 or stride == dense for size, stride, dense in pairs):
            return order + misses
    return f"strided:{','.join(map(str, strides))}{misses}"


def main() -> None:
    """List sets, or write them as JSON lines."""
    parser = argparse.ArgumentParser(description="List the convolutions of problem sets.")
    parser.add_argument("sets", choices=SETS, nargs="+")
    parser.add_argument("--directions", default="forward", help=f"comma-separated, of {', '.join(DIRECTIONS)}")
    parser.add_argument("--jsonl", action="store_true", help="as JSON lines for kernelwright record")
    parser.add_argument("--count", type=int, default=120, help="sample size of each workload in the JSON lines")
    args = parser.parse_args()
    for name in args.sets:
        for entry in load_conv2d(name, args.directions.split(",")):
            if args.jsonl:
                print(json.dumps({"id": entry.id, "count": args.count, "workload": entry.workload.to_json()}))
            else:
                print(f"{entry.id}  [{group(entry.workload)} {kind(entry.workload)}] {entry.workload}")
        for skipped in () if args.jsonl else skipped_conv2d(name):
            print(f"{skipped.id}  left out: {skipped.reason}")


if __name__ == "__main__":
    main()
