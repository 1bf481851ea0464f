"""What the compiler makes of convolution schedules for GPUs that are not here."""

from __future__ import annotations

from typing import Any

import pytest

from kernelwright.kernels.build import BuildPool
from kernelwright.kernels.conv2d.operator import CONV2D
from kernelwright.kernels.conv2d.workload import conv2d_workload
from kernelwright.kernels.device import named_device
from kernelwright.types import Scalar, Schedule, Workload

H100 = named_device("h100")
BN = ("scale_vec", "bias", "relu")

DENSE = conv2d_workload((32, 256, 14, 14), 256, 3, epilogue=BN, padding=1)
PLAIN = conv2d_workload((32, 256, 14, 14), 256, 3, epilogue=("bias", "relu"), padding=1)
DEPTHWISE = conv2d_workload((32, 128, 56, 56), 128, 7, epilogue=("bias",), padding=3, groups=128)
GROUPED = conv2d_workload((32, 128, 56, 56), 128, 3, epilogue=BN, padding=1, groups=32)
FIRST = conv2d_workload((32, 3, 224, 224), 64, 7, epilogue=BN, stride=2, padding=3)
EXACT = conv2d_workload((64, 128, 28, 28), 128, 3, "fp32", "nchw", BN, padding=1)
STRIDED = conv2d_workload((64, 256, 28, 28), 256, 3, stride=2, padding=1, direction="input_gradient")

CASES: dict[str, tuple[Workload, dict[str, Scalar]]] = {
    "implicit_gemm_tma": (DENSE, {"block_m": 128, "block_n": 128, "block_k": 64, "num_warps": 8, "num_stages": 4}),
    "implicit_gemm_warp_specialized": (PLAIN, {"mode": "cooperative", "block_m": 128, "block_n": 256, "num_stages": 3}),
    "implicit_gemm_parts": (EXACT, {"precision": "bf16x6", "block_m": 128, "block_n": 128, "num_stages": 4}),
    "depthwise": (DEPTHWISE, {"tile": 8, "block_v": 8, "block_c": 64, "num_warps": 4, "unroll": 0, "pack": 1}),
    "depthwise_tile": (DEPTHWISE, {"rows": 4, "tile": 7, "block_v": 1, "block_c": 64, "num_warps": 1}),
    "grouped_direct": (GROUPED, {"block_m": 128, "span": 8, "num_warps": 8, "num_stages": 3}),
    "stem": (FIRST, {"block_m": 128, "block_n": 64, "num_warps": 8, "reduction": "runs", "unroll": 0}),
}


def member(template: str, workload: Workload, wanted: dict[str, Scalar], device: Any = H100) -> Schedule:
    space = CONV2D.templates[template].space(workload, device)
    return next(s for s in space if all(s.knobs[name] == value for name, value in wanted.items()))


@pytest.mark.parametrize("template", CASES)
def test_good_schedules_build_without_spills(pool: BuildPool, template: str) -> None:
    workload, wanted = CASES[template]
    schedule = member(template, workload, wanted)
    report = pool.build(workload, schedule, H100, keep_artifact=True)
    assert report.spills == 0
    estimate = CONV2D.templates[template].shared_bytes(workload, schedule)
    assert report.shared_bytes <= 1.25 * estimate + 8192
    code = " ".join(str(text) for name, text in report.artifact.items() if name.endswith(".ptx"))
    assert ("wgmma.mma_async" in code) == (not template.startswith("depthwise"))
    assert ("cp.async.bulk.tensor" in code) == template.startswith("implicit_gemm_")


@pytest.mark.parametrize("direction", ["forward", "input_gradient", "weight_gradient"])
def test_tiles_of_channels_by_themselves_leave_the_compiler_no_choice(pool: BuildPool, direction: str) -> None:
    """It takes minutes to choose a layout for each of hundreds of loads, and to move numbers between layouts."""
    sizes: dict[str, Any] = {"stride": 2, "padding": 1, "groups": 240, "direction": direction}
    workload = conv2d_workload((32, 240, 28, 28), 240, 3, **sizes)
    schedule = member("depthwise_tile", workload, {"rows": 2, "tile": 2 if direction == "input_gradient" else 7})
    report = pool.build(workload, schedule, H100, keep_artifact=True)
    assert report.spills == 0
    text = next(str(text) for name, text in report.artifact.items() if name.endswith("_threads.ttgir"))
    assert text.count("tt.load") > 10 and "ttg.convert_layout" not in text
    # neighbouring channels of a thread are loaded at once
    code = next(str(text) for name, text in report.artifact.items() if name.endswith("_threads.ptx"))
    each = int(schedule.knobs["block_v"]) * int(schedule.knobs["block_c"]) // (32 * int(schedule.knobs["num_warps"]))
    assert f"ld.global{'.v2' if each == 4 else ''}.b{16 * min(each, 2)}" in code


