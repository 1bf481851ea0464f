"""What the process imports that the children of these tests are forks of."""

from __future__ import annotations

import importlib


def preload() -> None:
    """What takes long."""
    for name in ("compiler.explain", "compiler.piece_job", "db.engine"):
        importlib.import_module(f"kernelwright.{name}")
    for name in ("_inductor.compile_fx", "distributed"):
        importlib.import_module(f"torch.{name}")
