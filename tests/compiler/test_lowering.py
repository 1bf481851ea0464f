"""What Inductor makes of calls of ours: operands lie as eager mode has them, and a shared value is written once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from kernelwright.compiler.backend import kernelwright as backend
from kernelwright.compiler.report import Report

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Written = tuple[torch.Tensor, str, Report]


@pytest.fixture
def written(recorder: Any) -> Callable[..., Written]:
    """Compiles with the pass forced on the CPU, and gives what ran with Inductor's code."""

    def compile_it(model: Any, *args: torch.Tensor, **options: Any) -> Written:
        report = Report()
        ours = {"answers": recorder(), "devices": ("cpu",), "report": report}
        with torch.no_grad():
            run = torch.compile(model, backend=backend, options=ours, **options)
            found, codes = run_and_get_code(run, *args)
            torch.testing.assert_close(found, model(*args), rtol=1e-4, atol=1e-4)
        return found, codes[0], report

    return compile_it


def buffers(code: str, size: str) -> int:
    """How many buffers of a size the code makes."""
    return code.count(f"empty_strided_cpu(({size}), ")


def test_what_two_products_read_is_written_once(written: Any) -> None:
    """The sum is written for the caller, and one relu of it for both products."""

    def model(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = x + y
        start = torch.relu(total)
        return total, start @ w, start @ v

    x, w, v = torch.randn(48, 40), torch.randn(40, 56), torch.randn(40, 72)
    _, code, report = written(model, x, x + 1, w, v)
    assert len(report.replaced) == 2 and buffers(code, "48, 40") == 2


def test_what_two_products_read_behind_views_is_written_once(written: Any) -> None:
    def model(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = x + y
        start = torch.relu(total)
        return total, start.view(48, 40) @ w, start.view(24, 80) @ v

    x, w, v = torch.randn(6, 8, 40), torch.randn(40, 56), torch.randn(80, 72)
    _, code, report = written(model, x, x + 1, w, v)
    assert len(report.replaced) == 2
    assert [buffers(code, size) for size in ("6, 8, 40", "48, 40", "24, 80")] == [2, 0, 0]


def test_a_residual_that_is_an_image_too_is_written_once(written: Any) -> None:
    """As in ResNet: what the first convolution of a block reads is added behind the last one."""
    torch.manual_seed(0)
    one, two = (torch.nn.Conv2d(16, 16, 1).to(memory_format=torch.channels_last) for _ in range(2))

    def model(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + y
        start = torch.relu(total)
        return total, torch.relu(two(torch.relu(one(start))) + start)

    x, y = (torch.randn(2, 16, 6, 6).to(memory_format=torch.channels_last) for _ in range(2))
    found, code, report = written(model, x, y)
    assert len(report.replaced) == 2 and buffers(code, "2, 16, 6, 6") == 2
    assert found[1].stride() == model(x, y)[1].stride()


def test_a_value_with_one_reader_is_written_as_the_reader_wants_it(written: Any) -> None:
    """No copy behind it: a transposed operand is written transposed at once."""

    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x * 2).t().contiguous() @ w

    _, code, report = written(model, torch.randn(40, 48), torch.randn(40, 56))
    assert len(report.replaced) == 1 and buffers(code, "48, 40") == 1 and buffers(code, "40, 48") == 0


def test_operands_lie_as_in_eager_mode_whatever_inductor_would_choose(written: Any) -> None:
    """A sum of images in both orders of memory, and a number of rows that only a call tells."""

    def images(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(torch.relu(x + y), w)

    x, w = torch.randn(2, 16, 6, 6), torch.randn(8, 16, 1, 1)
    _, _, report = written(images, x, x.to(memory_format=torch.channels_last), w)
    assert len(report.replaced) == 1

    def rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + 1) @ w

    written(rows, torch.randn(48, 40), torch.randn(40, 56), dynamic=True)
