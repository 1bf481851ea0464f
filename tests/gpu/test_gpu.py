"""What only a GPU can show: right numbers from every template, and survival of kernels that fault, hang and lie.

python -m pytest tests/gpu       in under 100 seconds; scripts/gpu-bench check-matmul looks much further
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kernelwright.kernels import get_operator
from kernelwright.kernels.device import gpu_count
from kernelwright.kernels.matmul.operator import TEMPLATES
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.kernels.render import render
from kernelwright.search.child_runner import ChildRunner, Jobs
from kernelwright.types import Measurement, Schedule, Status, Workload

pytestmark = pytest.mark.skipif(gpu_count() == 0, reason="no GPU here")

TARGETS = Path(__file__).parents[1] / "assets" / "child_targets"

MATMUL = get_operator("matmul")

NAMES = sorted(TEMPLATES)

WORKLOADS = [
    matmul_workload(130, 264, 1032, "bf16", "nt", ("bias", "gelu", "residual")),
    matmul_workload(16, 1024, 2048, "bf16", epilogue=("bias", "gelu")),
    matmul_workload(1, 4096, 4096),
    matmul_workload(64, 64, 16384),
    matmul_workload(511, 1024, 97, "fp16", "nn"),
    matmul_workload(300, 264, 200, groups=6),
    matmul_workload(200, 512, 1024, "fp8e4m3", scaling="block128"),
    matmul_workload(16, 512, 1024, b_dtype="int4", scaling="group:128"),
    matmul_workload(64, 264, 512, b_dtype="fp4", scaling="mx"),
]
"""A template is tried on the first of these that it can run."""

EACH = 3

SECONDS = 45
"""For all templates together, after which no further schedule is measured."""

Results = Mapping[str, tuple[Workload, dict[Schedule, Measurement]]]


@pytest.fixture(scope="module")
def runner() -> Iterator[ChildRunner]:
    found = ChildRunner()
    yield found
    found.close()


def chosen(runner: ChildRunner) -> dict[str, tuple[Workload, list[Schedule]]]:
    """By template the workload that it is tried on, and the schedules."""
    out = {}
    for name, template in TEMPLATES.items():
        spaces = ((workload, template.space(workload, runner.device)) for workload in WORKLOADS)
        for workload, space in spaces:
            if len(space):
                out[name] = (workload, space.sample(random.Random(0), EACH))
                break
    return out


@pytest.fixture(scope="module")
def results(runner: ChildRunner) -> Results:
    """What the schedules of each template came to; those on one workload are built side by side."""
    wanted, deadline = chosen(runner), time.monotonic() + SECONDS
    measured: dict[Schedule, Measurement] = {}
    for workload in WORKLOADS:
        schedules = [s for chosen_for, found in wanted.values() if chosen_for == workload for s in found]
        measured |= dict(runner.measure(workload, schedules, deadline)) if schedules else {}
    return {name: (w, {s: measured[s] for s in found if s in measured}) for name, (w, found) in wanted.items()}


@pytest.mark.parametrize("template", NAMES)
def test_sampled_schedules_are_right(results: Results, template: str) -> None:
    if template not in results:
        pytest.skip("no schedule of it is legal on this GPU")
    workload, measured = results[template]
    allowed = (Status.OK, Status.OUT_OF_RESOURCES)
    bad = {str(s): (m.status.value, m.message) for s, m in measured.items() if m.status not in allowed}
    assert not bad, (str(workload), bad)
    assert any(m.ok for m in measured.values()), (str(workload), measured)


def test_planted_faults_leave_trials() -> None:
    sys.path.insert(0, str(TARGETS))
    import kw_planted

    kw_planted.plant()
    jobs = Jobs("kw_planted:plan_in_compiler", "kw_planted:start_real", trial_timeout_s=6.0)
    runner = ChildRunner(jobs=jobs, compile_workers=4)
    workload = matmul_workload(128, 128, 256, "fp16")
    try:
        results = dict(runner.measure(workload, list(TEMPLATES["planted"].space(workload, runner.device))))
    finally:
        runner.close()
        del TEMPLATES["planted"]
    assert {str(s.knobs["fault"]): m.status for s, m in results.items()} == {
        "none": Status.OK,
        "abort_in_compiler": Status.BUILD_ERROR,
        "no_such_syntax": Status.BUILD_ERROR,
        "wrong": Status.WRONG_RESULT,
        "unwritten": Status.WRONG_RESULT,
        "raise": Status.CRASHED,
        "crash": Status.CRASHED,
        "hang": Status.TIMEOUT,
    }


def test_rendered_files_are_right_on_their_own(runner: ChildRunner, tmp_path: Path) -> None:
    """One of each template, all at once."""
    running = {}
    for name, (workload, schedules) in chosen(runner).items():
        file = tmp_path / f"{name}.py"
        file.write_text(render(workload, schedules[0]))
        command = [sys.executable, "-P", str(file)]
        running[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    end, said = time.monotonic() + 60, {}
    for name, process in running.items():
        try:
            text, _ = process.communicate(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            text = "not done in time\n" + process.communicate()[0]
        said[name] = (process.returncode, text[-1500:])
    wrong = {name: found for name, found in said.items() if found[0] != 0 or "right" not in found[1]}
    assert said and not wrong, wrong
