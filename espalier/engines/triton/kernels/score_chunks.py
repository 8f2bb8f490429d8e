"""Linear node scorers over tiles of a node's children. A block of a query's features is looked up in a tile's rows at once.

Legend: B queries, K beam, C candidates, N nodes, F a query's features, T tiles, R rows, W weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from espalier.engines.triton.kernels.dependency import begin_after
from espalier.engines.triton.kernels.scoring import is_eligible, is_finite, log_sigmoid

MINUS_INF = tl.constexpr(float("-inf"))
HASH = tl.constexpr(2654435769)
"""2^32 over the golden ratio, the multiplier of `chunk_tiles.bucket_of`."""
KEYS = tl.constexpr(8)
"""Keys of a bucket that are compared at once: 32 bytes, a GPU's smallest memory access."""


@triton.jit
def _bits_set(x):
    """The number of 1 bits of uint32 numbers."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _rows_of(feature, exists, first_key_U, keys_R, buckets, longest):
    """int32[block]: the positions of the features' rows in a tile, −1 for a feature without a row."""
    bucket = tl.umulhi(feature.to(tl.uint32) * HASH, buckets.to(tl.uint32)).to(tl.int32)
    begin = tl.load(first_key_U + bucket, mask=exists, other=0)
    end = tl.load(first_key_U + bucket + 1, mask=exists, other=0)
    row = tl.full(feature.shape, -1, tl.int32)
    for start in range(0, longest, KEYS):
        at = begin[:, None] + start + tl.arange(0, KEYS)[None, :]
        key = tl.load(keys_R + at, mask=at < end[:, None], other=-1)
        row = tl.maximum(row, tl.max(tl.where(key == feature[:, None], at, -1), 1))
    return row


@triton.jit
def _logits_of(
    bias, features, values, count, tile_4, first_key_U, keys_R, places_R2, weights_W, TILE: tl.constexpr, FEATURES: tl.constexpr
):  # fmt: skip
    """float32[TILE]: bias + Σ weight · value, in blocks of features, so the order of the sum depends on the query alone.

    features, values  pointers to the addresses of the query's features and of their values
    """
    features_F = tl.load(features).to(tl.pointer_type(tl.int32))
    values_F = tl.load(values).to(tl.pointer_type(tl.float32))
    unit_from, row_from, weight_from, size = tl.load(tile_4), tl.load(tile_4 + 1), tl.load(tile_4 + 2), tl.load(tile_4 + 3)
    buckets, longest = (size & 0xFFFFFFFF).to(tl.int32), (size >> 32).to(tl.int32)
    child = tl.arange(0, TILE)
    bit = tl.full([TILE], 1, tl.uint32) << child.to(tl.uint32)
    logit = bias
    for start in range(0, count, FEATURES):
        f = start + tl.arange(0, FEATURES)
        feature = tl.load(features_F + f, mask=f < count, other=0)
        value = tl.load(values_F + f, mask=f < count, other=0.0)
        row = _rows_of(feature, f < count, first_key_U + unit_from, keys_R + row_from, buckets, longest)
        row_2 = places_R2 + 2 * (row_from + row)
        has = tl.load(row_2, mask=row >= 0, other=0).to(tl.uint32, bitcast=True)
        begin = tl.load(row_2 + 1, mask=row >= 0, other=0)
        before = _bits_set(has[:, None] & (bit - 1)[None, :])
        inside = (has[:, None] & bit[None, :]) != 0
        weight = tl.load(weights_W + weight_from + begin[:, None] + before, mask=inside, other=0.0).to(tl.float32)
        logit += tl.sum(weight * value[:, None], 0)
    return logit


@triton.jit
def _own_of(logit, POWER: tl.constexpr):
    """A node's own part of its rank by POWER: its logit (−1), its log sigmoid (0), or −max(0, 1 − logit)^POWER; NaN if the logit is not
    finite.
    """
    if POWER < 0:
        own_rank = logit
    elif POWER == 0:
        own_rank = log_sigmoid(logit)
    else:
        short = tl.maximum(1.0 - logit, 0.0)
        loss = short
        for _ in tl.static_range(1, POWER):
            loss *= short
        own_rank = -loss
    return tl.where(is_finite(logit), own_rank, float("nan"))


@triton.jit
def _numbers(parent, child, first_child_N, level_start, next_start, children, UNIFORM: tl.constexpr):
    """The node numbers of a parent's children, by their positions `child` (int32[TILE]), and which of them exist."""
    if UNIFORM:
        number = next_start + (parent - level_start) * children + child
        exists = child < children
    else:
        number = tl.load(first_child_N + parent) + child
        exists = number < tl.load(first_child_N + parent + 1)
    return number, exists


