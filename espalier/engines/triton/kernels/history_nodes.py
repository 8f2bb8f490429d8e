"""Histories of item rows → the ancestors of their leaves on each level.

Legend: B queries, T history, L levels, N nodes, I items.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T", "first", "height"])
def history_nodes_kernel(history_BT, leaf_of_item_I, parent_N, levels_L2, nodes_BLT, T, first, height, T_PAD: tl.constexpr):
    """One query a program.

    history_BT      int32[B, T] item rows, −1 = padding
    leaf_of_item_I  int32[I] · parent_N int32[N], not read if all levels are uniform
    levels_L2       int32[H + 1, 2]: a level's first node; children per node, 0 where they differ
    nodes_BLT       int64[B, H + 1 − first, T], out: the ancestors on the levels `first` … `height`, −1 = padding
    """
    b = tl.program_id(0)
    t = tl.arange(0, T_PAD)
    in_history = t < T
    item = tl.load(history_BT + b * T + t, mask=in_history, other=-1)
    has_item = item >= 0
    node = tl.load(leaf_of_item_I + item, mask=has_item, other=0)
    nodes_T = nodes_BLT + b.to(tl.int64) * (height + 1 - first) * T + t
    for up in range(0, height - first + 1):
        level = height - up
        tl.store(nodes_T + (level - first) * T, tl.where(has_item, node, -1).to(tl.int64), mask=in_history)
        if level > first:
            children = tl.load(levels_L2 + 2 * (level - 1) + 1)
            if children > 0:
                parent_start = tl.load(levels_L2 + 2 * (level - 1))
                node = parent_start + (node - tl.load(levels_L2 + 2 * level)) // children
            else:
                node = tl.load(parent_N + node, mask=has_item, other=0)
