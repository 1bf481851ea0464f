"""The exception tree is the one that its docstring draws."""

from __future__ import annotations

import inspect
import re

import pytest

from kernelwright import errors
from kernelwright.errors import KernelwrightError

CLASSES = {
    name: cls for name, cls in vars(errors).items() if inspect.isclass(cls) and cls.__module__ == errors.__name__
}


def drawn_tree() -> dict[str, str]:
    """Name of the base by name of the class, as drawn; a branch's depth is where its ├ or └ stands."""
    bases: dict[str, str] = {}
    path: list[tuple[int, str]] = [(-1, "KernelwrightError")]
    for line in (errors.__doc__ or "").splitlines():
        branch = re.match(r"^([ │]*)[├└]── (\w+)", line)
        if branch:
            depth = len(branch[1])
            while path[-1][0] >= depth:
                path.pop()
            bases[branch[2]] = path[-1][1]
            path.append((depth, branch[2]))
    return bases


def test_the_tree_in_the_docstring_is_the_one_in_the_code() -> None:
    real = {name: cls.__bases__[0].__name__ for name, cls in CLASSES.items() if cls is not KernelwrightError}
    assert drawn_tree() == real


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_each_says_what_it_is_for(cls: type[Exception]) -> None:
    assert cls.__doc__ and cls.__doc__.endswith(".")
    assert issubclass(cls, KernelwrightError)
    assert str(cls("wanted this, got that")) == "wanted this, got that"
