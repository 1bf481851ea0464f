"""Decode and backward without a GPU: what their spaces hold, why they are empty, and that their members build."""

from __future__ import annotations

from typing import Any

import pytest

from kernelwright.kernels.attention.operator import ATTENTION
from kernelwright.kernels.attention.workload import attention_workload
from kernelwright.kernels.build import BuildPool
from kernelwright.kernels.device import named_device
from kernelwright.kernels.render import inline
from kernelwright.types import FrozenMap, Schedule, Workload

H100 = named_device("h100")

DECODE: dict[str, Any] = {
    "block_m": 16,
    "block_n": 64,
    "split_kv": 4,
    "combine": "second",
    "turned": 0,
    "loads": "pointer",
}
BACKWARD: dict[str, Any] = {"block_m1": 32, "block_n1": 64, "block_m2": 64, "block_n2": 32, "loads": "pointer"}

GROUPED = attention_workload(4, 32, 1, 4096, 128, kv_heads=8)
PAGED = attention_workload(4, 32, 1, 4096, 128, kv_heads=8, page=64)
ABSORBED = attention_workload(32, 128, 1, 4096, 576, kv_heads=1, v_dim=512, kv_shared=True)
CAUSAL = attention_workload(1, 32, 4096, 4096, 128, kv_heads=8, causal="bottom_right", direction="backward")


def decode(**knobs: Any) -> Schedule:
    return Schedule("decode", FrozenMap({**DECODE, "num_warps": 4, "num_stages": 3, "precision": "bf16", **knobs}))


def backward(**knobs: Any) -> Schedule:
    own: dict[str, Any] = {"num_warps": 4, "num_warps2": 4, "num_stages": 1, "num_stages2": 1, "precision": "bf16"}
    return Schedule("backward", FrozenMap({**BACKWARD, **own, **knobs}))


def why_empty(template: str, workload: Workload, schedule: Schedule) -> str:
    space = ATTENTION.templates[template].space(workload, H100)
    assert len(space) == 0
    return "; ".join(space.why_illegal(schedule))


def test_spaces_are_empty_where_they_must_be_and_say_why() -> None:
    packed = attention_workload(4, 8, 9, 512, 64, packed=(20, 2000))
    prefill = attention_workload(1, 8, 4096, 4096, 64, kv_heads=1)
    assert "not packed ones" in why_empty("decode", packed, decode())
    assert "at most 1024 query rows" in why_empty("decode", prefill, decode())
    assert "computes forwards" in why_empty("decode", CAUSAL, decode())
    assert "computes gradients" in why_empty("backward", GROUPED, backward())


@pytest.mark.parametrize(
    "workload", [GROUPED, PAGED, ABSORBED, CAUSAL], ids=["grouped", "paged", "absorbed", "backward"]
)
def test_spaces_are_moderate_and_offer_both_ways_of_loading(workload: Workload) -> None:
    template = "backward" if workload is CAUSAL else "decode"
    members = ATTENTION.templates[template].space(workload, H100).members
    assert 100 < len(members) < 6000
    assert {member.knobs["loads"] for member in members} == {"pointer", "bulk"}
    on_a100 = ATTENTION.templates[template].space(workload, named_device("a100")).members
    assert {member.knobs["loads"] for member in on_a100} == {"pointer"}


def test_small_pages_cannot_be_copied_in_bulk_by_larger_blocks() -> None:
    workload = attention_workload(4, 32, 1, 4096, 128, kv_heads=8, page=16)
    bulk = [s for s in ATTENTION.templates["decode"].space(workload, H100) if s.knobs["loads"] == "bulk"]
    assert bulk
    assert {s.knobs["block_n"] for s in bulk} == {16}


@pytest.mark.parametrize("layout", ["strided:4096,128,128,2", "strided:0,262144,64,1", "bhsd+1"])
def test_unaligned_or_repeated_keys_are_not_copied_in_bulk(layout: str) -> None:
    workload = attention_workload(2, 8, 1, 2048, 64, layout={"k": layout})
    members = ATTENTION.templates["decode"].space(workload, H100).members
    assert {member.knobs["loads"] for member in members} == {"pointer"}


