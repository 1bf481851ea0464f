"""Our kernels inside packages of torch.export and AOTInductor.

    exported = torch.export.export(model, inputs)
    path = torch._inductor.aoti_compile_and_package(exported, inductor_configs=export.settings(db="sqlite:///team.db"))
    run = export.load(path)

A package calls our operators by name, so that a process that loads it needs Kernelwright: `load` brings it in.
Schedules are written into the package; a GPU that cannot run one of them computes that place by torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kernelwright.compiler import attention_ops, kernel_call, merged_call, open_call, ops

LIBRARIES = (ops.LIBRARY, kernel_call.LIBRARY, merged_call.LIBRARY, open_call.LIBRARY, attention_ops.LIBRARY)
"""The operators that a package may call; they are registered once this module is imported."""


def settings(**options: Any) -> dict[str, Any]:
    """Inductor's settings that put our kernels in, for `inductor_configs`. options: those of the backend, ours and
    Inductor's; UsageError or RuntimeError for one that neither has."""
    # all of Inductor, which takes seconds to import and which a process that loads packages does not need
    from kernelwright.compiler.backend import kernel_settings, split_options

    ours, patches = split_options(None, options)
    # packages are kept by whoever asks for them, never in the cache of graphs
    return {**patches, **{name: value for name, value in kernel_settings(ours, patches).items() if "cache" not in name}}


def load(path: str | Path) -> Any:
    """torch._inductor.aoti_load_package, with our operators registered."""
    return torch._inductor.aoti_load_package(str(path))
