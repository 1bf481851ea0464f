"""Ranks of one job choose the same kernels, whatever each of them knows."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch.distributed as distributed

from kernelwright.compiler.agreement import AgreedAnswers, default_store
from kernelwright.compiler.dispatch import RecordedAnswers
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.kernels.triton_adapter import current_toolchain
from kernelwright.search.answer import Answer
from kernelwright.search.timing import TIMER_VERSION
from kernelwright.types import TuningRecord, Workload

H100 = named_device("h100")
TOOLCHAIN = current_toolchain(TIMER_VERSION)
WORKLOAD = matmul_workload(2048, 4096, 4096)
Maker = Callable[..., TuningRecord]


def answers(*records: TuningRecord) -> RecordedAnswers:
    return RecordedAnswers(records, H100, TOOLCHAIN)


def test_the_first_answer_is_everybodys(record_of: Maker) -> None:
    store = distributed.HashStore()
    ranks = [AgreedAnswers(known, store, known.state) for known in (answers(record_of(WORKLOAD)), answers())]
    first, second = (rank(WORKLOAD) for rank in ranks)
    assert first.choice == "kernel" and second == dataclasses.replace(first, record=None, roofline=None)
    assert [rank.state is None for rank in ranks] == [False, True]


def test_what_was_not_measured_holds_for_the_graph_that_asked(record_of: Maker) -> None:
    store, known = distributed.HashStore(), answers(record_of(WORKLOAD))
    early, late = AgreedAnswers(answers(), store, None), AgreedAnswers(known, store, None)
    asked = [WORKLOAD, matmul_workload(16, 16, 16)]
    early.prepare(asked)
    late.prepare(asked)
    assert [rank(WORKLOAD).choice for rank in (early, late)] == ["vendor", "vendor"]
    # in the next graph one of them has tuned it, and all take that
    for rank in (late, early):
        rank.prepare([WORKLOAD])
        assert rank(WORKLOAD).choice == "kernel"
    # whoever compiles the first graph only now does as the others did
    third = AgreedAnswers(known, store, None)
    third.prepare(asked[::-1])
    assert third(WORKLOAD).choice == "vendor"


def test_another_gpu_has_answers_of_its_own(record_of: Maker) -> None:
    store = distributed.HashStore()
    other = RecordedAnswers([], named_device("h200"), TOOLCHAIN)
    assert AgreedAnswers(answers(record_of(WORKLOAD)), store, None)(WORKLOAD).choice == "kernel"
    assert AgreedAnswers(other, store, None)(WORKLOAD).choice == "vendor"


def test_a_store_that_fails_leaves_a_rank_its_own_answers(record_of: Maker, caplog: pytest.LogCaptureFixture) -> None:
    class Gone:
        def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
            raise RuntimeError("connection lost")

    known = answers(record_of(WORKLOAD))
    rank = AgreedAnswers(known, Gone(), known.state)
    assert rank(WORKLOAD).choice == "kernel" and rank.state == known.state
    assert "connection lost" in caplog.text


def test_questions_are_passed_on() -> None:
    class Source:
        asked: Sequence[Workload] = ()

        def prepare(self, workloads: Sequence[Workload]) -> None:
            self.asked = workloads

        def __call__(self, workload: Workload) -> Answer:
            return Answer("vendor", workload, H100)

    source = Source()
    AgreedAnswers(source, distributed.HashStore(), None).prepare([WORKLOAD])
    assert source.asked == [WORKLOAD]


def test_without_a_job_there_is_nobody_to_agree_with() -> None:
    assert default_store() is None


RANK = """
import sys
import torch.distributed as distributed
from kernelwright.compiler.agreement import AgreedAnswers, default_store
from kernelwright.kernels import get_operator
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.search.answer import Answer

rank, meet = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
workload, h100 = matmul_workload(64, 64, 64), named_device("h100")
schedule = get_operator("matmul").space(workload, h100).members[rank]
own = Answer("measured", workload, h100, schedule, "kernel", 1.0, "torch.mm", 2.0)
print(AgreedAnswers(lambda workload: own, default_store(), None)(workload).schedule.key)
distributed.barrier()
distributed.destroy_process_group()
"""


def test_two_processes_agree(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "meet")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    first, second = (rank.communicate(timeout=120)[0] for rank in ranks)
    assert first == second and first.strip()
