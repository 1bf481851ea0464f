"""check_matmul: cases that cover the grammar, a judge that sees every planted fault, and a run that survives them."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import check_matmul
import matmul_cases
import pytest
import torch
import verify_job
from verify_job import Case, CheckJob, LoadJob
from verify_runner import MOST_DEATHS, Checked, Checker, Choice

from kernelwright.errors import BuildFailed
from kernelwright.kernels import get_operator
from kernelwright.kernels.child_process import ChildDied, ChildProcess, ChildTimeout
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.workload import FLOATS, FP8, LAYOUTS, SCALINGS, STEPS, matmul_workload, problem_of
from kernelwright.search.failures import failed
from kernelwright.search.measure_job import Reply
from kernelwright.types import Measurement, Schedule, Status, Workload

MATMUL = get_operator("matmul")
H100 = named_device("h100")


def test_the_cases_cover_what_a_matmul_can_be() -> None:
    cases = matmul_cases.coverage()
    assert len({case.id for case in cases}) == len(cases)
    problems = [problem_of(case.workload) for case in cases]
    assert {step for p in problems for step in p.epilogue} == set(STEPS)
    assert {p.scaling for p in problems} == set(SCALINGS)
    assert {p.a_dtype for p in problems} >= {*FLOATS, *FP8, "int8", "fp4"}
    assert {p.b_dtype for p in problems} >= {*FLOATS, *FP8, "int8", "int4", "fp4"}
    assert {p.out_dtype for p in problems} == set(FLOATS)
    assert {(p.a.order, p.b.order) for p in problems} >= set(LAYOUTS.values())
    assert {"row", "col", "strided"} == {p.out.order for p in problems}
    sizes = {name: {case.workload.dims.get(name) for case in cases} for name in "MNKBG"}
    assert all({0, 1} <= sizes[name] for name in "MNK") and {0, 1, 65537} <= sizes["B"] and 256 in sizes["G"]
    assert any(p.deterministic for p in problems) and any(p.workspace_bytes == 0 for p in problems)
    assert any(0 in [e - s for s, e in zip((0, *c.ends), c.ends, strict=False)] for c in cases if c.ends)
    far = [(p.m - 1) * layout.leading for p in problems for layout in (p.a, p.out) if layout.order == "row"]
    assert max(far) >= 2**31


def test_random_chains_are_legal() -> None:
    rng = random.Random(0)
    for _ in range(300):
        chain = matmul_cases.random_chain(rng)
        assert problem_of(matmul_workload(8, 8, 8, epilogue=chain)).epilogue == chain


def test_labels_tell_workloads_apart() -> None:
    cases = matmul_cases.coverage()
    labels = {matmul_cases.label(case.workload): case.workload for case in cases}
    assert len(labels) == len({case.workload for case in cases})


def test_sets_are_chosen_by_words() -> None:
    awkward = check_matmul.cases_of(["awkward"], "")
    assert len(awkward) == 26
    assert {case.id[:5]: dict(case.fills) for case in awkward if case.fills} == {
        "awk23": {"a": "large_positive", "b": "large_positive"},
        "awk24": {"bias": "nan"},
        "awk25": {"a": "nan_outside", "b": "nan_outside"},
    }
    assert [case.tag for case in check_matmul.cases_of(["coverage", "extra"], "softcap,router")] == [
        "softcap",
        "router",
    ]


def test_chosen_templates_are_asked_only_for_what_they_can_run() -> None:
    cases = check_matmul.cases_of(["coverage"], "mx,shared out")
    assert check_matmul.able(cases, Choice(), H100) == cases
    shared = check_matmul.able(cases, Choice(templates=("stream_k_warp_specialized",)), H100)
    assert shared == [case for case in cases if case.tag.startswith("shared out")]
    wide = Choice(templates=("stream_k_warp_specialized",), knobs={"block_n": "144"})
    # a row-major b has no pieces of 16 columns
    assert 0 < len(check_matmul.able(shared, wide, H100)) < len(shared)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ChildProcess]:
    init = {"device_index": 0, "l2_bytes": 0, "device": "cpu"}
    with ChildProcess("verify_job:start", init=init, env={"TRITON_INTERPRET": "1"}) as child:
        yield child


@pytest.mark.parametrize("number", ["00", "07", "08", "09", "10", "12", "13", "15", "16", "23", "24", "25"])
def test_awkward_problems_are_right_in_the_interpreter(interpreter: ChildProcess, number: str) -> None:
    case = check_matmul.cases_of(["awkward"], f"awk{number}")[0]
    schedule = MATMUL.default_schedule(case.workload, H100)
    assert interpreter.call(LoadJob(case, 0, False)) == Reply(())
    measurement = interpreter.call(CheckJob(case, schedule, 0, False)).measurements[0]
    assert measurement.status is Status.OK, measurement


class Kernel:
    """Stands for a compiled kernel: does on launch what it is told."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[[], object]:
        return self._run


