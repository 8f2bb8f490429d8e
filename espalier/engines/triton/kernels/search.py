"""The search of one query by one program, from the start level to the leaves. No query waits for others between levels.

Legend: B queries, K beam, C candidates, N nodes, D node row, S state, L levels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from espalier.engines.triton.kernels.score import (
    candidates_of,
    children_of,
    clear_finite,
    matrices_of,
    matrix_of,
    parents_of,
    rows_of,
    slots_of,
    with_state,
)
from espalier.engines.triton.kernels.select import select


@triton.jit(
    do_not_specialize=[
        "levels", "kept_stride", "excluded_steps", "state_stride", "candidate_stride",
    ]
)  # fmt: skip
def search_kernel(
    levels_L5, levels, above_BK, above_ranks_BK, kept_BK, kept_ranks_BK, kept_keys_BK, kept_stride,
    beam_size_B, m_B, first_child_N, masks_B, excluded, excluded_from_B, excluded_count_B, excluded_steps,
    rows_ND, state_BLS, state_stride, weights, vectors, D: tl.constexpr, gamma, finite_B, memory_B3, memory_weight,
    nodes_BC, ranks_BC, keys_BC, candidate_stride,
    CHILDREN: tl.constexpr, UNIFORM: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, FEW: tl.constexpr, SLOTS_PAD: tl.constexpr,
    D_PAD: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr, S3: tl.constexpr, CONVEX: tl.constexpr, SHARED: tl.constexpr,
    LOG_ACTIVATION: tl.constexpr, MEMORY: tl.constexpr,
):  # fmt: skip
    """Scores and selects level by level, as `score_children_kernel` and `select_kernel` do.

    levels_L5           int32[levels, 5]: the slots of the beam above and of the new beam, the first node of the level above and of the
                        level, and the offset of the level's state
    above_BK            int32: the beam above the start
    kept_BK             int32, out: a buffer for later beams; at the end the leaves, at most m_B of a query, in no order
    nodes_BC, ranks_BC, keys_BC  buffers for a level's candidates
    WIDTH, FEW, SLOTS_PAD  see `select_kernel`; no level has more candidates than WIDTH
    The other arguments are those of `score_children_kernel`.
    """
    matrices = matrices_of(weights, D_PAD, S0, S1, S2, S3)
    b = tl.program_id(0).to(tl.int64)
    nodes_C, ranks_C, keys_C = nodes_BC + b * candidate_stride, ranks_BC + b * candidate_stride, keys_BC + b * candidate_stride
    kept_K, kept_ranks_K, kept_keys_K = kept_BK + b * kept_stride, kept_ranks_BK + b * kept_stride, kept_keys_BK + b * kept_stride
    from_K, from_ranks_K = above_BK + b * kept_stride, above_ranks_BK + b * kept_stride
    beam_size = tl.load(beam_size_B + b)
    mask_address = tl.load(masks_B + b)
    excluded_count = tl.load(excluded_count_B + b)
    excluded_X = excluded + tl.load(excluded_from_B + b)
    wrong = tl.zeros([TILE], tl.int32)
    for step in range(0, levels):
        level_5 = levels_L5 + 5 * step
        slots = tl.minimum(tl.load(level_5), beam_size)
        keep = tl.load(level_5 + 1)
        level_start, next_start = tl.load(level_5 + 2), tl.load(level_5 + 3)
        state_S = state_BLS + b * state_stride + tl.load(level_5 + 4)
        if S0 > 0:
            state_S = tl.multiple_of(state_S, 16)  # states are padded to a layer's width
        w0 = 0
        if S0 > 0:
            w0 = matrix_of(weights, D_PAD, S0)  # read again on each level: keeping it would take registers
        scorer = with_state((w0, matrices[1], matrices[2], matrices[3]), state_S, vectors, D, D_PAD, S0)
        parent = parents_of(from_K, 0, slots, TILE, CHILDREN)
        number, exists = children_of(parent, 0, first_child_N, level_start, next_start, TILE, CHILDREN, UNIFORM)
        x = rows_of(number, exists, rows_ND, D, D_PAD)
        later = parents_of(from_K, TILE, slots, TILE, CHILDREN)
        candidates = slots * CHILDREN
        for first in range(0, candidates, TILE):
            number, exists = children_of(later, first + TILE, first_child_N, level_start, next_start, TILE, CHILDREN, UNIFORM)
            next_x = rows_of(number, exists, rows_ND, D, D_PAD)
            later = parents_of(from_K, first + 2 * TILE, slots, TILE, CHILDREN)
            parent = parents_of(from_K, first, slots, TILE, CHILDREN)
            inherited = tl.load(from_ranks_K + slots_of(first, TILE, CHILDREN), mask=parent >= 0, other=0.0)
            number, exists = children_of(parent, first, first_child_N, level_start, next_start, TILE, CHILDREN, UNIFORM)
            node, rank, key, tile_wrong = candidates_of(
                x, number, exists, inherited, mask_address, excluded_X, excluded_count, excluded_steps, state_S, scorer, vectors, gamma,
                memory_B3 + 3 * b, memory_weight, D, D_PAD, S0, S1, S2, S3, CONVEX, SHARED, LOG_ACTIVATION, MEMORY,
            )  # fmt: skip
            wrong |= tile_wrong
            c = first + tl.arange(0, TILE)
            tl.store(nodes_C + c, node, mask=c < candidates)
            tl.store(ranks_C + c, rank, mask=c < candidates)
            if MEMORY:
                tl.store(keys_C + c, key, mask=c < candidates)
            x = next_x
        tl.debug_barrier()  # afterwards all threads of the program see each other's writes
        size = beam_size
        if step == levels - 1:
            size = tl.load(m_B + b)
        else:
            keep = tl.minimum(keep, beam_size)  # later levels read no more of the beam
        select(nodes_C, ranks_C, keys_C, candidates, size, kept_K, kept_ranks_K, kept_keys_K, keep, WIDTH, True, FEW, SLOTS_PAD, MEMORY)
        tl.debug_barrier()
        from_K, from_ranks_K = kept_K, kept_ranks_K
    clear_finite(wrong, finite_B + b)
