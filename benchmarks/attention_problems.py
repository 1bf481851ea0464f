"""The attentions of the problem sets under workloads/, read as Workloads.

Command line: `python benchmarks/attention_problems.py core` lists a set, and what was left out of it and why.
`python benchmarks/attention_problems.py core extra --jsonl | kernelwright record --workloads -` records them.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from problems import FLOATS, NOT_AT_INFERENCE, SETS, Entry, Skipped

from kernelwright.errors import InvalidWorkload
from kernelwright.kernels.attention.layout import dense_strides
from kernelwright.kernels.attention.workload import attention_workload, problem_of
from kernelwright.types import Workload

FOLDER = Path(__file__).resolve().parent / "workloads"

FEW_QUERIES = 16
"""Up to this many queries a problem counts as decoding."""

NOPE = 128
"""Elements without a rotation that stand before each value in DeepSeek's merged keys and values."""


def load_attention(name: str) -> list[Entry]:
    """The attentions of the set `name`, in the file's order."""
    return [entry for entry in map(_read, _problems(name)) if isinstance(entry, Entry)]


def skipped_attention(name: str) -> list[Skipped]:
    """Those attentions of the set that cannot be run, each with the reason."""
    return [entry for entry in map(_read, _problems(name)) if isinstance(entry, Skipped)]


def group(workload: Workload) -> str:
    """The group under which results are summed up; the first that fits of backward, paged, varlen, decode, mask
    (windows, soft caps, sinks and position biases too), forward."""
    p = problem_of(workload)
    kinds = {
        "backward": p.backward,
        "paged": p.page > 0,
        "varlen": p.packed,
        "decode": p.q_length <= FEW_QUERIES,
        "mask": bool(p.mask or p.window or p.softcap or p.sinks or p.alibi),
    }
    return next((name for name, fits in kinds.items() if fits), "forward")


def _problems(name: str) -> list[dict[str, Any]]:
    if name not in SETS:
        raise ValueError(f"problem set must be one of {', '.join(SETS)}, got {name!r}")
    data = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return [problem for problem in data["problems"] if problem["family"] == "attention"]


def _read(problem: Mapping[str, Any]) -> Entry | Skipped:
    id, tag = problem["id"], problem.get("tag") or problem["why"]
    sequences = problem.get("seqlens")
    batch = len(sequences) if sequences else problem["B"]
    queries, keys = (max(sequences),) * 2 if sequences else (problem["Sq"], problem["Skv"])
    try:
        workload = attention_workload(
            batch,
            problem["Hq"],
            queries,
            keys,
            problem["Dqk"],
            FLOATS[problem["dtype"]],
            kv_heads=problem["Hkv"],
            v_dim=problem["Dv"],
            layout={} if sequences or "page_size" in problem else _layouts(problem),
            page=problem.get("page_size"),
            packed=(sum(sequences),) * 2 if sequences else None,
            **_attributes(problem),
        )
    except InvalidWorkload as error:
        return Skipped(id, tag, str(error))
    dropped = NOT_AT_INFERENCE if problem.get("dropout") else ()
    return Entry(id, tag, workload, tuple(dropped), problem.get("tensors"))


def _attributes(problem: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {name: problem.get(name) for name in ("window", "softcap", "sinks")}
    if problem.get("causal"):
        # lengths that vary are those of prefills, in which a query's place is that of its key
        found["causal"] = problem.get("causal_align", "bottom_right")
    scale = problem.get("scale")
    if scale is not None and not math.isclose(scale, problem["Dqk"] ** -0.5):
        found["scale"] = scale
    if problem.get("mask", "none") != "none":
        found |= {"mask": problem["mask"], "mask_dims": _mask_dims(problem)}
    if problem["op"] == "sdpa_bwd":
        found |= {"direction": "backward", "mask_gradient": problem.get("mask_grad")}
    return found | ({"kv_shared": True} if problem.get("kv_shared") else {})


def _mask_dims(problem: Mapping[str, Any]) -> str:
    """The dimensions that the mask has, from the outermost in memory to the innermost."""
    tensor = (problem.get("tensors") or {}).get("mask")
    shape = tensor["shape"] if tensor else problem["mask_shape"]
    strides = tensor["stride"] if tensor else problem.get("mask_stride") or dense_strides(shape)
    there = [i for i in range(4) if shape[i] > 1 and strides[i]]
    return "".join("bhqk"[i] for i in sorted(there, key=lambda i: -strides[i]))


def _layouts(problem: Mapping[str, Any]) -> dict[str, str]:
    """Layouts of q, k, v and out; a result lies [B, S, H, D] unless the problem is about strides."""
    tensors = problem.get("tensors")
    if tensors:
        return {name: layout_of(tensors[name]) for name in ("q", "k", "v")}
    heads = {"q": (problem["Hq"], problem["Dqk"]), "k": (problem["Hkv"], problem["Dqk"])}
    heads["v"] = (problem["Hkv"], problem["Dv"])
    merged = sum(many * width for many, width in heads.values())
    found = {"out": "bshd"}
    for name, (many, width) in heads.items():
        named, length = problem[f"{name}_layout"], problem["Sq" if name == "q" else "Skv"]
        if named == "bshd_packed":
            found[name] = f"strided:{length * merged},{width},{merged},1"
        elif named == "strided":
            line = many * (NOPE + width)
            found[name] = f"strided:{length * line},{NOPE + width},{line},1"
        elif named != "packed":
            found[name] = named
    return found


def layout_of(tensor: Mapping[str, Any]) -> str:
    """The layout's text of a 16-bit tensor [B, H, S, D] with these strides, whose base is `offset` into its buffer."""
    shape, strides = tensor["shape"], tensor["stride"]
    misses = f"+{tensor['offset'] % 8}" if tensor["offset"] % 8 else ""
    for text, order in (("bhsd", None), ("bshd", (0, 2, 1, 3))):
        pairs = zip(shape, strides, dense_strides(shape, order), strict=True)
        if all(size <= 1 or stride == dense for size, stride, dense in pairs):
            return text + misses
    return f"strided:{','.join(map(str, strides))}{misses}"


def to_record(entries: Sequence[Entry], count: int) -> list[dict[str, Any]]:
    """The entries as `kernelwright record` reads them, each workload once."""
    once = {entry.workload.key: entry for entry in entries}.values()
    return [{"id": entry.id, "count": count, "workload": entry.workload.to_json()} for entry in once]


def main() -> None:
    """List sets, or write them as JSON lines."""
    parser = argparse.ArgumentParser(description="List the attentions of problem sets.")
    parser.add_argument("sets", choices=SETS, nargs="+")
    parser.add_argument("--jsonl", action="store_true", help="as JSON lines for kernelwright record")
    parser.add_argument("--count", type=int, default=120, help="sample size of each workload in the JSON lines")
    args = parser.parse_args()
    for name in args.sets:
        entries = load_attention(name)
        for line in to_record(entries, args.count) if args.jsonl else ():
            print(json.dumps(line))
        for entry in () if args.jsonl else entries:
            dropped = f"  without {', '.join(entry.dropped)}" if entry.dropped else ""
            print(f"{entry.id}  [{group(entry.workload)}] {entry.workload}{dropped}")
        for skipped in () if args.jsonl else skipped_attention(name):
            print(f"{skipped.id}  left out: {skipped.reason}")


if __name__ == "__main__":
    main()
