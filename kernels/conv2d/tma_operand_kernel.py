"""Operands and results of a convolution as the bulk copy engine needs them: as they lie, or copied."""

from kernelwright.kernels.conv2d.layout_copy_kernel import krsc_copy, nhwc_copy, turned_weight_copy

ENGINE_BYTES = 16


def in_whole_pieces(image):
    """Whether base and strides of an NHWC image [N, C, H, W] are whole pieces of 16 bytes."""
    size = image.element_size()
    # meta tensors have no address
    address = image.storage_offset() * size if image.device.type == "meta" else image.data_ptr()
    lines = [stride * size for axis, stride in enumerate(image.stride()) if axis != 1 and image.shape[axis] > 1]
    neighbours = image.stride(1) == 1 or image.shape[1] == 1
    return neighbours and address % ENGINE_BYTES == 0 and all(x and x % ENGINE_BYTES == 0 for x in lines)


def engine_image(image, geometry, repack):
    """(an image [N, C, H, W] that the engine can read, launches that make it).

    repack: copy it to NHWC where it cannot be read as it lies. Axes that a stride splits must be whole strides long.
    """
    splits = geometry["SPLIT_H"], geometry["SPLIT_W"]
    steps = [geometry[name] if split else 1 for name, split in zip(("STRIDE_H", "STRIDE_W"), splits, strict=True)]
    whole = all(size % step == 0 for size, step in zip(image.shape[2:], steps, strict=True))
    even = not splits[1] or image.stride(3) == image.shape[1]
    if not repack or (in_whole_pieces(image) and whole and even):
        return image, []
    copy, launch = nhwc_copy(image, steps)
    return copy, [launch]


def engine_weight(weight, groups, scatters, repack):
    """(lines, whether these are of the sum's channels, launches that make them) of a weight [A, B, R, S].

    Lines [A, R * S * B], as it lies in memory; or [groups * B, R * S * A / groups] where the sum is over A and the
    tensor cores need its channels innermost, as they do for all but 16-bit elements. repack: copy it where needed.
    """
    if scatters and weight.element_size() != 2:
        turned, launch = turned_weight_copy(weight, groups)
        return turned.permute(0, 2, 3, 1).flatten(1), False, [launch]
    lines, launches = weight.permute(0, 2, 3, 1), []
    if repack and not (lines.is_contiguous() and in_whole_pieces(weight)):
        weight, launch = krsc_copy(weight)
        lines, launches = weight.permute(0, 2, 3, 1), [launch]
    return lines.flatten(1), scatters, launches


def class_views(out, steps):
    """A result [N, K, P, Q] as the pixels of each class, by their remainders of the steps, row by row."""
    return [out[:, :, row :: steps[0], column :: steps[1]] for row in range(steps[0]) for column in range(steps[1])]


def stored_by_tma(out):
    """Whether the engine can write whole tiles of a result [N, K, P, Q]."""
    # it writes whole pieces: past a row that is no multiple of them it would run over
    whole = out.shape[1] * out.element_size() % ENGINE_BYTES == 0
    return out.numel() > 0 and whole and out.stride(1) == 1 and in_whole_pieces(out)