def test_classes_of_a_strided_gradient_build_by_specialised_warps(pool: BuildPool) -> None:
    template = "implicit_gemm_warp_specialized"
    report = pool.build(STRIDED, member(template, STRIDED, {"block_m": 128, "block_n": 128}), H100)
    assert report.spills == 0


SIGNAL = conv2d_workload(
    (16, 1280, 1, 3000), 1280, (1, 3), "fp16", "nchw", ("bias", "gelu"), stride=(1, 2), padding=(0, 1)
)
TF32 = conv2d_workload(
    (64, 128, 28, 28), 128, 3, "fp32", "nchw", padding=1, direction="input_gradient", error_budget=1e-3
)


@pytest.mark.parametrize(
    ("workload", "store", "tile_w", "pieces"),
    [(SIGNAL, "direct", 64, "v2"), (TF32, "direct", 16, "v4"), (TF32, "copied", 4, "")],
)
def test_nchw_by_specialised_warps(pool: BuildPool, workload: Workload, store: str, tile_w: int, pieces: str) -> None:
    template = "implicit_gemm_warp_specialized"
    schedule = member(template, workload, {"block_m": 128, "block_n": 128, "store": store, "tile_w": tile_w})
    report = pool.build(workload, schedule, H100, keep_artifact=True)
    assert report.spills == 0 and report.shared_bytes <= H100.shared_memory_bytes
    code = {name: str(text) for name, text in report.artifact.items() if name.endswith(".ptx")}
    copies = next(text for name, text in code.items() if "copy_tiles" in name)
    assert "st.global.v4" in copies
    # neighbouring pixels leave together, as many as divide the sizes of the result
    main = next(text for name, text in code.items() if template in name)
    assert "wgmma.mma_async" in main
    assert f"st.global.{pieces}" in main if pieces else "st.global" not in main


@pytest.mark.parametrize("device", ["h100", "a100", "b200", "mi300x"])
def test_patch_gradients_build(pool: BuildPool, device: str) -> None:
    workload = conv2d_workload((32, 3, 224, 224), 128, 4, stride=4, direction="input_gradient")
    target = named_device(device)
    schedule = member("patch_gradient", workload, {"block_m": 64, "block_n": 64, "block_k": 64}, target)
    assert pool.build(workload, schedule, target).spills == 0


@pytest.mark.parametrize("device", ["a100", "mi300x"])
def test_portable_templates_build_elsewhere(pool: BuildPool, device: str) -> None:
    target = named_device(device)
    for template in ("depthwise", "grouped_direct"):
        workload, wanted = CASES[template]
        report = pool.build(workload, member(template, workload, wanted, target), target)
        assert report.registers > 0


