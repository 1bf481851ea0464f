"""The command line, called in the process of the tests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kernelwright.service.cli import main


class CommandLine:
    """Runs commands in the process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def run(self, *argv: str) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        with pytest.raises(SystemExit) as exit_:
            main(argv)
        out, err = self._capsys.readouterr()
        return exit_.value.code or 0, out, err  # type: ignore[return-value]

    def json(self, *argv: str) -> Any:
        """What a command prints with --json; it must succeed."""
        code, out, err = self.run(*argv, "--json")
        assert code == 0, err
        return json.loads(out)
