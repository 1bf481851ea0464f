"""The vendor library's side of a convolution: the fastest call that torch offers for it, cuDNN on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kernelwright.kernels.conv2d.inputs import operand_name, torch_dtype
from kernelwright.kernels.conv2d.reference import activations, finished
from kernelwright.kernels.conv2d.workload import OPERANDS, Problem
from kernelwright.kernels.fastest_call import Call, fastest
from kernelwright.kernels.operator import Inputs
from kernelwright.kernels.precision import allowed
from kernelwright.types import Workload

if TYPE_CHECKING:
    import torch

IN_PLACE = ("relu", "relu6", "silu", "hardswish", "sigmoid", "tanh")


def vendor_call(workload: Workload, problem: Problem, inputs: Inputs) -> Call | None:
    """(name, call) of the fastest way; None where torch's convolution cannot write the result's type.

    On a GPU the operands as they lie, channels_last and NCHW are tried, each with cuDNN's own search
    (`cudnn.benchmark`), and the fastest is taken: images that lie otherwise are copied inside the call, weights before
    it. 8-bit operands are widened before the call to the 16-bit type that a user without such a kernel runs; vectors
    are brought to the result's type.
    """
    first, second = (problem.dtypes[name] for name in problem.operands)
    result = problem.dtypes[problem.result]
    narrow = first.startswith("fp8") or first == "int8"
    if not narrow and result != first:
        return None
    if narrow:
        kind = torch_dtype(result if result in ("fp16", "bf16") else "bf16")
        inputs = {**inputs, **{name: inputs[name].to(kind) for name in ("x", "w")}}
    inputs = {name: t.to(torch_dtype(result)) if t.dim() == 1 else t for name, t in inputs.items()}
    tf32 = "tf32" in allowed(first, second, result, workload.error_budget)
    calls = [_named(call, tf32, narrow) for call in _candidates(problem, inputs)]
    return fastest(calls) if inputs[_image(problem)].is_cuda else calls[0]


def _image(problem: Problem) -> str:
    return "d_out" if problem.direction == "input_gradient" else "x"


def _named(call: Call, tf32: bool, narrow: bool) -> Call:
    name, run = call
    note = " (tf32)" if tf32 else " (16 bits)" if narrow else ""
    return name + note, lambda: _with_flags(run, tf32)


def _with_flags(run: Callable[[], Any], tf32: bool) -> Any:
    import torch

    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=tf32):
        return run()


def _candidates(problem: Problem, inputs: Inputs) -> list[Call]:
    """Every call worth timing; the first works everywhere."""
    import torch

    makers = {
        "forward": _forward,
        "input_gradient": _input_gradient,
        "weight_gradient": _weight_gradient,
    }
    make = makers[problem.direction]
    formats = [("", None), (" channels_last", torch.channels_last), (" nchw", torch.contiguous_format)]
    if not inputs[_image(problem)].is_cuda:
        formats = formats[:1]
    return [call for note, kind in formats for call in make(problem, inputs, note, kind)]


def _converted(tensor: torch.Tensor, kind: torch.memory_format | None) -> torch.Tensor:
    return tensor if kind is None else tensor.contiguous(memory_format=kind)


def _rest(problem: Problem) -> tuple[Any, ...]:
    return (problem.stride, problem.padding, problem.dilation)


def _forward(problem: Problem, inputs: Inputs, note: str, kind: torch.memory_format | None) -> list[Call]:
    import torch
    import torch.nn.functional as functional

    p, x, w = problem, inputs["x"], _converted(inputs["w"], kind)
    steps = p.epilogue
    bias = inputs["bias"] if steps[:1] == ("bias",) else None
    done = 1 if bias is not None else 0
    stride, padding, dilation = _rest(p)

    def convolution() -> torch.Tensor:
        image = _converted(x, kind)
        if p.transposed:
            return functional.conv_transpose2d(
                image, w, bias, stride, padding, p.output_padding, p.groups, dilation=dilation
            )
        return functional.conv2d(image, w, bias, stride, padding, dilation, p.groups)

    name = ("conv_transpose2d" if p.transposed else "conv2d") + note
    calls = [_with_rest(name, convolution, steps, done, inputs)]
    fused = steps[:2] == ("bias", "relu"), steps[:3] == ("bias", "residual", "relu")
    if any(fused) and bias is not None and not p.transposed and x.is_cuda:

        def in_one() -> torch.Tensor:
            image = _converted(x, kind)
            if fused[0]:
                return torch.cudnn_convolution_relu(image, w, bias, stride, padding, dilation, p.groups)
            added = inputs["residual"]
            return torch.cudnn_convolution_add_relu(image, w, added, 1.0, bias, stride, padding, dilation, p.groups)

        calls.append(_with_rest("cudnn fused" + note, in_one, steps, 2 if fused[0] else 3, inputs))
    return calls


def _with_rest(
    name: str, convolution: Callable[[], torch.Tensor], steps: Sequence[str], done: int, inputs: Inputs
) -> Call:
    """The convolution, then the epilogue's steps from number `done` on: a folded batch norm in one pass, activations in
    place where torch can."""
    import torch

    steps = tuple(steps)
    folded = steps[done : done + 2] == ("scale_vec", "bias")
    after = done + 2 if folded else done
    names = [operand_name(steps, place) for place in (done, done + 1)] if folded else []
    scale, shift = (inputs[name].view(-1, 1, 1) for name in names) if folded else (None, None)

    def call() -> torch.Tensor:
        out = convolution()
        if scale is not None and shift is not None:
            out = torch.addcmul(shift, out, scale)
        for place in range(after, len(steps)):
            out = _step(out, steps, place, inputs)
        return out

    return "+".join((name, *steps[done:])), call


def _step(out: torch.Tensor, steps: tuple[str, ...], place: int, inputs: Inputs) -> torch.Tensor:
    import torch.nn.functional as functional

    step = steps[place]
    if step in OPERANDS:
        value = inputs[operand_name(steps, place)]
        return finished(out, {step: value}, (step,))
    if step in ("sigmoid", "tanh"):
        return out.sigmoid_() if step == "sigmoid" else out.tanh_()
    if step in IN_PLACE:
        activation: Callable[..., torch.Tensor] = getattr(functional, step)
        return activation(out, inplace=True)
    return activations()[step](out)


def _backward(problem: Problem, d_out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, which: int) -> torch.Tensor:
    import torch

    mask = [place == which for place in range(3)]
    stride, padding, dilation = (list(pair) for pair in _rest(problem))
    found = torch.ops.aten.convolution_backward(
        d_out, x, w, None, stride, padding, dilation, False, [0, 0], problem.groups, mask
    )
    gradient: torch.Tensor = found[which]
    return gradient


def _input_gradient(problem: Problem, inputs: Inputs, note: str, kind: torch.memory_format | None) -> list[Call]:
    import torch

    d_out, w = inputs["d_out"], _converted(inputs["w"], kind)
    # only its sizes and its layout are looked at
    x = torch.empty(problem.shapes["x"], dtype=d_out.dtype, device=d_out.device)
    x = x.as_strided(x.shape, problem.layouts["x"].strides) if kind is None and _dense(problem) else _converted(x, kind)
    return [("conv2d gradient of x" + note, lambda: _backward(problem, _converted(d_out, kind), x, w, 0))]


def _dense(problem: Problem) -> bool:
    """Whether x has no gaps, so that its strides fit a fresh buffer of its size."""
    return problem.layouts["x"].order != "strided"


def _weight_gradient(problem: Problem, inputs: Inputs, note: str, kind: torch.memory_format | None) -> list[Call]:
    import torch

    x, d_out = inputs["x"], inputs["d_out"]
    w = _converted(torch.empty(problem.shapes["w"], dtype=x.dtype, device=x.device), kind)
    return [
        (
            "conv2d gradient of w" + note,
            lambda: _backward(problem, _converted(d_out, kind), _converted(x, kind), w, 1),
        )
    ]
