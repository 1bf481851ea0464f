"""Sources of kernels: what a file imports of ours is found as Python itself would find it."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from kernelwright.kernels import OPERATORS, get_operator
from kernelwright.kernels.source import kernel_sources, source_fingerprint

MODULES = sorted({one.kernel_module for name in OPERATORS for one in get_operator(name).templates.values()})


@pytest.mark.parametrize("module", MODULES)
def test_a_kernels_sources_are_what_it_imports(module: str) -> None:
    found = kernel_sources(module)
    for name, text in found.items():
        statements = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
        imported = [node.module or "" for node in statements if isinstance(node, ast.ImportFrom)]
        imported += [alias.name for node in statements if isinstance(node, ast.Import) for alias in node.names]
        ours = [one for one in imported if one.startswith("kernelwright.")]
        names = list(found)
        assert all(names.index(one) < names.index(name) for one in ours)
    assert list(found)[-1] == module and len(source_fingerprint(module)) == 16
    file = importlib.import_module(module).__file__
    assert file is not None and found[module] == Path(file).read_text(encoding="utf-8")


def test_sources_hold_nothing_that_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '"""A text: from kernelwright.kernels import x"""\n    # from kernelwright.y import z\n'
    (tmp_path / "alone.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert list(kernel_sources("alone")) == ["alone"]
