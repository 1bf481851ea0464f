"""What torch.compile, torch.export and torch.distributed can do goes on working with our operators in the graph."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from kernelwright.compiler import export, ops
from kernelwright.compiler.backend import kernelwright as backend
from kernelwright.compiler.report import Report

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Mixed(torch.nn.Module):
    """A convolution, products, a batched product and attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image = torch.nn.Conv2d(3, 16, 4, 4)
        self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.image(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(y).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        y = y + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return torch.relu(torch.bmm(y, y.transpose(1, 2)))


@pytest.fixture
def compiled(recorder: Any) -> Callable[..., tuple[Any, Report]]:
    """Compiles with the pass forced on the CPU."""

    def compile_it(model: Any, **options: Any) -> tuple[Any, Report]:
        report = Report()
        ours = {"answers": recorder(), "devices": ("cpu",), "report": report}
        return torch.compile(model, backend=backend, options=ours, **options), report

    return compile_it


def test_a_whole_model_is_one_graph(compiled: Any) -> None:
    model, x = Mixed(), torch.randn(2, 3, 16, 16)
    run, report = compiled(model, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
    assert {one.workload.operator for one in report.replaced} == {"matmul", "conv2d", "attention"}
    assert len(report.replaced) == 5 and report.warnings == []


def test_torchs_cpp_wrapper_gets_none_of_our_operators(recorder: Any) -> None:
    """It cannot compile their texts, and crashes on lists of one result."""
    model, x, report = Small(), torch.randn(2, 8, 16), Report()
    quick = {"cpp_cache_precompile_headers": False}  # for this model alone
    options = {"answers": recorder(), "devices": ("cpu",), "report": report, "cpp_wrapper": True, **quick}
    with torch.no_grad():
        run = torch.compile(model, backend=backend, options=options)
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
    assert report.replaced == [] and len(report.warnings) == 1 and "C++ wrapper" in report.warnings[0]


def test_a_whole_model_trains_in_one_graph(compiled: Any) -> None:
    model, x = Mixed(), torch.randn(2, 3, 16, 16)
    run, report = compiled(model, fullgraph=True)
    weights = list(model.parameters())
    found, want = (torch.autograd.grad(call(x).square().mean(), weights) for call in (run, model))
    for got, exact in zip(found, want, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-3, atol=1e-4)
    assert any("gradient" in one.workload.attributes.get("direction", "") for one in report.replaced)


def test_open_sizes_are_compiled_once_and_are_right_at_all(compiled: Any) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
    run, report = compiled(layers, dynamic=True)
    for rows in (5, 64, 17, 300):
        x = torch.randn(rows, 16, requires_grad=True)
        got, want = run(x), layers(x)
        torch.testing.assert_close(got, want)
        grads = (torch.autograd.grad(out.square().sum(), x)[0] for out in (got, want))
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
    products = [one for one in report.decisions if one.replaced]
    # two layers and the gradients of what goes into them; those of weights sum over the rows
    assert len(products) == 4 and all("rows" in one.reason for one in products)


def test_autocast_decides_by_the_type_that_is_computed_in(compiled: Any) -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)), torch.randn(8, 16)

    def step(call: Any) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            out = call(x)
        return [out, *torch.autograd.grad(out.float().square().sum(), list(model.parameters()))]

    run, report = compiled(model)
    for got, want in zip(step(run), step(model), strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)
    assert {one.workload.dtypes["a"] for one in report.replaced} == {"bf16"}


