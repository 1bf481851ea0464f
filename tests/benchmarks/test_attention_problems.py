"""The attentions of the problem sets, the cases of check_attention, and a judge of results of several tensors."""

from __future__ import annotations

import math

import check_attention
import pytest
import verify_job
from attention_cases import coverage
from attention_problems import group, load_attention, skipped_attention
from verify_job import Case

from kernelwright.kernels.attention.operator import ATTENTION
from kernelwright.kernels.attention.workload import CAUSAL, FP8, MASKS, attention_workload, problem_of
from kernelwright.kernels.device import named_device

H100 = named_device("h100")


@pytest.mark.parametrize(("name", "count"), [("core", 35), ("extra", 4), ("awkward", 23), ("smoke", 4)])
def test_every_attention_of_the_sets_can_be_run(name: str, count: int) -> None:
    entries = load_attention(name)
    assert len(entries) == count and not skipped_attention(name)
    for entry in entries:
        assert len(ATTENTION.space(entry.workload, H100)), entry


def test_problems_say_what_the_files_say() -> None:
    by_tag = {entry.tag: entry.workload for name in ("core", "extra") for entry in load_attention(name)}
    bias = by_tag["additive position bias"]
    assert bias.attributes == {"mask": "additive", "mask_dims": "qkh", "scale": 1.0}
    assert by_tag["encoder + padding mask"].attributes["mask_dims"] == "bk"
    assert by_tag["packed qkv, odd 1000"].layouts["v"] == "strided:2304000,64,2304,1"
    assert by_tag["MLA absorbed decode 576/512"].attributes["kv_shared"] is True
    assert by_tag["varlen packed prefill"].dims["T"] == 8216
    assert {group(workload) for workload in by_tag.values()} == {
        "forward", "decode", "paged", "varlen", "mask", "backward",
    }  # fmt: skip


def test_flops_are_those_that_were_counted() -> None:
    import json

    from attention_problems import FOLDER

    problems = json.loads((FOLDER / "core.json").read_text())["problems"]
    counted = {problem["id"]: problem["flops"] for problem in problems if problem["family"] == "attention"}
    for entry in load_attention("core"):
        assert ATTENTION.work(entry.workload).flops == pytest.approx(counted[entry.id], rel=1e-9), entry


def test_the_cases_cover_what_an_attention_can_be() -> None:
    cases = coverage()
    assert len({case.id for case in cases}) == len(cases)
    problems = [problem_of(case.workload) for case in cases]
    assert {p.causal for p in problems} == {"", *CAUSAL} and {p.mask for p in problems} == {"", *MASKS}
    assert {p.dtype for p in problems} == {"fp16", "bf16", "fp32", *FP8}
    for name in ("alibi", "sinks", "lse", "packed", "page", "kv_shared", "window", "softcap", "mask_gradient"):
        assert {bool(getattr(p, name)) for p in problems} == {True, False}, name
    assert max(p.q.span for p in problems) >= 2**31
    empty = [case for case in cases if not len(ATTENTION.space(case.workload, H100))]
    assert not empty, empty
    large = [case for case in check_attention.cases_of(("awkward",), "") if case.fills]
    assert [set(case.fills) for case in large] == [{"q", "k"}]


def test_the_judge_sees_faults_in_either_tensor() -> None:
    workload = attention_workload(1, 2, 20, 8, 16, "fp16", causal="bottom_right", lse=True)
    inputs = verify_job.case_inputs(Case("x", "x", workload), 0, "cpu")
    right = ATTENTION.reference(workload, inputs)
    assert isinstance(right, tuple) and right[1].isinf().any()
    out = (right[0].half(), right[1].float())
    limit = ATTENTION.tolerance(workload)
    assert verify_job.compare_all(out, right, limit).right
    for place, value in ((0, 9.0), (1, 9.0), (1, math.nan), (0, math.nan)):
        spoilt = [x.clone() for x in out]
        spoilt[place].view(-1)[-1] = value
        assert not verify_job.compare_all((spoilt[0], spoilt[1]), right, limit).right
    dead = out[1].clone().masked_fill_(out[1].isinf(), 0.0)
    assert not verify_job.compare_all((out[0], dead), right, limit).right
    verify_job.blank(out)
    assert all(x.isnan().all() for x in out)
