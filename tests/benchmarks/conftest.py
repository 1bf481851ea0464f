"""The benchmark scripts import each other by bare name, as they do when they are run."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = str(Path(__file__).resolve().parents[2] / "benchmarks")

if FOLDER not in sys.path:
    sys.path.append(FOLDER)
