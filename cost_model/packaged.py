"""The cost model that comes with the package, and loading any model file."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from kernelwright.cost_model.model import CostModel, read_model
from kernelwright.cost_model.roofline_model import RooflineModel
from kernelwright.cost_model.xgboost_model import XGBoostModel
from kernelwright.errors import MissingDependency, ModelMismatch

KINDS: dict[str, type[RooflineModel] | type[XGBoostModel]] = {"roofline": RooflineModel, "xgboost": XGBoostModel}
"""Cost models by the kind written in their files."""


def load_model(path: Path, operator: str | None = None) -> CostModel:
    """The model in a file, of whichever kind; ModelMismatch when it was made for other features or, where an operator
    is given, for another one."""
    data = read_model(path)
    kind = data["kind"]
    if kind not in KINDS:
        raise ModelMismatch(f"{path} must hold a model of kind {' or '.join(KINDS)}, got {kind!r}")
    if operator is not None and data["operator"] != operator:
        raise ModelMismatch(f"{path} must hold a model of {operator}, got {data['operator']}")
    return KINDS[kind].load(path)


def packaged_model(operator: str) -> CostModel:
    """The trained model that comes with the package, fresh at each call.

    Where there is none for the operator, or xgboost is not installed, the analytic model instead.
    """
    source = importlib.resources.files("kernelwright.cost_model") / "models" / f"{operator}.json"
    if not source.is_file():
        return RooflineModel(operator)
    try:
        with importlib.resources.as_file(source) as path:
            return load_model(path, operator)
    except MissingDependency:
        return RooflineModel(operator)
