"""A question for the best kernel, from query parameters or the body of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kernelwright.errors import InvalidWorkload, KernelwrightError
from kernelwright.kernels.device import named_device
from kernelwright.service.schemas import ATTRIBUTES_TEXT, LAYOUT_TEXT, ShortText, WorkloadIn
from kernelwright.service.workload_args import WorkloadArgs, add_dim, parse_attributes, parse_epilogue, parse_shape
from kernelwright.types import DeviceSpec, FrozenMap, Workload

M = TypeVar("M", bound=BaseModel)

MAX_DIM_NAME = 16


class QuestionIn(BaseModel):
    """The query parameters of a question; any other one is the size of a dimension."""

    model_config = ConfigDict(extra="ignore")

    operator: ShortText = Field(description="Name of the operator.", examples=["matmul"])
    hardware: ShortText = Field(description="Name of the GPU.", examples=["h100"])
    shape: ShortText | None = Field(None, description="Sizes by name.", examples=["M=2048,N=4096,K=4096"])
    dtype: ShortText = Field("bf16", description="Element type of the operands.", examples=["bf16"])
    layout: ShortText = Field("", description=LAYOUT_TEXT, examples=["nt"])
    epilogue: ShortText = Field("", description="Steps done on the result.", examples=["bias,gelu"])
    out_dtype: ShortText | None = Field(None, description="Element type of the result, if another.", examples=["fp16"])
    error_budget: float | None = Field(
        None, description="Largest relative error allowed, between 0 and 1.", examples=[0.01]
    )
    attributes: ShortText = Field("", description=ATTRIBUTES_TEXT, examples=["deterministic=true"])

    @property
    def args(self) -> WorkloadArgs:
        """The workload as typed, with the sizes that `shape` gives."""
        return WorkloadArgs(
            self.operator,
            parse_shape(self.shape) if self.shape else {},
            self.dtype,
            self.layout,
            parse_epilogue(self.epilogue),
            self.out_dtype or None,
            self.error_budget,
            FrozenMap(parse_attributes(self.attributes)),
        )


@dataclasses.dataclass(frozen=True)
class Question:
    """A checked workload and the GPU it is asked for."""

    workload: Workload
    device: DeviceSpec


def read_question(request: Request) -> Question:
    """The question in a request's query parameters; InvalidWorkload and its kin tell what cannot be asked."""
    asked = read_query(QuestionIn, request)
    args = asked.args
    dims = dict(args.dims)
    for name, value in request.query_params.multi_items():
        if name not in QuestionIn.model_fields:
            if len(name) > MAX_DIM_NAME:
                known = ", ".join(sorted(QuestionIn.model_fields))
                raise InvalidWorkload(f"parameter must be one of {known} or a dimension, got {name[:40]!r}")
            add_dim(dims, name, value)
    return Question(dataclasses.replace(args, dims=dims).workload(), named_device(asked.hardware))


def read_query(model: type[M], request: Request) -> M:
    """The query parameters as a model; a parameter that is given twice counts as given last."""
    try:
        return model.model_validate(dict(request.query_params))
    except ValidationError as error:
        raise RequestValidationError([{**item, "loc": ("query", *item["loc"])} for item in error.errors()]) from error


def args_in(body: WorkloadIn) -> WorkloadArgs:
    """The workload of a body, as typed."""
    dims = parse_shape(body.shape) if isinstance(body.shape, str) else dict(body.shape)
    return WorkloadArgs(
        body.operator,
        dims,
        body.dtype,
        body.layout,
        parse_epilogue(body.epilogue),
        body.out_dtype,
        body.error_budget,
        FrozenMap(parse_attributes(body.attributes) if isinstance(body.attributes, str) else body.attributes),
    )


def try_workloads(bodies: Sequence[WorkloadIn]) -> list[Workload | str]:
    """The checked workload of each body, or why there is none."""
    return [_try_workload(body) for body in bodies]


def _try_workload(body: WorkloadIn) -> Workload | str:
    try:
        return args_in(body).workload()
    except KernelwrightError as error:
        return str(error)


def parameters_of(model: type[BaseModel], *dims: str) -> list[dict[str, Any]]:
    """The query parameters of a model, and sizes by these names, for the OpenAPI document."""
    schema = model.model_json_schema()
    out = []
    for name, field in schema["properties"].items():
        shape = {key: value for key, value in field.items() if key not in ("title", "description", "examples")}
        parameter = {"name": name, "in": "query", "required": name in schema.get("required", ()), "schema": shape}
        if "description" in field:
            parameter["description"] = field["description"]
        if "examples" in field:
            parameter["example"] = field["examples"][0]
        out.append(parameter)
    for name in dims:
        shape = {"type": "integer", "minimum": 1}
        about = f"Size of dimension {name}, instead of `shape`."
        out.append({"name": name, "in": "query", "required": False, "schema": shape, "description": about})
    return out
