"""What there is to choose from: GPUs and operators."""

from __future__ import annotations

from fastapi import APIRouter

from kernelwright.service.catalog import list_devices, list_operators
from kernelwright.service.problems import RESPONSES
from kernelwright.service.schemas import DeviceList, OperatorList
from kernelwright.service.state import State

router = APIRouter(prefix="/v1", tags=["catalog"], responses=RESPONSES)


@router.get("/devices", summary="GPUs that have a name")
def devices(state: State) -> DeviceList:
    """Their limits and rates, with where the figures come from."""
    return DeviceList(devices=list_devices(state.settings.recorded))


@router.get("/operators", summary="Operators")
def operators() -> OperatorList:
    """Their dimensions and templates."""
    return OperatorList(operators=list_operators())
