"""The best k of a query's candidates, in the order that they came in; and the chosen leaves, best first.

Only the set matters on inner levels, so nothing is sorted there: a radix search finds the k-th best key, bits by bits, and one scan closes
the chosen ones up. Ties go to the candidate that comes first, which is the lower node number. Where a bundle has a memory, candidates are
chosen by their keys, and their ranks are carried along. Of the chosen leaves each counts how many are better: for the few hundred results
of a search that is less work than a sort, and all of it in parallel.

Legend: B queries, K beam, C candidates, M results.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def _at_least(codes, trials):
    """int32[trials]: how many codes are at least each trial."""
    return tl.sum((codes[:, None] >= trials[None, :]).to(tl.int32), 0)


@triton.jit(do_not_specialize=["candidate_stride", "candidates", "kept_stride", "slots"])
def select_kernel(
    nodes_BC, ranks_BC, keys_BC, candidate_stride, candidates, size_B, kept_BK, kept_ranks_BK, kept_keys_BK, kept_stride, slots,
    WIDTH: tl.constexpr, WHOLE: tl.constexpr, BITS: tl.constexpr, SLOTS_PAD: tl.constexpr, MEMORY: tl.constexpr,
):  # fmt: skip
    """One query a program.

    nodes_BC, keys_BC     int32, float32: the candidates; −1 = none there
    size_B                int32[B]: how many to keep; at most `slots` are
    kept_BK, kept_keys_BK  out: the chosen nodes and their keys in candidate order, then −1 and −inf up to `slots`
    WIDTH                 candidates at a time; WHOLE: all of them fit
    BITS                  of the threshold that are found in one pass
    MEMORY                the ranks are other than the keys: those of the chosen go from ranks_BC to kept_ranks_BK
    """
    b = tl.program_id(0)
    nodes_C = nodes_BC + b.to(tl.int64) * candidate_stride
    ranks_C = ranks_BC + b.to(tl.int64) * candidate_stride
    keys_C = keys_BC + b.to(tl.int64) * candidate_stride
    kept_K = kept_BK + b.to(tl.int64) * kept_stride
    kept_ranks_K = kept_ranks_BK + b.to(tl.int64) * kept_stride
    kept_keys_K = kept_keys_BK + b.to(tl.int64) * kept_stride
    size = tl.minimum(tl.minimum(tl.load(size_B + b), slots), candidates)

    if WHOLE:
        all_codes = _codes_at(nodes_C, keys_C, 0, candidates, WIDTH)
    threshold = tl.full([], 0, tl.uint32)
    digits = tl.arange(0, 2**BITS).to(tl.uint32)
    for done in tl.static_range(0, 32, BITS):
        trials = threshold + (digits << (32 - BITS - done))
        if WHOLE:
            count = _at_least(all_codes, trials)
        else:
            count = tl.zeros([2**BITS], tl.int32)
            for start in range(0, candidates, WIDTH):
                count += _at_least(_codes_at(nodes_C, keys_C, start, candidates, WIDTH), trials)
        digit = tl.sum((count >= size).to(tl.int32), 0) - 1  # trials rise, so the counts fall
        threshold += digit.to(tl.uint32) << (32 - BITS - done)

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
        both = tl.cumsum((better << 16) + tie, 0)
        better_to, ties_to = both >> 16, ties_before + (both & 0xFFFF)
        take = (better == 1) | ((tie == 1) & (ties_to <= wanted_ties))
        # Those before and with this one: the better ones, and the ties that were still wanted.
        place = taken + better_to + tl.minimum(ties_to, wanted_ties) - tl.minimum(ties_before, wanted_ties) - 1
        tl.store(kept_K + place, node, mask=take)
        tl.store(kept_keys_K + place, key, mask=take)
        if MEMORY:
            tl.store(kept_ranks_K + place, tl.load(ranks_C + c, mask=take, other=0.0), mask=take)
        taken += tl.sum(take.to(tl.int32), 0)
        ties_before += tl.sum(tie, 0)

    for start in range(0, slots, SLOTS_PAD):
        k = start + tl.arange(0, SLOTS_PAD)
        empty = (k >= taken) & (k < slots)
        tl.store(kept_K + k, tl.full([SLOTS_PAD], -1, tl.int32), mask=empty)
        tl.store(kept_keys_K + k, tl.full([SLOTS_PAD], float("-inf"), tl.float32), mask=empty)
        if MEMORY:
            tl.store(kept_ranks_K + k, tl.full([SLOTS_PAD], float("-inf"), tl.float32), mask=empty)


@triton.jit(do_not_specialize=["kept_stride", "leaf_offset", "wanted", "out_stride"])
def order_kernel(
    leaves_BM, ranks_BM, keys_BM, kept_stride, leaf_item, leaf_offset, rows_BM, out_ranks_BM, out_keys_BM, wanted, out_stride,
    TILE: tl.constexpr, MEMORY: tl.constexpr,
):  # fmt: skip
    """A tile of one query's leaves a program.

    leaves_BM, keys_BM    int32, float32: chosen leaves in ascending order, −1 and −inf after their end
    leaf_item             int32[leaves]
    rows_BM, out_keys_BM  out: item rows and keys, best first, the lower leaf before its equals; −1 and −inf after their end
    MEMORY                the ranks are other than the keys: they go from ranks_BM to out_ranks_BM
    """
    b = tl.program_id(1)
    leaves_M, keys_M = leaves_BM + b.to(tl.int64) * kept_stride, keys_BM + b.to(tl.int64) * kept_stride
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    leaf = tl.load(leaves_M + i, mask=i < wanted, other=-1)
    key = tl.load(keys_M + i, mask=i < wanted, other=float("-inf"))
    place = tl.zeros([TILE], tl.int32)
    for start in range(0, wanted, TILE):
        j = start + tl.arange(0, TILE)
        other = tl.load(keys_M + j, mask=j < wanted, other=float("-inf"))
        before = (other[None, :] > key[:, None]) | ((other[None, :] == key[:, None]) & (j[None, :] < i[:, None]))
        place += tl.sum(before.to(tl.int32), 1)
    there = leaf >= 0
    item = tl.load(leaf_item + leaf - leaf_offset, mask=there, other=-1)
    out = b.to(tl.int64) * out_stride + place
    tl.store(rows_BM + out, item, mask=i < wanted)
    tl.store(out_keys_BM + out, key, mask=i < wanted)
    if MEMORY:
        rank = tl.load(ranks_BM + b.to(tl.int64) * kept_stride + i, mask=i < wanted, other=float("-inf"))
        tl.store(out_ranks_BM + out, rank, mask=i < wanted)
