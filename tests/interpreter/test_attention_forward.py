"""Attention forward kernels by numbers, run on the CPU by triton's interpreter (fp16 and fp32 only)."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kernelwright.kernels.attention.operator import ATTENTION
from kernelwright.kernels.attention.workload import attention_workload
from kernelwright.kernels.device import named_device
from kernelwright.kernels.operator import launch_all
from kernelwright.search.verification import Verdict, verify
from kernelwright.types import Schedule, Workload

H100 = named_device("h100")

pytestmark = [
    # the interpreter computes in numpy, which speaks up where a GPU gives infinity
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
]

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one query": {"sizes": (2, 2, 1, 70, 64)},
    "one key": {"sizes": (1, 2, 33, 1, 64)},
    "causal": {"causal": "bottom_right"},
    "causal, top left, few keys": {"sizes": (1, 2, 70, 33, 32), "causal": "top_left"},
    "causal, top left, many keys": {"sizes": (1, 2, 33, 100, 32), "causal": "top_left"},
    "rows without keys": {"sizes": (1, 2, 70, 33, 32), "causal": "bottom_right", "lse": True},
    "chunked prefill": {"sizes": (1, 2, 33, 130, 32), "causal": "bottom_right", "lse": True},
    "window": {"sizes": (1, 2, 130, 130, 32), "causal": "bottom_right", "window": 40},
    "window of one": {"sizes": (1, 2, 70, 70, 32), "causal": "top_left", "window": 1},
    "window alone": {"sizes": (1, 2, 40, 130, 32), "window": 50, "lse": True},
    "shared heads": {"sizes": (1, 6, 20, 40, 32), "kv_heads": 2, "causal": "bottom_right"},
    "soft cap": {"softcap": 3.0, "causal": "bottom_right", "window": 30},
    "negative scale": {"scale": -0.2, "causal": "bottom_right"},
    "no scale": {"scale": 0.0},
    "bool mask": {"mask": "bool", "lse": True},
    "bool mask of keys": {"mask": "bool", "mask_dims": "bk"},
    "additive mask": {"mask": "additive", "lse": True},
    "additive mask, heads innermost": {"mask": "additive", "mask_dims": "qkh", "causal": "bottom_right"},
    "slopes": {"alibi": True, "causal": "bottom_right"},
    "slopes both ways": {"alibi": True, "softcap": 5.0},
    "sinks": {"sinks": True, "lse": True, "causal": "bottom_right", "window": 20},
    "sinks and hidden rows": {"sinks": True, "lse": True, "mask": "bool"},
    "wide values": {"sizes": (1, 2, 33, 40, 24), "v_dim": 40},
    "odd heads": {"sizes": (1, 2, 33, 70, 65), "causal": "bottom_right"},
    "tiny heads": {"sizes": (1, 2, 33, 40, 8)},
    "heads of 72": {"sizes": (1, 2, 33, 40, 72), "causal": "bottom_right"},
    "heads of 96 and 48": {"sizes": (1, 2, 33, 40, 96), "v_dim": 48},
    "columns shared": {"sizes": (1, 2, 33, 40, 48), "v_dim": 32, "kv_shared": True, "kv_heads": 1},
    "no keys": {"sizes": (1, 2, 16, 0, 32), "lse": True},
    "packed": {"sizes": (5, 2, 50, 50, 32), "packed": (130, 130), "causal": "bottom_right", "lse": True},
    "packed, few queries": {"sizes": (5, 2, 20, 50, 32), "packed": (41, 130), "causal": "bottom_right"},
    "packed, no order": {"sizes": (5, 4, 50, 40, 24), "packed": (120, 90), "kv_heads": 2, "window": 20},
}


def workload_of(case: dict[str, Any], dtype: str) -> Workload:
    options = dict(case)
    return attention_workload(*options.pop("sizes", (1, 2, 70, 70, 32)), dtype, **options)


def some(workload: Workload, template: str, count: int) -> list[Schedule]:
    return ATTENTION.templates[template].space(workload, H100).sample(random.Random(7), count)


def run(workload: Workload, schedule: Schedule, seed: int = 1) -> Verdict:
    inputs = ATTENTION.make_inputs(workload, seed, "cpu")
    out = ATTENTION.empty_output(workload, "cpu")
    launch_all(ATTENTION.plan(workload, schedule, inputs, out))
    return verify(out, ATTENTION.reference(workload, inputs), ATTENTION.tolerance(workload))


@pytest.mark.parametrize("case", CASES)
def test_every_feature(case: str) -> None:
    # numbers of 32 bits show what 16 bits hide, and 16 bits are what is run
    for dtype in ("fp16", "fp32") if case in ("plain", "soft cap", "window") else ("fp16",):
        workload = workload_of(CASES[case], dtype)
        (schedule,) = some(workload, "forward", 1)
        verdict = run(workload, schedule)
        assert verdict.right, (schedule, verdict)


@pytest.mark.parametrize("head", ["pad", "split"])
@pytest.mark.parametrize("section", [1, 4])
def test_head_dimensions_and_sections(head: str, section: int) -> None:
    workload = attention_workload(3, 2, 70, 70, 80, "fp16", v_dim=40, causal="bottom_right")
    knobs = {"head": head, "section": section, "block_m": 32, "block_n": 32}
    # two parts of a head dimension are not offered on Hopper
    space = ATTENTION.templates["forward"].space(workload, H100 if head == "pad" else named_device("a100"))
    schedule = next(s for s in space if knobs.items() <= dict(s.knobs).items())
    assert run(workload, schedule).right


LAYOUTS: list[dict[str, str]] = [
    {"q": "bshd", "k": "bshd", "v": "bshd", "out": "bshd"},
    # slices of one buffer of queries, keys and values
    {"q": "strided:6720,32,192,1", "k": "strided:6720,32,192,1+64", "v": "strided:6720,32,192,1+3", "out": "bshd"},
    # keys that lie along the sequence, heads repeated, gaps between rows
    {"q": "bhsd+1", "k": "strided:2240,0,1,35", "v": "strided:2500,0,40,1", "out": "strided:3000,1400,40,1"},
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gaps_are_neither_read_nor_written(layout: dict[str, str]) -> None:
    workload = attention_workload(2, 2, 35, 35, 32, "fp16", layout=layout, causal="bottom_right")
    for schedule in some(workload, "forward", 1):
        inputs, out = ATTENTION.make_inputs(workload, 2, "cpu"), ATTENTION.empty_output(workload, "cpu")
        assert isinstance(out, torch.Tensor)
        storage = torch.as_strided(out, (out.untyped_storage().nbytes() // 2,), (1,), 0)
        launch_all(ATTENTION.plan(workload, schedule, inputs, out))
        assert verify(out, ATTENTION.reference(workload, inputs), ATTENTION.tolerance(workload)).right, schedule
        assert storage.isnan().sum() == storage.numel() - out.numel(), "a gap between rows was written"


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_scores_too_large_for_exp(softcap: float | None) -> None:
    workload = attention_workload(1, 2, 40, 40, 32, "fp16", softcap=softcap)
    inputs, out = ATTENTION.make_inputs(workload, 0, "cpu"), ATTENTION.empty_output(workload, "cpu")
    for name in ("q", "k"):
        inputs[name] *= 100
    for schedule in some(workload, "forward", 1):
        launch_all(ATTENTION.plan(workload, schedule, inputs, out))
        assert verify(out, ATTENTION.reference(workload, inputs), ATTENTION.tolerance(workload)).right


@pytest.mark.parametrize("sizes", [(0, 2, 8, 8, 32), (2, 2, 0, 8, 32), (2, 2, 0, 0, 32)])
def test_empty_results_launch_nothing(sizes: tuple[int, int, int, int, int]) -> None:
    workload = attention_workload(*sizes, "fp16")
    inputs, out = ATTENTION.make_inputs(workload, 0, "cpu"), ATTENTION.empty_output(workload, "cpu")
    assert ATTENTION.plan(workload, ATTENTION.default_schedule(workload, H100), inputs, out) == []
    assert verify(out, ATTENTION.reference(workload, inputs), 0.0).right


@pytest.mark.parametrize("dtype", ["fp8e4m3", "fp8e5m2"])
def test_eight_bit_operands(dtype: str) -> None:
    workload = attention_workload(1, 2, 40, 200, 40, dtype, scaling="tensor", out_dtype="fp16", lse=True)
    for schedule in some(workload, "forward", 1):
        verdict = run(workload, schedule)
        assert verdict.right, (schedule, verdict)
