"""Matmul kernels by numbers, run on the CPU by triton's interpreter (fp16 and fp32: its bf16 products are wrong)."""

from __future__ import annotations

import random

import pytest
import torch

from kernelwright.kernels import get_operator
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.workload import ACTIVATIONS, matmul_workload
from kernelwright.kernels.operator import launch_all
from kernelwright.search.verification import Verdict, verify
from kernelwright.types import Schedule, Workload

MATMUL = get_operator("matmul")
H100 = named_device("h100")

pytestmark = [
    # the interpreter computes exp in numpy, which speaks up where a GPU gives infinity
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

SHAPES = [
    (1, 1, 1, "nt"),
    (17, 33, 65, "nn"),
    (65, 70, 130, "nt"),
    (40, 96, 64, "tn"),
    (33, 57, 19, "tt"),
    (5, 1, 7, "nt"),
    (1, 200, 640, "nt"),
    (64, 64, 1536, "nt"),
]


def run(workload: Workload, schedule: Schedule) -> Verdict:
    inputs = MATMUL.make_inputs(workload, 1, "cpu")
    out = MATMUL.empty_output(workload, "cpu")
    launch_all(MATMUL.plan(workload, schedule, inputs, out))
    return verify(out, MATMUL.reference(workload, inputs), MATMUL.tolerance(workload))


def some(workload: Workload, template: str, count: int) -> list[Schedule]:
    return MATMUL.templates[template].space(workload, H100).sample(random.Random(7), count)


@pytest.mark.parametrize("template", ["persistent_tma", "pointer", "skinny", "tile_tma"])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize(("m", "n", "k", "layout"), SHAPES)
def test_sampled_schedules_are_right(template: str, dtype: str, m: int, n: int, k: int, layout: str) -> None:
    workload = matmul_workload(m, n, k, dtype, layout, ("bias", "relu"))
    for schedule in some(workload, template, 2):
        verdict = run(workload, schedule)
        assert verdict.right, (schedule, verdict)


@pytest.mark.parametrize("template", ["persistent_tma", "pointer", "skinny", "tile_tma"])
@pytest.mark.parametrize("epilogue", [(), ("bias",), *((name,) for name in ACTIVATIONS), ("bias", "gelu")])
def test_every_epilogue(template: str, epilogue: tuple[str, ...]) -> None:
    workload = matmul_workload(64, 64, 1024, "fp32", "nt", epilogue)
    split = [s for s in MATMUL.templates[template].space(workload, H100) if s.knobs["split_k"] in (1, 4)]
    for schedule in random.Random(3).sample(split, 2):
        verdict = run(workload, schedule)
        assert verdict.right, (schedule, verdict)


@pytest.mark.parametrize("split_k", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("template", ["persistent_tma", "pointer", "skinny"])
def test_every_split(template: str, split_k: int) -> None:
    # K is no multiple of the parts, so the last part is ragged
    workload = matmul_workload(16, 64, 4104, "fp16")
    members = [s for s in MATMUL.templates[template].space(workload, H100) if s.knobs["split_k"] == split_k]
    if template == "persistent_tma":
        assert not members, "a tile of 64 rows is wasted on 16"
        return
    verdict = run(workload, min(members, key=lambda s: -int(s.knobs["block_k"])))
    assert verdict.right, verdict


@pytest.mark.parametrize("epilogue", [(), ("bias", "gelu")])
def test_no_products_give_zeros_and_the_epilogue(epilogue: tuple[str, ...]) -> None:
    workload = matmul_workload(16, 128, 0, "fp16", epilogue=epilogue)
    for schedule in MATMUL.space(workload, H100):
        assert run(workload, schedule).right


@pytest.mark.parametrize(("m", "n"), [(0, 8), (8, 0), (0, 0)])
def test_empty_results_launch_nothing(m: int, n: int) -> None:
    workload = matmul_workload(m, n, 32, "fp16")
    schedule = MATMUL.default_schedule(workload, H100)
    inputs, out = MATMUL.make_inputs(workload, 0, "cpu"), MATMUL.empty_output(workload, "cpu")
    assert MATMUL.plan(workload, schedule, inputs, out) == []


@pytest.mark.parametrize("layouts", [("row:70", "col:48", "row:100"), ("col:33", "row:80", "col:41")])
def test_padded_rows_are_not_read_and_gaps_not_written(layouts: tuple[str, str, str]) -> None:
    base = matmul_workload(33, 65, 45, "fp16")
    workload = Workload("matmul", base.dims, base.dtypes, dict(zip(("a", "b", "out"), layouts, strict=True)))  # type: ignore[arg-type]
    for schedule in MATMUL.space(workload, H100).sample(random.Random(5), 4):
        inputs, out = MATMUL.make_inputs(workload, 2, "cpu"), MATMUL.empty_output(workload, "cpu")
        storage = torch.as_strided(out, (out.untyped_storage().nbytes() // 2,), (1,))
        launch_all(MATMUL.plan(workload, schedule, inputs, out))
        assert verify(out, MATMUL.reference(workload, inputs), MATMUL.tolerance(workload)).right, schedule
        assert storage.isnan().sum() == storage.numel() - out.numel(), "a gap between rows was written"


def test_split_k_gives_the_same_bits_twice() -> None:
    workload = matmul_workload(8, 64, 2048, "fp16")
    schedule = next(s for s in MATMUL.templates["skinny"].space(workload, H100) if s.knobs["split_k"] == 4)
    inputs = MATMUL.make_inputs(workload, 0, "cpu")
    outs = [MATMUL.empty_output(workload, "cpu") for _ in range(2)]
    for out in outs:
        launch_all(MATMUL.plan(workload, schedule, inputs, out))
    assert torch.equal(*outs)


CHAINS = [
    ("scale", "tanh", "scale"),
    ("bias", "scale_vec", "residual"),
    ("bias_m", "gelu", "scale_m", "multiply"),
    ("residual", "silu", "residual"),
    ("gelu_backward",),
    ("bias", "swiglu"),
    ("scale_vec", "geglu", "scale_m", "residual"),
    ("glu",),
]


@pytest.mark.parametrize("template", ["pointer", "persistent_tma", "skinny"])
@pytest.mark.parametrize("epilogue", CHAINS)
def test_chains_of_steps(template: str, epilogue: tuple[str, ...]) -> None:
    workload = matmul_workload(40, 72, 136, "fp32", "nt", epilogue)
    for schedule in some(workload, template, 1):
        verdict = run(workload, schedule)
        assert verdict.right, (schedule, verdict)


@pytest.mark.parametrize("template", ["pointer", "skinny"])
def test_gated_units_of_split_sums(template: str) -> None:
    workload = matmul_workload(16, 128, 2056, "fp16", "nt", ("bias", "swiglu"))
    split = [s for s in MATMUL.templates[template].space(workload, H100) if s.knobs["split_k"] == 4]
    assert run(workload, random.Random(1).choice(split)).right


BATCHES = [
    {"a": "row", "b": "col", "out": "row"},
    {"a": "col", "b": "row", "out": "col"},
    {"a": "row", "b": "col:72@0", "out": "row"},
    {"a": "row:80@8000", "b": "row", "out": "row:208@14000"},
]


@pytest.mark.parametrize("template", ["pointer", "persistent_tma"])
@pytest.mark.parametrize("layouts", BATCHES)
def test_batches(template: str, layouts: dict[str, str]) -> None:
    base = matmul_workload(64, 200, 72, "fp16", epilogue=("bias", "residual"), batch=3)
    workload = Workload("matmul", base.dims, base.dtypes, layouts, base.epilogue)  # type: ignore[arg-type]
    for schedule in some(workload, template, 2):
        verdict = run(workload, schedule)
        assert verdict.right, (schedule, verdict)


def test_more_matrices_than_a_grid_has_layers() -> None:
    workload = matmul_workload(2, 2, 2, "fp16", batch=65537)
    schedule = MATMUL.default_schedule(workload, H100)
    inputs, out = MATMUL.make_inputs(workload, 1, "meta"), MATMUL.empty_output(workload, "meta")
    (_, grid, _, _) = MATMUL.plan(workload, schedule, inputs, out)[0]
    assert grid[0] == 65537 and max(grid[1:]) < 65536


def test_empty_batches_launch_nothing() -> None:
    workload = matmul_workload(4, 4, 4, "fp16", batch=0)
    inputs, out = MATMUL.make_inputs(workload, 0, "cpu"), MATMUL.empty_output(workload, "cpu")
    assert MATMUL.plan(workload, MATMUL.default_schedule(workload, H100), inputs, out) == []


@pytest.mark.parametrize("template", ["pointer", "persistent_tma", "skinny"])
@pytest.mark.parametrize(
    ("dtype", "scaling"), [("int8", "row"), ("int8", "tensor"), ("fp8e4m3", "row"), ("fp8e5m2", "tensor")]
)
def test_scaled_eight_bit_operands(template: str, dtype: str, scaling: str) -> None:
    workload = matmul_workload(64, 64, 272, dtype, scaling=scaling, epilogue=("bias",), out_dtype="fp32")
    for schedule in some(workload, template, 2):
        verdict = run(workload, schedule)
        assert verdict.right, (schedule, verdict)


@pytest.mark.parametrize("a", ["strided:960,3", "strided:0,1", "strided:1,1", "row+1", "col:65+3"])
def test_operands_without_a_unit_stride_or_off_their_alignment(a: str) -> None:
    base = matmul_workload(64, 48, 40, "fp16")
    workload = Workload("matmul", base.dims, base.dtypes, {**base.layouts, "a": a})  # type: ignore[arg-type]
    for schedule in MATMUL.space(workload, H100).sample(random.Random(5), 3):
        verdict = run(workload, schedule)
        assert verdict.right, (schedule, verdict)


@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
def test_operands_turned_for_the_tensor_cores(layout: str) -> None:
    workload = matmul_workload(70, 65, 130, "fp32", layout, error_budget=5e-3)
    space = MATMUL.templates["persistent_tma"].space(workload, H100)
    for schedule in random.Random(2).sample([s for s in space if s.knobs["repack"]], 2):
        verdict = run(workload, schedule)
        assert verdict.right, (schedule, verdict)


@pytest.mark.parametrize("epilogue", [(), ("bias", "gelu", "residual")])
def test_parts_added_where_they_meet(epilogue: tuple[str, ...]) -> None:
    workload = matmul_workload(72, 80, 1100, "fp16", "nt", epilogue)
    added = [s for s in MATMUL.templates["persistent_tma"].space(workload, H100) if s.knobs["combine"] == "add"]
    assert run(workload, random.Random(1).choice(added)).right
