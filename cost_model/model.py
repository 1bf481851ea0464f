"""What a cost model is: it tells, without measuring, which schedules of a workload should be fast."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from kernelwright.cost_model.features import FEATURE_VERSION
from kernelwright.errors import ModelMismatch
from kernelwright.types import VENDOR_TEMPLATE, DeviceSpec, Schedule, Toolchain, Trial, Workload

Scores = npt.NDArray[np.float64]

FILE_VERSION = 1
"""Version of the model file; a file of another version is refused."""

_SHARPNESS = 8.0


class CostModel(Protocol):
    """Ranks the schedules of one workload on one device."""

    def predict(self, workload: Workload, device: DeviceSpec, schedules: Sequence[Schedule]) -> Scores:
        """A score for each schedule, in (0, 1], higher is faster: the share of the best speed that is expected.
        Does not depend on which schedules are given together; only comparable inside one workload and device.
        UnknownOperator when the operator has no features."""
        ...

    def expected_regret(self, workload: Workload, device: DeviceSpec, schedules: Sequence[Schedule]) -> Scores:
        """For each schedule the share of the best speed, in [0, 1], that running it is expected to lose. `schedules` is
        what there is to choose from; the model's first choice has the least regret."""
        ...

    def update(self, trials: Sequence[Trial]) -> None:
        """Learn from new trials, failures included; fits again when enough came to pay for it."""
        ...

    def save(self, path: Path) -> None:
        """Write one file that `load` reads."""
        ...

    @classmethod
    def load(cls, path: Path) -> Self:
        """The model in a file; ModelMismatch when it was made for other features or is of another kind."""
        ...


Groups = dict[tuple[str, str, str], list[Trial]]


def workload_groups(trials: Iterable[Trial]) -> Groups:
    """Trials by (workload, device, toolchain) key, the only ones whose times compare; vendor calls are left out.

    A schedule measured more than once keeps its last trial that is ok, or its last trial.
    """
    keys: dict[Workload | DeviceSpec | Toolchain, str] = {}
    groups: dict[tuple[str, str, str], dict[Schedule, Trial]] = {}
    for trial in trials:
        if trial.schedule.template != VENDOR_TEMPLATE:
            parts = (trial.workload, trial.device, trial.toolchain)
            keys.update({part: part.key for part in parts if part not in keys})
            known = groups.setdefault((keys[parts[0]], keys[parts[1]], keys[parts[2]]), {})
            if trial.measurement.ok or not (before := known.get(trial.schedule)) or not before.measurement.ok:
                known[trial.schedule] = trial
    return {key: list(known.values()) for key, known in groups.items()}


def shares(trials: Sequence[Trial]) -> Scores:
    """Best time over each trial's time, in (0, 1]; 0 for a failure. The trials are one workload group."""
    times = np.array([t.measurement.median_us or np.inf for t in trials])
    best = times.min(initial=np.inf)
    return best / times if np.isfinite(best) else np.zeros(len(trials))


def squash(log_share: Scores) -> Scores:
    """2 to the power of `log_share`, bent smoothly so that it stays in (0, 1] and the order is kept."""
    bent = -np.logaddexp(0.0, -_SHARPNESS * np.asarray(log_share, dtype=np.float64)) / _SHARPNESS
    return np.asarray(np.exp2(bent))


def write_model(path: Path, kind: str, operator: str, content: dict[str, Any]) -> None:
    """Write a model file: a JSON object with kind, operator, feature version and the model's own content."""
    head = {"kernelwright_cost_model": FILE_VERSION, "kind": kind, "operator": operator}
    path.write_text(json.dumps({**head, "feature_version": FEATURE_VERSION, **content}, sort_keys=True))


def read_model(path: Path, kind: str | None = None) -> dict[str, Any]:
    """Read a model file; ModelMismatch when it is not one, or made for other features or another kind of model."""
    try:
        data: dict[str, Any] = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelMismatch(f"{path} must be a cost model file, but it is not JSON ({error})") from error
    version = data.get("kernelwright_cost_model") if isinstance(data, dict) else None
    if version != FILE_VERSION:
        raise ModelMismatch(f"{path} must be a cost model file of version {FILE_VERSION}, got {version}; train again")
    if (made_for := data["feature_version"]) != FEATURE_VERSION:
        raise ModelMismatch(f"{path} must be for features of version {FEATURE_VERSION}, got {made_for}; train again")
    if kind is not None and data["kind"] != kind:
        raise ModelMismatch(f"{path} must hold a {kind} model, got {data['kind']}")
    return data
