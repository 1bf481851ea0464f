"""What only a GPU can show: right numbers from every template, and survival of kernels that fault, hang and lie.

python -m pytest tests/gpu
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelwright.kernels import get_operator
from kernelwright.kernels.device import gpu_count
from kernelwright.kernels.matmul.operator import TEMPLATES
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.kernels.render import render
from kernelwright.search.child_runner import ChildRunner, Jobs
from kernelwright.types import Status, Workload

pytestmark = pytest.mark.skipif(gpu_count() == 0, reason="no GPU here")

TARGETS = Path(__file__).parents[1] / "assets" / "child_targets"

WORKLOADS = [
    matmul_workload(1, 1, 1),
    matmul_workload(127, 129, 1),
    matmul_workload(511, 1024, 96, "fp32"),
    matmul_workload(17, 4099, 333, "bf16", "nn", ("bias", "gelu")),
    matmul_workload(300, 200, 500, "fp16", "tt", ("silu",)),
    matmul_workload(16, 128, 0, "bf16", epilogue=("bias", "tanh")),
    matmul_workload(5, 256, 7168, "bf16", epilogue=("bias",)),
    matmul_workload(64, 512, 4096, "fp32", error_budget=3e-3),
    matmul_workload(130, 70, 4104, "bf16", "tn", ("relu",)),
]

PADDED = Workload(
    "matmul",
    {"M": 33, "N": 65, "K": 45},  # type: ignore[arg-type]
    {"a": "bf16", "b": "bf16", "out": "bf16"},  # type: ignore[arg-type]
    {"a": "row:72", "b": "col:48", "out": "row:100"},  # type: ignore[arg-type]
)


@pytest.fixture(scope="module")
def runner() -> Iterator[ChildRunner]:
    found = ChildRunner()
    yield found
    found.close()


@pytest.mark.parametrize("workload", [*WORKLOADS, PADDED], ids=str)
def test_sampled_schedules_are_right(runner: ChildRunner, workload: Workload) -> None:
    schedules = runner.space(workload).sample(random.Random(0), 9)
    results = dict(runner.measure(workload, schedules))
    assert set(results) == set(schedules)
    allowed = (Status.OK, Status.OUT_OF_RESOURCES)
    assert all(m.status in allowed for m in results.values()), {str(s): m for s, m in results.items() if not m.ok}
    assert any(m.ok for m in results.values())


def test_planted_faults_leave_trials() -> None:
    sys.path.insert(0, str(TARGETS))
    import kw_planted

    kw_planted.plant()
    jobs = Jobs("kw_planted:plan_in_compiler", "kw_planted:start_real", trial_timeout_s=8.0)
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


@pytest.mark.parametrize("template", sorted(get_operator("matmul").templates))
def test_rendered_files_are_right_on_their_own(runner: ChildRunner, template: str, tmp_path: Path) -> None:
    workload = matmul_workload(64, 1024, 2048, "bf16", epilogue=("bias", "gelu"))
    schedule = TEMPLATES[template].space(workload, runner.device).sample(random.Random(1), 1)[0]
    file = tmp_path / "kernel.py"
    file.write_text(render(workload, schedule))
    ran = subprocess.run([sys.executable, "-P", str(file)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0 and "right" in ran.stdout, ran.stdout + ran.stderr
