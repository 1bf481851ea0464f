"""The cost model to start from: a user's own, the one that comes with the package, or the analytic one."""

from __future__ import annotations

import importlib.resources
import logging
from pathlib import Path

from kernelwright.cost_model.features import feature_names
from kernelwright.cost_model.model import CostModel, read_model
from kernelwright.cost_model.roofline_model import RooflineModel
from kernelwright.cost_model.xgboost_model import XGBoostModel
from kernelwright.errors import MissingDependency, ModelMismatch, UnknownOperator

logger = logging.getLogger(__name__)

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

    For an operator that has features but no trained model yet, one that starts from the analytic estimate and learns
    from what is measured; where that cannot be used here, the analytic model itself.
    """
    source = importlib.resources.files("kernelwright.cost_model") / "models" / f"{operator}.json"
    if not source.is_file():
        return _untrained(operator)
    with importlib.resources.as_file(source) as path:
        return _load_or_none(path, operator, "the analytic model") or RooflineModel(operator)


def own_model(operator: str, folder: Path) -> CostModel:
    """The model <operator>.json of a folder of the user's; where there is none, or it cannot be used here, the packaged
    one. A file that is refused is told of in a warning of the log."""
    path = folder / f"{operator}.json"
    found = _load_or_none(path, operator, "the packaged model") if path.is_file() else None
    return found or packaged_model(operator)


def _untrained(operator: str) -> CostModel:
    try:
        feature_names(operator)
        return XGBoostModel(operator)
    except (MissingDependency, UnknownOperator):
        return RooflineModel(operator)


def _load_or_none(path: Path, operator: str, instead: str) -> CostModel | None:
    try:
        return load_model(path, operator)
    except MissingDependency:
        return None
    except ModelMismatch as error:
        logger.warning("%s; going on with %s", error, instead)
        return None
