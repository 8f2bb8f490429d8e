"""The chosen leaves, best first.

Each leaf counts how many are better: for the few hundred results of a search that is less work than a sort, and all of it in parallel.

Legend: B queries, M results.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
