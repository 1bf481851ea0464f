"""Names that differ between versions of Gluon: 3.6 has the first of each pair only, 3.8 renamed them."""

import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

gluon_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