@triton.jit(
    do_not_specialize=["kept_stride", "level_start", "next_start", "children", "tiles", "excluded_steps", "first_tile", "candidate_stride"]
)
def score_chunks_kernel(
    kept_BK, kept_ranks_BK, kept_stride, first_child_N, level_start, next_start, children, tiles,
    masks_B, excluded, excluded_from_B, excluded_count_B, excluded_steps,
    features_B, values_B, count_B,
    tiles_T4, first_tile, first_key_U, keys_R, places_R2, weights_W, bias_N, gamma,
    nodes_BC, ranks_BC, candidate_stride,
    UNIFORM: tl.constexpr, TILE: tl.constexpr, FEATURES: tl.constexpr, POWER: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The children of a beam, in beam order, with their ranks own + γ · rank of the parent; a tile of one parent's children a program.

    kept_BK, kept_ranks_BK   int32, float32: the beam, −1 after its end
    masks_B, excluded …        as `score_children_kernel` has them
    features_B, values_B     int64[B]: the addresses of each query's features, int32, and of their values, float32; count_B int32[B]
    children, tiles          the most of a node; UNIFORM: every node has so many children, so child numbers are computed
    tiles_T4 … weights_W     as `ChunkTiles` has them; first_tile: of the level's first parent; TILE: children of a tile
    FEATURES                 of a query that are looked up at a time; POWER: see `_own_of`
    nodes_BC, ranks_BC       out: −1 and −inf where a candidate is missing or not eligible, or its rank is not finite
    """
    begin_after(DEPENDENT)
    b = tl.program_id(1)
    slot, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    beam_entry = b.to(tl.int64) * kept_stride + slot
    parent = tl.load(kept_BK + beam_entry)
    child = tile * TILE + tl.arange(0, TILE)
    node = tl.full([TILE], -1, tl.int32)
    rank = tl.full([TILE], MINUS_INF, tl.float32)
    if parent >= 0:
        number, exists = _numbers(parent, child, first_child_N, level_start, next_start, children, UNIFORM)
        excluded_X = excluded + tl.load(excluded_from_B + b)
        exists = is_eligible(number, exists, tl.load(masks_B + b), excluded_X, tl.load(excluded_count_B + b), excluded_steps)
        tile_4 = tiles_T4 + 4 * (first_tile + (parent - level_start) * tiles + tile).to(tl.int64)
        logit = _logits_of(
            tl.load(bias_N + number, mask=exists, other=0.0), features_B + b, values_B + b, tl.load(count_B + b),
            tile_4, first_key_U, keys_R, places_R2, weights_W, TILE, FEATURES,
        )  # fmt: skip
        total = _own_of(logit, POWER) + gamma * tl.load(kept_ranks_BK + beam_entry)
        exists = exists & is_finite(total)  # a node without a finite rank cannot be ordered, so it is no candidate
        node = tl.where(exists, number, -1)
        rank = tl.where(exists, total, MINUS_INF)
    out = b.to(tl.int64) * candidate_stride + slot * children + child
    tl.store(nodes_BC + out, node, mask=child < children)
    tl.store(ranks_BC + out, rank, mask=child < children)


@triton.jit(do_not_specialize=["above_stride", "level_start", "next_start", "children", "tiles", "first_tile", "out_stride"])
def score_level_kernel(
    above_BK, above_stride, first_child_N, level_start, next_start, children, tiles,
    features_B, values_B, count_B,
    tiles_T4, first_tile, first_key_U, keys_R, places_R2, weights_W, bias_N, gamma,
    ranks_BK, out_stride,
    UNIFORM: tl.constexpr, TILE: tl.constexpr, FEATURES: tl.constexpr, POWER: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The ranks of a whole level, in node order, from those of the level above; a tile of one parent's children a program."""
    begin_after(DEPENDENT)
    b = tl.program_id(1)
    k, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    parent = level_start + k
    child = tile * TILE + tl.arange(0, TILE)
    number, exists = _numbers(parent, child, first_child_N, level_start, next_start, children, UNIFORM)
    tile_4 = tiles_T4 + 4 * (first_tile + k * tiles + tile).to(tl.int64)
    logit = _logits_of(
        tl.load(bias_N + number, mask=exists, other=0.0), features_B + b, values_B + b, tl.load(count_B + b),
        tile_4, first_key_U, keys_R, places_R2, weights_W, TILE, FEATURES,
    )  # fmt: skip
    total = _own_of(logit, POWER) + gamma * tl.load(above_BK + b.to(tl.int64) * above_stride + k)
    tl.store(ranks_BK + b.to(tl.int64) * out_stride + number - next_start, total, mask=exists)
