"""The models that are compiled on a GPU: they are there, trace without a graph break, and compute what they say."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional

from kernelwright.compiler.collect import collect_workloads, load_model
from kernelwright.compiler.passes.rival import TENSOR_STEPS
from kernelwright.errors import UsageError
from kernelwright.types import Workload

model_run = pytest.importorskip("model_run")

LIBRARIES = {
    "gpt2": "transformers",
    "bert": "transformers",
    "whisper": "transformers",
    "vit": "timm",
    "convnext": "timm",
    "mobilenet": "timm",
}
"""What models are built with, where that is more than torch."""

INFERENCE = ["llama_block", "llama_block:decode", "resnet50", "unet", "moe", *LIBRARIES]
TRAINING = [f"{name}:training" for name in ("llama_block", "resnet50", "unet", "moe", *LIBRARIES)]


def made(name: str) -> tuple[Any, Any]:
    pytest.importorskip(LIBRARIES.get(name.partition(":")[0], "torch"))
    return load_model(model_run.target_of(name))


@functools.cache
def collected(name: str) -> tuple[Counter[Workload], list[str]]:
    """The workloads of a model, and what has none."""
    return collect_workloads(*made(name))


def on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch, **sizes: Any) -> ModuleType:
    """The module of a model, with other sizes, in fp32."""
    load_model(model_run.target_of(name))
    loaded = [module for name, module in sys.modules.items() if name.startswith("kernelwright_collected_")]
    module, parts = loaded[-1], sys.modules["model_parts"]
    monkeypatch.setattr(parts, "DEVICE", "cpu")
    monkeypatch.setattr(parts, "DTYPE", torch.float32)
    monkeypatch.setattr(parts, "PLACE", {"device": "cpu", "dtype": torch.float32})
    for size, value in sizes.items():
        monkeypatch.setattr(module, size, value)
    return module


@pytest.mark.parametrize("name", [*INFERENCE, *TRAINING])
def test_models_are_there(name: str) -> None:
    model, inputs = made(name)
    assert isinstance(model, torch.nn.Module) and model.training is name.endswith("training")
    wanted = model_run.DEVICE_TYPE
    assert {tensor.device.type for tensor in (*inputs, *model.parameters())} == {wanted}
    assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}
    assert any(tensor.requires_grad for tensor in model.parameters()) is model.training


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run the whole model")
@pytest.mark.parametrize(
    ("name", "places"), [("unet", 60), ("moe", 8), ("bert", 32), ("gpt2", 31), ("vit", 32), ("convnext", 35)]
)
def test_every_product_of_a_model_has_a_workload(name: str, places: int) -> None:
    """Products that share an operand count once more, as the one that they could be."""
    found, left_out = collected(name)
    # what reads a tensor of its result's size is counted without it, too
    twice = sum(calls for workload, calls in found.items() if any(step in TENSOR_STEPS for step in workload.epilogue))
    assert left_out == [] and found.total() - twice == places


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run the whole model")
def test_masks_that_transformers_makes_are_known_to_be_causal() -> None:
    found, _ = collected("gpt2")
    (attention,) = [workload for workload in found if workload.operator == "attention"]
    assert attention.attributes["causal"] == "bottom_right" and "mask" not in attention.attributes


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run the whole model")
def test_a_training_step_takes_gradients_of_products_and_attention() -> None:
    found, _ = collected("llama_block:training")
    directions = [w.attributes.get("direction") for w in found if w.operator == "attention"]
    assert sorted(map(str, directions)) == ["None", "backward"]


def test_experts_compute_what_the_chosen_ones_give(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"TOKENS": 24, "WIDTH": 8, "HIDDEN": 12, "EXPERTS": 4, "CAPACITY": 24, "LAYERS": 1}
    module = on_the_cpu("moe", monkeypatch, **sizes)
    model, (x,) = module.inference()
    (layer,) = model
    y = layer.norm(x)
    weights, chosen = layer.router(y).softmax(-1).topk(2, -1)
    want = x.clone()
    for token in range(24):
        for weight, expert in zip(weights[token] / weights[token].sum(), chosen[token], strict=True):
            hidden = functional.silu(y[token] @ layer.gate[expert]) * (y[token] @ layer.up[expert])
            want[token] += weight * (hidden @ layer.down[expert])
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-4)


def test_experts_drop_what_is_over_their_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"TOKENS": 24, "WIDTH": 8, "HIDDEN": 12, "EXPERTS": 4, "CAPACITY": 3, "LAYERS": 1}
    model, (x,) = on_the_cpu("moe", monkeypatch, **sizes).inference()
    changed = (model(x) != x).any(-1)
    # the last tokens find every expert full
    assert changed[0] and not changed[-1] and torch.isfinite(model(x)).all()


@pytest.mark.parametrize("name", ["moe", "unet"])
def test_a_training_step_gives_every_weight_a_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {"TOKENS": 32, "WIDTH": 8, "HIDDEN": 8, "EXPERTS": 4, "CAPACITY": 32}
    if name == "unet":
        sizes = {"LATENTS": 1, "SIDE": 8, "WIDTHS": (32, 64), "TOKENS": 3, "TEXT": 8, "STEP": 8, "HEADS": 2}
    model, inputs = on_the_cpu(name, monkeypatch, **sizes).training()
    loss = model(*inputs)
    loss.backward()
    assert loss.dim() == 0 and all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    load_model(model_run.target_of("moe"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="built with transformers, which must be installed"):
        sys.modules["model_parts"].library("transformers")


def test_cross_entropy_is_that_of_torch() -> None:
    load_model(model_run.target_of("moe"))
    scores, wanted = torch.randn(2, 3, 7), torch.randint(7, (6,))
    loss = sys.modules["model_parts"].Classified(torch.nn.Identity())(scores, wanted)
    torch.testing.assert_close(loss, functional.cross_entropy(scores.flatten(0, 1), wanted))