def check_planted(
    monkeypatch: pytest.MonkeyPatch, workload: Workload, fault: Callable[[torch.Tensor, int], None]
) -> Measurement:
    """The verdict on a kernel that writes the right result and then has `fault` change it; it is told which launch."""
    case, launches = Case("planted", "", workload), [0]

    def plan(workload: Workload, schedule: Schedule, inputs: Any, out: torch.Tensor) -> list[Any]:
        def run() -> None:
            launches[0] += 1
            out.copy_(MATMUL.reference(workload, inputs))
            fault(out, launches[0])

        return [(Kernel(run), (1,), (), {})]

    names = ("make_inputs", "empty_output", "reference", "tolerance", "vendor")
    fake = SimpleNamespace(plan=plan, **{name: getattr(MATMUL, name) for name in names})
    monkeypatch.setattr(verify_job, "get_operator", lambda name: fake)
    schedule = MATMUL.default_schedule(workload, H100)
    reply: Reply = verify_job.start(0, 0, "cpu")(CheckJob(case, schedule, 0, False))
    return reply.measurements[0]


def test_a_right_kernel_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = matmul_cases.laid_out(matmul_workload(33, 40, 24, epilogue=("bias",)), out="row:48")
    found = check_planted(monkeypatch, workload, lambda out, launch: None)
    assert found.status is Status.OK and found.error is not None and 0 < found.error < 4e-3


def test_faults_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    padded = matmul_cases.laid_out(matmul_workload(33, 40, 24), out="row:48")
    fixed = matmul_workload(33, 40, 24, "fp32", attributes={"deterministic": True})

    def spill(out: torch.Tensor, launch: int) -> None:
        out.as_strided((2,), (1,), 40).zero_()

    def stop(out: torch.Tensor, launch: int) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    cases: list[tuple[Workload, Callable[[torch.Tensor, int], object], str]] = [
        (padded, lambda out, launch: out[3].fill_(math.nan), "not finite or not written"),
        (padded, lambda out, launch: out[3, 5].add_(9), "relative error"),
        (padded, lambda out, launch: out.mul_(1 if launch < 3 else 2), "right at first, then not"),
        (padded, spill, "2 elements between the result's rows"),
        (fixed, lambda out, launch: out.mul_(1 + launch * 1e-7), "two runs differ"),
    ]
    for workload, fault, words in cases:
        found = check_planted(monkeypatch, workload, fault)  # type: ignore[arg-type]
        assert found.status is Status.WRONG_RESULT and words in found.message, (words, found)
    assert check_planted(monkeypatch, padded, stop).status is Status.CRASHED


def test_overflow_must_match() -> None:
    reference = torch.tensor([[1.0, 1e6, -1e6, math.nan]], dtype=torch.float64)
    right = reference.half()
    assert verify_job.compare(right, reference, 1e-3).right
    for wrong in (math.nan, 65504.0, -math.inf):
        changed = right.clone()
        changed[0, 1] = wrong
        assert "must be inf" in verify_job.compare(changed, reference, 1e-3).reason
    changed = right.clone()
    changed[0, 0] = math.inf
    assert not verify_job.compare(changed, reference, 1e-3).right


def test_some_rows_of_what_is_too_large() -> None:
    problem = problem_of(matmul_workload(70000, 32768, 64))
    rows = verify_job.some_rows(problem, "cpu")
    assert rows is not None and {0, 69999, 65535, 65536} <= set(rows.tolist()) and len(rows) < 1000
    assert verify_job.some_rows(problem_of(matmul_workload(4096, 4096, 4096)), "cpu") is None


class Child:
    """Stands for the GPU child: its behaviour by template."""

    def __init__(self, does: Callable[[str], Measurement]) -> None:
        self.does, self.pid, self.loads = does, 1, Counter[str]()

    def call(self, job: Any, timeout_s: float) -> Reply:
        if isinstance(job, LoadJob):
            if "unloadable" in job.case.tag:
                raise ChildDied(1, "out of memory")
            self.loads[job.case.id] += 1
            return Reply((), vendor="torch.mm", vendor_us=20.0) if job.timed else Reply(())
        return Reply((self.does(job.schedule.template),))

    def kill(self) -> None:
        pass

    def close(self) -> None:
        pass


