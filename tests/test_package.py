"""What users install: the wheel holds every package and its data, and the source archive builds the same wheel."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build(kind: str, tree: Path, out: Path) -> Path:
    """Run one hook of the build backend in `tree` without the network; the file it wrote."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{kind}", str(out)], cwd=tree, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves build folders that would bring deleted files back."""
    folder = tmp_path_factory.mktemp("sdist")
    skipped = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "results", "*.db")
    shutil.copytree(ROOT, folder / "tree", ignore=skipped)
    return build("sdist", folder / "tree", folder)


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from the source archive alone."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    return zipfile.ZipFile(build("wheel", tree, folder))


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def expected_files(table: dict[str, Any]) -> set[str]:
    mapping = table["package-dir"]
    expected = set()
    for package in table["packages"]:
        root, _, rest = package.removeprefix("kernelwright.").partition(".")
        source = mapping.get(package) or f"{mapping[f'kernelwright.{root}']}/{rest.replace('.', '/')}"
        target = package.replace(".", "/")
        files = list((ROOT / source).glob("*.py"))
        for pattern in table["package-data"].get(package, []):
            files += [path for path in (ROOT / source).glob(pattern) if path.is_file()]
        expected |= {f"{target}/{path.relative_to(ROOT / source).as_posix()}" for path in files}
    return expected


def test_wheel_holds_every_module_and_its_data_and_nothing_else(
    wheel: zipfile.ZipFile, pyproject: dict[str, Any]
) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == expected_files(pyproject["tool"]["setuptools"])
    assert "kernelwright/py.typed" in names


def test_wheel_says_who_it_is(wheel: zipfile.ZipFile) -> None:
    info = {Path(name).name: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" in name}
    assert "License-Expression: Apache-2.0" in info["METADATA"]
    assert "Apache License" in info["LICENSE"]
    assert "kernelwright = kernelwright.service.cli:main" in info["entry_points.txt"]
    assert "kernelwright = kernelwright.compiler.backend:kernelwright" in info["entry_points.txt"]


def test_base_install_brings_no_gpu_stack_and_no_xgboost(pyproject: dict[str, Any]) -> None:
    base = " ".join(pyproject["project"]["dependencies"])
    assert not any(name in base for name in ("torch", "triton", "xgboost", "ray", "psycopg"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_entry_points_resolve() -> None:
    found = {(point.group, point.name): point.load() for point in distribution("kernelwright").entry_points}
    assert found.keys() == {("console_scripts", "kernelwright"), ("torch_dynamo_backends", "kernelwright")}
    assert all(map(callable, found.values()))
