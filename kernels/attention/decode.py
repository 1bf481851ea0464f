"""Template "decode": few queries over many keys, in one piece or in pages; keys are divided over programs."""

from __future__ import annotations

from kernelwright.kernels.attention.template import (
    AttentionTemplate,
    bulk_copy,
    can_split,
    element_bytes,
    forward_only,
    head_parts,
    multiplies,
    power_above,
)
from kernelwright.kernels.attention.workload import Problem
from kernelwright.kernels.matmul.template import Knobs, number, over
from kernelwright.kernels.space import Constraint, Knob
from kernelwright.types import DeviceSpec

MOST_ROWS = 1024
"""Query rows of a key head beyond which keys that lie in one piece are better read by the template "forward"."""

LONG_PART = 1024
"""Keys that a program goes through in about the time of a launch."""

IN_FLIGHT = 32 * 1024
"""Bytes that a multiprocessor must have asked for at any time to get its share of the memory's bandwidth."""

_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def _knobs(problem: Problem, device: DeviceSpec, precisions: tuple[str, ...]) -> list[Knob]:
    most = max(1, -(-_keys(problem) // 32))
    hopper = _hopper(device)
    turns = hopper and element_bytes(problem) == 2
    return [
        # rows of queries of one key head: more than there are only cost, fewer read keys again
        Knob("block_m", (16, 32, 64, 128), "log2"),
        Knob("block_n", (16, 32, 64, 128, 256), "log2"),
        Knob("split_kv", tuple(s for s in _SPLITS if s <= most), "log2"),
        # parts put together by the program that comes last, or by a second launch with more programs
        Knob("combine", ("last", "second"), "category"),
        # keys on the wide side of the tensor cores instead of the few queries
        Knob("turned", (0, 1) if turns else (0,), "category"),
        Knob("loads", ("pointer", "bulk") if hopper else ("pointer",), "category"),
        Knob("num_warps", (2, 4, 8), "log2"),
        Knob("num_stages", (1, 2, 3, 4, 5)),
        Knob("precision", precisions, "category"),
    ]


def _hopper(device: DeviceSpec) -> bool:
    return device.vendor == "nvidia" and int(device.architecture.removeprefix("sm_")) >= 90


def _keys(problem: Problem) -> int:
    """Keys that the queries of a sequence see at most."""
    return min(problem.kv_length, problem.window + problem.q_length) if problem.window else problem.kv_length


def _rows(problem: Problem) -> int:
    return problem.q_length * problem.group


def _widths(problem: Problem) -> tuple[int, int]:
    """Elements that a key and a value take in a tile."""
    return sum(head_parts(problem.head_dim, True)), power_above(problem.v_dim)


def _programs(problem: Problem, knobs: Knobs) -> int:
    """Tiles of query rows, over all heads and sequences."""
    return problem.batch * problem.kv_heads * -(-_rows(problem) // number(knobs, "block_m"))


def _shared(problem: Problem, knobs: Knobs) -> int:
    k_width, v_width = _widths(problem)
    shares = problem.kv_shared and v_width == problem.v_dim == head_parts(problem.head_dim, True)[0]
    tile = k_width + (0 if shares else v_width)
    warpgroup = bool(knobs["turned"]) or number(knobs, "block_m") >= 64
    stages = number(knobs, "num_stages") - (0 if warpgroup else 1)
    queries = number(knobs, "block_m") * k_width
    return (number(knobs, "block_n") * tile * max(stages, 1) + queries) * element_bytes(problem)


def _constraints(problem: Problem, device: DeviceSpec) -> list[Constraint]:
    rows, v_width = _rows(problem), _widths(problem)[1]

    def form(knobs: Knobs) -> str | None:
        if problem.packed:
            return "takes sequences of one length of queries, not packed ones"
        if rows > MOST_ROWS and not problem.page:
            return f"is for at most {MOST_ROWS} query rows of a key head, the problem has {rows}"
        return None

    def block_rows(knobs: Knobs) -> str | None:
        fitting, block = power_above(min(rows, 128)), number(knobs, "block_m")
        if block > fitting:
            return f"block_m {block} for {rows} query rows, {fitting} is enough"
        return f"block_m {block} reads every key {-(-rows // block)} times" if block * 8 < fitting else None

    def registers(knobs: Knobs) -> str | None:
        warps = number(knobs, "num_warps")
        each = number(knobs, "block_m") * (v_width + number(knobs, "block_n")) / (32 * warps)
        least = 8 if warps == 2 else 12
        if each < least:
            return f"a thread holds {each:g} scores and sums, fewer than {least}: too many warps"
        return over(each, 160, "registers a thread for scores and sums")

    def parts(knobs: Knobs) -> str | None:
        split, programs = number(knobs, "split_kv"), _programs(problem, knobs)
        if split == 1:
            return "one part needs nothing to put it together" if knobs["combine"] == "second" else None
        if programs * split > 8 * device.multiprocessors + split:
            return f"{programs * split} programs are more than eight waves on {device.multiprocessors} multiprocessors"
        share = _keys(problem) / split
        return f"a part has {share:g} keys, fewer than a block" if share < number(knobs, "block_n") else None

    return [
        forward_only(problem),
        multiplies(problem, device),
        Constraint("form", form),
        Constraint("rows", block_rows),
        Constraint("registers", registers),
        Constraint("parts", parts),
        _filled(problem, device),
        _steps(problem),
        _pointers(problem),
        _in_flight(problem, device),
        _wide_side(problem),
        _two_parts(problem, device),
        _bulk(problem, device),
    ]


def _steps(problem: Problem) -> Constraint:
    """Blocks and stages must not be more than the keys need."""

    def check(knobs: Knobs) -> str | None:
        fitting, block = power_above(_keys(problem)), number(knobs, "block_n")
        if block > fitting:
            return f"block_n {block} for {_keys(problem)} keys, {fitting} is enough"
        steps = -(-_keys(problem) // (block * number(knobs, "split_kv")))
        stages = number(knobs, "num_stages")
        return f"{stages} stages for {steps} blocks of keys" if stages > max(steps, 2) else None

    return Constraint("pipeline", check)


def _filled(problem: Problem, device: DeviceSpec) -> Constraint:
    """Long parts must be enough for every multiprocessor."""

    def check(knobs: Knobs) -> str | None:
        split = number(knobs, "split_kv")
        programs, share = _programs(problem, knobs) * split, _keys(problem) / split
        if programs >= 0.9 * device.multiprocessors or share < LONG_PART:
            return None
        return f"{programs} programs of {share:g} keys leave multiprocessors idle for long"

    return Constraint("idle", check)


def _pointers(problem: Problem) -> Constraint:
    """Loads through pointers need large tiles, enough threads for their addresses, and something to overlap with."""
    widest = max(_widths(problem))

    def check(knobs: Knobs) -> str | None:
        if knobs["loads"] != "pointer":
            return None
        block, keys = number(knobs, "block_n"), _keys(problem)
        steps = -(-keys // (block * number(knobs, "split_kv")))
        if steps > 2 and number(knobs, "num_stages") == 1:
            return f"one stage leaves {steps} blocks of keys waiting for each other"
        if block < 32 <= keys:
            return f"a block of {block} keys is too few for loads through pointers"
        each = block * widest / (32 * number(knobs, "num_warps"))
        return over(each, 128, "elements a thread of a tile that is loaded through pointers")

    return Constraint("pointers", check)


def _in_flight(problem: Problem, device: DeviceSpec) -> Constraint:
    """Long problems are as fast as memory, if enough of it has been asked for at any time."""

    def check(knobs: Knobs) -> str | None:
        key = sum(_widths(problem)) * element_bytes(problem)
        running = _programs(problem, knobs) * number(knobs, "split_kv") / device.multiprocessors
        if running * _keys(problem) / number(knobs, "split_kv") * key < 16 * IN_FLIGHT:
            return None
        warps, stages = number(knobs, "num_warps"), number(knobs, "num_stages")
        resident = min(running, device.shared_memory_bytes / (_shared(problem, knobs) + 1024), 64 / warps)
        # without a pipeline a program waits for its keys, then for its values
        asked = resident * (stages - 1 if stages > 1 else 0.5) * number(knobs, "block_n") * key
        return f"{asked:.0f} bytes in flight, {IN_FLIGHT} keep memory busy" if asked < IN_FLIGHT else None

    return Constraint("in_flight", check)


def _wide_side(problem: Problem) -> Constraint:
    """What stands on the wide side must fill it."""
    v_width = _widths(problem)[1]

    def check(knobs: Knobs) -> str | None:
        if not knobs["turned"]:
            return None
        if number(knobs, "num_warps") < 4:
            return "the wide side of the tensor cores is four warps' work"
        least = min(number(knobs, "block_n"), v_width)
        return f"keys and values fill {least} of the 64 rows of the wide side" if least < 64 else None

    return Constraint("turned", check)


def _two_parts(problem: Problem, device: DeviceSpec) -> Constraint:
    """What was measured wrong on Hopper of keys in two parts: both products by warpgroups, but for the plainest way."""

    def check(knobs: Knobs) -> str | None:
        if not can_split(problem.head_dim) or device.architecture != "sm_90":
            return None
        rows, warps = number(knobs, "block_m"), number(knobs, "num_warps")
        if knobs["turned"]:
            return "turned products of keys in two parts were measured wrong on sm_90"
        if rows >= 64 and warps > rows // 16:
            return f"{warps} warps on {rows} rows of keys in two parts were measured wrong on sm_90"
        return None

    return Constraint("two_parts", check)


def _bulk(problem: Problem, device: DeviceSpec) -> Constraint:
    """The bulk copy engine takes aligned rows, and a block of keys from one page."""
    able = bulk_copy(problem, device, ("k", "v"))

    def check(knobs: Knobs) -> str | None:
        if knobs["loads"] != "bulk":
            return None
        if problem.page and problem.page % number(knobs, "block_n"):
            return f"a block of {knobs['block_n']} keys does not lie in one page of {problem.page}"
        for layout in (problem.k, problem.v):
            if any(stride == 0 and size > 1 for size, stride in zip(layout.shape, layout.strides, strict=True)):
                return "the bulk copy engine takes no stride of 0"
        return able.check(knobs)

    return Constraint("bulk", check)


DECODE = AttentionTemplate("decode", "kernelwright.kernels.attention.decode_kernel", _knobs, _constraints, _shared)
