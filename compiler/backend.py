"""The torch.compile backend: torch.compile(model, backend="kernelwright").

Inductor compiles the graph as ever; where the local records say that our kernel is faster on this GPU, a pass puts it
in. Options of ours, in torch.compile's `options` beside any of Inductor's:

    db        database URL; default KERNELWRIGHT_DB, else the SQLite file in the user's data folder
    url       address of a service that is asked too, with KERNELWRIGHT_API_KEY as its key; default KERNELWRIGHT_URL
    wait      seconds that a compile waits for the service at most; default 3
    how       kinds of answer that are trusted, of "measured", "stale" and "nearest"; default ("measured",)
    report    a kernelwright.compiler.report.Report to fill in
    mode      an Inductor mode, since torch.compile takes `mode` or `options` but not both
    device    name of the GPU to answer for; default the one that is present
    devices   torch device types whose products are replaced; default ("cuda",)
    answers   a function from Workload to Answer, in place of the database
    tune      "never" (default); "missing": what has no record is tuned before a graph is compiled; "background": it is
              tuned in a child process while the graph runs as it is, and the graph is compiled again after that
    tune_seconds   how long the workloads of a graph are tuned; default 60
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._logging._internal import warning_once

from kernelwright.compiler import tuning
from kernelwright.compiler.agreement import AgreedAnswers, Job, current_job
from kernelwright.compiler.dispatch import Answers, MostCertain, RecordedAnswers, device_of, local_answers
from kernelwright.compiler.improving import improving, is_static, kept
from kernelwright.compiler.passes.replace import Replace
from kernelwright.compiler.passes.sequence import joined
from kernelwright.compiler.passes.traced_mask import simplify_traced_masks
from kernelwright.compiler.pieces import (
    AgreedPieces,
    KnownPieces,
    MissingTimed,
    Pieces,
    WantedPiece,
    local_pieces,
    time_pieces,
)
from kernelwright.compiler.prebuild import build_ahead
from kernelwright.compiler.report import Report
from kernelwright.compiler.service_answers import SECONDS, Source, service_answers
from kernelwright.errors import DatabaseError, UsageError
from kernelwright.kernels.triton_adapter import current_toolchain, renew_inductors_workers, settle_compiler
from kernelwright.search.answer import Answer
from kernelwright.search.timing import TIMER_VERSION
from kernelwright.types import Toolchain, Workload, digest

TRUSTED = ("measured", "stale", "nearest")
"""Kinds of answer that come from a measurement, most certain first."""

SLOT = "joint_custom_pre_pass"
"""Where Inductor runs our pass: on forward and backward together, before it pads unaligned operands."""

MAX_AUTOTUNE = ("max_autotune", "max_autotune_gemm")
"""Inductor's settings of which each has it measure what its workers compiled."""

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Options:
    """Our own options; the module's docstring tells what they mean."""

    db: str | None = None
    url: str | None = None
    wait: float = SECONDS
    how: tuple[str, ...] = ("measured",)
    report: Report | None = None
    mode: str | None = None
    device: str | None = None
    devices: tuple[str, ...] = ("cuda",)
    answers: Callable[[Workload], Answer] | None = None
    tune: str = "never"
    tune_seconds: float = tuning.SECONDS

    def __post_init__(self) -> None:
        for name in ("how", "devices"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        unknown = [how for how in self.how if how not in TRUSTED]
        if not 0 < self.wait <= 600:
            raise UsageError(f"option wait must lie between 0 and 600 seconds, got {self.wait!r}")
        if self.tune not in tuning.MODES:
            raise UsageError(f"option tune must be one of {', '.join(tuning.MODES)}, got {self.tune!r}")
        if self.tune != "never" and (self.answers is not None or self.device is not None):
            raise UsageError("option tune measures on the GPU that is present, so leave out answers and device")
        if not 0 < self.tune_seconds <= 86400:
            raise UsageError(f"option tune_seconds must lie between 0 and 86400, got {self.tune_seconds!r}")
        if unknown:
            raise UsageError(f"option how must name some of {', '.join(TRUSTED)}, got {', '.join(unknown)}")


def kernelwright(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Compile a graph with Inductor and our kernels. Called by torch.compile; `mode` and `options` are its own.

    Raises UsageError or RuntimeError for options that neither we nor Inductor have. Whatever else goes wrong on our
    side is logged, and the graph is compiled as Inductor alone would.
    """
    ours, patches = split_options(mode, options or {})
    if ours.report is not None:
        ours.report.inductor_options.update(patches)
    if not _has_tensor_on(gm, example_inputs, ours.devices):
        return compile_fx(gm, example_inputs, config_patches=patches)
    simplify_traced_masks(gm)
    if torch.cuda.is_available():
        # as tuning compiled our kernels
        settle_compiler()
        if any(patches.get(name, getattr(inductor_config, name)) for name in MAX_AUTOTUNE):
            renew_inductors_workers()
    if ours.tune == "background" and is_static(example_inputs):
        return _improving(gm, example_inputs, ours, patches)
    return compile_fx(gm, example_inputs, config_patches={**patches, **kernel_settings(ours, patches)})


def _improving(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], ours: Options, patches: Mapping[str, Any]
) -> Any:
    """The graph with what is known now; it is tuned in the background where something is not."""
    missing: dict[Workload, int] = {}
    graph = kept(gm)
    now: Any = compile_fx(gm, example_inputs, config_patches={**patches, **kernel_settings(ours, patches, missing)})
    # ranks of a job must not change their kernels one by one: what is tuned there is for the next run
    alone = current_job() is None

    def tune() -> bool:
        return _tune(ours, missing, ours.tune_seconds) and alone

    def again(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        later = dataclasses.replace(ours, tune="never")
        return compile_fx(graph, inputs, config_patches={**patches, **kernel_settings(later, patches)})

    return improving(now, graph, tune, again) if missing else now


def _tune(ours: Options, calls: tuning.Calls, seconds: float) -> bool:
    return tuning.tune_in_child(calls, _database(ours), seconds)


def _database(ours: Options) -> str | None:
    return ours.db or os.environ.get("KERNELWRIGHT_DB")


def _service(ours: Options) -> str | None:
    return ours.url or os.environ.get("KERNELWRIGHT_URL")


def split_options(mode: str | None, options: Mapping[str, Any]) -> tuple[Options, dict[str, Any]]:
    """Our options, and the Inductor settings that `mode` and the other options stand for."""
    names = {field.name for field in dataclasses.fields(Options)}
    ours = Options(**{name: value for name, value in options.items() if name in names})
    others = {name: value for name, value in options.items() if name not in names}
    # The wrapper behind backend="inductor" knows the modes and checks names and types of the settings.
    wrapper = torch._TorchCompileInductorWrapper(mode or ours.mode, others, None)
    return ours, dict(wrapper.config)


def kernel_settings(
    ours: Options, patches: Mapping[str, Any], missing: dict[Workload, int] | None = None
) -> dict[str, Any]:
    """The Inductor settings that bring our pass in; none at all when there are no answers to be had. missing: takes
    what nothing was measured of."""
    report, job = ours.report or Report(), current_job()
    try:
        answers, known = _answers(ours, job, report, missing)
        pieces, timed = _pieces(ours, job)
    except Exception as error:
        report.warnings.append(str(error))
        warning_once(_log, "every product is left to Inductor: %s", error)
        return {}
    state = None if known is None or timed is None else digest([known, timed])
    if job is not None and state is not None and not job.all_know(state):
        state = None
    # a graph from the cache is not decided again, so that a report would miss it unless somebody knows better
    keep_out_of_cache = state is None or (ours.report is not None and not patches.get("fx_graph_cache"))
    ours_pass = Replace(
        answers,
        how=ours.how,
        devices=ours.devices,
        state=None if keep_out_of_cache else state,
        report=report,
        pieces=pieces,
        chosen=build_ahead if ours.device is None and torch.cuda.is_available() else None,
    )
    existing = patches[SLOT] if SLOT in patches else getattr(inductor_config, SLOT)
    return {SLOT: joined(existing, ours_pass), **({"fx_graph_cache": False} if keep_out_of_cache else {})}


def _answers(
    ours: Options, job: Job | None, report: Report, missing: dict[Workload, int] | None
) -> tuple[Callable[[Workload], Answer], str | None]:
    """A source of answers, and what identifies its present state (None where nothing does)."""
    if ours.answers is not None:
        return ours.answers, None

    def found() -> Answers:
        try:
            return known_answers(ours) if ours.tune == "never" else _tuned_answers(ours)
        except Exception as error:
            if job is None:
                raise
            # without our kernels this rank would be the only one
            report.warnings.append(str(error))
            warning_once(_log, "this rank takes what others know: %s", error)
            return _no_answers(ours)

    own = _read(job, ours, "answers", found)
    agreed = own if job is None else AgreedAnswers(own, job.store)
    if missing is not None:
        # a graph from a cache would not tell what it misses
        return tuning.MissingNoted(agreed, missing), None
    return agreed, own.state if job is None or _lasts(ours) else None


def _pieces(ours: Options, job: Job | None) -> tuple[Pieces | None, str | None]:
    """What is known of pieces timed as a whole, None where that is nothing, and nothing will be timed; and what
    identifies it, None where nothing does."""
    if ours.answers is not None:
        return None, ""
    own: Pieces = _read(job, ours, "pieces", lambda: known_pieces(ours))
    if ours.tune == "missing" and torch.cuda.is_available():

        def measure(wanted: Sequence[WantedPiece]) -> None:
            time_pieces(wanted, _database(ours), ours.tune_seconds, torch.cuda.current_device())

        own = MissingTimed(lambda: known_pieces(ours), measure)
    if job is None and isinstance(own, KnownPieces) and not own:
        return None, ""
    return own if job is None else AgreedPieces(own, job.store, device_of(ours.device)), own.state


def _lasts(ours: Options) -> bool:
    """Whether what is known to begin with decides all graphs of a job: nothing is tuned, and no service is asked."""
    return ours.tune == "never" and not _service(ours)


def _read(job: Job | None, ours: Options, what: str, read: Callable[[], T]) -> T:
    """What is read for a graph; in a job, where others go by it, what was read for the first."""
    if job is None or not _lasts(ours):
        return read()
    return job.once((what, _database(ours), device_of(ours.device).key), read)


def known_pieces(ours: Options, toolchain: Toolchain | None = None) -> KnownPieces:
    """The times in the local database, with this software (None: what is here); none where it cannot be read, for
    whatever reason."""
    try:
        return local_pieces(_database(ours), ours.device, toolchain)
    except Exception as error:
        _log.info("no times of pieces: %s", error)
        return KnownPieces([])


def _tuned_answers(ours: Options) -> Answers:
    """Answers that are tuned where they are missing, or known to be missing: an empty database is no obstacle."""
    tune = functools.partial(_tune, ours) if ours.tune == "missing" else lambda calls, seconds: True
    failures = tuning.Failures(_database(ours))
    return tuning.MissingTuned(lambda: known_answers(ours), _no_answers(ours), tune, ours.tune_seconds, failures)


def _no_answers(ours: Options) -> Answers:
    return RecordedAnswers([], device_of(ours.device), current_toolchain(TIMER_VERSION))


def known_answers(ours: Options, toolchain: Toolchain | None = None) -> Answers:
    """The answers of the database and, where there is one, of the service; with a service no database is needed.
    toolchain: what the kernels will run with, None for what is here."""
    db, url = _database(ours), _service(ours)
    if not url:
        return local_answers(db, ours.device, toolchain)
    asked = service_answers(source_of(url, ours, toolchain))
    try:
        return MostCertain([local_answers(db, ours.device, toolchain), asked])
    except DatabaseError as error:
        _log.info("only the service is asked: %s", error)
        return asked


def source_of(url: str, ours: Options, toolchain: Toolchain | None = None) -> Source:
    """The service at `url` as it is asked, with the key that the environment has."""
    key, software = os.environ.get("KERNELWRIGHT_API_KEY"), toolchain or current_toolchain(TIMER_VERSION)
    return Source(url, device_of(ours.device), software, key, ours.wait)


def _has_tensor_on(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], devices: Sequence[str]) -> bool:
    tensors = itertools.chain(example_inputs, gm.parameters(), gm.buffers())
    return any(isinstance(tensor, torch.Tensor) and tensor.device.type in devices for tensor in tensors)
