"""The packages listed in pyproject.toml are those on disk: one that is missing works when editable and is silently
absent from the wheel."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

NOT_SHIPPED = {"tests"}


@pytest.fixture(scope="module")
def setuptools_table() -> dict[str, Any]:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    table: dict[str, Any] = pyproject["tool"]["setuptools"]
    return table


def folder_of(package: str, mapping: dict[str, str]) -> Path:
    """Where setuptools looks for a package: the longest mapped prefix, then the rest of the name."""
    parts = package.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        if prefix in mapping:
            return ROOT.joinpath(mapping[prefix], *parts[length:])
    return ROOT.joinpath(*parts)


def packages_on_disk() -> set[Path]:
    hidden = {path.name for path in ROOT.iterdir() if path.name.startswith(".")}
    skipped = NOT_SHIPPED | hidden | {"build", "dist"}
    return {path.parent for path in ROOT.rglob("__init__.py") if path.relative_to(ROOT).parts[0] not in skipped}


def test_every_package_on_disk_is_listed(setuptools_table: dict[str, Any]) -> None:
    mapping = setuptools_table["package-dir"]
    listed = {folder_of(package, mapping) for package in setuptools_table["packages"]}
    assert listed == packages_on_disk()


def test_packages_are_sorted_and_listed_once(setuptools_table: dict[str, Any]) -> None:
    packages = setuptools_table["packages"]
    assert packages == sorted(set(packages))


def test_package_data_belongs_to_listed_packages_and_matches_files(setuptools_table: dict[str, Any]) -> None:
    mapping = setuptools_table["package-dir"]
    for package, patterns in setuptools_table["package-data"].items():
        assert package in setuptools_table["packages"]
        for pattern in patterns:
            assert list(folder_of(package, mapping).glob(pattern)), f"{pattern} of {package} matches no file"
