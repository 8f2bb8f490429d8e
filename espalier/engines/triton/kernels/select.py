"""The best k of a query's candidates; and the chosen leaves, best first.

For few queries, `count_kernel`: each candidate counts how many candidates are better, which is its position in the order. The work grows
with the square of the candidates, but all of it is parallel. For many queries, `select_kernel`, one program a query: it finds the k-th best
key bit by bit and then compacts the chosen candidates in one scan, in candidate order. Either way ties go to the lower node number. With a
memory, candidates are chosen by their keys, and their ranks are copied as well.

Legend: B queries, K beam, C candidates, M results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from espalier.engines.triton.kernels.dependency import begin_after


@triton.jit
def codes_of(keys, nodes):
    """uint32 in the order of the keys (float32; 0 and −0 are equal), 0 where there is no node."""
    bits = tl.where(keys == 0, 0.0, keys).to(tl.int32, bitcast=True)
    code = tl.where(bits < 0, ~bits, bits ^ (-2147483648)).to(tl.uint32, bitcast=True)
    return tl.where(nodes >= 0, code, 0)


@triton.jit
def _codes_at(nodes_C, keys_C, start, candidates, WIDTH: tl.constexpr):
    c = start + tl.arange(0, WIDTH)
    nodes = tl.load(nodes_C + c, mask=c < candidates, other=-1)
    return codes_of(tl.load(keys_C + c, mask=c < candidates, other=0.0), nodes)


@triton.jit
def standing_of(keys, nodes, position):
    """uint64: higher is better, and no two are equal: by key, then the lower node number; candidates without a node come last."""
    low = tl.where(nodes >= 0, nodes, position).to(tl.uint32)
    return (codes_of(keys, nodes).to(tl.uint64) << 32) | (0xFFFFFFFF - low.to(tl.uint64))


@triton.jit(do_not_specialize=["candidate_stride", "candidates", "kept_stride", "slots", "leaf_offset"])
def count_kernel(
    nodes_BC, ranks_BC, keys_BC, candidate_stride, candidates, size_B, kept_BK, kept_ranks_BK, kept_keys_BK, kept_stride, slots,
    leaf_item, leaf_offset,
    TILE: tl.constexpr, WIDTH: tl.constexpr, ITEMS: tl.constexpr, MEMORY: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A tile of one query's candidates a program.

    nodes_BC, keys_BC     int32, float32: the candidates; −1 = no candidate
    size_B                int32[B]: how many to keep; at most `slots` are kept, and there are at least `slots` candidates
    kept_BK, kept_keys_BK  out: the chosen nodes and their keys, best first, then −1 and −inf up to `slots`
    leaf_item             int32[leaves]. ITEMS: the nodes are leaves, and their item rows are written instead
    WIDTH                 candidates that each is compared with at a time
    MEMORY                ranks differ from keys: the ranks of the chosen are copied from ranks_BC to kept_ranks_BK
    """
    begin_after(DEPENDENT)
    b = tl.program_id(1)
    nodes_C = nodes_BC + b.to(tl.int64) * candidate_stride
    keys_C = keys_BC + b.to(tl.int64) * candidate_stride
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    node = tl.load(nodes_C + i, mask=i < candidates, other=-1)
    key = tl.load(keys_C + i, mask=i < candidates, other=float("-inf"))
    size = tl.load(size_B + b)
    standing = standing_of(key, node, i)
    position = tl.zeros([TILE], tl.int32)
    for start in range(0, candidates, WIDTH):
        j = start + tl.arange(0, WIDTH)
        other_nodes = tl.load(nodes_C + j, mask=j < candidates, other=-1)
        other_standing = standing_of(tl.load(keys_C + j, mask=j < candidates, other=0.0), other_nodes, j)
        position += tl.sum((other_standing[:, None] > standing[None, :]).to(tl.int32), 0)
    chosen = (node >= 0) & (position < size)
    row = node
    if ITEMS:
        row = tl.load(leaf_item + node - leaf_offset, mask=chosen, other=-1)
    out, inside = b.to(tl.int64) * kept_stride + position, (i < candidates) & (position < slots)
    tl.store(kept_BK + out, tl.where(chosen, row, -1), mask=inside)
    tl.store(kept_keys_BK + out, tl.where(chosen, key, float("-inf")), mask=inside)
    if MEMORY:
        rank = tl.load(ranks_BC + b.to(tl.int64) * candidate_stride + i, mask=chosen, other=float("-inf"))
        tl.store(kept_ranks_BK + out, rank, mask=inside)


