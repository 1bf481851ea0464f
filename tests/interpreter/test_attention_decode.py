"""Decode kernels by numbers, run on the CPU by triton's interpreter (fp16 and fp32 only)."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelwright.kernels.attention.operator import ATTENTION
from kernelwright.kernels.attention.workload import attention_workload
from kernelwright.kernels.device import named_device
from kernelwright.kernels.operator import Inputs, launch_all
from kernelwright.search.verification import Verdict, verify
from kernelwright.types import FrozenMap, Schedule, Workload

H100 = named_device("h100")

pytestmark = [
    # the interpreter computes in numpy, which speaks up where a GPU gives infinity
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
]

KNOBS: dict[str, Any] = {
    "block_m": 16,
    "block_n": 16,
    "split_kv": 1,
    "combine": "last",
    "turned": 0,
    "loads": "pointer",
    "num_warps": 4,
    "num_stages": 2,
    "precision": "ieee",
}

VARIANTS: dict[str, dict[str, Any]] = {
    "one part": {},
    "parts, last": {"split_kv": 3},
    "parts, second": {"split_kv": 4, "combine": "second"},
    "turned": {"turned": 1, "split_kv": 3, "combine": "second"},
}

SPECULATIVE = {"sizes": (1, 4, 3, 60, 16), "kv_heads": 2, "causal": "bottom_right"}

CASES: dict[str, dict[str, Any]] = {
    "one key": {"sizes": (1, 2, 1, 1, 64)},
    "speculative": {**SPECULATIVE, "lse": True},
    "top left": {"sizes": (1, 2, 9, 40, 16), "causal": "top_left"},
    "fewer keys than queries": {"sizes": (1, 2, 9, 4, 32), "causal": "bottom_right", "lse": True},
    "window": {**SPECULATIVE, "window": 20, "softcap": 2.0},
    "window alone": {"sizes": (1, 2, 3, 60, 16), "window": 10},
    "bool mask": {**SPECULATIVE, "mask": "bool", "lse": True},
    "additive mask of keys": {"sizes": (2, 1, 1, 60, 16), "mask": "additive", "mask_dims": "bk"},
    "slopes": {**SPECULATIVE, "alibi": True},
    "sinks": {**SPECULATIVE, "sinks": True, "lse": True, "mask": "bool"},
    "odd heads": {"sizes": (1, 3, 1, 40, 65), "v_dim": 40},
    "two widths": {"sizes": (1, 2, 1, 40, 80), "v_dim": 72},
    "absorbed": {"sizes": (1, 16, 1, 40, 72), "v_dim": 64, "kv_heads": 1, "kv_shared": True},
    "shared, no power of two": {"sizes": (1, 4, 1, 40, 48), "v_dim": 24, "kv_heads": 1, "kv_shared": True},
    "no keys": {"sizes": (1, 2, 2, 0, 32), "lse": True},
    "tokens first": {"sizes": (2, 4, 1, 40, 16), "kv_heads": 2, "layout": "bshd"},
    "gaps and a turned head": {
        "sizes": (2, 2, 2, 40, 32),
        "layout": {"k": "strided:4096,2048,1,48", "v": "strided:5000,2400,50,1+3", "out": "strided:300,140,33,1"},
    },
    "pages in a block": {"sizes": (2, 2, 1, 75, 16), "kv_heads": 1, "page": 8},
    "blocks in a page": {"sizes": (2, 1, 2, 75, 16), "page": 32, "causal": "bottom_right", "lse": True},
    "pages of an odd size": {"sizes": (2, 1, 1, 75, 16), "page": 24, "window": 30},
    "pages, absorbed": {"sizes": (2, 16, 1, 40, 72), "v_dim": 64, "kv_heads": 1, "kv_shared": True, "page": 16},
}


def workload_of(case: dict[str, Any], dtype: str) -> Workload:
    options = dict(case)
    return attention_workload(*options.pop("sizes"), dtype, **options)


def decode(knobs: dict[str, Any], workload: Workload) -> Schedule:
    precision = ATTENTION.compute_precisions(workload)[-1]
    return Schedule("decode", FrozenMap({**KNOBS, "precision": precision, **knobs}))


def run(workload: Workload, schedule: Schedule, inputs: Inputs | None = None) -> Verdict:
    inputs = inputs if inputs is not None else ATTENTION.make_inputs(workload, 1, "cpu")
    out = ATTENTION.empty_output(workload, "cpu")
    launch_all(ATTENTION.plan(workload, schedule, inputs, out))
    return verify(out, ATTENTION.reference(workload, inputs), ATTENTION.tolerance(workload))


@pytest.mark.parametrize("case", CASES)
def test_every_feature(case: str) -> None:
    """Each in one of the forms, by turns."""
    turn = list(CASES).index(case)
    workload = workload_of(CASES[case], ("fp16", "fp32")[turn // 2 % 2])
    verdict = run(workload, decode(list(VARIANTS.values())[turn % len(VARIANTS)], workload))
    assert verdict.right, verdict


@pytest.mark.parametrize("form", VARIANTS)
def test_every_form(form: str) -> None:
    for case in ("sinks", "blocks in a page"):
        workload = workload_of(CASES[case], "fp16")
        verdict = run(workload, decode(VARIANTS[form], workload))
        assert verdict.right, (case, verdict)


@pytest.mark.parametrize("case", ["speculative", "absorbed", "two widths", "blocks in a page", "tokens first"])
def test_loads_by_the_bulk_copy_engine(case: str) -> None:
    workload = workload_of(CASES[case], "fp16")
    for knobs in ({"split_kv": 2}, {"turned": 1}):
        verdict = run(workload, decode({**knobs, "loads": "bulk"}, workload))
        assert verdict.right, (knobs, verdict)


@pytest.mark.parametrize("dtype", ["fp8e4m3", "fp8e5m2"])
def test_eight_bit_operands_with_scales(dtype: str) -> None:
    workload = attention_workload(
        1, 2, 1, 40, 32, dtype, kv_heads=1, scaling="tensor", out_dtype="fp16", page=16, sinks=True
    )
    for knobs in ({}, {"split_kv": 2, "combine": "second"}):
        assert run(workload, decode(knobs, workload)).right


def test_sampled_schedules_are_right() -> None:
    workload = attention_workload(1, 2, 2, 150, 16, "fp16", kv_heads=1, causal="bottom_right", lse=True)
    space = ATTENTION.templates["decode"].space(workload, H100)
    for schedule in space.sample(random.Random(3), 3):
        verdict = run(workload, schedule)
        assert verdict.right, (schedule, verdict)


@pytest.mark.parametrize("combine", ["last", "second"])
def test_same_bits_twice_and_counters_ready_for_the_next_launch(combine: str) -> None:
    workload = workload_of(SPECULATIVE, "fp16")
    inputs, out = ATTENTION.make_inputs(workload, 1, "cpu"), ATTENTION.empty_output(workload, "cpu")
    launches = ATTENTION.plan(workload, decode({"split_kv": 3, "combine": combine}, workload), inputs, out)
    assert isinstance(out, torch.Tensor)
    launch_all(launches)
    first = out.clone()
    out.fill_(math.nan)
    launch_all(launches)
    assert torch.equal(first, out)


def test_gaps_of_the_result_are_not_written() -> None:
    workload = workload_of(CASES["gaps and a turned head"], "fp16")
    inputs, out = ATTENTION.make_inputs(workload, 1, "cpu"), ATTENTION.empty_output(workload, "cpu")
    assert isinstance(out, torch.Tensor)
    launch_all(ATTENTION.plan(workload, decode({"split_kv": 2}, workload), inputs, out))
    storage = torch.as_strided(out, (out.untyped_storage().nbytes() // 2,), (1,))
    assert storage.isnan().sum() == storage.numel() - out.numel()


@pytest.mark.parametrize("sizes", [(0, 2, 1, 8, 16), (1, 2, 0, 8, 16)])
def test_empty_results_launch_nothing(sizes: tuple[int, ...]) -> None:
    workload = attention_workload(*sizes, "fp16")
    inputs, out = ATTENTION.make_inputs(workload, 0, "cpu"), ATTENTION.empty_output(workload, "cpu")
    assert ATTENTION.plan(workload, decode({}, workload), inputs, out) == []


@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=3),
    st.sampled_from([16, 48, 64]),
    st.sampled_from([{}, {"split_kv": 3}, {"split_kv": 2, "combine": "second"}, {"block_n": 16, "loads": "bulk"}]),
    st.randoms(use_true_random=False),
)
def test_any_lengths_in_any_pages(lengths: list[int], page: int, knobs: dict[str, Any], rng: random.Random) -> None:
    """Lengths down to 0; table entries behind the last key are no pages at all, and no value there is read."""
    workload = attention_workload(len(lengths), 2, 1, 70, 16, "fp32", kv_heads=1, page=page, lse=True)
    inputs = ATTENTION.make_inputs(workload, 1, "cpu")
    count, width = inputs["k"].shape[0], inputs["block_table"].shape[1]
    places = rng.sample(range(count), count)
    k, v = (torch.full_like(inputs[name], math.nan) for name in ("k", "v"))
    table = torch.full((len(lengths), width), -1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        for turn in range(-(-length // page)):
            table[row, turn] = places.pop()
            kept = min(page, length - turn * page)
            for cache in (k, v):
                cache[table[row, turn], :kept] = torch.randn(kept, *cache.shape[2:])
    inputs |= {"k": k, "v": v, "block_table": table, "lengths": torch.tensor(lengths, dtype=torch.int32)}
    verdict = run(workload, decode(knobs, workload), inputs)
    assert verdict.right, verdict
