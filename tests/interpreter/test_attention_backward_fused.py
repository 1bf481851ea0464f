"""Gradients in one pass by numbers, run on the CPU by triton's interpreter (fp16 and fp32 only)."""

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
from kernelwright.types import FrozenMap, Schedule, Workload

H100 = named_device("h100")

pytestmark = [
    # the interpreter computes in numpy, which speaks up where a GPU gives infinity
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

KNOBS: dict[str, Any] = {"block_m": 32, "block_n": 64, "num_warps": 4, "num_stages": 2, "section": 1}

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one query": {"sizes": (1, 2, 1, 2, 16)},
    "causal, shared heads": {"sizes": (1, 4, 50, 150, 16), "kv_heads": 2, "causal": "bottom_right"},
    "queries without keys": {"sizes": (1, 1, 90, 40, 16), "causal": "bottom_right"},
    "causal, top left": {"sizes": (1, 1, 50, 90, 16), "causal": "top_left"},
    "window": {"sizes": (1, 1, 110, 110, 16), "causal": "bottom_right", "window": 40},
    "window alone": {"sizes": (1, 1, 70, 110, 16), "window": 20},
    "soft cap": {"softcap": 1.5, "causal": "bottom_right"},
    "slopes": {"alibi": True, "causal": "bottom_right"},
    "sinks": {"sinks": True, "causal": "bottom_right"},
    "bool mask": {"mask": "bool"},
    "wide values": {"sizes": (1, 1, 40, 50, 24), "v_dim": 40},
    "odd heads": {"sizes": (1, 1, 33, 40, 65), "causal": "bottom_right"},
    "no keys": {"sizes": (1, 2, 9, 0, 16)},
    "no queries": {"sizes": (1, 2, 0, 9, 16)},
    "packed": {"sizes": (4, 1, 50, 50, 16), "packed": (110, 110), "causal": "bottom_right"},
    "packed, other keys": {"sizes": (4, 2, 30, 50, 16), "packed": (70, 110), "kv_heads": 1, "window": 20},
    "tokens first": {"sizes": (2, 2, 40, 40, 16), "kv_heads": 1, "layout": "bshd"},
    "gaps": {
        "sizes": (1, 2, 40, 50, 32),
        "layout": {"q": "strided:4096,2048,1,48", "k": "strided:5000,2400,44,1+3", "out": "strided:4000,1500,33,1"},
    },
    "mask gradient": {"mask": "additive", "mask_gradient": True, "softcap": 3.0},
}


def workload_of(case: dict[str, Any], dtype: str) -> Workload:
    options = dict(case)
    b, h, sq, skv, d = options.pop("sizes", (1, 2, 40, 50, 16))
    return attention_workload(b, h, sq, skv, d, dtype, direction="backward", **options)


def fused(workload: Workload, **knobs: Any) -> Schedule:
    precision = ATTENTION.compute_precisions(workload)[-1]
    return Schedule("backward_fused", FrozenMap({**KNOBS, "loads": "pointer", "precision": precision, **knobs}))


def run(workload: Workload, schedule: Schedule) -> Verdict:
    inputs = ATTENTION.make_inputs(workload, 1, "cpu")
    out = ATTENTION.empty_output(workload, "cpu")
    launch_all(ATTENTION.plan(workload, schedule, inputs, out))
    return verify(out, ATTENTION.reference(workload, inputs), ATTENTION.tolerance(workload))


@pytest.mark.parametrize("case", CASES)
def test_every_feature(case: str) -> None:
    workload = workload_of(CASES[case], ("fp16", "fp32")[list(CASES).index(case) % 2])
    verdict = run(workload, fused(workload))
    assert verdict.right, verdict


@pytest.mark.parametrize("case", ["causal, shared heads", "window", "packed", "tokens first", "wide values"])
def test_loads_by_the_bulk_copy_engine(case: str) -> None:
    workload = workload_of(CASES[case], "fp16")
    verdict = run(workload, fused(workload, loads="bulk", section=4))
    assert verdict.right, verdict


def test_sampled_schedules_are_right() -> None:
    workload = workload_of({"sizes": (2, 2, 90, 80, 16), "kv_heads": 1, "causal": "top_left"}, "fp16")
    space = ATTENTION.templates["backward_fused"].space(workload, H100)
    for schedule in space.sample(random.Random(5), 2):
        verdict = run(workload, schedule)
        assert verdict.right, (schedule, verdict)


def test_keys_that_do_not_exist_add_nothing_however_small_the_weights_of_others() -> None:
    # exp2 of minus the logarithm of such a denominator is infinite
    workload = workload_of({"sizes": (1, 1, 20, 40, 16), "scale": 15.0}, "fp32")
    inputs = ATTENTION.make_inputs(workload, 1, "cpu")
    inputs |= {"q": inputs["q"].abs(), "k": -inputs["k"].abs()}
    inputs["lse"] = torch.logsumexp(15.0 * inputs["q"] @ inputs["k"].mT, -1)
    assert inputs["lse"].min() < -90
    out = ATTENTION.empty_output(workload, "cpu")
    launch_all(ATTENTION.plan(workload, fused(workload), inputs, out))
    assert all(gradient.isfinite().all() for gradient in out)
