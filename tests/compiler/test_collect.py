"""A model's products are counted as the pass would find them, without a GPU and without compiling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelwright.compiler.collect import collect_file, collect_workloads
from kernelwright.errors import UsageError
from kernelwright.kernels.matmul.workload import matmul_workload


class Block(torch.nn.Module):
    """Two equal layers with an activation, and one without."""

    def __init__(self, dtype: torch.dtype = torch.float16, device: str = "cpu") -> None:
        super().__init__()
        self.up = torch.nn.ModuleList(torch.nn.Linear(64, 64, dtype=dtype, device=device) for _ in range(2))
        self.down = torch.nn.Linear(64, 32, bias=False, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.up:
            x = torch.nn.functional.silu(layer(x))
        return self.down(x)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layers_are_counted_with_what_is_fused_behind_them(device: str) -> None:
    x = torch.zeros(16, 64, dtype=torch.float16, device=device)
    with torch.no_grad():
        found, left_out = collect_workloads(Block(device=device), [x])
    up = matmul_workload(16, 64, 64, "fp16", epilogue=("bias", "silu"))
    assert found == {up: 2, matmul_workload(16, 32, 64, "fp16"): 1}
    assert left_out == []


def test_a_product_with_a_residual_is_counted_without_it_too() -> None:
    w, b, y = (torch.zeros(*size, dtype=torch.float16) for size in ((64, 64), (64,), (16, 64)))
    with torch.no_grad():
        found, _ = collect_workloads(lambda x: torch.nn.functional.linear(x, w, b) + y, [y])
    assert found == {
        matmul_workload(16, 64, 64, "fp16", epilogue=steps): 1 for steps in (("bias", "residual"), ("bias",))
    }


def test_training_counts_the_products_of_the_backward_pass_too() -> None:
    x = torch.zeros(16, 64, dtype=torch.float16)
    found, _ = collect_workloads(Block(), [x])
    assert found.total() == 3 + 3 + 2
    assert {workload.dims["K"] for workload in found} == {64, 16, 32}


@pytest.mark.parametrize(
    "returns", [lambda hidden, out: {"loss": out.square().sum(), "hidden": hidden}, lambda hidden, out: (hidden, [out])]
)
def test_training_is_counted_whatever_a_model_returns(returns: Callable[..., Any]) -> None:
    first, second = (torch.nn.Linear(64, 64, bias=False, dtype=torch.float16) for _ in range(2))

    def model(x: torch.Tensor) -> Any:
        hidden = first(x)
        return returns(hidden, second(torch.sin(hidden)))

    found, _ = collect_workloads(model, [torch.zeros(16, 64, dtype=torch.float16)])
    assert found.total() == 2 + 3


def test_what_has_no_workload_is_told() -> None:
    with torch.no_grad():
        found, left_out = collect_workloads(Block(torch.float64), [torch.zeros(16, 64, dtype=torch.float64)])
    assert not found and len(left_out) == 3 and "float64" in left_out[0]


MODEL = """
import torch
model = torch.nn.Linear(64, 32, bias=False, dtype=torch.float16).requires_grad_(False)
inputs = torch.zeros(16, 64, dtype=torch.float16)
def make():
    return model, (inputs[:8],)
def by_name():
    return (lambda scale, x: model(x) * scale), {"x": inputs[:4], "scale": 2.0}
