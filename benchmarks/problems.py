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
from kernelwright.kernels.matmul.workload import matmul_workload, problem_of
from kernelwright.types import Workload

FOLDER = Path(__file__).resolve().parent / "workloads"

SETS = ("core", "extra", "awkward", "smoke")

FLOATS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}

QUANTISED = {
    ("float8_e4m3fn", "tensorwise"): ("fp8e4m3", "fp8e4m3", "tensor"),
    ("float8_e4m3fn", "rowwise"): ("fp8e4m3", "fp8e4m3", "row"),
    ("float8_e4m3fn", "blockwise128"): ("fp8e4m3", "fp8e4m3", "block128"),
    ("int8", "rowwise"): ("int8", "int8", "row"),
    ("int4_weight", "group128"): ("bf16", "int4", "group:128"),
}
"""(dtype, scale) of a problem as types of a and b and the attribute scaling of its workload; the result is bf16."""

STEPS = {
    "residual_add": "residual",
    "mul_full": "multiply",
    "swiglu_pair": "swiglu",
    "glu(silu)": "swiglu",
    "glu(gelu)": "geglu",
    "glu(sigmoid)": "glu",
}
"""Epilogue steps that the files call otherwise than workloads do."""

NOT_AT_INFERENCE = ("dropout",)

LARGE_FLOPS = 100e9

SKINNY_ROWS = 16

DENSE_PER_GROUP = 4


class Entry(NamedTuple):
    """One problem that can be run. dropped: the steps of its epilogue that do nothing at inference.

    tensors: by operand the exact shape, stride, offset, dtype and fill, where the problem is about them.
    """

    id: str
    tag: str
    workload: Workload
    dropped: tuple[str, ...] = ()
    tensors: Mapping[str, Mapping[str, Any]] | None = None


EXAMPLE = Entry("example", "the worked example of the README", matmul_workload(2048, 4096, 4096))


class Skipped(NamedTuple):
    """One problem that cannot be run, and why."""

    id: str
    tag: str
    reason: str


def load_matmul(name: str) -> list[Entry]:
    """The matmuls of the set `name`, in the file's order."""
    return [entry for entry in map(_read, _problems(name, "matmul")) if isinstance(entry, Entry)]


def skipped_matmul(name: str) -> list[Skipped]:
    """Those matmuls of the set that cannot be run, each with the reason."""
    return [entry for entry in map(_read, _problems(name, "matmul")) if isinstance(entry, Skipped)]


def group(workload: Workload) -> str:
    """The group under which results are summed up; the first that fits of grouped, batched, w4a16 (4-bit weights), fp8,
    int8, fp32, unaligned, skinny, tall_k, epilogue, large, medium."""
    problem = problem_of(workload)
    kinds = {
        "grouped": problem.groups > 0,
        "batched": problem.batched,
        "w4a16": problem.b_dtype in ("int4", "fp4"),
        "fp8": problem.a_dtype.startswith("fp8"),
        "int8": problem.a_dtype == "int8",
        "fp32": problem.a_dtype == "fp32",
        "unaligned": not all(problem.aligned(tensor) for tensor in ("a", "b", "out")),
        "skinny": problem.m <= SKINNY_ROWS,
        "tall_k": problem.k >= 16 * max(problem.m, problem.n),
        "epilogue": bool(workload.epilogue),
        "large": get_operator("matmul").work(workload).flops >= LARGE_FLOPS,
    }
    return next((name for name, fits in kinds.items() if fits), "medium")


def split_epilogue(steps: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The steps as a workload calls them, and those that are dropped."""
    kept = tuple(STEPS.get(step, step) for step in steps if step not in NOT_AT_INFERENCE)
    return kept, tuple(step for step in steps if step in NOT_AT_INFERENCE)


def layout_of(named: str, shape: Sequence[int], stride: Sequence[int] | None, misses: int = 0) -> str | None:
    """The layout's text for the strides in elements of a [rows, columns] or [batch, rows, columns] tensor.

    named: the order ("row" or "col") that is tried first, and meant when stride is None. misses: elements by which the
    base misses a multiple of 16 bytes. None for negative strides, which no layout says.
    """
    if stride is None:
        return named
    if min(stride) < 0:
        return None
    text, dense_batch = _matrix_layout(named, shape[-2:], stride[-2:])
    if len(shape) == 3 and shape[0] > 1 and stride[0] != dense_batch:
        text += f"@{stride[0]}"
    return text + (f"+{misses}" if misses else "")


def _matrix_layout(named: str, shape: Sequence[int], stride: Sequence[int]) -> tuple[str, int]:
    """(text, elements from one matrix of a dense batch to the next) of a [rows, columns] matrix."""
    for order in (named, "col" if named == "row" else "row"):
        across, along = (0, 1) if order == "row" else (1, 0)
        length, dense = shape[across], max(shape[along], 1)
        unit = stride[along] == 1 or shape[along] <= 1
        leading = stride[across] if length > 1 else dense
        if unit and leading >= dense:
            return order if leading == dense else f"{order}:{leading}", leading * length
    return f"strided:{stride[0]},{stride[1]}", 0


def _problems(name: str, family: str) -> list[dict[str, Any]]:
    if name not in SETS:
        raise ValueError(f"problem set must be one of {', '.join(SETS)}, got {name!r}")
    data = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return [problem for problem in data["problems"] if problem["family"] == family]


def _read(problem: Mapping[str, Any]) -> Entry | Skipped:
    id, tag = problem["id"], problem.get("tag") or problem["why"]
    batch = problem["batch"] if problem["op"] == "bmm" else None
    m, n, k = problem.get("m_total", problem["M"]), problem["N"], problem["K"]
    a = _layout(problem, "a", (m, k), batch)
    b = _layout(problem, "b", (k, n), batch)
    if a is None or b is None:
        return Skipped(id, tag, "an operand has a negative stride, which torch has not")
    if problem["dtype"] in FLOATS:
        a_dtype = b_dtype = FLOATS[problem["dtype"]]
        out_dtype, scaling = FLOATS[problem.get("out_dtype") or problem["dtype"]], ""
    else:
        (a_dtype, b_dtype, scaling), out_dtype = QUANTISED[problem["dtype"], problem["scale"]], "bf16"
    epilogue, dropped = split_epilogue(problem.get("epilogue", []))
    if problem.get("bias") == "matrix" and problem.get("args", {}).get("beta", 1.0) != 0:
        epilogue = ("residual", *epilogue)
    dims = {"M": m, "N": n, "K": k} | ({} if batch is None else {"B": batch})
    workload = Workload.from_json(
        {
            "operator": "matmul",
            "dims": dims | ({"G": problem["groups"]} if problem["op"] == "grouped_mm" else {}),
            "dtypes": {"a": a_dtype, "b": b_dtype, "out": out_dtype},
            "layouts": {"a": a, "b": b, "out": "row"},
            "epilogue": epilogue,
            "attributes": {"scaling": scaling} if scaling else {},
        }
    )
    return Entry(id, tag, workload, dropped, problem.get("tensors"))


def _layout(problem: Mapping[str, Any], name: str, shape: tuple[int, int], batch: int | None) -> str | None:
    named, sizes = problem[f"{name}_layout"], shape if batch is None else (batch, *shape)
    if "tensors" not in problem:
        return layout_of(named, sizes, problem.get(f"{name}_stride"))
    tensor = problem["tensors"][name]
    bytes_each = {"float32": 4}.get(tensor["dtype"], 2)
    return layout_of(named, sizes, tensor["stride"], tensor["offset"] % (16 // bytes_each))


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
