"""Convolution with one tap and stride 1: the product of a matrix of pixels and the weight, by the matmul operator's TMA
kernel. Images that lie as [pixels, channels] are one matrix, others a batch of them."""

import itertools

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernelwright.kernels.matmul.epilogue_kernel import chain_of
from kernelwright.kernels.matmul.persistent_tma_kernel import (
    destination,
    matmul_persistent_tma,
    multiprocessors,
    operand,
)
from kernelwright.kernels.matmul.product_kernel import dot_precision
from kernelwright.kernels.matmul.split_k_kernel import reduce_launch, zeros_launch


def merged_stride(sizes, strides):
    """The stride of dimensions taken together, outermost first; None where their elements are not evenly spaced."""
    kept = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size != 1]
    even = all(outer[1] == inner[0] * inner[1] for outer, inner in itertools.pairwise(kept))
    return (kept[-1][1] if kept else 0) if even else None


def image_matrix(image, batched):
    """An image [N, C, H, W] as the matrix [N * H * W, C], or as N of them [N, H * W, C]."""
    (n, channels, height, width), (step_n, step_c, step_h, step_w) = image.shape, image.stride()
    if batched:
        step = merged_stride((height, width), (step_h, step_w)) or channels * step_c
        return image.as_strided((n, height * width, channels), (step_n, step, step_c), image.storage_offset())
    step = merged_stride((n, height, width), (step_n, step_h, step_w)) or channels * step_c
    return image.as_strided((n * height * width, channels), (step, step_c), image.storage_offset())


def weight_matrix(weight):
    """A weight [A, B, 1, 1] as the matrix [A, B]."""
    return weight.as_strided(weight.shape[:2], weight.stride()[:2], weight.storage_offset())


def matrices_of(inputs, out, attributes):
    """(inputs with a, b and what the epilogue reads as matrices, out as a matrix) of the equal matrix product."""
    direction = attributes["direction"]
    if direction == "weight_gradient":
        views = {"a": image_matrix(inputs["d_out"], False).T, "b": image_matrix(inputs["x"], False)}
        return views, weight_matrix(out)
    images = {"a": inputs["d_out" if direction == "input_gradient" else "x"], "out": out}
    images |= {name: tensor for name, tensor in inputs.items() if tensor.dim() == 4 and name not in ("x", "w", "d_out")}
    batched = any(
        merged_stride((t.shape[0], *t.shape[2:]), (t.stride(0), *t.stride()[2:])) is None for t in images.values()
    )
    views = {name: image_matrix(tensor, batched) for name, tensor in images.items()}
    plain = direction == "forward" and not attributes["transposed"]
    matrix = weight_matrix(inputs["w"]).T if plain else weight_matrix(inputs["w"])
    if batched:
        # one weight for every image
        matrix = matrix.expand(out.shape[0], *matrix.shape)
    vectors = {name: tensor for name, tensor in inputs.items() if tensor.dim() == 1}
    return {**vectors, **views, "b": matrix}, views["out"]


def plan(inputs, out, knobs, attributes, epilogue):
    """Launches that write the convolution, or the gradient that `attributes` name, to out."""
    if out.numel() == 0:
        return []
    inputs, out = matrices_of(inputs, out, attributes)
    a, b = inputs["a"], inputs["b"]
    (m, k), n, split_k = a.shape[-2:], out.shape[-1], knobs["split_k"]
    block_m, block_n, block_k = (knobs[x] for x in ("block_m", "block_n", "block_k"))
    # the tensor cores take 16-bit operands in either order, others only along K
    wide = a.element_size() != 2
    a_row, a_desc, a_batched, a_launches = operand(a, (block_m, block_k), knobs["repack"], wide and a.stride(-1) != 1)
    b_row, b_desc, b_batched, b_launches = operand(b, (block_k, block_n), knobs["repack"], wide and b.stride(-1) == 1)
    target, strides, store, added = destination(a, b, out, knobs)
    matrix = target if split_k == 1 else target[0, 0]
    c_block = [block_m, block_n // knobs["subtile"]]
    by_tma = store in ("tma", "add_tma")
    c_desc = TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), c_block) if by_tma else None
    batch = out.shape[0] if out.dim() == 3 else 1
    items = batch * triton.cdiv(m, block_m) * triton.cdiv(n, block_n) * split_k
    steps, operands = chain_of(inputs, epilogue) if split_k == 1 else ("", ())
    args = (
        a_desc, b_desc, c_desc, target, operands, batch, m, n, k, *strides,
        block_m, block_n, block_k, knobs["group_m"], split_k, knobs["subtile"], a_row, b_row, a_batched, b_batched,
        store, dot_precision(knobs["precision"], a), tl.float32, False, steps,
    )  # fmt: skip
    options = {"num_warps": knobs["num_warps"], "num_stages": knobs["num_stages"]}
    programs = min(items, multiprocessors(a) * knobs["blocks_per_sm"])
    main = (matmul_persistent_tma, (programs,), args, options)
    tail = [reduce_launch(target, out, inputs, epilogue)] if split_k > 1 else []
    return [*a_launches, *b_launches, *([zeros_launch(target)] if added else []), main, *tail]
