"""Sibling products as one wider product of our real kernels, in triton's interpreter."""

from __future__ import annotations

import json
import random

import pytest
import torch
import torch.nn.functional as functional

from kernelwright.compiler import torch_calls
from kernelwright.compiler.merged_call import MERGED
from kernelwright.kernels import get_operator
from kernelwright.kernels.device import named_device
from kernelwright.kernels.matmul.workload import matmul_workload


@pytest.mark.parametrize("steps", [(), ("bias",), ("swiglu",), ("bias", "swiglu")], ids="+".join)
def test_wider_product_runs_on_our_kernels(steps: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch_calls, "compute")
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(6, 32, generator=generator)
    weights = [weight.t() for weight in torch.randn(48, 32, generator=generator).split(24)]
    biases = list(torch.randn(48, generator=generator).split(24)) if "bias" in steps else []
    workload, device = matmul_workload(6, 48, 32, "fp32", epilogue=steps), named_device("h100")
    schedule = get_operator("matmul").templates["pointer"].space(workload, device).sample(random.Random(1), 1)[0]
    got = MERGED(a, weights, biases, *(json.dumps(one.to_json()) for one in (workload, schedule)), True)
    parts = [a @ weight + (biases[i] if biases else 0) for i, weight in enumerate(weights)]
    want = functional.silu(parts[0]) * parts[1] if "swiglu" in steps else torch.cat(parts, 1)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
