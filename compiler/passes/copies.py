"""Takes copies out of a graph that change nothing, as Inductor does right behind our pass.

Dropout leaves one where it drops nothing out, between a product and the residual that its kernel could add.
"""

from __future__ import annotations

import logging

from torch.fx import Graph

_log = logging.getLogger(__name__)


def drop_copies(graph: Graph) -> None:
    """Let whoever uses a copy use what was copied, by Inductor's own rules for inputs and outputs. Where they are not
    to be had, the graph stays as it is."""
    try:
        from torch._inductor.fx_passes.post_grad import remove_noop_ops

        remove_noop_ops(graph)
    except Exception as error:
        _log.info("copies stay in the graph: %s", error)