def test_autocast_around_attention_and_convolution(compiled: Any) -> None:
    model, x = Mixed(), torch.randn(2, 3, 16, 16)
    run, report = compiled(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(run(x), model(x), rtol=5e-2, atol=5e-2)
    assert all("bf16" in dict(one.workload.dtypes).values() for one in report.replaced) and report.replaced


COMPLEX = torch.randn(8, 8, dtype=torch.complex64)


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex operators")
@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: x @ x, COMPLEX),
        (lambda x: torch.view_as_real(x[None] @ x[None]), COMPLEX),
        (lambda x: x @ x, torch.ones(4, 4, dtype=torch.int64)),
        (lambda x: x.expand(8, 8) @ x.expand(8, 8), torch.randn(8, 1)),
        (lambda x: torch.as_strided(x, (4, 4), (1, 1)) @ torch.as_strided(x, (4, 4), (2, 3)), torch.randn(32)),
        (lambda x: x @ x, torch.randn(0, 0)),
        (lambda x: functional.conv1d(x, x), torch.randn(3, 3, 3)),
        (lambda x: functional.conv3d(x, x), torch.randn(2, 2, 2, 2, 2)),
        (lambda x: functional.scaled_dot_product_attention(x, x, x), torch.randn(5, 8)),
    ],
    ids=["complex", "complex batch", "integers", "repeated", "overlapping", "empty", "one", "three", "matrices"],
)
def test_what_no_kernel_has_falls_through(compiled: Any, function: Callable[..., Any], x: torch.Tensor) -> None:
    run, report = compiled(function)
    with torch.no_grad():
        torch.testing.assert_close(run(x), function(x), rtol=1e-4, atol=1e-4)
    assert report.warnings == []


def test_odd_strides_are_computed_as_they_lie(compiled: Any) -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x[:, ::2, 1::2], y[1:, :, ::3])

    x, y = torch.randn(3, 16, 16), torch.randn(4, 8, 24)
    run, report = compiled(model)
    torch.testing.assert_close(run(x, y), model(x, y), rtol=1e-4, atol=1e-4)
    assert report.warnings == []


def test_without_a_gpu_everything_falls_through() -> None:
    report, model, x = Report(), Mixed(), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        got = torch.compile(model, backend="kernelwright", options={"report": report})(x)
        torch.testing.assert_close(got, model(x), rtol=1e-4, atol=1e-4)
    assert report.decisions == []


def test_data_parallel_training_gives_the_gradients_of_the_whole_batch(tmp_path: Path, two_ranks: Any) -> None:
    assert two_ranks("child_training:start", meet=str(tmp_path / "meet")) == [(5, [])] * 2


LOADED = """
import sys
import torch
path = sys.argv[1]
x, want = torch.load(path + ".pt")
try:
    torch._inductor.aoti_load_package(path + ".pt2")(x)
except RuntimeError as error:
    print(error)
from kernelwright.compiler import export
torch.testing.assert_close(export.load(path + ".pt2")(x), want, rtol=1e-4, atol=1e-4)
assert "torch._inductor.compile_fx" not in sys.modules, "a process that compiles nothing"
print("right")
"""


class Small(torch.nn.Module):
    """A product that is kernelwright::matmul in a graph, and a batched one that is kernelwright::call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(functional.gelu(self.layer(x)), x.transpose(1, 2))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_package_runs_in_a_fresh_process(tmp_path: Path, recorder: Any) -> None:
    model, x, report, path = Small().eval(), torch.randn(2, 8, 16), Report(), str(tmp_path / "small")
    # what torch includes would be compiled, and optimised, for this package alone
    quick = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}
    configs = export.settings(answers=recorder(), devices=("cpu",), report=report, **quick)
    exported = torch.export.export(model, (x,))
    torch._inductor.aoti_compile_and_package(exported, package_path=f"{path}.pt2", inductor_configs=configs)
    assert len(report.replaced) == 2 and report.warnings == []
    torch.save((x, model(x).detach()), f"{path}.pt")
    found = subprocess.run([sys.executable, "-c", LOADED, path], capture_output=True, text=True, timeout=300)
    # at first torch itself says which operator is missing
    missing, _, right = found.stdout.strip().rpartition("\n")
    assert "Could not find schema for kernelwright::" in missing and right == "right", found.stderr


def test_an_exported_model_with_our_operators_is_torchs_to_save(tmp_path: Path) -> None:
    class Direct(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return ops.MATMUL(a, b, None, "relu", '{"template": "pointer", "knobs": {}}', "float32")

    a, b = torch.randn(4, 8), torch.randn(8, 4)
    torch.export.save(torch.export.export(Direct(), (a, b)), tmp_path / "direct.pt2")
    again = torch.export.load(tmp_path / "direct.pt2").module()
    torch.testing.assert_close(again(a, b), torch.relu(a @ b))