"""


def test_a_file_gives_its_model(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    assert collect_file(str(path)) == ([{"workload": matmul_workload(16, 32, 64, "fp16").to_json(), "calls": 1}], [])
    for name, rows in (("make", 8), ("by_name", 4)):
        assert [entry["workload"]["dims"]["M"] for entry in collect_file(f"{path}:{name}")[0]] == [rows]
    path.write_text("model = 1")
    with pytest.raises(UsageError, match="has no inputs"):
        collect_file(str(path))
    with pytest.raises(UsageError, match="which is none"):
        collect_file(str(tmp_path / "no.py"))


FAULTS = {
    "x = 1\nraise ValueError('gone')": "model.py, line 2 raised ValueError: gone",
    "import sys\nsys.exit(3)": "model.py, line 2 raised SystemExit: 3",
    "import no_such_module": "line 1 raised ModuleNotFoundError: No module named 'no_such_module'",
    "model = (": "SyntaxError: '\\(' was never closed",
    "model, inputs = 3, 4": "`model` must be something that can be called, got int 3",
}
MAKERS = {
    "make = 3": "make must be something that can be called, got int 3",
    "def make(size): pass": "raised TypeError: make\\(\\) missing 1 required positional argument",
    "def make():\n    assert False": "model.py, line 2 raised AssertionError$",
    "def make(): return len": "make must return a model and its inputs, got builtin_function",
    "def make(): return 1, 2": "the model of make must be something that can be called, got int 1",
}


@pytest.mark.parametrize(
    "text, name, told",
    [(text, "", told) for text, told in FAULTS.items()] + [(text, ":make", told) for text, told in MAKERS.items()],
)
def test_a_file_with_a_fault_is_told_where(tmp_path: Path, text: str, name: str, told: str) -> None:
    path = tmp_path / "model.py"
    path.write_text(text)
    with pytest.raises(UsageError, match=told):
        collect_file(f"{path}{name}")


def test_a_file_sees_no_arguments_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["kernelwright", "explain", "--json"])
    path = tmp_path / "model.py"
    path.write_text(f"import argparse\nargparse.ArgumentParser().parse_args()\n{MODEL}")
    assert len(collect_file(f"{path}:make")[0]) == 1


class Halves(torch.nn.Module):
    """Attention over a list of tensors, and what it makes of numbers itself, as a cache of keys begins."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = torch.nn.Linear(64, 64)

    def forward(self, halves: list[torch.Tensor]) -> torch.Tensor:
        x = self.inside(torch.cat([torch.tensor([], dtype=halves[0].dtype, device=halves[0].device), *halves]))
        heads = x.view(1, 1, -1, 64)
        return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_inside_lists_may_have_no_data(device: str) -> None:
    with torch.device(device), torch.no_grad():
        model, halves = Halves().bfloat16(), [torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(2)]
        found, left_out = collect_workloads(model, [halves])
        assert collect_workloads(model, [], {"halves": halves})[0] == found
    assert {workload.operator for workload in found} == {"matmul", "attention"} and left_out == []


class Mixed(torch.nn.Module):
    """A convolution with its norm, and attention over its pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(8, 16, 3, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm2d(16)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        q = x.flatten(2).transpose(1, 2).unsqueeze(1)
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("training", [False, True])
def test_convolutions_and_attention_are_counted_alike_with_and_without_data(training: bool, device: str) -> None:
    model = Mixed().to(device, torch.float16, memory_format=torch.channels_last).train(training)
    x = torch.zeros(2, 8, 4, 5, dtype=torch.float16, device=device).to(memory_format=torch.channels_last)
    mask = torch.ones(20, 20, dtype=torch.bool, device=device)
    with torch.set_grad_enabled(training):
        found, left_out = collect_workloads(model, [x, mask])
    kinds = sorted((w.operator, *w.epilogue, str(w.attributes.get("direction", ""))) for w in found.elements())
    if training:
        want = [("attention", ""), ("attention", "backward"), ("conv2d", ""), ("conv2d", "weight_gradient")]
    else:
        want = [("attention", ""), ("conv2d", "scale_vec", "bias", "relu", "")]
    assert (kinds, left_out) == (want, [])
    (conv,) = [
        workload for workload in found if workload.operator == "conv2d" and "direction" not in workload.attributes
    ]
    assert dict(conv.layouts) == dict.fromkeys(("x", "w", "out"), "nhwc")
    assert all(w.attributes["mask"] == "bool" for w in found if w.operator == "attention")
