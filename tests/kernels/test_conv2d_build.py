"""Conv2d templates: they build for every kind of GPU without one, their spaces are bounded, and offsets are wide where
they must be."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kernelwright.kernels.build import BuildPool
from kernelwright.kernels.conv2d.operator import CONV2D, MIDDLING
from kernelwright.kernels.conv2d.workload import conv2d_workload
from kernelwright.kernels.device import named_device
from kernelwright.types import Schedule, Workload

H100 = named_device("h100")

FORWARD = conv2d_workload((32, 64, 28, 28), 128, 3, padding=1, epilogue=("scale_vec", "bias", "relu"))
INPUT = conv2d_workload((32, 64, 28, 28), 128, 3, padding=1, stride=2, direction="input_gradient")
WEIGHT = conv2d_workload((32, 64, 28, 28), 128, 3, padding=1, direction="weight_gradient", dtypes={"w": "fp32"})
POINTS = conv2d_workload((32, 64, 28, 28), 128, 1, epilogue=("bias", "residual", "relu"))

TEMPLATES = {
    "implicit_gemm": FORWARD,
    "implicit_gemm_input_gradient": INPUT,
    "implicit_gemm_weight_gradient": WEIGHT,
    "pointwise": POINTS,
}


def nearest(workload: Workload, template: str, device: str, **wanted: Any) -> Schedule:
    """The schedule that has most of the knobs wanted."""
    members = CONV2D.templates[template].space(workload, named_device(device)).members
    return max(members, key=lambda s: (sum(s.knobs.get(name) == x for name, x in wanted.items()), s.key))


@pytest.mark.parametrize("template", TEMPLATES)
def test_good_schedules_use_the_tensor_cores_without_spills(pool: BuildPool, template: str) -> None:
    workload = TEMPLATES[template]
    wanted = {"block_m": 128, "block_n": 128, "block_k": 64, "num_warps": 8, "num_stages": 3, "reduction": "taps"}
    schedule = nearest(workload, template, "h100", **wanted)
    report = pool.build(workload, schedule, H100, keep_artifact=True)
    assert report.spills == 0 and report.registers <= 255
    assert report.shared_bytes <= H100.shared_memory_bytes
    ptx = "".join(str(text) for name, text in report.artifact.items() if name.endswith(".ptx"))
    assert "wgmma.mma_async" in ptx
    # pixels and weights come by copies of 16 bytes that do not pass through registers
    assert "cp.async.bulk" in ptx if template == "pointwise" else "cp.async.cg" in ptx


@pytest.mark.parametrize(
    ("template", "device"),
    [("implicit_gemm", "a100"), ("implicit_gemm_input_gradient", "mi300x"), ("implicit_gemm_weight_gradient", "b200")],
)
def test_other_devices(pool: BuildPool, template: str, device: str) -> None:
    workload = TEMPLATES[template]
    report = pool.build(workload, nearest(workload, template, device, **MIDDLING), named_device(device))
    assert report.spills == 0 and report.shared_bytes <= named_device(device).shared_memory_bytes


def test_eight_warps_build_at_the_sizes_of_a_wrong_result(pool: BuildPool) -> None:
    # pytorch/pytorch#173068: the numbers are checked on a GPU by check_conv2d.py
    workload = conv2d_workload((2, 33, 34, 41), 34, 3, "fp32", stride=(2, 3), padding=(4, 5))
    schedule = nearest(workload, "implicit_gemm", "h100", num_warps=8, block_k=16, block_m=256, precision="ieee")
    assert schedule.knobs["num_warps"] == 8
    assert pool.build(workload, schedule, H100).registers <= 255


ALL_KINDS: list[dict[str, Any]] = [
    {"image": (32, 3, 224, 224), "k": 64, "kernel": 7, "stride": 2, "padding": 3},
    {"image": (32, 128, 28, 28), "k": 128, "kernel": 3, "padding": 1},
    {"image": (1, 512, 7, 7), "k": 512, "kernel": 3, "padding": 1},
    {"image": (32, 1024, 7, 7), "k": 1024, "kernel": 3, "padding": 1, "groups": 32},
    {"image": (16, 1280, 1, 3000), "k": 1280, "kernel": (1, 3), "padding": (0, 1), "layout": "nchw"},
    {"image": (256, 128, 56, 56), "k": 128, "kernel": 3, "padding": 1, "stride": 2},
    {"image": (1, 1, 1, 1), "k": 1, "kernel": 1},
]


@pytest.mark.parametrize("direction", ["forward", "input_gradient", "weight_gradient"])
@pytest.mark.parametrize("case", ALL_KINDS)
def test_spaces_are_never_empty_and_never_huge(case: dict[str, Any], direction: str) -> None:
    workload = conv2d_workload(**case, direction=direction)
    sizes = {name: len(template.space(workload, H100)) for name, template in CONV2D.templates.items()}
    portable = {"forward": "implicit_gemm"}.get(direction, f"implicit_gemm_{direction}")
    assert 0 < sizes[portable] <= 6000, sizes
    for name, template in CONV2D.templates.items():
        for schedule in template.space(workload, H100).sample(random.Random(1), 2):
            assert template.shared_bytes(workload, schedule) <= H100.shared_memory_bytes, name
    offered = {schedule.template for schedule in CONV2D.space(workload, H100)}
    default = CONV2D.default_schedule(workload, H100)
    assert default.template == (portable if portable in offered else "weight_gradient_warp_specialized")
    assert default in set(CONV2D.space(workload, H100))


@pytest.mark.parametrize("direction", ["forward", "input_gradient", "weight_gradient"])
def test_offsets_past_32_bits_are_wide(direction: str) -> None:
    large = conv2d_workload((33, 64, 1024, 1024), 8, 3, padding=1, direction=direction)
    small = conv2d_workload((3, 64, 1024, 1024), 8, 3, padding=1, direction=direction)
    for workload, wide in ((large, True), (small, False)):
        schedule = CONV2D.default_schedule(workload, H100)
        inputs, out = CONV2D.make_inputs(workload, 0, "meta"), CONV2D.empty_output(workload, "meta")
        launches = CONV2D.plan(workload, schedule, inputs, out)
        kernel, _, args, _ = next(launch for launch in launches if "WIDE" in launch[0].arg_names)
        # of a gradient of x only the result is this large, and offsets into results are always wide
        assert args[kernel.arg_names.index("WIDE")] is (wide and direction != "input_gradient")


def test_a_fixed_order_of_sums_and_little_memory_are_kept_to() -> None:
    limits = {"deterministic": True, "workspace_bytes": 2**22}
    workload = conv2d_workload((32, 64, 28, 28), 128, 3, padding=1, direction="weight_gradient", attributes=limits)
    members = CONV2D.space(workload, H100).members
    assert members and {s.knobs["combine"] for s in members} == {"parts"}
    assert max(int(s.knobs["split_k"]) for s in members) * 4 * 128 * 64 * 9 <= 2**22
