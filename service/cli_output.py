"""How commands print: JSON on standard output, tables for people, everything else on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kernelwright.service.schemas import BestKernel, DeviceOut

WIDTH = 200
"""Columns of a table that goes to a file or another program."""


def to_stderr(message: str) -> None:
    """A line that is not part of the result."""
    typer.echo(message, err=True)


def print_json(value: BaseModel | Mapping[str, Any]) -> None:
    """The result as JSON, numbers and all."""
    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    typer.echo(json.dumps(plain, indent=2))


def print_best(best: BestKernel) -> None:
    """An answer with its provenance, for people."""
    rows = [
        ("workload", best.label),
        ("hardware", f"{best.hardware.name} ({best.hardware.slug})"),
        ("run", "our kernel" if best.choice == "kernel" else f"the vendor library {best.vendor}".rstrip()),
        ("how known", f"{best.how}: {best.note}" if best.note else best.how),
        ("schedule", _schedule(best)),
        ("expected time", _us(best.expected_us)),
        ("vendor time", f"{_us(best.vendor_us)} {best.vendor}".rstrip()),
        ("speedup", "unknown" if best.speedup is None else f"{best.speedup:.3f} x"),
        ("roofline", "unknown" if best.roofline_percent is None else f"{best.roofline_percent:.1f} %"),
    ]
    if best.regret is not None:
        rows.append(("expected regret", f"{100 * best.regret:.1f} %"))
    if best.toolchain is not None:
        t = best.toolchain
        rows.append(("toolchain", f"triton {t.triton}, torch {t.torch}, driver {t.driver}, {t.compiler}"))
        rows.append(("record", f"{best.record_id}, {best.trials} trials, {best.measured_at}"))
    print_rows(rows)


def print_table(table: Table) -> None:
    """A table as wide as the terminal, or WIDTH where there is none."""
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)


def print_rows(rows: Sequence[tuple[str, str]]) -> None:
    """Names and values, one a line."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows:
        table.add_row(Text(name, style="bold"), Text(value))
    print_table(table)


def print_devices(devices: Sequence[DeviceOut]) -> None:
    """Named GPUs as a table."""
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "GPU", "architecture", "SMs", "GB/s", "here", "replay"):
        table.add_column(heading)
    for device in devices:
        spec = device.spec
        table.add_row(
            device.slug,
            spec["name"],
            spec["architecture"],
            str(spec["multiprocessors"]),
            f"{spec['bandwidth_gbs']:g}",
            "yes" if device.present else "",
            "yes" if device.replay else "",
        )
    print_table(table)


def _schedule(best: BestKernel) -> str:
    if best.schedule is None:
        return "none"
    knobs = ", ".join(f"{name}={value}" for name, value in best.schedule.knobs.items())
    return f"{best.schedule.template}({knobs})"


def _us(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f} us"
