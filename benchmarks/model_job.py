"""One model in a process of its own, as `model_runner` starts it: python model_job.py JOB.json

The job's file names the model, the fields of its `Plan`, the seconds for compiling and the file for its row, which is
written whenever more is known.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from model_run import Plan, run_model


def main() -> None:
    """The command line."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    out = Path(job["out"])

    def keep(row: dict[str, Any]) -> None:
        part = out.with_suffix(".part")
        part.write_text(json.dumps(row), encoding="utf-8")
        # whoever kills this process finds a whole row
        part.replace(out)

    plan = Plan(**{**job["plan"], "modes": tuple(job["plan"]["modes"])})
    run_model(job["model"], plan, time.monotonic() + job["seconds"], keep)


if __name__ == "__main__":
    main()
