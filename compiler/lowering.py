"""How Inductor lowers our operators: as calls whose operands lie in memory as they did when the pass put the call in.

Inductor would do as much by itself (`torch.Tag.needs_exact_strides`, which stands for calls that others write), but it
copies a value that it has not written yet for each such call that reads it. Here a value with several readers is
written once, and all of them read it there.
"""

from __future__ import annotations

import functools
from typing import Any

from torch._inductor import ir, lowering
from torch._inductor.virtualized import V
from torch.fx import Node

from kernelwright.compiler.kernel_call import CALL
from kernelwright.compiler.merged_call import MERGED
from kernelwright.compiler.open_call import OPEN_CALL
from kernelwright.compiler.ops import MATMUL
from kernelwright.compiler.passes.candidate import HELD
from kernelwright.compiler.piece import RENAMING


@functools.cache
def register() -> None:
    """Tell Inductor, once in a process."""
    for target in (CALL, MERGED, OPEN_CALL, MATMUL):
        lowering.make_fallback(target, warn=False)
        lowering.register_lowering(target, type_promotion_kind=None)(_held(lowering.lowerings[target]))


def _held(fallback: Any) -> Any:
    def lowered(*args: Any) -> Any:
        node = V.graph.current_node
        if HELD in node.meta:
            _write_shared(args, node.args)
            args, _ = lowering.constrain_to_fake_tensors(args, {}, node.meta[HELD], {})
        return fallback(*args)

    return lowered


def _write_shared(arg: Any, source: Any) -> None:
    if isinstance(arg, (list, tuple)):
        for one, other in zip(arg, source, strict=True):
            _write_shared(one, other)
    elif isinstance(arg, ir.IRNode) and isinstance(source, Node) and _has_readers(source):
        arg.realize()


def _has_readers(node: Node) -> bool:
    """Whether several nodes read a value, under one name or another."""
    while len(node.users) == 1:
        source = node.args[0] if node.args and node.target in RENAMING else None
        if not isinstance(source, Node):
            return False
        node = source
    return True
