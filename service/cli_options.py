"""Options that several commands share, and what they lead to."""

from __future__ import annotations

from typing import Annotated

import typer

from kernelwright.service.workload_args import WorkloadArgs, parse_attributes, parse_epilogue, parse_shape
from kernelwright.types import FrozenMap

Shape = Annotated[str, typer.Option("--shape", help="Sizes by name, such as M=2048,N=4096,K=4096.")]
MaybeShape = Annotated[str | None, typer.Option("--shape", help="Sizes by name, such as M=2048,N=4096,K=4096.")]
MaybeOperator = Annotated[str | None, typer.Option("--operator", help="Only this operator.")]
Dtype = Annotated[str, typer.Option("--dtype", help="Element type of the operands.")]
Layout = Annotated[
    str, typer.Option("--layout", help="For a matmul nt (an nn.Linear, the default), nn, tn or tt; by operator.")
]
Attributes = Annotated[
    str, typer.Option("--attributes", help="What else the operator is told, such as deterministic=true.")
]
Epilogue = Annotated[str, typer.Option("--epilogue", help="Steps done on the result, such as bias,gelu.")]
OutDtype = Annotated[str | None, typer.Option("--out-dtype", help="Element type of the result, if another.")]
ErrorBudget = Annotated[float | None, typer.Option("--error-budget", help="Largest relative error allowed.")]
Hardware = Annotated[str | None, typer.Option("--hardware", help="Name of the GPU, such as h100.")]
QueryDevice = Annotated[
    str | None, typer.Option("--device", help="The GPU as for tune: cuda (the one here), cuda:1, replay:h100.")
]
Database = Annotated[
    str | None, typer.Option("--db", help="Database URL, such as sqlite:///tuning.db. [default: KERNELWRIGHT_DB]")
]
Url = Annotated[
    str | None, typer.Option("--url", help="Ask this service instead of a database. [default: KERNELWRIGHT_URL]")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, and nothing else.")]
RunnerName = Annotated[str, typer.Option("--runner", help="local (GPUs of this machine) or ray (a cluster).")]
Address = Annotated[str | None, typer.Option("--address", help="Address of the Ray cluster, such as host:6379.")]
DeviceCount = Annotated[
    int | None, typer.Option("--devices", min=1, help="Most devices that work together. [default: all there are]")
]


def workload_args(
    operator: str,
    shape: str,
    dtype: str,
    layout: str,
    epilogue: str,
    out_dtype: str | None,
    error_budget: float | None,
    attributes: str,
) -> WorkloadArgs:
    """What was typed about a workload, read but not yet checked."""
    return WorkloadArgs(
        operator,
        parse_shape(shape),
        dtype,
        layout,
        parse_epilogue(epilogue),
        out_dtype,
        error_budget,
        FrozenMap(parse_attributes(attributes)),
    )
