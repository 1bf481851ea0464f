"""The problem sets under workloads/, read as Workloads: what the benchmarks and the recorded sweeps run on.

Command line: `python benchmarks/problems.py core` lists the matmuls of a set, and what was left out of it and why.
`python benchmarks/problems.py core extra --jsonl | kernelwright record --workloads -` records them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kernelwright.kernels import get_operator
from kernelwright.kernels.matmul.workload import ACTIVATIONS, matmul_workload, problem_of
from kernelwright.types import Workload

FOLDER = Path(__file__).resolve().parent / "workloads"

SETS = ("core", "extra", "awkward", "smoke")

DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}

LARGE_FLOPS = 100e9

SKINNY_ROWS = 16

DENSE_PER_GROUP = 4


class Entry(NamedTuple):
    """One problem that can be run. dropped: the steps of its epilogue that the workload leaves out, in order."""

    id: str
    tag: str
    workload: Workload
    dropped: tuple[str, ...] = ()


EXAMPLE = Entry("example", "the worked example of the README", matmul_workload(2048, 4096, 4096))


class Skipped(NamedTuple):
    """One problem that cannot be run, and why."""

    id: str
    tag: str
    reason: str


def load_matmul(name: str) -> list[Entry]:
    """The matmuls of the set `name` that Kernelwright computes today, in the file's order."""
    return [entry for entry in map(_read, _problems(name, "matmul")) if isinstance(entry, Entry)]


def skipped_matmul(name: str) -> list[Skipped]:
    """The other matmuls of the set, each with the reason."""
    return [entry for entry in map(_read, _problems(name, "matmul")) if isinstance(entry, Skipped)]


def group(workload: Workload) -> str:
    """The group under which results are summed up; the first that fits of fp32, unaligned, skinny, tall_k, epilogue,
    large, medium."""
    problem = problem_of(workload)
    if problem.a_dtype == "fp32":
        return "fp32"
    if not all(problem.aligned(tensor) for tensor in ("a", "b", "out")):
        return "unaligned"
    if problem.m <= SKINNY_ROWS:
        return "skinny"
    if problem.k >= 16 * max(problem.m, problem.n):
        return "tall_k"
    if workload.epilogue:
        return "epilogue"
    return "large" if get_operator("matmul").work(workload).flops >= LARGE_FLOPS else "medium"


def split_epilogue(steps: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The steps from the start that a matmul can fuse, a bias and then one activation, and those left over."""
    fused = 1 if steps and steps[0] == "bias" else 0
    if len(steps) > fused and steps[fused] in ACTIVATIONS:
        fused += 1
    return tuple(steps[:fused]), tuple(steps[fused:])


def layout_of(named: str, shape: tuple[int, int], stride: Sequence[int] | None) -> str | None:
    """The layout's text for strides in elements, `named` ("row" or "col") first; None when no layout says it."""
    if stride is None:
        return named
    for order in (named, "col" if named == "row" else "row"):
        across, along = (0, 1) if order == "row" else (1, 0)
        length, dense = shape[across], max(shape[along], 1)
        unit = stride[along] == 1 or shape[along] <= 1
        leading = stride[across] if length > 1 else dense
        if unit and leading >= dense:
            return order if leading == dense else f"{order}:{leading}"
    return None


def _problems(name: str, family: str) -> list[dict[str, Any]]:
    if name not in SETS:
        raise ValueError(f"problem set must be one of {', '.join(SETS)}, got {name!r}")
    data = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return [problem for problem in data["problems"] if problem["family"] == family]


def _read(problem: Mapping[str, Any]) -> Entry | Skipped:
    id, tag = problem["id"], problem.get("tag") or problem["why"]
    reason = _why_not(problem)
    if reason:
        return Skipped(id, tag, reason)
    m, n, k = problem["M"], problem["N"], problem["K"]
    a = layout_of(problem["a_layout"], (m, k), _stride(problem, "a"))
    b = layout_of(problem["b_layout"], (k, n), _stride(problem, "b"))
    if a is None or b is None:
        return Skipped(id, tag, "an operand has no unit stride, or its rows overlap")
    dtype = DTYPES[problem["dtype"]]
    out_dtype = DTYPES[problem.get("out_dtype") or problem["dtype"]]
    epilogue, dropped = split_epilogue(problem.get("epilogue", []))
    workload = Workload.from_json(
        {
            "operator": "matmul",
            "dims": {"M": m, "N": n, "K": k},
            "dtypes": {"a": dtype, "b": dtype, "out": out_dtype},
            "layouts": {"a": a, "b": b, "out": "row"},
            "epilogue": epilogue,
        }
    )
    return Entry(id, tag, workload, dropped)


def _why_not(problem: Mapping[str, Any]) -> str:
    tensors = problem.get("tensors", {}).values()
    if problem["op"] not in ("mm", "addmm"):
        return f"{problem['op']} is not a single product"
    if problem["dtype"] not in DTYPES or "scale" in problem:
        return f"quantised operands ({problem['dtype']}, {problem.get('scale', 'no scale')})"
    if problem.get("bias") == "matrix":
        return "the added term is a matrix"
    if min(problem["M"], problem["N"], problem["K"]) == 0:
        return "a dimension is 0"
    if any(tensor["offset"] * 2 % 16 for tensor in tensors):
        return "a base address that is not aligned, which a workload does not say"
    if any(tensor["fill"] != "randn" for tensor in tensors):
        return "the operands' values are the point, which a workload does not say"
    return ""


def _stride(problem: Mapping[str, Any], tensor: str) -> Sequence[int] | None:
    if "tensors" in problem:
        stride: Sequence[int] = problem["tensors"][tensor]["stride"]
        return stride
    return problem.get(f"{tensor}_stride")


def to_record(entries: Sequence[Entry], dense: int, sparse: int) -> list[dict[str, Any]]:
    """The entries as `kernelwright record` reads them, each workload once: the first DENSE_PER_GROUP of each group with
    a sample of `dense` schedules, then all others with `sparse`."""
    seen: dict[str, int] = {}
    first, rest = [], []
    for entry in {entry.workload.key: entry for entry in entries}.values():
        name = group(entry.workload)
        seen[name] = seen.get(name, 0) + 1
        many = seen[name] <= DENSE_PER_GROUP
        line = {"id": entry.id, "count": dense if many else sparse, "workload": entry.workload.to_json()}
        (first if many else rest).append(line)
    return first + rest


def _list(name: str) -> None:
    for entry in load_matmul(name):
        dropped = f"  without {', '.join(entry.dropped)}" if entry.dropped else ""
        print(f"{entry.id}  [{group(entry.workload)}] {entry.workload}{dropped}")
    for skipped in skipped_matmul(name):
        print(f"{skipped.id}  left out: {skipped.reason}")


def main() -> None:
    """List sets, or write them as JSON lines."""
    parser = argparse.ArgumentParser(description="List the matmuls of problem sets.")
    parser.add_argument("sets", choices=SETS, nargs="+")
    parser.add_argument("--jsonl", action="store_true", help="as JSON lines for kernelwright record")
    parser.add_argument("--dense", type=int, default=180, help="sample size of the first workloads of each group")
    parser.add_argument("--sparse", type=int, default=60, help="sample size of the others")
    args = parser.parse_args()
    if args.jsonl:
        entries = [EXAMPLE, *(entry for name in args.sets for entry in load_matmul(name))]
        for line in to_record(entries, args.dense, args.sparse):
            print(json.dumps(line))
    else:
        for name in args.sets:
            _list(name)


if __name__ == "__main__":
    main()
