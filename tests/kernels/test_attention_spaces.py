"""What the spaces of attention offer: something for every problem, and nothing that was measured to be hopeless."""

from __future__ import annotations

from typing import Any

import pytest

from kernelwright.kernels.attention.operator import ATTENTION
from kernelwright.kernels.attention.workload import attention_workload
from kernelwright.kernels.device import named_device
from kernelwright.types import FrozenMap, Schedule, Workload

H200 = named_device("h200")
LONG = attention_workload(1, 32, 1, 32768, 128, kv_heads=8)
WIDE_BATCH = attention_workload(128, 64, 1, 4096, 128, kv_heads=8)
PAGED = attention_workload(32, 32, 1, 4096, 128, kv_heads=8, page=16)


def why(workload: Workload, template: str = "decode", **knobs: Any) -> str:
    space = ATTENTION.templates[template].space(workload, H200)
    usual: dict[str, Any] = {"precision": "bf16", "num_warps": 4}
    if template == "decode":
        usual |= {"block_m": 16, "combine": "last", "turned": 0}
    return " ".join(space.why_illegal(Schedule(template, FrozenMap({**usual, **knobs}))))


@pytest.mark.parametrize("kv", [1, 16, 33, 1000, 70000])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256, 576])
@pytest.mark.parametrize("batch", [1, 300])
def test_every_decode_has_schedules(kv: int, head_dim: int, batch: int) -> None:
    for heads, page in ((1, None), (8, None), (8, 16), (8, 256)):
        workload = attention_workload(batch, heads, 1, kv, head_dim, kv_heads=1, page=page)
        assert len(ATTENTION.templates["decode"].space(workload, H200)) > 0, (heads, page)


def test_decodes_that_leave_memory_idle_are_not_offered() -> None:
    good = {"block_n": 128, "loads": "bulk", "num_stages": 3}
    assert why(LONG, split_kv=16, **good) == "" and why(WIDE_BATCH, split_kv=1, **good) == ""
    assert "multiprocessors idle" in why(LONG, split_kv=8, **good)
    assert "bytes in flight" in why(LONG, split_kv=64, block_n=16, loads="bulk", num_stages=1)
    assert "one stage" in why(WIDE_BATCH, split_kv=1, block_n=256, loads="pointer", num_stages=1, num_warps=8)
    assert "too few" in why(WIDE_BATCH, split_kv=1, block_n=16, loads="pointer", num_stages=5, num_warps=2)
    assert "elements a thread" in why(WIDE_BATCH, split_kv=1, block_n=128, loads="pointer", num_stages=3, num_warps=2)
    assert "too many warps" in why(WIDE_BATCH, split_kv=1, block_n=16, loads="bulk", num_stages=5, num_warps=8)


def test_small_decodes_need_not_fill_the_device() -> None:
    short = attention_workload(1, 8, 1, 512, 64, kv_heads=1)
    assert why(short, split_kv=1, block_n=64, loads="bulk", num_stages=2) == ""


def test_pages_smaller_than_a_block_go_by_pointers() -> None:
    assert why(PAGED, split_kv=1, block_n=64, loads="pointer", num_stages=4) == ""
    assert "one page" in why(PAGED, split_kv=1, block_n=64, loads="bulk", num_stages=4)


def test_forward_counts_the_stage_that_warpgroups_still_read() -> None:
    """Measured on an H100: 294912 bytes where 232448 were thought to do."""
    workload = attention_workload(1, 8, 2048, 2048, 256, kv_heads=1, causal="bottom_right")
    knobs = {"block_m": 64, "num_warps": 8, "head": "pad", "section": 1}
    assert "shared memory" in why(workload, "forward", block_n=64, num_stages=4, **knobs)
    assert why(workload, "forward", block_n=64, num_stages=3, **knobs) == ""


@pytest.mark.parametrize("template", ["backward_fused", "backward_warp_specialized"])
def test_one_pass_gradients_even_out_causal_tiles(template: str) -> None:
    def sections(batch: int, **options: Any) -> set[object]:
        workload = attention_workload(batch, 8, 1024, 1024, 64, direction="backward", **options)
        return {schedule.knobs["section"] for schedule in ATTENTION.templates[template].space(workload, H200)}

    assert sections(2, causal="bottom_right") == {4, 16}
    assert sections(1, causal="bottom_right", kv_heads=2) == {2}
    assert sections(2) == {1}


def test_few_keys_divide_their_queries() -> None:
    def parts(*sizes: int, **options: Any) -> set[object]:
        workload = attention_workload(*sizes, direction="backward", **options)
        space = ATTENTION.templates["backward_warp_specialized"].space(workload, H200)
        return {schedule.knobs["split_k"] for schedule in space if schedule.knobs["block_m"] == 64}

    assert parts(2, 10, 4096, 77, 64) == {3, 4, 6}
    assert parts(1, 1, 300, 77, 64) == {1}
    assert parts(1, 32, 4096, 4096, 128, kv_heads=8, causal="bottom_right") == {1}
