"""Convolutions in graphs: what is taken in, by numbers, and that results lie where the graph expects them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from kernelwright.compiler.kernel_call import CALL
from kernelwright.compiler.passes import convolution
from kernelwright.compiler.passes.candidate import Candidate
from kernelwright.kernels.conv2d.reference import activations
from kernelwright.types import Workload

aten = torch.ops.aten
Module = torch.nn.Module
LAST = torch.channels_last


def image(*size: int, dtype: torch.dtype = torch.float32, last: bool = True) -> torch.Tensor:
    x = torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)
    return x.to(memory_format=LAST) if last else x


def conv(channels_in: int, channels_out: int, size: int = 3, last: bool = True, **options: Any) -> Module:
    torch.manual_seed(channels_in + channels_out)
    layer = torch.nn.Conv2d(channels_in, channels_out, size, **options)
    return layer.to(memory_format=LAST) if last else layer


def norm(channels: int) -> Module:
    layer = torch.nn.BatchNorm2d(channels).eval()
    for tensor in (layer.running_mean, layer.running_var, layer.weight, layer.bias):
        assert tensor is not None
        torch.nn.init.uniform_(tensor, 0.5, 1.5)
    return layer


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    precise = want.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-4 if precise else 3e-2, atol=1e-4 if precise else 3e-2)
    assert got.stride() == want.stride()


def check(forced: Any, model: Callable[..., Any], *args: torch.Tensor) -> None:
    with torch.no_grad():
        same(forced.compile(model)(*args), model(*args))


@pytest.mark.parametrize("last", [True, False], ids=["nhwc", "nchw"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False, "stride": 2, "padding": 1},
        {"dilation": 2, "padding": (2, 1)},
        {"groups": 4, "bias": False},
        {"size": 1},
    ],
    ids=str,
)
def test_plain_convolution(forced: Any, options: dict[str, Any], last: bool) -> None:
    layer, x = conv(8, 16, last=last, **options), image(2, 8, 9, 11, last=last)
    check(forced, layer, x)
    (decision,) = forced.report.replaced
    assert decision.workload.epilogue == (("bias",) if options.get("bias", True) else ())
    assert dict(decision.workload.layouts) == dict.fromkeys(("x", "w", "out"), "nhwc" if last else "nchw")
    assert aten.convolution.default not in forced.targets()


@pytest.mark.parametrize("last", [True, False], ids=["nlc", "ncl"])
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False, "stride": 2, "padding": 1}, {"dilation": 2, "padding": 3}, {"groups": 8}, {"kernel_size": 1}],
    ids=str,
)
def test_a_line_is_an_image_of_height_one(forced: Any, options: dict[str, Any], last: bool) -> None:
    torch.manual_seed(1)
    layer = torch.nn.Conv1d(8, 16, **{"kernel_size": 3, **options})
    line = torch.randn(2, 11, 8).transpose(1, 2) if last else torch.randn(2, 8, 11)
    check(forced, layer, line)
    (decision,) = forced.report.replaced
    dims, told = decision.workload.dims, decision.workload.attributes
    assert (dims["H"], dims["W"], dims["R"], dims["S"]) == (1, 11, 1, options.get("kernel_size", 3))
    assert (told.get("pad_h", 0), told.get("pad_w", 0)) == (0, options.get("padding", 0))
    assert aten.convolution.default not in forced.targets()


def test_what_follows_a_line_is_taken_in(forced: Any) -> None:
    torch.manual_seed(1)
    norm = torch.nn.BatchNorm1d(16).eval()
    torch.nn.init.uniform_(norm.running_var, 0.5, 1.5)  # type: ignore[arg-type]
    layer, last = torch.nn.Conv1d(8, 16, 3, padding=1), torch.nn.Conv1d(16, 16, 1)
    scale = torch.rand(16, 1)

    def model(x: torch.Tensor) -> torch.Tensor:
        y = functional.gelu(norm(layer(x)))
        return torch.relu(last(y) * scale + y)

    check(forced, model, torch.randn(2, 8, 11))
    assert forced.epilogues() == [("scale_vec", "bias", "gelu"), ("scale_vec", "bias", "residual", "relu")]


def test_a_transposed_line(forced: Any) -> None:
    layer = torch.nn.ConvTranspose1d(8, 12, 3, stride=2, padding=1, output_padding=1)
    check(forced, layer, torch.randn(2, 8, 7))
    (decision,) = forced.report.replaced
    told = decision.workload.attributes
    assert (told["transposed"], told["output_pad_w"], told.get("output_pad_h", 0)) == (True, 1, 0)


def test_gradients_of_a_line_are_left_to_torch(forced: Any) -> None:
    torch.manual_seed(1)
    layer, x = torch.nn.Conv1d(8, 16, 3), torch.randn(2, 8, 11)
    want = torch.autograd.grad(layer(x).square().sum(), layer.parameters())
    got = torch.autograd.grad(forced.compile(layer)(x).square().sum(), layer.parameters())
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert [one.workload.attributes.get("direction", "forward") for one in forced.report.replaced] == ["forward"]


def test_transposed_convolution(forced: Any) -> None:
    layer = torch.nn.ConvTranspose2d(8, 12, 3, stride=2, padding=1, output_padding=1).to(memory_format=LAST)
    check(forced, layer, image(2, 8, 5, 6))
    (decision,) = forced.report.replaced
    assert decision.workload.attributes["transposed"] and decision.workload.attributes["output_pad_h"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted(activations()))
def test_norm_residual_and_activation_are_taken_in(forced: Any, name: str, dtype: torch.dtype) -> None:
    layer, bn = conv(8, 16, bias=False).to(dtype), norm(16).to(dtype)
    activation = activations()[name]

    def model(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return activation(bn(layer(x)) + residual)

    check(forced, model, image(2, 8, 6, 7, dtype=dtype), image(2, 16, 4, 5, dtype=dtype))
    assert forced.epilogues() == [("scale_vec", "bias", "residual", name)]
    calls = [target for target in forced.targets() if target in (CALL, aten.add.Tensor)]
    assert calls.count(CALL) == 1


def test_bias_of_the_convolution_goes_through_the_norm(forced: Any) -> None:
    check(forced, torch.nn.Sequential(conv(8, 16), norm(16), torch.nn.ReLU6()), image(2, 8, 6, 7))
    assert forced.epilogues() == [("scale_vec", "bias", "relu6")]


def test_each_form_of_a_place_is_worked_out_once(forced: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    find, work_out = convolution._forwards, convolution.workload_of
    forms: list[Candidate] = []
    asked: list[Workload] = []

    def found(node: torch.fx.Node) -> list[Candidate]:
        forms.extend(find(node))
        return list(forms)

    def worked_out(*args: Any) -> Workload:
        asked.append(work_out(*args))
        return asked[-1]

    monkeypatch.setattr(convolution, "_forwards", found)
    monkeypatch.setattr(convolution, "workload_of", worked_out)
    check(forced, torch.nn.Sequential(conv(8, 16), norm(16), torch.nn.ReLU6()), image(2, 8, 6, 7))
    assert forced.epilogues() == [("scale_vec", "bias", "relu6")]
    assert len(asked) == len(forms) > 1


def test_vectors_of_a_norm_are_taken_as_they_lie(forced: Any) -> None:
    """Each view of one is a step more for Inductor to compile."""
    check(forced, torch.nn.Sequential(conv(8, 16, bias=False), norm(16), torch.nn.ReLU()), image(2, 8, 6, 7))
    assert forced.epilogues() == [("scale_vec", "bias", "relu")]
    assert aten.view.default not in forced.targets()


def test_gate_like_the_result_is_taken_in(forced: Any) -> None:
    layer = conv(8, 16)
    check(forced, lambda x, y: functional.silu(layer(x)) * y, image(2, 8, 6, 7), image(2, 16, 4, 5))
    assert forced.epilogues() == [("bias", "silu", "multiply")]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.mean((2, 3)),
        lambda x: functional.max_pool2d(x, 2),
        lambda x: x * 2,
        lambda x: x + torch.arange(5.0),
        lambda x: x + torch.ones(16, 1, 1, dtype=torch.float64),
        lambda x: x.contiguous(),
    ],
)
def test_other_steps_stay_behind(forced: Any, function: Callable[..., Any]) -> None:
    layer = conv(8, 16)
    check(forced, lambda x: function(layer(x)), image(2, 8, 6, 7))
    assert forced.epilogues() == [("bias",)]


def test_residual_that_lies_otherwise_stays_outside(forced: Any) -> None:
    layer = conv(8, 16)
    check(forced, lambda x, y: layer(x) + y, image(2, 8, 6, 7), image(2, 16, 4, 5, last=False))
    assert forced.epilogues() == [("bias",)]


def test_value_that_others_use_is_kept(forced: Any) -> None:
    layer, x = conv(8, 16), image(2, 8, 6, 7)

    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = layer(x)
        return y, torch.relu(y)

    with torch.no_grad():
        for got, want in zip(forced.compile(model)(x), model(x), strict=True):
            same(got, want)
    assert forced.epilogues() == [("bias",)]


@pytest.mark.parametrize("what", ["fp64", "complex", "3d", "empty batch"])
def test_what_no_kernel_takes_is_left_alone(forced: Any, what: str) -> None:
    x, w, function = image(2, 8, 6, 7), torch.randn(16, 8, 3, 3), functional.conv2d
    if what in ("fp64", "complex"):
        kind = torch.float64 if what == "fp64" else torch.complex64
        x, w = x.to(kind), w.to(kind)
    elif what == "3d":
        function, x, w = functional.conv3d, x.unsqueeze(2), w.unsqueeze(2)
    else:
        x = x[:0]
    with torch.no_grad():
        torch.testing.assert_close(forced.compile(function)(x, w), function(x, w), rtol=1e-4, atol=1e-4)
    # torch makes real convolutions of complex ones, which are as good as any
    assert what == "complex" or not forced.report.replaced


@pytest.mark.parametrize("what", ["rows repeat", "cut from a larger one", "transposed image"])
def test_odd_strides_are_told_or_left_alone(forced: Any, what: str) -> None:
    x = {
        "rows repeat": torch.randn(2, 8, 1, 7).expand(2, 8, 6, 7),
        "cut from a larger one": image(2, 16, 6, 7)[:, 4:12],
        "transposed image": image(2, 8, 7, 6).transpose(2, 3),
    }[what]
    check(forced, conv(8, 16), x)
    assert all(one.workload.layouts["x"].startswith("strided:") for one in forced.report.replaced)


def test_gradients_are_separate_workloads(forced: Any) -> None:
    layer = conv(8, 16, padding=1, stride=2)
    x = image(2, 8, 6, 7).requires_grad_()
    forced.compile(layer)(x).square().sum().backward()
    got = [x.grad, layer.weight.grad, layer.bias.grad]
    x.grad = layer.weight.grad = layer.bias.grad = None
    layer(x).square().sum().backward()
    for one, other in zip(got, (x.grad, layer.weight.grad, layer.bias.grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    directions = [decision.workload.attributes.get("direction") for decision in forced.report.replaced]
    assert directions == [None, "input_gradient", "weight_gradient"]


@pytest.mark.parametrize("kept", ["input_gradient", "weight_gradient"])
def test_either_gradient_alone_may_be_ours(tried_with: Any, kept: str) -> None:
    tried = tried_with(lambda workload: workload.attributes.get("direction") == kept)
    layer = conv(8, 16, bias=False)
    x = image(2, 8, 6, 7).requires_grad_()
    tried.compile(layer)(x).square().sum().backward()
    got = [x.grad, layer.weight.grad]
    x.grad = layer.weight.grad = None
    layer(x).square().sum().backward()
    for one, other in zip(got, (x.grad, layer.weight.grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert len(tried.report.replaced) == 1 and aten.convolution.default in tried.targets()


class Normed(torch.nn.Module):
    """A convolution behind a group norm, which loses the order of its image; in a model that is channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = torch.nn.GroupNorm(2, 8), torch.nn.Conv2d(8, 16, 3, padding=1)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(torch.nn.functional.silu(self.norm(x)))


def test_an_image_that_is_just_computed_comes_channels_last(forced: Any) -> None:
    model, x = Normed(), torch.randn(2, 8, 6, 6).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        got, want = forced.compile(model)(x), model(x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert got.stride() == want.stride()
    (decision,) = forced.report.replaced
    assert dict(decision.workload.layouts) == dict.fromkeys(("x", "w", "out"), "nhwc")


def test_an_image_that_lies_in_memory_stays_as_it_is(forced: Any) -> None:
    conv, x = torch.nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last), torch.randn(2, 8, 6, 6)

    def used_twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(x)
        return conv(y), y

    with torch.no_grad():
        torch.testing.assert_close(forced.compile(conv)(x), conv(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(forced.compile(used_twice)(x), used_twice(x), rtol=1e-4, atol=1e-5)
    assert [one.workload.layouts["x"] for one in forced.report.replaced] == ["nchw", "nchw"]
