"""Node scorers over tiles of nodes: the children of a beam, and whole levels above it.

Legend: B queries, K beam, C candidates, N nodes, D node row, S state, L levels, X excluded nodes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from espalier.engines.triton.kernels.dependency import begin_after
from espalier.engines.triton.kernels.scoring import is_eligible, is_finite, log_sigmoid
from espalier.engines.triton.kernels.select import standing_of


@triton.jit
def memory_of(node, exists, memory_3):
    """float32[tile]: mem of the nodes (int32[tile]) that exist; 0 for nodes that are not in the query's list.

    memory_3  int64[3]: the addresses of the list's nodes (int32[X], ascending) and of their mem (float32[X]), and X
    """
    nodes_X = tl.load(memory_3).to(tl.pointer_type(tl.int32))
    values_X = tl.load(memory_3 + 1).to(tl.pointer_type(tl.float32))
    count = tl.load(memory_3 + 2).to(tl.int32)
    # Binary search: the last entry that is at most the node, if any, is among the `size` entries from `low` on.
    low = tl.zeros_like(node)
    size = count
    while size > 1:
        half = size // 2
        middle = tl.load(nodes_X + low + half, mask=exists, other=0)
        low = tl.where(exists & (middle <= node), low + half, low)
        size -= half
    exists = exists & (count > 0)
    exists = exists & (tl.load(nodes_X + low, mask=exists, other=-1) == node)
    return tl.load(values_X + low, mask=exists, other=0.0)


MINUS_INF = tl.constexpr(float("-inf"))


@triton.jit
def matrix_of(weights, before: tl.constexpr, width: tl.constexpr):
    return tl.load(weights + tl.arange(0, before)[:, None] * width + tl.arange(0, width)[None, :])


@triton.jit
def matrices_of(weights, D_PAD: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr, S3: tl.constexpr):
    """The layers' matrices, end to end at `weights`; 0 for a layer that does not exist. A program reads them once."""
    w0 = 0
    w1 = 0
    w2 = 0
    w3 = 0
    if S0 > 0:
        w0 = matrix_of(weights, D_PAD, S0)
    if S1 > 0:
        w1 = matrix_of(weights + D_PAD * S0, S0, S1)
    if S2 > 0:
        w2 = matrix_of(weights + D_PAD * S0 + S0 * S1, S1, S2)
    if S3 > 0:
        w3 = matrix_of(weights + D_PAD * S0 + S0 * S1 + S1 * S2, S2, S3)
    return w0, w1, w2, w3


@triton.jit
def _vector(vectors, width: tl.constexpr):
    return tl.load(vectors + tl.arange(0, width))


@triton.jit
def with_state(matrices, state_S, vectors, D: tl.constexpr, D_PAD: tl.constexpr, S0: tl.constexpr):
    """The matrices, with the query's state and the first layer's biases written into the first matrix, so that its product adds them.

    `rows_of` pads node rows with ones. Two of these multiply a sum that is split into two numbers of the matrix's precision, which together
    have twice its digits.
    """
    w0, w1, w2, w3 = matrices
    if S0 > 0:
        d = tl.arange(0, D_PAD)[:, None]
        sums = _vector(vectors, S0) + _vector(state_S, S0)
        high = sums.to(w0.dtype)
        low = (sums - high.to(tl.float32)).to(w0.dtype)
        w0 = tl.where(d == D, high[None, :], tl.where(d == D + 1, low[None, :], w0))
    return w0, w1, w2, w3


@triton.jit
def _active(sums, dtype: tl.constexpr, slopes, width: tl.constexpr, last: tl.constexpr, CONVEX: tl.constexpr, SHARED: tl.constexpr):
    """A layer's activation of its float32 sums: negative sums times a slope. In the weights' precision; the last layer's in float32."""
    if SHARED:
        slope = tl.load(slopes)
    else:
        slope = _vector(slopes, width)[None, :]
    if not last:
        sums = sums.to(dtype)
        slope = slope.to(dtype)
    if CONVEX:
        active = tl.maximum(sums, sums * slope).to(sums.dtype)
    else:
        active = tl.where(sums >= 0, sums, sums * slope)
    return active


