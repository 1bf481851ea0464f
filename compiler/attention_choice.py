"""Which schedules a call of attention runs: those on record, then those that the cost model predicts; and whether
torch's own attention is the faster one."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence

import torch

from kernelwright.compiler.dispatch import RecordedAnswers, local_answers
from kernelwright.cost_model.model import CostModel
from kernelwright.cost_model.packaged import packaged_model
from kernelwright.errors import KernelwrightError
from kernelwright.kernels import get_operator
from kernelwright.kernels.attention.workload import Problem, problem_of
from kernelwright.kernels.device import present_device
from kernelwright.kernels.triton_adapter import current_toolchain
from kernelwright.search.answer import Answer, find_winner
from kernelwright.search.timing import TIMER_VERSION
from kernelwright.types import FrozenMap, Schedule, Workload

_log = logging.getLogger(__name__)


def is_plain(p: Problem) -> bool:
    """Whether torch has a fused call for the problem, and one for its gradients."""
    special = p.packed or p.page or p.mask or p.window or p.softcap or p.alibi or p.sinks
    aligned = not p.causal or p.causal == "top_left" or p.q_length == p.kv_length
    return not special and aligned and p.v_dim == p.head_dim and 0 not in (*p.out.shape, p.kv_length)


class Chooser:
    """Chooses for one GPU, each workload once. model: None predicts nothing."""

    def __init__(self, answers: RecordedAnswers, model: CostModel | None) -> None:
        self._records = answers
        self._model = model
        self._answers: dict[Workload, Answer] = {}

    def schedule(self, workload: Workload) -> Schedule | None:
        """The best that is known, predicted or, where nothing is, the operator's own default; None where no kernel of
        ours can run."""
        answer = self._answer(workload)
        if answer.schedule is not None:
            return answer.schedule
        try:
            return get_operator(workload.operator).default_schedule(workload, answer.device)
        except KernelwrightError as error:
            _log.info("torch computes %s: %s", workload, error)
            return None

    def torch_is_faster(self, workloads: Sequence[Workload]) -> bool:
        """Whether torch's own calls, which must be able to, are at least not known to be slower than ours: of a
        forward, or of a forward and its backward together."""
        if not is_plain(problem_of(workloads[0])):
            return False
        found = [self._answer(workload) for workload in workloads]
        if len(found) == 1:
            return found[0].choice != "kernel"
        times = [(answer.expected_us, answer.vendor_us) for answer in found if answer.record is not None]
        ours, vendors = [ours for ours, _ in times if ours], [vendor for _, vendor in times if vendor]
        known = len(ours) == len(vendors) == len(found)
        return not known or sum(ours) > sum(vendors)

    def _answer(self, workload: Workload) -> Answer:
        if workload not in self._answers:
            self._answers[workload] = self._found(workload)
        return self._answers[workload]

    def _found(self, workload: Workload) -> Answer:
        """A forward with logarithms may go by the record of one without."""
        answer = self._records(workload)
        if answer.schedule is None and workload.attributes.get("lse"):
            fewer = FrozenMap({name: value for name, value in workload.attributes.items() if name != "lse"})
            other = self._records(dataclasses.replace(workload, attributes=fewer))
            answer = dataclasses.replace(other, workload=workload)
        if answer.schedule is None and self._model is not None:
            answer = find_winner(workload, answer.device, self._records, model=self._model)
        return answer


@functools.lru_cache(maxsize=16)
def chooser_of(index: int) -> Chooser:
    """Chooses for the GPU of that number by the user's own database, read once, and the packaged cost model."""
    with torch.cuda.device(index):
        try:
            answers = local_answers()
        except KernelwrightError as error:
            _log.info("no records of attention: %s", error)
            answers = RecordedAnswers([], present_device(index), current_toolchain(TIMER_VERSION))
    return Chooser(answers, packaged_model("attention"))


def reads_any_address(schedule: Schedule) -> bool:
    """Whether a schedule's kernels read operands by plain pointers."""
    return "warp_specialized" not in schedule.template and schedule.knobs.get("loads", "pointer") == "pointer"
