"""What one rank does that trains a model in parallel with another one."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as distributed

from kernelwright.compiler.report import Report
from kernelwright.kernels.device import named_device
from kernelwright.search.answer import Answer
from kernelwright.types import Schedule, Workload


class Model(torch.nn.Module):
    """Each layer fills a bucket of a megabyte."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(x)))
        return found


def answers(workload: Workload) -> Answer:
    """Ours is the faster one."""
    return Answer("measured", workload, named_device("h100"), Schedule("pointer", {}), "kernel", 1.0, "torch.mm", 2.0)


def start(meet: str) -> Callable[[int], tuple[int, list[str]]]:
    """A child that is asked to be a rank; the ranks find each other by the file `meet`."""
    return lambda rank: train(rank, meet)


def train(rank: int, meet: str) -> tuple[int, list[str]]:
    """One step on a half of the batch, whose gradients must be those of the whole: how many products were replaced,
    and the warnings."""
    distributed.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model, x = Model(), torch.randn(8, 256)
    want = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    report = Report()
    # a layer fills a bucket: the model is compiled in pieces
    parallel = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    options = {"answers": answers, "devices": ("cpu",), "report": report}
    compiled = torch.compile(parallel, backend="kernelwright", options=options)
    compiled(x[4 * rank : 4 * rank + 4]).square().mean().backward()
    for parameter, exact in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.grad, exact, rtol=1e-4, atol=1e-6)
    distributed.barrier()
    distributed.destroy_process_group()
    return len(report.replaced), report.warnings