@triton.jit
def _layer(x, weight, vectors, width: tl.constexpr, last: tl.constexpr, CONVEX: tl.constexpr, SHARED: tl.constexpr):
    """One hidden layer: float32 sums of products in the weights' precision, see `_active`."""
    sums = tl.dot(x, weight, input_precision="tf32x3")
    # A plain addition would make the biases the product's initial value, which takes a register for each sum during the product.
    sums = tl.fma(sums, 1.0, _vector(vectors, width)[None, :])
    return _active(sums, weight.dtype, vectors + width, width, last, CONVEX, SHARED)


@triton.jit
def _out(x, vectors, width: tl.constexpr):
    return tl.sum(x * _vector(vectors, width)[None, :], 1) + tl.load(vectors + width)


@triton.jit
def rows_of(node, exists, rows_ND, D: tl.constexpr, D_PAD: tl.constexpr):
    """[tile, D_PAD]: the rows of nodes (int32[tile]), padded with ones; node 0's row for a node that does not exist."""
    d = tl.arange(0, D_PAD)
    row = tl.where(exists, node, 0)[:, None].to(tl.int64)
    return tl.load(rows_ND + row * D + d[None, :], mask=(d < D)[None, :], other=1.0)


@triton.jit
def logits_of(
    x, state_S, matrices, vectors, D: tl.constexpr,
    D_PAD: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr, S3: tl.constexpr, CONVEX: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """float32[tile]: the logits of node rows.

    S0 = 0     an inner product of the node row with the state, float32[D]
    S0 … S3    padded widths of the hidden layers (0 = no such layer) of an MLP
    CONVEX     no slope is above 1, so a layer's activation is max(x, slope · x)
    SHARED     each layer has one slope
    matrices   see `with_state` · vectors: each layer's biases and slopes, then the output's weights and bias
    """
    w0, w1, w2, w3 = matrices
    if S0 == 0:
        d = tl.arange(0, D_PAD)
        state = tl.load(state_S + d, mask=d < D, other=0.0)
        logit = tl.sum(x.to(tl.float32) * state[None, :], 1)
    else:
        h = _active(tl.dot(x, w0, input_precision="tf32x3"), w0.dtype, vectors + S0, S0, S1 == 0, CONVEX, SHARED)
        vectors += 2 * S0
        if S1 == 0:
            logit = _out(h, vectors, S0)
        else:
            h1 = _layer(h, w1, vectors, S1, S2 == 0, CONVEX, SHARED)
            vectors += 2 * S1
            if S2 == 0:
                logit = _out(h1, vectors, S1)
            else:
                h2 = _layer(h1, w2, vectors, S2, S3 == 0, CONVEX, SHARED)
                vectors += 2 * S2
                if S3 == 0:
                    logit = _out(h2, vectors, S2)
                else:
                    logit = _out(_layer(h2, w3, vectors, S3, True, CONVEX, SHARED), vectors + 2 * S3, S3)
    return logit


@triton.jit
def own_of(logit, LOG_ACTIVATION: tl.constexpr):
    """float32[tile]: the nodes' own part of their ranks, NaN where the logit is not finite."""
    finite = is_finite(logit)
    if LOG_ACTIVATION:
        logit = log_sigmoid(logit)
    return tl.where(finite, logit, float("nan"))


@triton.jit
def clear_finite(wrong, finite_1):
    """Write 0 to finite_1 (float32[1]) if the logit of some node is wrong (int32[tile]: 1); otherwise leave it as it is."""
    tl.store(finite_1, 0.0, mask=tl.max(wrong, 0) == 1)


@triton.jit
def slots_of(first, TILE: tl.constexpr, CHILDREN: tl.constexpr):
    """int32[TILE]: the slots in a beam that hold the parents of the candidates from `first` on, which is a multiple of TILE."""
    if TILE % CHILDREN == 0:
        slot = first // CHILDREN + tl.arange(0, TILE) // CHILDREN
    else:
        slot = (first + tl.arange(0, TILE)) // CHILDREN
    return slot


@triton.jit
def parents_of(kept_K, first, slots, TILE: tl.constexpr, CHILDREN: tl.constexpr):
    """The parents of the candidates of `slots_of`, −1 past the end of the beam."""
    slot = slots_of(first, TILE, CHILDREN)
    return tl.load(kept_K + slot, mask=slot < slots, other=-1)


@triton.jit
def children_of(
    parent, first, first_child_N, level_start, next_start, TILE: tl.constexpr, CHILDREN: tl.constexpr, UNIFORM: tl.constexpr
):  # fmt: skip
    """The node numbers of the candidates of `slots_of`, whose parents are int32[TILE], and which of them exist."""
    exists = parent >= 0
    if TILE % CHILDREN == 0:
        child = tl.arange(0, TILE) % CHILDREN
    else:
        child = (first + tl.arange(0, TILE)) % CHILDREN
    if UNIFORM:
        number = next_start + (parent - level_start) * CHILDREN + child
    else:
        number = tl.load(first_child_N + parent, mask=exists, other=0) + child
        exists = exists & (number < tl.load(first_child_N + parent + 1, mask=exists, other=0))
    return number, exists


@triton.jit
def candidates_of(
    x, number, exists, inherited, mask_address, excluded_X, excluded_count, excluded_steps, state_S, matrices, vectors, gamma,
    memory_3, memory_weight, D: tl.constexpr,
    D_PAD: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr, S3: tl.constexpr, CONVEX: tl.constexpr, SHARED: tl.constexpr,
    LOG_ACTIVATION: tl.constexpr, MEMORY: tl.constexpr,
):  # fmt: skip
    """A tile's candidates: nodes, ranks and keys, −1 and −inf where there is no candidate; and int32: 1 where a logit is not finite."""
    exists = is_eligible(number, exists, mask_address, excluded_X, excluded_count, excluded_steps)
    logit = logits_of(x, state_S, matrices, vectors, D, D_PAD, S0, S1, S2, S3, CONVEX, SHARED)
    wrong = (exists & (is_finite(logit) == 0)).to(tl.int32)
    rank = own_of(logit, LOG_ACTIVATION) + gamma * inherited
    exists = exists & is_finite(rank)  # a node without a finite rank cannot be ordered, so it is no candidate
    key = rank
    if MEMORY:
        key = rank + memory_weight * memory_of(number, exists, memory_3)
        exists = exists & is_finite(key)
        key = tl.where(exists, key, MINUS_INF)
    return tl.where(exists, number, -1), tl.where(exists, rank, MINUS_INF), key, wrong


@triton.jit(
    do_not_specialize=[
        "slots", "kept_stride", "before", "level_start", "next_start", "excluded_steps",
        "state_stride", "state_offset", "candidate_stride", "candidates", "tiles",
    ]
)  # fmt: skip
def score_children_kernel(
    kept_BK, kept_ranks_BK, kept_keys_BK, slots, kept_stride, before, size_B, first_child_N, level_start, next_start,
    masks_B, excluded, excluded_from_B, excluded_count_B, excluded_steps,
    rows_ND, state_BLS, state_stride, state_offset, weights, vectors, D: tl.constexpr, gamma, finite_B, memory_B3, memory_weight,
    nodes_BC, ranks_BC, keys_BC, candidate_stride, candidates, tiles,
    CHILDREN: tl.constexpr, UNIFORM: tl.constexpr, TILE: tl.constexpr,
    D_PAD: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr, S3: tl.constexpr, CONVEX: tl.constexpr, SHARED: tl.constexpr,
    LOG_ACTIVATION: tl.constexpr, MEMORY: tl.constexpr, DEPENDENT: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """The children of a beam, in the beam's order, with their ranks own + γ · rank of the parent; `tiles` tiles of one query a program.

    kept_BK, kept_ranks_BK   int32, float32: the first `slots` entries of each row are the beam, −1 after its end
    size_B                   int32[B]: the beam size; entries past it are ignored
    BEFORE                   0: the beam is selected. Otherwise its first `before` entries, at most BEFORE, are the candidates of its level.
                               Every program chooses the best of them by their keys, as `count_kernel` does; then `tiles` is 1
    masks_B                  int64[B]: the addresses of masks, 0 = no mask
    excluded                 int32: the ascending lists of excluded nodes end to end; a query's begins at excluded_from_B, int32[B]
    excluded_steps             of a binary search in the longest list
    CHILDREN                 the most children of a node; UNIFORM: every node has so many, so child numbers are computed
    finite_B                 float32[B], out: see `clear_finite`
    memory_B3, memory_weight   see `memory_of`; λ. Not read without MEMORY
    nodes_BC, ranks_BC       out: −1 and −inf where a candidate is missing or not eligible, or its rank or key is not finite
    keys_BC                  out, with MEMORY: rank + λ · mem, −inf likewise
    """
    matrices = matrices_of(weights, D_PAD, S0, S1, S2, S3)  # before the wait: no kernel writes the weights
    begin_after(DEPENDENT)
    b = tl.program_id(1)
    kept_BK += b.to(tl.int64) * kept_stride
    kept_ranks_BK += b.to(tl.int64) * kept_stride
    slots = tl.minimum(slots, tl.load(size_B + b))
    mask_address = tl.load(masks_B + b)
    excluded_count = tl.load(excluded_count_B + b)
    excluded_X = excluded + tl.load(excluded_from_B + b)
    state_S = state_BLS + b.to(tl.int64) * state_stride + state_offset
    if S0 > 0:
        state_S = tl.multiple_of(state_S, 16)  # states are padded to a layer's width
    matrices = with_state(matrices, state_S, vectors, D, D_PAD, S0)
    begin = tl.program_id(0) * tiles * TILE
    used_tiles = tl.cdiv(slots * CHILDREN - begin, TILE)  # later tiles have empty slots only
    if BEFORE > 0:
        k = tl.arange(0, BEFORE)
        candidate = tl.load(kept_BK + k, mask=k < before, other=-1)
        candidate_rank = tl.load(kept_ranks_BK + k, mask=k < before, other=0.0)
        candidate_key = candidate_rank
        if MEMORY:
            candidate_key = tl.load(kept_keys_BK + b.to(tl.int64) * kept_stride + k, mask=k < before, other=0.0)
        standing = standing_of(candidate_key, candidate, k)
        position = tl.sum((standing[:, None] > standing[None, :]).to(tl.int32), 0)
        position = tl.where(candidate >= 0, position, BEFORE)
        slot = slots_of(begin, TILE, CHILDREN)
        chosen = (position[:, None] == slot[None, :]) & (slot < slots)[None, :]
        parent = tl.max(tl.where(chosen, candidate[:, None], -1), 0)
        inherited = tl.sum(tl.where(chosen, candidate_rank[:, None], 0.0), 0)
    else:
        parent = parents_of(kept_BK, begin, slots, TILE, CHILDREN)
        later = parents_of(kept_BK, begin + TILE, slots, TILE, CHILDREN)
    number, exists = children_of(parent, begin, first_child_N, level_start, next_start, TILE, CHILDREN, UNIFORM)
    x = rows_of(number, exists, rows_ND, D, D_PAD)
    wrong = tl.zeros([TILE], tl.int32)
    out = b.to(tl.int64) * candidate_stride
    for tile in range(0, tiles):
        node = tl.full([TILE], -1, tl.int32)
        rank = tl.full([TILE], MINUS_INF, tl.float32)
        key = rank
        if tile < used_tiles:
            if BEFORE == 0:  # load the next tile's rows and the parents of the one after it while this tile is scored
                next_number, next_exists = children_of(later, begin + TILE, first_child_N, level_start, next_start, TILE, CHILDREN, UNIFORM)
                next_x = rows_of(next_number, next_exists, rows_ND, D, D_PAD)
                later = parents_of(kept_BK, begin + 2 * TILE, slots, TILE, CHILDREN)
                parent = parents_of(kept_BK, begin, slots, TILE, CHILDREN)
                inherited = tl.load(kept_ranks_BK + slots_of(begin, TILE, CHILDREN), mask=parent >= 0, other=0.0)
                number, exists = children_of(parent, begin, first_child_N, level_start, next_start, TILE, CHILDREN, UNIFORM)
            node, rank, key, tile_wrong = candidates_of(
                x, number, exists, inherited, mask_address, excluded_X, excluded_count, excluded_steps, state_S, matrices, vectors, gamma,
                memory_B3 + 3 * b, memory_weight, D, D_PAD, S0, S1, S2, S3, CONVEX, SHARED, LOG_ACTIVATION, MEMORY,
            )  # fmt: skip
            wrong |= tile_wrong
            if BEFORE == 0:
                x = next_x
        c = begin + tl.arange(0, TILE)
        tl.store(nodes_BC + out + c, node, mask=c < candidates)
        tl.store(ranks_BC + out + c, rank, mask=c < candidates)
        if MEMORY:
            tl.store(keys_BC + out + c, key, mask=c < candidates)
        begin += TILE
    clear_finite(wrong, finite_B + b)


@triton.jit(do_not_specialize=["state_stride", "state_width", "state_levels", "nodes"])
def score_levels_kernel(
    tiles_3, rows_ND, state_BLS, state_stride, state_width, state_levels, weights, vectors, D: tl.constexpr, finite_B, own_BN, nodes,
    TILE: tl.constexpr,
    D_PAD: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr, S3: tl.constexpr, CONVEX: tl.constexpr, SHARED: tl.constexpr,
    LOG_ACTIVATION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The own part of the rank of each node of whole levels; one tile of one level and one query a program.

    tiles_3       int32[tiles, 3]: the number of a tile's state, its first node and its number of nodes
    state_levels  1 where all levels share a state
    finite_B, own_BN  float32[B] and float32[B, nodes], by node number, out: see `clear_finite` and `own_of`
    """
    matrices = matrices_of(weights, D_PAD, S0, S1, S2, S3)
    begin_after(DEPENDENT)
    b = tl.program_id(1)
    level = tl.load(tiles_3 + 3 * tl.program_id(0))
    first = tl.load(tiles_3 + 3 * tl.program_id(0) + 1)
    count = tl.load(tiles_3 + 3 * tl.program_id(0) + 2)
    n = tl.arange(0, TILE)
    state_S = state_BLS + b.to(tl.int64) * state_stride + tl.minimum(level, state_levels - 1) * state_width
    if S0 > 0:
        state_S = tl.multiple_of(state_S, 16)
    matrices = with_state(matrices, state_S, vectors, D, D_PAD, S0)
    x = rows_of(first + n, n < count, rows_ND, D, D_PAD)
    logit = logits_of(x, state_S, matrices, vectors, D, D_PAD, S0, S1, S2, S3, CONVEX, SHARED)
    clear_finite(((n < count) & (is_finite(logit) == 0)).to(tl.int32), finite_B + b)
    tl.store(own_BN + b.to(tl.int64) * nodes + first + n, own_of(logit, LOG_ACTIVATION), mask=n < count)


@triton.jit(do_not_specialize=["nodes", "levels", "width", "kept_stride"])
def rank_level_kernel(
    own_BN, nodes, ancestors_LK, levels, width, ranks_BK, kept_stride, gamma, TILE: tl.constexpr, DEPENDENT: tl.constexpr
):
    """The ranks of a level's nodes, from their own parts and those of their ancestors below the root.

    ancestors_LK  int32[levels, width]: node numbers from level 1 down to the level's own
    """
    begin_after(DEPENDENT)
    b = tl.program_id(1)
    k = tl.program_id(0) * TILE + tl.arange(0, TILE)
    exists = k < width
    rank = tl.zeros([TILE], tl.float32)
    for level in range(0, levels):
        node = tl.load(ancestors_LK + level * width + k, mask=exists, other=0)
        rank = tl.load(own_BN + b.to(tl.int64) * nodes + node, mask=exists, other=0.0) + gamma * rank
    tl.store(ranks_BK + b.to(tl.int64) * kept_stride + k, rank, mask=exists)
