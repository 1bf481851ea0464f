"""Result files name no folder of the machine that wrote them."""

from __future__ import annotations

import pytest
import report


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("/somewhere/out/attention.json", "attention.json"),
        ("sqlite:////somewhere/out/d.db", "sqlite:///d.db"),
        ("--out=/elsewhere/a.json", "--out=a.json"),
        ("benchmarks/run_attention.py", "benchmarks/run_attention.py"),
        ("a/b/c.json", "a/b/c.json"),
        ("sqlite://", "sqlite://"),
        ("--seconds", "--seconds"),
    ],
)
def test_commands_tell_files_without_absolute_folders(word: str, told: str) -> None:
    assert report.command([word]) == f"python {told}"
