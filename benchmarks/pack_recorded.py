"""Turn recorded trials (JSON lines, gzip) into the Parquet under recorded/, one file a device and operator.

python benchmarks/pack_recorded.py a.jsonl.gz b.jsonl.gz
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

from kernelwright.search.recorded import save_recorded
from kernelwright.types import Trial

FOLDER = Path(__file__).resolve().parent / "recorded"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("files", type=Path, nargs="+")
    trials: dict[tuple[str, str], dict[str, Trial]] = {}
    for path in parser.parse_args().files:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                trial = Trial.from_json(json.loads(line))
                trials.setdefault((trial.device.slug, trial.workload.operator), {})[trial.key] = trial
    for (slug, operator), found in trials.items():
        target = FOLDER / slug / f"{operator}.parquet"
        target.parent.mkdir(parents=True, exist_ok=True)
        save_recorded(list(found.values()), target)
        print(
            f"{target.name}: {len(found)} trials of {len({t.workload.key for t in found.values()})} workloads on {slug}"
        )


if __name__ == "__main__":
    main()
