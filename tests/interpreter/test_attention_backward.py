"""Gradients by numbers, run on the CPU by triton's interpreter (fp16 and fp32 only)."""

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

KNOBS: dict[str, Any] = {
    "block_m1": 32,
    "block_n1": 64,
    "block_m2": 64,
    "block_n2": 32,
    "num_warps": 4,
    "num_warps2": 4,
    "num_stages": 2,
    "num_stages2": 2,
    "loads": "pointer",
}

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one query": {"sizes": (1, 2, 1, 2, 16)},
    "causal, shared heads": {"sizes": (1, 4, 50, 50, 16), "kv_heads": 2, "causal": "bottom_right"},
    "causal, more keys": {"sizes": (1, 1, 40, 110, 16), "causal": "bottom_right"},
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
    "mask gradient over the batch": {
        "sizes": (2, 1, 40, 50, 16),
        "mask": "additive",
        "mask_dims": "hqk",
        "mask_gradient": True,
        "causal": "bottom_right",
    },
    "mask gradient over queries": {"mask": "additive", "mask_dims": "bk", "mask_gradient": True},
    "mask gradient over all": {"mask": "additive", "mask_dims": "qk", "mask_gradient": True, "kv_heads": 1},
}


def workload_of(case: dict[str, Any], dtype: str) -> Workload:
    options = dict(case)
    return attention_workload(
        *options.pop("sizes", (1, 2, 40, 50, 16)), dtype, direction="backward", deterministic=True, **options
    )


def backward(workload: Workload, **knobs: Any) -> Schedule:
    precision = ATTENTION.compute_precisions(workload)[-1]
    return Schedule("backward", FrozenMap({**KNOBS, "precision": precision, **knobs}))


def run(workload: Workload, schedule: Schedule) -> Verdict:
    inputs = ATTENTION.make_inputs(workload, 1, "cpu")
    out = ATTENTION.empty_output(workload, "cpu")
    launch_all(ATTENTION.plan(workload, schedule, inputs, out))
    return verify(out, ATTENTION.reference(workload, inputs), ATTENTION.tolerance(workload))


@pytest.mark.parametrize("case", CASES)
def test_every_feature(case: str) -> None:
    workload = workload_of(CASES[case], ("fp16", "fp32")[list(CASES).index(case) % 2])
    verdict = run(workload, backward(workload))
    assert verdict.right, verdict


@pytest.mark.parametrize("case", ["causal, shared heads", "window", "packed", "tokens first", "wide values"])
def test_loads_by_the_bulk_copy_engine(case: str) -> None:
    workload = workload_of(CASES[case], "fp16")
    verdict = run(workload, backward(workload, loads="bulk"))
    assert verdict.right, verdict


def test_sampled_schedules_are_right() -> None:
    workload = workload_of({"sizes": (1, 2, 90, 80, 16), "kv_heads": 1, "causal": "top_left"}, "fp16")
    space = ATTENTION.templates["backward"].space(workload, H100)
    for schedule in space.sample(random.Random(5), 2):
        verdict = run(workload, schedule)
        assert verdict.right, (schedule, verdict)


def test_gradients_are_those_of_autograd() -> None:
    """Against torch's own differentiation in fp64, with no reference of ours between."""
    workload = workload_of({"sizes": (1, 2, 24, 30, 16), "kv_heads": 1, "causal": "top_left"}, "fp32")
    inputs = ATTENTION.make_inputs(workload, 2, "cpu")
    q, k, v = leaves = [inputs[name].double().requires_grad_() for name in ("q", "k", "v")]
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    wanted = torch.autograd.grad(exact, leaves, inputs["d_out"].double())
    results = ATTENTION.empty_output(workload, "cpu")
    launch_all(ATTENTION.plan(workload, backward(workload), inputs, results))
    for found, right in zip(results, wanted, strict=True):
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)
