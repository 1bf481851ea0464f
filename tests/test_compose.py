"""The compose file names what there is: stages of the Dockerfile and settings of ours."""

from __future__ import annotations

import re
from pathlib import Path

from kernelwright.service.settings import PREFIX, Settings

ROOT = Path(__file__).resolve().parents[1]


def test_stages_and_settings_exist() -> None:
    compose = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    stages = set(re.findall(r"(?m)^FROM \S+ AS (\w+)", (ROOT / "Dockerfile").read_text(encoding="utf-8")))
    targets = set(re.findall(r"target: (\w+)", compose))
    assert targets == {"api", "worker"} and targets <= stages
    named = set(re.findall(rf"{PREFIX}(\w+):", compose))
    assert named and {name.lower() for name in named} <= set(Settings.model_fields)


def test_no_port_is_open_to_other_machines_and_keys_are_asked_for() -> None:
    compose = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    published = re.findall(r'- "([\d.:]+)"', compose)
    assert published and all(port.startswith("127.0.0.1:") for port in published)
    assert 'KERNELWRIGHT_REQUIRE_KEYS: "true"' in compose
