"""What people type about a workload, and about a device."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelwright.errors import (
    InvalidWorkload,
    KernelwrightError,
    UnknownDevice,
    UnknownOperator,
    UnsupportedDtype,
    UsageError,
)
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.workload import matmul_workload
from kernelwright.service.device_args import device_for_query, parse_device
from kernelwright.service.workload_args import (
    MAX_DIM,
    WorkloadArgs,
    args_of,
    format_attributes,
    format_shape,
    parse_attributes,
    parse_epilogue,
    parse_shape,
)
from kernelwright.types import Workload

SIZES = st.integers(1, 100_000)


@given(st.fixed_dictionaries({"M": SIZES, "N": SIZES, "K": SIZES}))
def test_shape_reads_what_it_writes(dims: dict[str, int]) -> None:
    assert parse_shape(format_shape(dims)) == dims


@given(st.text(max_size=40))
def test_shape_of_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(InvalidWorkload):
        assert parse_shape(text)


@pytest.mark.parametrize("text", ["", "M", "M=", "=4", "M=1.5", "M=-1", "M=1,M=2", "M=1;N=2", "M=²", "M=" + "9" * 30])
def test_shape_that_cannot_be_read(text: str) -> None:
    with pytest.raises(InvalidWorkload):
        parse_shape(text)


@pytest.mark.parametrize(
    ("args", "workload"),
    [
        (
            WorkloadArgs("matmul", {"M": 4, "N": 8, "K": 128}, "bf16*int4/group:128"),
            matmul_workload(4, 8, 128, b_dtype="int4", scaling="group:128"),
        ),
        (
            WorkloadArgs("matmul", {"M": 4, "N": 8, "K": 16}, "fp8e4m3/row", out_dtype="fp16"),
            matmul_workload(4, 8, 16, "fp8e4m3", scaling="row", out_dtype="fp16"),
        ),
        (WorkloadArgs("matmul", {"M": 4, "N": 8, "K": 16, "B": 3}), matmul_workload(4, 8, 16, batch=3)),
        (
            WorkloadArgs("matmul", {"M": 4, "N": 8, "K": 16, "G": 3}, layout="nn"),
            matmul_workload(4, 8, 16, layout="nn", groups=3),
        ),
        (
            WorkloadArgs("matmul", {"M": 4, "N": 8, "K": 16}, attributes={"deterministic": True, "workspace_bytes": 9}),
            matmul_workload(4, 8, 16, attributes={"deterministic": True, "workspace_bytes": 9}),
        ),
    ],
)
def test_quantised_batched_grouped_and_limited_products_can_be_typed(args: WorkloadArgs, workload: Workload) -> None:
    assert args.workload() == workload
    assert args_of(workload) == args


def test_a_type_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(InvalidWorkload, match=r"bf16\*int4/group:128"):
        WorkloadArgs("matmul", {"M": 4, "N": 8, "K": 16}, "bf16*/row").workload()


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        (None, ()),
        ("", ()),
        ("none", ()),
        ("bias, gelu", ("bias", "gelu")),
        (["bias", "gelu"], ("bias", "gelu")),
        (["bias,gelu"], ("bias", "gelu")),
    ],
)
def test_epilogue(text: str | list[str] | None, steps: tuple[str, ...]) -> None:
    assert parse_epilogue(text) == steps


@given(
    st.fixed_dictionaries({"M": SIZES, "N": SIZES, "K": SIZES}),
    st.sampled_from(["bf16", "fp16", "fp32"]),
    st.sampled_from(["nt", "nn", "tn", "tt"]),
    st.sampled_from([(), ("bias",), ("bias", "gelu"), ("relu",)]),
    st.sampled_from([None, 0.01]),
)
def test_way_back_from_a_workload(
    dims: dict[str, int], dtype: str, layout: str, epilogue: tuple[str, ...], budget: float | None
) -> None:
    args = WorkloadArgs("matmul", dims, dtype, layout, epilogue, None, budget)
    assert args_of(args.workload()) == args


def test_workload_is_the_operators_own() -> None:
    args = WorkloadArgs("matmul", {"K": 3, "N": 2, "M": 1}, "fp16", "tn", ("bias", "relu"), "fp32")
    assert args.workload() == matmul_workload(1, 2, 3, "fp16", "tn", ("bias", "relu"), out_dtype="fp32")


def test_strided_workload_cannot_be_typed() -> None:
    plain = matmul_workload(64, 64, 64)
    assert (
        args_of(Workload.from_json({**plain.to_json(), "layouts": {"a": "row:80", "b": "col", "out": "row"}})) is None
    )


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"operator": "matmull"}, UnknownOperator, "matmul"),
        ({"dims": {"M": 1, "N": 1}}, InvalidWorkload, "M, N, K.*try M=1024"),
        ({"dims": {"M": 0, "N": 1, "K": 1}}, InvalidWorkload, "between 1 and"),
        ({"dims": {"M": MAX_DIM + 1, "N": 1, "K": 1}}, InvalidWorkload, "between 1 and"),
        ({"dtype": "bf17"}, UnsupportedDtype, "bf17"),
        ({"dtype": "int8"}, UnsupportedDtype, "int8"),
        ({"layout": "xy"}, InvalidWorkload, "nt, nn, tn, tt"),
        ({"epilogue": ("softmax",)}, InvalidWorkload, "epilogue"),
        ({"error_budget": 3.0}, InvalidWorkload, "error_budget"),
        ({"attributes": {"causal": True}}, InvalidWorkload, "deterministic, workspace_bytes, got 'causal'"),
        ({"attributes": {"workspace_bytes": True}}, InvalidWorkload, "workspace_bytes must be of type int, got True"),
        ({"attributes": {"workspace_bytes": -1}}, InvalidWorkload, "workspace_bytes must be a whole number"),
    ],
)
def test_misuse_is_told(change: dict[str, object], error: type[KernelwrightError], words: str) -> None:
    good: dict[str, object] = {"operator": "matmul", "dims": {"M": 64, "N": 64, "K": 64}}
    with pytest.raises(error, match=words):
        WorkloadArgs(**{**good, **change}).workload()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("replay:h100", "replay:h100"),
        ("Replay:H100", "replay:h100"),
        ("cuda", "cuda"),
        ("gpu:0", "cuda"),
        ("cuda:1", "cuda:1"),
    ],
)
def test_device(text: str, written: str) -> None:
    assert str(parse_device(text)) == written


@pytest.mark.parametrize("text", ["", "h100", "cuda:x", "cuda:", "replay:", "replay:h1000", "tpu", "cuda:1:2"])
def test_device_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UnknownDevice):
        parse_device(text)


def test_hardware_and_device_must_agree() -> None:
    assert device_for_query("h100", "replay:h100") == named_device("h100")
    assert device_for_query(None, "replay:h100") == named_device("h100")
    with pytest.raises(UsageError, match="same GPU"):
        device_for_query("l4", "replay:h100")


@given(
    st.dictionaries(
        st.from_regex(r"[a-z_]{1,12}", fullmatch=True),
        st.booleans()
        | st.integers(-(10**17), 10**17)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.sampled_from(["bottom_right", "bhqk", "strided:1,2"]).filter(lambda text: "," not in text),
        max_size=6,
    )
)
def test_attributes_are_written_and_read_alike(attributes: dict[str, bool | int | float | str]) -> None:
    read = parse_attributes(format_attributes(attributes))
    assert read == attributes and [type(v) for v in read.values()] == [type(v) for v in attributes.values()]


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("", {}),
        ("deterministic", {"deterministic": True}),
        (" a = 1 , b=x ", {"a": 1, "b": "x"}),
        ("a=1e999", {"a": "1e999"}),
    ],
)
def test_attributes(text: str, read: dict[str, object]) -> None:
    assert parse_attributes(text) == read


@pytest.mark.parametrize("text", ["=1", "a=", "a=1,a=2"])
def test_attributes_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(InvalidWorkload):
        parse_attributes(text)