@triton.jit
def select(
    nodes_C, ranks_C, keys_C, candidates, size, kept_K, kept_ranks_K, kept_keys_K, slots,
    WIDTH: tl.constexpr, WHOLE: tl.constexpr, FEW: tl.constexpr, SLOTS_PAD: tl.constexpr, MEMORY: tl.constexpr,
):  # fmt: skip
    """The best `size` of a query's candidates, at most `slots` of them, by one program: see `select_kernel`."""
    size = tl.minimum(tl.minimum(size, slots), candidates)
    if WHOLE:
        all_codes = _codes_at(nodes_C, keys_C, 0, candidates, WIDTH)
    # Bit by bit, in loops that are not unrolled: few programs run them, and loading more code would cost more than it saves.
    threshold = tl.full([], 0, tl.uint32)
    if FEW:
        count = tl.full([], -1, tl.int32)  # unknown: even a row that keeps none needs a threshold that none reaches
        unit = tl.full([], 1 << 30, tl.uint32)
        while (unit > 0) & (count != size):  # stop once exactly `size` codes reach the threshold
            three = (all_codes >= threshold + unit).to(tl.int32)
            three += (all_codes >= threshold + 2 * unit).to(tl.int32) << 10
            three += (all_codes >= threshold + 3 * unit).to(tl.int32) << 20
            counts = tl.sum(three, 0)
            for third in tl.static_range(0, 3):
                least = (counts >> (10 * third)) & 1023
                threshold += unit * (least >= size).to(tl.uint32)
                count = tl.where(least >= size, least, count)
            unit >>= 2
    else:
        for step in range(0, 32):
            trial = threshold | (tl.full([], 1 << 31, tl.uint32) >> step)
            if WHOLE:
                count = tl.sum((all_codes >= trial).to(tl.int32), 0)
            else:
                count = tl.full([], 0, tl.int32)
                for start in range(0, candidates, WIDTH):
                    count += tl.sum((_codes_at(nodes_C, keys_C, start, candidates, WIDTH) >= trial).to(tl.int32), 0)
            threshold = tl.where(count >= size, trial, threshold)

    above = tl.full([], 0, tl.int32)
    if WHOLE:
        above += tl.sum((all_codes > threshold).to(tl.int32), 0)
    else:
        for start in range(0, candidates, WIDTH):
            above += tl.sum((_codes_at(nodes_C, keys_C, start, candidates, WIDTH) > threshold).to(tl.int32), 0)
    wanted_ties = size - above
    taken = tl.full([], 0, tl.int32)
    ties_before = tl.full([], 0, tl.int32)
    for start in range(0, candidates, WIDTH):
        c = start + tl.arange(0, WIDTH)
        node = tl.load(nodes_C + c, mask=c < candidates, other=-1)
        key = tl.load(keys_C + c, mask=c < candidates, other=0.0)
        code = codes_of(key, node)
        better, tie = (code > threshold).to(tl.int32), ((code == threshold) & (node >= 0)).to(tl.int32)
        running_counts = tl.cumsum((better << 16) + tie, 0)
        better_to, ties_to = running_counts >> 16, ties_before + (running_counts & 0xFFFF)
        take = (better == 1) | ((tie == 1) & (ties_to <= wanted_ties))
        # Up to here and with this one: the better candidates, and as many ties as are wanted.
        position = taken + better_to + tl.minimum(ties_to, wanted_ties) - tl.minimum(ties_before, wanted_ties) - 1
        tl.store(kept_K + position, node, mask=take)
        tl.store(kept_keys_K + position, key, mask=take)
        if MEMORY:
            tl.store(kept_ranks_K + position, tl.load(ranks_C + c, mask=take, other=0.0), mask=take)
        taken += tl.sum(take.to(tl.int32), 0)
        ties_before += tl.sum(tie, 0)

    if taken < slots:
        for start in range(0, slots, SLOTS_PAD):
            k = start + tl.arange(0, SLOTS_PAD)
            empty = (k >= taken) & (k < slots)
            tl.store(kept_K + k, tl.full([SLOTS_PAD], -1, tl.int32), mask=empty)
            tl.store(kept_keys_K + k, tl.full([SLOTS_PAD], float("-inf"), tl.float32), mask=empty)
            if MEMORY:
                tl.store(kept_ranks_K + k, tl.full([SLOTS_PAD], float("-inf"), tl.float32), mask=empty)


@triton.jit(do_not_specialize=["candidate_stride", "candidates", "kept_stride", "slots"])
def select_kernel(
    nodes_BC, ranks_BC, keys_BC, candidate_stride, candidates, size_B, kept_BK, kept_ranks_BK, kept_keys_BK, kept_stride, slots,
    WIDTH: tl.constexpr, WHOLE: tl.constexpr, FEW: tl.constexpr, SLOTS_PAD: tl.constexpr, MEMORY: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One query a program.

    nodes_BC, keys_BC     int32, float32: the candidates; −1 = no candidate
    size_B                int32[B]: how many to keep; at most `slots` are kept
    kept_BK, kept_keys_BK  out: the chosen nodes and their keys in candidate order, then −1 and −inf up to `slots`
    WIDTH                 candidates at a time. WHOLE: all candidates fit. FEW: they also are fewer than 1,024, so two bits of the threshold
                            are found at once
    MEMORY                ranks differ from keys: the ranks of the chosen are copied from ranks_BC to kept_ranks_BK
    """
    begin_after(DEPENDENT)
    b = tl.program_id(0).to(tl.int64)
    candidate_start, beam_start = b * candidate_stride, b * kept_stride
    select(
        nodes_BC + candidate_start, ranks_BC + candidate_start, keys_BC + candidate_start, candidates, tl.load(size_B + b),
        kept_BK + beam_start, kept_ranks_BK + beam_start, kept_keys_BK + beam_start, slots, WIDTH, WHOLE, FEW, SLOTS_PAD, MEMORY,
    )  # fmt: skip
