"""Recorded data as cases for replay: kernels of others one by one, our own recordings workload by workload."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path

from kernelwright.cost_model.evaluation import Plan, held_out
from kernelwright.cost_model.model import CostModel
from kernelwright.cost_model.train import train
from kernelwright.errors import UsageError
from kernelwright.kernels.device import named_device
from kernelwright.kernels.space import FiniteSpace
from kernelwright.search.recorded import load_recorded
from kernelwright.search.replay_evaluation import Case
from kernelwright.search.strategy import Strategy, make_strategy
from kernelwright.search.tuning_data import TuningData, find_tuning_data, load_tuning_data
from kernelwright.types import FrozenMap, Trial, Workload

_NO_OPERATOR = Workload("recorded", FrozenMap(), FrozenMap())
_RECORDING = ".parquet"


def find_spaces(data: Path) -> dict[str, Path]:
    """What `load_cases` can load from a folder or a file, by name; UsageError when there is nothing."""
    paths = [data] if data.is_file() else [*find_tuning_data(data), *sorted(data.rglob(f"*{_RECORDING}"))]
    if not paths:
        raise UsageError(
            f"{data} must be or hold recorded data: .csv.gz with .space.json, Kernel Tuner .json, or .parquet of ours"
        )
    return {_name(path): path for path in paths}


def load_cases(path: Path, jobs: int | None = None) -> list[Case]:
    """The cases of one file: one, or for a recording of ours one a workload.

    For those, "model" starts from a model that was trained without the workload and its relatives. jobs: threads for
    training.
    """
    if path.suffix == _RECORDING:
        return list(_own_cases(path, jobs))
    return [_general_case(load_tuning_data(path))]


def _name(path: Path) -> str:
    if path.suffix == _RECORDING:
        return f"{path.stem}@{path.parent.name}"
    return path.name.removesuffix(".gz").removesuffix(".csv").removesuffix(".json")


def _general_case(data: TuningData) -> Case:
    # Only a name that no model knows is told: what the kernel is must not matter.
    def make(strategy: str, seed: int) -> Strategy:
        return make_strategy(strategy, _NO_OPERATOR, named_device("h100"), data.space, seed)

    return Case(data.space, data.measurements, make, data.seconds)


def _own_cases(path: Path, jobs: int | None) -> Iterator[Case]:
    trials = load_recorded(path)
    operator = trials[0].workload.operator

    def trained(kept: Sequence[Trial]) -> CostModel:
        return train(kept, operator, jobs=jobs)

    for _, model, group in held_out(trials, trained, Plan(operator=operator, jobs=jobs)):
        yield _own_case(model, group)


def _own_case(model: CostModel, group: list[Trial]) -> Case:
    measurements = {trial.schedule: trial.measurement for trial in group}
    space, first = FiniteSpace(list(measurements)), group[0]

    def make(strategy: str, seed: int) -> Strategy:
        # A model learns during a search, and no search may know of another.
        return make_strategy(strategy, first.workload, first.device, space, seed, copy.deepcopy(model))

    return Case(space, measurements, make)
