"""Devices: figures of the named ones hang together; the one present is matched or described."""

from __future__ import annotations

import types
from typing import Any

import pytest

from kernelwright.errors import UnknownDevice
from kernelwright.kernels import device
from kernelwright.kernels.device import NAMED_DEVICES, device_from_properties, gpu_count, named_device, present_device
from kernelwright.types import DeviceSpec

PRECISIONS = {"fp64", "ieee", "tf32", "fp16", "bf16", "fp8", "int8", "fp4"}
WANTED = {
    "v100",
    "t4",
    "a100",
    "a100-80",
    "a10",
    "l4",
    "l40s",
    "rtx3090",
    "rtx4090",
    "rtx5090",
    "h100",
    "h100-pcie",
    "h200",
    "b200",
    "mi250x",
    "mi300x",
    "mi355x",
}


def properties(**given: Any) -> Any:
    """What torch reports of an H100 SXM, with changes."""
    reported = {
        "name": "NVIDIA H100 80GB HBM3",
        "major": 9,
        "minor": 0,
        "multi_processor_count": 132,
        "total_memory": 84930985984,
        "L2_cache_size": 52428800,
        "shared_memory_per_block_optin": 232448,
        "regs_per_multiprocessor": 65536,
        "warp_size": 32,
    }
    return types.SimpleNamespace(**{**reported, **given})


def test_names_asked_for_are_there() -> None:
    assert set(NAMED_DEVICES) >= WANTED


@pytest.mark.parametrize("spec", NAMED_DEVICES.values(), ids=lambda spec: spec.slug)
def test_figures_hang_together(spec: DeviceSpec) -> None:
    rates = spec.peak_tflops
    assert set(rates) <= PRECISIONS
    assert rates["fp64"] <= rates["ieee"] <= rates["fp16"]
    assert rates.get("tf32", rates["ieee"]) >= rates["ieee"]
    assert rates.get("bf16", rates["fp16"]) == rates["fp16"] <= rates.get("fp8", rates["fp16"])
    assert spec.l2_bytes < spec.memory_bytes
    assert 200 < spec.bandwidth_gbs <= 8000
    assert 48 * 1024 <= spec.shared_memory_bytes <= 228 * 1024
    assert spec.source
    assert DeviceSpec.from_json(spec.to_json()) == spec


def test_keys_tell_what_changes_the_winner_apart() -> None:
    keys = {slug: spec.key for slug, spec in NAMED_DEVICES.items()}
    assert keys["v100"] == keys["v100-32"]
    different = [key for slug, key in keys.items() if slug != "v100-32"]
    assert len(set(different)) == len(different)


@pytest.mark.parametrize("name", ["h100", "H100", " h100 "])
def test_named_device_in_any_case(name: str) -> None:
    assert named_device(name) is NAMED_DEVICES["h100"]


def test_spaces_and_underscores_serve_as_dashes() -> None:
    assert named_device("H100 PCIe").multiprocessors == 114
    assert named_device("a100_80").memory_bytes == 80 * 2**30


def test_unknown_names_are_told_with_the_list_and_the_nearest() -> None:
    with pytest.raises(UnknownDevice, match=r"one of v100.*mi355x, got 'h10'; did you mean 'h100'\?"):
        named_device("h10")
    with pytest.raises(UnknownDevice) as caught:
        named_device("potato")
    assert "did you mean" not in str(caught.value)


def test_two_h100_sxm_have_one_spec() -> None:
    other = properties(name="NVIDIA H800", total_memory=85520809984)
    assert device_from_properties(properties()) is device_from_properties(other) is NAMED_DEVICES["h100"]


@pytest.mark.parametrize(
    ("given", "slug"),
    [
        ({"total_memory": 150754820096, "name": "NVIDIA H200"}, "h200"),
        ({"multi_processor_count": 114}, "h100-pcie"),
        ({"major": 8, "multi_processor_count": 108, "total_memory": 42285268992}, "a100"),
        ({"major": 8, "minor": 9, "multi_processor_count": 128, "total_memory": 25248268288}, "rtx4090"),
        ({"major": 7, "multi_processor_count": 80, "total_memory": 34079637504}, "v100-32"),
        (
            {"gcnArchName": "gfx942:sramecc+:xnack-", "multi_processor_count": 304, "total_memory": 206141652992},
            "mi300x",
        ),
    ],
)
def test_known_gpus_are_recognised(given: dict[str, Any], slug: str) -> None:
    assert device_from_properties(properties(**given)).slug == slug


def test_an_h100_with_other_memory_is_described_from_what_torch_tells() -> None:
    nvl = properties(name="NVIDIA H100 NVL", total_memory=99857334272, memory_clock_rate=2619000, memory_bus_width=6144)
    spec = device_from_properties(nvl)
    assert (spec.slug, spec.name, spec.architecture) == ("nvidia-h100-nvl", "NVIDIA H100 NVL", "sm_90")
    assert spec.bandwidth_gbs == pytest.approx(4023, rel=0.01)
    assert spec.peak_tflops["bf16"] == pytest.approx(875, rel=0.01)
    assert "from memory clock and bus width" in spec.source and "scaled from" in spec.source


def test_a_slice_of_a_gpu_is_not_the_whole_one() -> None:
    spec = device_from_properties(properties(multi_processor_count=60, total_memory=40 * 2**30))
    assert spec.multiprocessors == 60
    assert spec.key != NAMED_DEVICES["h100"].key
    assert "guessed" in spec.source


def test_an_architecture_nobody_knows_gets_safe_guesses() -> None:
    bare = types.SimpleNamespace(name="New GPU", major=13, minor=0, multi_processor_count=10, total_memory=2**33)
    spec = device_from_properties(bare)
    assert (spec.architecture, spec.shared_memory_bytes, spec.vendor) == ("sm_130", 49152, "nvidia")
    assert spec.peak_tflops["fp16"] > spec.peak_tflops["ieee"] > 0
    assert spec.source.count("guessed") == 2


def test_no_gpu_is_told_with_what_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_torch", lambda: None)
    assert gpu_count() == 0
    with pytest.raises(UnknownDevice, match=r"no GPU.*torch is not installed.*replay:h100"):
        present_device()


def test_an_index_too_high_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = types.SimpleNamespace(device_count=lambda: 2, get_device_properties=lambda index: properties())
    monkeypatch.setattr(device, "_torch", lambda: types.SimpleNamespace(cuda=cuda))
    assert present_device(1) is NAMED_DEVICES["h100"]
    with pytest.raises(UnknownDevice, match=r"has 2 GPUs.*no number 2"):
        present_device(2)
