"""Cost models: which schedule will be fast, told without measuring it."""

from kernelwright.cost_model.model import CostModel
from kernelwright.cost_model.packaged import load_model, own_model, packaged_model
from kernelwright.cost_model.roofline_model import RooflineModel
from kernelwright.cost_model.train import train
from kernelwright.cost_model.xgboost_model import XGBoostModel

__all__ = ["CostModel", "RooflineModel", "XGBoostModel", "load_model", "own_model", "packaged_model", "train"]
