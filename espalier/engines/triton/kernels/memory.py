"""What a query's memory holds of nodes. For use in the kernel that scores.

Legend: B queries, X nodes of a query's list.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def memory_of(node, there, memory_3):
    """float32[tile]: mem of the nodes (int32[tile]) that are `there`, 0 for those that the query's list lacks.

    memory_3  int64[3]: the addresses of the list's nodes (int32[X], ascending) and of their mem (float32[X]), and X
    """
    nodes_X = tl.load(memory_3).to(tl.pointer_type(tl.int32))
    values_X = tl.load(memory_3 + 1).to(tl.pointer_type(tl.float32))
    count = tl.load(memory_3 + 2).to(tl.int32)
    # The last entry that is no larger than the node is one of the `size` from `low` on, if there is one.
    low = tl.zeros_like(node)
    size = count
    while size > 1:
        half = size // 2
        middle = tl.load(nodes_X + low + half, mask=there, other=0)
        low = tl.where(there & (middle <= node), low + half, low)
        size -= half
    there = there & (count > 0)
    there = there & (tl.load(nodes_X + low, mask=there, other=-1) == node)
    return tl.load(values_X + low, mask=there, other=0.0)