@pytest.mark.parametrize("direction", ["forward", "input_gradient", "weight_gradient"])
@pytest.mark.parametrize(("taps", "layout", "best"), [(7, "nhwc", "_tile"), (7, "nchw", ""), (31, "nhwc", "")])
def test_channels_by_themselves_are_never_multiplied_as_matrices(
    direction: str, taps: int, layout: str, best: str
) -> None:
    sizes: dict[str, Any] = {"padding": taps // 2, "groups": 64, "direction": direction}
    workload = conv2d_workload((8, 64, 56, 56), 64, taps, "bf16", layout, **sizes)
    space = CONV2D.space(workload, H100)
    assert {schedule.template for schedule in space} == {f"depthwise{best}"}
    assert CONV2D.default_schedule(workload, H100) in set(space)


@pytest.mark.parametrize(
    ("image", "k", "taps", "dtype", "groups", "portable"),
    [
        ((32, 3, 224, 224), 64, 7, "bf16", 1, False),
        ((32, 128, 56, 56), 128, 3, "bf16", 32, False),
        ((256, 128, 28, 28), 128, 3, "fp32", 1, False),
        ((1, 64, 56, 56), 64, 3, "fp32", 1, True),
        ((64, 64, 56, 56), 64, 3, "bf16", 1, True),
    ],
)
def test_gradients_of_weights_that_are_rearranged_are_not_read_by_elements(
    image: tuple[int, int, int, int], k: int, taps: int, dtype: str, groups: int, portable: bool
) -> None:
    given: dict[str, Any] = {"padding": taps // 2, "groups": groups, "direction": "weight_gradient"}
    workload = conv2d_workload(image, k, taps, dtype, **given)
    space = CONV2D.space(workload, H100)
    found = {schedule.template for schedule in space}
    assert "weight_gradient_warp_specialized" in found
    assert ("implicit_gemm_weight_gradient" in found) == portable
    assert CONV2D.default_schedule(workload, H100) in set(space)
    # other GPUs have only that
    elsewhere = {schedule.template for schedule in CONV2D.space(workload, named_device("a100"))}
    assert "implicit_gemm_weight_gradient" in elsewhere


@pytest.mark.parametrize(
    ("template", "channels", "groups"),
    [
        ("implicit_gemm_weight_gradient", 64, 1),
        ("weight_gradient_warp_specialized", 64, 1),
        ("grouped_direct", 128, 32),
        ("depthwise", 64, 64),
        ("depthwise_tile", 64, 64),
    ],
)
def test_parts_of_weights_are_read_many_at_once(template: str, channels: int, groups: int) -> None:
    """One after the other, each waits for the last: hundreds of parts take longer than what made them."""
    given: dict[str, Any] = {"padding": 1, "groups": groups, "direction": "weight_gradient"}
    workload = conv2d_workload((32, channels, 56, 56), channels, 3, **given)
    schedule = max(
        (s for s in CONV2D.templates[template].space(workload, H100) if s.knobs.get("combine") != "add"),
        key=lambda s: int(s.knobs.get("split_k", 1)) * int(s.knobs.get("parts", 1)),
    )
    inputs, out = CONV2D.make_inputs(workload, 0, "meta"), CONV2D.empty_output(workload, "meta")
    *_, (kernel, _, args, _) = CONV2D.plan(workload, schedule, inputs, out)
    values = dict(zip(kernel.arg_names, args, strict=True))
    together = values["BLOCK_P" if template.startswith("depthwise") else "ROWS"]
    assert values["PARTS"] >= 32 and together >= 32


def test_spaces_of_several_templates_make_the_operators() -> None:
    shares = {name: len(template.space(DENSE, H100)) for name, template in CONV2D.templates.items()}
    assert shares["implicit_gemm_tma"] > 100 and shares["implicit_gemm_warp_specialized"] > 20
    assert not any(shares[name] for name in ("depthwise", "grouped_direct", "stem"))


@pytest.mark.parametrize(("split_k", "stride", "walks"), [(1, 1, True), (2, 1, False), (1, 2, False)])
def test_loops_in_loops_do_not_walk_over_tiles(split_k: int, stride: int, walks: bool) -> None:
    """A next unit's loads may overtake what is still read of the last one, unless the compiler sees one loop."""
    direction = "forward" if stride == 1 else "input_gradient"
    image = (64, 128, 56, 56) if split_k == 1 else (1, 512, 7, 7)
    workload = conv2d_workload(image, image[1], 3, stride=stride, padding=1, direction=direction)
    space = CONV2D.templates["implicit_gemm_tma"].space(workload, H100)
    members = [schedule for schedule in space if schedule.knobs["split_k"] == split_k]
    assert {schedule.knobs["blocks_per_sm"] for schedule in members} == ({1, 2} if walks else {1})
    inputs, out = CONV2D.make_inputs(workload, 0, "meta"), CONV2D.empty_output(workload, "meta")
    launches = CONV2D.plan(workload, members[0], inputs, out)
    (programs,) = next(grid for kernel, grid, _, _ in launches if kernel.__name__ == "conv_implicit_gemm_tma")
    # there is one multiprocessor where there is no GPU
    assert (programs == 1) == walks
