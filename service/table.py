"""Dispatch tables: the best schedule by the size of one dimension, in as few ranges as tell it all."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from fastapi import Request
from pydantic import Field

from kernelwright.errors import InvalidWorkload
from kernelwright.kernels.device import named_device
from kernelwright.search import Answer
from kernelwright.service.questions import QuestionIn, read_query
from kernelwright.service.schemas import ShortText, TableRow
from kernelwright.service.telling import tell_schedule
from kernelwright.service.workload_args import add_dim
from kernelwright.types import DeviceSpec, Workload

MAX_VALUES = 256


class TableIn(QuestionIn):
    """The query parameters of a dispatch table."""

    shape: ShortText = Field(description="Sizes of the other dimensions, by name.", examples=["N=4096,K=4096"])
    dim: ShortText = Field(description="The dimension whose size varies.", examples=["M"])
    values: str = Field(
        max_length=2048, description="Its sizes, with commas, at most 256.", examples=["1,2,4,8,16,32,64,128"]
    )


@dataclasses.dataclass(frozen=True)
class TableQuestion:
    """The workloads of a table, one for each value, smallest first."""

    workloads: tuple[Workload, ...]
    device: DeviceSpec
    dim: str
    values: tuple[int, ...]
    fixed: dict[str, int]


def table_questions(request: Request) -> TableQuestion:
    """The questions behind a table; InvalidWorkload and its kin tell what cannot be asked."""
    asked = read_query(TableIn, request)
    unknown = sorted(set(request.query_params) - set(TableIn.model_fields))
    if unknown:
        raise InvalidWorkload(f"parameter must be one of {', '.join(TableIn.model_fields)}, got {unknown[0][:40]!r}")
    args = asked.args
    values = _values(asked.dim, asked.values)
    if asked.dim in args.dims:
        raise InvalidWorkload(f"shape must give the other dimensions only, got {asked.dim} too")
    workloads = (dataclasses.replace(args, dims={**args.dims, asked.dim: value}).workload() for value in values)
    return TableQuestion(tuple(workloads), named_device(asked.hardware), asked.dim, values, dict(args.dims))


def _values(dim: str, text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if len(parts) > MAX_VALUES:
        raise InvalidWorkload(f"values may name {MAX_VALUES} sizes, got {len(parts)}")
    sizes = set()
    for part in parts:
        one: dict[str, int] = {}
        add_dim(one, dim, part)
        sizes.add(one[dim])
    return tuple(sorted(sizes))


def merged_rows(values: Sequence[int], answers: Sequence[Answer]) -> list[TableRow]:
    """One row for each run of values that are answered alike; each range reaches to where the next begins."""
    pairs = list(zip(values, answers, strict=True))
    runs = [list(run) for _, run in itertools.groupby(pairs, key=lambda pair: (pair[1].choice, pair[1].schedule))]
    highs = [following[0][0] - 1 for following in runs[1:]]
    return [_row(run, high) for run, high in zip(runs, [*highs, None], strict=True)]


def _row(run: list[tuple[int, Answer]], high: int | None) -> TableRow:
    first = run[0][1]
    return TableRow(
        low=run[0][0],
        high=high,
        values=[value for value, _ in run],
        how=[answer.how for _, answer in run],  # type: ignore[misc]
        choice=first.choice,  # type: ignore[arg-type]
        schedule=None if first.schedule is None else tell_schedule(first.schedule),
        expected_us=[answer.expected_us for _, answer in run],
    )
