"""Winners as files that other tools read: Triton configs, vLLM's tuned configs, Inductor's lookup table."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kernelwright.errors import KernelwrightError
from kernelwright.kernels.matmul.workload import problem_of
from kernelwright.types import TuningRecord

_LAUNCH = ("num_warps", "num_stages", "num_ctas", "maxnreg")
_TORCH = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}
_FP8 = ("fp8e4m3", "fp8e5m2")


@dataclasses.dataclass(frozen=True)
class ToolFiles:
    """What one format gives: text by file name, how many records are in, and how many the format cannot say."""

    files: Mapping[str, str]
    written: int
    left_out: int


def tool_files(form: str, records: Iterable[TuningRecord]) -> ToolFiles:
    """The files of a format of TOOL_FORMATS; of records for one workload and device the first one counts."""
    first = {(record.workload, record.device.key): record for record in reversed(list(records))}
    chosen = list(reversed(first.values()))
    entries = [entry for record in chosen if (entry := TOOL_FORMATS[form](record)) is not None]
    files: dict[str, dict[str, Any]] = {}
    for name, key, value in entries:
        files.setdefault(name, {})[key] = value
    texts = {name: json.dumps(_ordered(content), indent=4) + "\n" for name, content in sorted(files.items())}
    return ToolFiles(texts, len(entries), len(chosen) - len(entries))


Entry = tuple[str, str, Any]
"""File name, key in the file, value."""


def triton_entry(record: TuningRecord) -> Entry | None:
    """Arguments of `triton.Config` for our kernel: `triton.Config(**entry["config"])`."""
    knobs = dict(record.schedule.knobs)
    launch = {name: knobs.pop(name) for name in _LAUNCH if name in knobs}
    value = {
        "workload": record.workload.to_json(),
        "template": record.schedule.template,
        "template_fingerprint": record.template_fingerprint,
        "config": {"kwargs": {name.upper(): value for name, value in knobs.items()}, **launch},
        "median_us": record.measurement.median_us,
        "vendor": record.vendor,
        "vendor_us": record.vendor_us,
    }
    return f"{_device(record)}.triton.json", str(record.workload), value


def vllm_moe_entry(record: TuningRecord) -> Entry | None:
    """vLLM's fused mixture of experts: a file for each number of experts E and width N, its keys the tokens M."""
    dims, dtypes = record.workload.dims, record.workload.dtypes
    if not {"E", "M", "N"} <= dims.keys():
        return None
    kind = ",dtype=fp8_w8a8" if dtypes.get("a") in _FP8 else ",dtype=int8_w8a8" if dtypes.get("a") == "int8" else ""
    return _vllm_entry(record, f"E={dims['E']},N={dims['N']},device_name={_device(record)}{kind}.json")


def vllm_fp8_entry(record: TuningRecord) -> Entry | None:
    """vLLM's block-scaled fp8 matmul: a file for each weight of N x K, its keys the tokens M."""
    workload = record.workload
    if workload.operator != "matmul" and "matmul" not in workload.operator:
        return None
    if set(workload.dims) != {"M", "N", "K"} or workload.dtypes.get("a") not in _FP8:
        return None
    block = [workload.attributes.get(name, 128) for name in ("scale_n", "scale_k")]
    n, k = workload.dims["N"], workload.dims["K"]
    shape = f"[{block[0]},{block[1]}]"
    name = f"N={n},K={k},device_name={_device(record)},dtype=fp8_w8a8,block_shape={shape}.json"
    return _vllm_entry(record, name)


def inductor_entry(record: TuningRecord) -> Entry | None:
    """Inductor's lookup table (`torch._inductor.config.lookup_table.table`) for mm: Inductor's own template with our
    block sizes, or aten where that wins. Left out: what its template has no counterpart for."""
    try:
        problem = problem_of(record.workload)
    except KernelwrightError:
        return None
    if record.workload.epilogue or problem.out_dtype != problem.a_dtype or problem.a_dtype not in _TORCH:
        return None
    choice = {"template_id": "aten::mm"} if record.winner == "vendor" else _inductor_choice(record)
    if choice is None:
        return None
    dtype = _TORCH[problem.a_dtype]
    sides = (((problem.m, problem.k), problem.a), ((problem.k, problem.n), problem.b))
    operands = ", ".join(f"({dtype}, {list(size)}, {list(layout.strides())})" for size, layout in sides)
    return f"{_device(record)}.inductor.json", f"({operands})+mm", [choice]


TOOL_FORMATS: Mapping[str, Callable[[TuningRecord], Entry | None]] = {
    "triton": triton_entry,
    "vllm-moe": vllm_moe_entry,
    "vllm-fp8": vllm_fp8_entry,
    "inductor": inductor_entry,
}
"""Each format's entry for a record, None where it has none."""


def _inductor_choice(record: TuningRecord) -> dict[str, Any] | None:
    knobs = record.schedule.knobs
    if record.schedule.template != "pointer" or knobs.get("split_k", 1) != 1:
        return None
    return {
        "template_id": "triton::mm",
        "BLOCK_M": knobs["block_m"],
        "BLOCK_N": knobs["block_n"],
        "BLOCK_K": knobs["block_k"],
        "GROUP_M": knobs.get("group_m", 8),
        "num_warps": knobs["num_warps"],
        "num_stages": knobs["num_stages"],
        "EVEN_K": record.workload.dims["K"] % int(knobs["block_k"]) == 0,
        "ALLOW_TF32": knobs.get("precision") == "tf32",
        "USE_FAST_ACCUM": False,
        "ACC_TYPE": "tl.float32",
    }


def _vllm_entry(record: TuningRecord, name: str) -> Entry | None:
    knobs = record.schedule.knobs
    wanted = {f"BLOCK_SIZE_{axis}": f"block_{axis.lower()}" for axis in "MNK"} | {"GROUP_SIZE_M": "group_m"}
    if any(knob not in knobs for knob in wanted.values()) or knobs.get("split_k", 1) != 1:
        return None
    config = {key: knobs[knob] for key, knob in wanted.items()} | {key: knobs[key] for key in _LAUNCH if key in knobs}
    return name, str(record.workload.dims["M"]), config


def _device(record: TuningRecord) -> str:
    """The GPU's name as part of a file's: an imported one may be anything, a path above all."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", record.device.name or record.device.slug).strip("._") or "unknown"


def _ordered(content: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers by size, then names."""
    return dict(
        sorted(content.items(), key=lambda item: (0, int(item[0]), "") if item[0].isdigit() else (1, 0, item[0]))
    )