def test_ways_that_were_measured_wrong_are_left_out_on_hopper_alone() -> None:
    """Both come from keys in two parts by warpgroups: heads of 576, 160 and 72, with triton 3.6 on an H200."""
    absorbed = list(ATTENTION.templates["decode"].space(ABSORBED, named_device("h100")))
    assert absorbed and not any(s.knobs["turned"] for s in absorbed)
    assert all(s.knobs["num_warps"] <= 4 for s in absorbed if s.knobs["block_m"] == 64)
    plain = ATTENTION.templates["decode"].space(GROUPED, named_device("h100"))
    assert any(s.knobs["turned"] for s in plain)
    uneven = attention_workload(1, 4, 300, 300, 72, causal="bottom_right")
    for device, heads in (("h100", {"pad"}), ("a100", {"pad", "split"})):
        space = ATTENTION.templates["forward"].space(uneven, named_device(device))
        assert {s.knobs["head"] for s in space} == heads


def test_splits_leave_every_part_a_block_of_keys() -> None:
    short = ATTENTION.templates["decode"].space(attention_workload(1, 8, 1, 100, 64, kv_heads=1), H100)
    assert all(int(s.knobs["split_kv"]) * int(s.knobs["block_n"]) <= 128 for s in short)
    assert max(int(s.knobs["split_kv"]) for s in short) > 1


BUILDS: dict[str, tuple[Workload, Schedule, int]] = {
    "grouped": (GROUPED, decode(loads="bulk", combine="last"), 96),
    "grouped, turned": (GROUPED, decode(loads="bulk", turned=1), 96),
    "paged": (PAGED, decode(), 255),
    "absorbed": (ABSORBED, decode(loads="bulk", split_kv=1, combine="last", num_warps=8, num_stages=2), 200),
    "backward": (CAUSAL, backward(loads="bulk"), 255),
}
"""With the most registers a thread may need: without spills, these are the schedules that should be fast."""


@pytest.mark.parametrize("name", BUILDS)
def test_schedules_build_without_spills(pool: BuildPool, name: str) -> None:
    workload, schedule, registers = BUILDS[name]
    template = ATTENTION.templates[schedule.template]
    assert template.space(workload, H100).why_illegal(schedule) == ()
    report = pool.build(workload, schedule, H100, keep_artifact=True)
    text = "".join(str(x) for stage, x in report.artifact.items() if stage.endswith("ptx"))
    assert (report.spills, "cp.async.bulk.tensor" in text) == (0, schedule.knobs["loads"] == "bulk")
    assert report.registers <= registers
    assert ("wgmma" in text) == (schedule.template == "backward" or bool(schedule.knobs["turned"]))
    estimate = template.shared_bytes(workload, schedule)
    assert 0.75 * report.shared_bytes <= estimate <= 1.3 * report.shared_bytes


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("turned", [0, 1])
def test_pages_leave_as_many_blocks_of_keys_in_flight(pool: BuildPool, page: int, turned: int) -> None:
    """A load of keys that waits for the page table's costs half of the stages."""
    paged = attention_workload(4, 32, 1, 4096, 128, kv_heads=8, page=page)
    reports = [pool.build(workload, decode(turned=turned), H100) for workload in (GROUPED, paged)]
    assert abs(reports[0].shared_bytes - reports[1].shared_bytes) <= 256
    assert all(report.spills == 0 for report in reports)


@pytest.mark.parametrize("device", ["a100", "mi300x"])
def test_portable_schedules_build_for_other_targets(pool: BuildPool, device: str) -> None:
    small = attention_workload(2, 4, 200, 200, 64, "fp16", kv_heads=2, causal="top_left", direction="backward")
    other = named_device(device)
    assert pool.build(PAGED, decode(num_stages=2), other).registers > 0
    assert pool.build(small, backward(precision="fp16"), other).registers > 0


@pytest.mark.parametrize("template", ["decode", "backward"])
def test_kernel_files_can_be_put_into_one(template: str) -> None:
    imports, code = inline(ATTENTION.templates[template].kernel_module)
    assert "import triton" in imports
    compile("\n".join([*sorted(imports), *code]), template, "exec")
