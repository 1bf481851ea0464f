"""Attention forward kernels build for every kind of GPU with none present, and keep their registers."""

from __future__ import annotations

from typing import Any

import pytest

from kernelwright.kernels.attention.operator import ATTENTION
from kernelwright.kernels.attention.workload import attention_workload
from kernelwright.kernels.build import BuildPool
from kernelwright.kernels.device import named_device
from kernelwright.types import Schedule, Workload

CAUSAL = {"causal": "bottom_right", "layout": "bshd"}


def member(workload: Workload, device: str, template: str, **knobs: Any) -> Schedule:
    space = ATTENTION.templates[template].space(workload, named_device(device))
    return next(s for s in space if knobs.items() <= dict(s.knobs).items())


@pytest.mark.parametrize("device", ["a100", "b200", "mi300x"])
def test_the_portable_template_builds_everywhere(pool: BuildPool, device: str) -> None:
    workload = attention_workload(1, 8, 512, 512, 80, kv_heads=2, lse=True, **CAUSAL)
    schedule = member(workload, device, "forward", block_m=64, block_n=64, num_warps=4, num_stages=2, head="split")
    report = pool.build(workload, schedule, named_device(device))
    assert report.spills == 0 and report.shared_bytes <= named_device(device).shared_memory_bytes


@pytest.mark.parametrize(("head_dim", "options", "block_n"), [(128, CAUSAL, 128), (80, {"lse": True}, 128)])
def test_warpgroups_keep_scores_and_sums_in_registers(
    pool: BuildPool, head_dim: int, options: dict[str, Any], block_n: int
) -> None:
    workload = attention_workload(1, 8, 512, 512, head_dim, **options)
    wanted = {"block_n": block_n, "num_stages": 2, "pingpong": 1}
    schedule = member(workload, "h100", "forward_warp_specialized", **wanted)
    template = ATTENTION.templates["forward_warp_specialized"]
    report = pool.build(workload, schedule, named_device("h100"), keep_artifact=True)
    assert report.spills == 0
    estimate = template.shared_bytes(workload, schedule)
    assert abs(report.shared_bytes - estimate) <= 256 and report.shared_bytes <= 232448
    assert "wgmma.mma_async" in str(report.artifact["attention_warp_specialized.ptx"])


def test_templates_say_why_they_cannot_run_a_workload() -> None:
    def why(template: str, workload: Workload, device: str = "h100") -> str:
        space = ATTENTION.templates[template].space(workload, named_device(device))
        assert len(space) == 0
        knobs = {name: knob.values[-1] for name, knob in space.knobs.items()}
        return " ".join(space.why_illegal(Schedule(template, knobs)))  # type: ignore[arg-type]

    usual = {"batch": 1, "heads": 4, "q_length": 256, "kv_length": 256, "head_dim": 64}

    def workload(**options: Any) -> Workload:
        return attention_workload(**{**usual, **options})

    special = "forward_warp_specialized"
    assert "sm_90" in why(special, workload(), "a100")
    assert "16-bit" in why(special, workload(dtype="fp32"))
    assert "sinks" in why(special, workload(sinks=True))
    assert "unit stride" in why(special, workload(head_dim=65))
    assert "unit stride" in why(special, workload(layout={"k": "strided:65536,0,64,1"}))
    assert "computes forwards" in why("forward", workload(direction="backward"))
    assert "pages" in why("forward", workload(page=16))
    assert "cannot multiply" in why("forward", workload(dtype="fp8e4m3", scaling="tensor"), "a100")


def test_spaces_are_of_moderate_size() -> None:
    for workload in (attention_workload(2, 32, 4096, 4096, d, **CAUSAL) for d in (64, 80, 128, 256)):
        sizes = {name: len(t.space(workload, named_device("h100"))) for name, t in ATTENTION.templates.items()}
        assert 100 <= sizes["forward"] <= 3000 and 10 <= sizes["forward_warp_specialized"] <= 1000, sizes