class Builds:
    """Stands for the compilers: refuses what `refuses` names."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses, self.closed = refuses, False

    def build(self, workload: Workload, schedule: Schedule, device: object) -> None:
        if schedule.template == self.refuses:
            raise BuildFailed("ptxas said no")

    def close(self) -> None:
        self.closed = True


def ran(
    child: Child, cases: list[Case], builds: Builds | None = None, timed: bool = False, seconds: float = 60.0
) -> tuple[Checker, list[Checked]]:
    checker = Checker(H100, builds or Builds(), child, workers=2, timed=timed)  # type: ignore[arg-type]
    done = check_matmul.run(cases, checker, Choice(3, templates=("pointer", "persistent_tma")), seconds, timed)
    checker.close()
    return checker, done


CASES = [Case(f"c{n}", "aligned", matmul_workload(256, 256, 64 * n)) for n in range(1, 6)]


def test_a_run_reports_each_template_and_prints_only_failures(capsys: pytest.CaptureFixture[str]) -> None:
    def does(template: str) -> Measurement:
        if template == "pointer":
            return Measurement(Status.OK, 0.0, (), 1e-3)
        return failed(Status.WRONG_RESULT, "relative error 3e-01 is over 4e-03")

    _, done = ran(Child(does), CASES)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(CASES)
    assert all("FAIL persistent_tma 0/3" in line and "relative error" in line for line in printed)
    assert check_matmul.count_failures(done) == 3 * len(CASES)
    table = {line.split()[0]: line.split() for line in check_matmul.table(done)[1:]}
    assert table["pointer"][1:4] == ["5", "15", "15"] and table["persistent_tma"][4] == "15"
    rows = [row for checked in done for row in check_matmul.rows_of(checked)]
    assert len(rows) == 10 and all(len(row["trials"]) == 3 for row in rows)


def test_times_and_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    _, done = ran(Child(lambda template: Measurement(Status.OK, 10.0, (), 1e-3)), CASES[:1], timed=True)
    line = capsys.readouterr().out.splitlines()[0]
    assert "10.0us x2.000 of torch.mm block_" in line
    assert "2.000 (1)" in check_matmul.table(done)[1]
    assert check_matmul.rows_of(done[0])[0]["ratio"] == 2.0


def test_what_does_not_fit_is_a_failure_only_where_nothing_works() -> None:
    full = failed(Status.OUT_OF_RESOURCES, "shared memory")
    _, done = ran(Child(lambda template: full), CASES[:1], Builds("persistent_tma"))
    statuses = {name: {m.status for _, m in results} for name, results in done[0].results.items()}
    assert statuses == {"pointer": {Status.OUT_OF_RESOURCES}, "persistent_tma": {Status.BUILD_ERROR}}
    assert check_matmul.count_failures(done) == 6
    answers = [full, Measurement(Status.OK, 0.0, (), 1e-3), full] * 2
    _, done = ran(Child(lambda template: answers.pop()), CASES[:1])
    assert check_matmul.count_failures(done) == 0


@pytest.mark.parametrize(
    ("error", "status"), [(ChildDied(-11, ""), Status.CRASHED), (ChildTimeout(30.0, ""), Status.TIMEOUT)]
)
def test_a_template_that_kills_the_child_is_given_up(
    error: Exception, status: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    def does(template: str) -> Measurement:
        if template == "persistent_tma":
            raise error
        return Measurement(Status.OK, 0.0, (), 1e-3)

    checker, done = ran(Child(does), CASES)
    counts = Counter(m.status for checked in done for results in checked.results.values() for _, m in results)
    assert counts == {Status.OK: 15, status: MOST_DEATHS}
    assert checker.given_up == ["persistent_tma"]
    assert sum(checked.left_out for checked in done) == 15 - MOST_DEATHS
    assert "GIVEN UP" in capsys.readouterr().out


def test_a_case_that_cannot_be_loaded_or_run_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    cases = [Case("a", "unloadable", matmul_workload(64, 64, 64)), CASES[0]]
    _, done = ran(Child(lambda template: Measurement(Status.OK, 0.0, (), 1e-3)), cases)
    assert "NOT RUN a 64x64x64 bf16 nt: ChildDied" in capsys.readouterr().out
    assert check_matmul.count_failures(done) == 1
    untried = Checked(CASES[0], {"pointer": []})
    assert check_matmul.lines_of(untried, False) == ["NO TEMPLATE c1 256x256x64 bf16 nt"]
    assert check_matmul.count_failures([untried]) == 1


def test_the_deadline_ends_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    def does(template: str) -> Measurement:
        time.sleep(0.05)
        return Measurement(Status.OK, 0.0, (), 1e-3)

    _, done = ran(Child(does), CASES, seconds=0.12)
    assert len(done) < len(CASES)
    assert f"LEFT OUT {len(CASES) - len(done)} workloads" in capsys.readouterr().out


def test_knobs_choose_schedules() -> None:
    chosen = Choice(5, templates=("pointer",), knobs={"block_m": "64", "split_k": "1"}).of(CASES[0].workload, H100)
    assert chosen["pointer"] and all(s.knobs["block_m"] == 64 for s in chosen["pointer"])
    assert Choice(5, knobs={"block_m": "3"}).of(CASES[0].workload, H100)["pointer"] == []


def test_printing_stops_at_its_limit() -> None:
    out: list[str] = []
    say = check_matmul.Lines(300, out.append)
    for _ in range(4):
        say("x" * 1000)
    assert [len(line) for line in out] == [check_matmul.LINE_CHARACTERS] and say.held_back == 3
