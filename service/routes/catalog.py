"""What there is to choose from: GPUs and operators."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from kernelwright.service.catalog import list_devices, list_operators
from kernelwright.service.conditional import ETAG_HEADERS, IF_NONE_MATCH, told
from kernelwright.service.problems import NOT_MODIFIED, responses
from kernelwright.service.schemas import DeviceList, OperatorList
from kernelwright.service.state import State

router = APIRouter(prefix="/v1", tags=["catalog"], responses=responses())

_TAGGED: dict[str, Any] = {"parameters": [IF_NONE_MATCH]}
_OK: dict[int | str, dict[str, Any]] = {200: {"headers": ETAG_HEADERS}, **NOT_MODIFIED}


@router.get(
    "/devices", summary="GPUs that have a name", response_model=DeviceList, responses=_OK, openapi_extra=_TAGGED
)
def devices(request: Request, state: State) -> Response:
    """Their limits and rates, with where the figures come from. Which of them a worker has, the service cannot tell."""
    return told(request, DeviceList(devices=list_devices(state.settings.recorded, look=False)))


@router.get("/operators", summary="Operators", response_model=OperatorList, responses=_OK, openapi_extra=_TAGGED)
def operators(request: Request) -> Response:
    """Their dimensions and templates."""
    return told(request, OperatorList(operators=list_operators()))
