"""Several passes in one of Inductor's slots, which before torch 2.13 hold one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph


class PassSequence(CustomGraphPass):
    """Runs passes in order. Graphs are cached only if every pass can be identified."""

    def __init__(self, passes: Sequence[Callable[[Graph], None]]) -> None:
        self._passes = tuple(passes)

    def __call__(self, graph: Graph) -> None:
        """Run them all."""
        for one in self._passes:
            one(graph)

    def uuid(self) -> Any:
        """The passes' own identities, or None if one has none."""
        parts = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self._passes]
        return tuple(parts) if all(parts) else None


def joined(existing: Any, added: CustomGraphPass) -> CustomGraphPass:
    """`added` behind what a slot holds already: nothing, a pass, or a list of them."""
    if not existing:
        return added
    before = existing if isinstance(existing, list | tuple) else [existing]
    return PassSequence([*before, added])
