"""Runs Python files as programs, in forks of a process that has imported torch and Triton's interpreter."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Callable


def preload() -> None:
    """What every file imports."""
    for name in ("torch", "triton.runtime.interpreter"):
        importlib.import_module(name)


def start() -> Callable[[list[str]], subprocess.CompletedProcess[str]]:
    """A child that runs one file. It gets the file's path and arguments."""
    return run


def run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    """As `python argv` in the file's folder."""
    sys.argv, code = argv, 0
    os.chdir(os.path.dirname(argv[0]))
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            runpy.run_path(argv[0], run_name="__main__")
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            traceback.print_exc()
            code = 1
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())
