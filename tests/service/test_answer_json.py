"""An answer's JSON is its model's, whatever is known and whatever was asked."""

from __future__ import annotations

import dataclasses

import pytest
from starlette.requests import Request

from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.search import Answer
from kernelwright.service.answer_json import answer_json, question_path, tell
from kernelwright.service.questions import read_question
from kernelwright.service.schemas import BestKernel
from kernelwright.types import FrozenMap, Measurement, Schedule, Status, TuningRecord, Workload
from tests.service.conftest import TOOLCHAIN

H100 = named_device("h100")
SCHEDULE = Schedule(
    "pointer", FrozenMap({"block_m": 64, "split_k": 1, "share": 0.5, "swap": True, "precision": "bf16"})
)

WORKLOADS = [
    matmul_workload(2048, 4096, 4096),
    matmul_workload(16, 4096, 4096),
    matmul_workload(16, 4096, 4096, epilogue=("bias", "gelu"), out_dtype="fp32", error_budget=0.01),
    matmul_workload(16, 4096, 4096, layout="tt", batch=3),
    matmul_workload(16, 4096, 4096, "bf16", b_dtype="int4", scaling="group:128"),
    matmul_workload(16, 4096, 4096, attributes={"deterministic": True}),
    dataclasses.replace(matmul_workload(16, 4096, 4096), layouts={"a": "row:8192", "b": "col", "out": "row"}),
]


def record(workload: Workload) -> TuningRecord:
    seen = Measurement(Status.OK, 10.0, error=1e-3)
    return TuningRecord(workload, H100, TOOLCHAIN, SCHEDULE, seen, "f" * 20, "tune", "2026-01-01T00:00:00+00:00")


def answers(workload: Workload) -> list[Answer]:
    other = record(matmul_workload(64, 64, 64))
    return [
        Answer("vendor", workload, H100, note='nothing "known"'),
        Answer("predicted", workload, H100, SCHEDULE, expected_us=4.5, regret=0.1, roofline=0.25),
        Answer("nearest", workload, H100, SCHEDULE, "kernel", 4.5, "torch.mm", None, None, other, None, "near"),
        Answer("measured", workload, H100, SCHEDULE, "kernel", 4.5, "torch.mm", 9.0, 0.5, record(workload)),
    ]


@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_json_is_that_of_the_model(workload: Workload) -> None:
    for answer in answers(workload):
        told = tell(answer)
        assert answer_json(answer) == told.model_dump_json().encode()
        assert BestKernel.model_validate_json(answer_json(answer)) == told
        assert told.workload == workload.to_json() and Workload.from_json(told.workload).key == told.workload_key


def test_links() -> None:
    nothing, predicted, nearest, measured = (tell(answer).links for answer in answers(WORKLOADS[0]))
    asked = "operator=matmul&shape=M=2048,N=4096,K=4096&dtype=bf16&layout=nt&hardware=h100"
    assert nothing.workload == f"/v1/kernels/best?{asked}" and nothing.self is None and nothing.source is None
    assert predicted.source == nearest.source == f"/v1/kernels/best/source?{asked}"
    assert measured.source == f"{measured.self}/source" == f"/v1/kernels/{record(WORKLOADS[0]).key}/source"


@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_the_question_leads_back(workload: Workload) -> None:

    path = question_path(workload, H100)
    if path is None:
        assert workload in (WORKLOADS[5], WORKLOADS[6])
        return
    query = path.partition("?")[2].encode()
    asked = read_question(Request({"type": "http", "query_string": query, "headers": []}))
    assert (asked.workload, asked.device) == (workload, H100)
