"""The memory and the popularity of a fold's items, counted anew from lists: what the formula of the bundle's memory makes of them.

The weights of a history's places, λ and the repeat term stay as training chose them. Of an item that the log
lacks the entries of before stay, too, where it came with a count, with which they were made, or without events; of two the larger counts.

Knows lists and memories. Does not know trees.

Legend: J items of the fold, E entries.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from espalier.bundle_writer import GraphContent
from espalier.label_counts import LabelCounts
from espalier.manifest import MemoryFormula
from espalier.memory import LARGEST_VALUE, Memory

from ..live.fold_log import FoldLog
from ..neighbours.cooccurrence import lists_of
from ..neighbours.fit import WITHOUT_ORDER, fitted_to

log = logging.getLogger(__name__)

Int64 = NDArray[np.int64]


def counted_anew(content: GraphContent, lists: FoldLog, given_J: Int64) -> GraphContent:
    """The content with the counts and the memory that the lists give.

    given_J  int64[J]: events that callers say items have had; 0: nobody says
    A memory of which nobody knows how it was made stays as it is.
    """
    events_J = lists_of(lists.lists, lists.users).events_I
    placed_J = events_J if content.counts is None else np.maximum(events_J, content.counts.counts_I)
    most = int(placed_J.max(initial=0))  # as of a placed item: none is taken to be more popular than the most popular one
    counts_J = np.where(lists.logged_J, np.maximum(events_J, np.minimum(given_J, most)), placed_J)
    counts = LabelCounts(counts_J, int(counts_J.sum()))
    memory = content.memory
    if memory is None or memory.formula is None:
        log.info("the memory stays as it is: the bundle %s", "has none" if memory is None else "does not say how it was made")
        return replace(content, counts=counts)
    counted = _counted(memory, memory.formula, lists)
    placed_better_J = ~lists.logged_J & ((given_J > events_J) | (events_J == 0))
    return replace(content, counts=counts, memory=_joined(counted, memory, placed_better_J))


def _counted(memory: Memory, formula: MemoryFormula, lists: FoldLog) -> Memory:
    """As many neighbours an item as the memory has, at most, by descending S."""
    names = formula.model_dump(exclude={"unit"})
    found = fitted_to(lists.lists, lists.users, WITHOUT_ORDER | names, seed=0).lists.limited(int(np.diff(memory.offset).max(initial=0)))
    value = np.minimum(found.score_N / np.float32(formula.unit), LARGEST_VALUE).astype(np.float16)
    return replace(memory, offset=found.offset_I1, item=found.item_N.astype(np.int32), value=value)


def _joined(counted: Memory, placed: Memory, kept_J: NDArray[np.bool_]) -> Memory:
    """The counted entries with the placed ones that lead from or to some items (kept_J); each row by ascending item."""
    source = np.repeat(np.arange(len(placed.offset) - 1), np.diff(placed.offset))
    kept = kept_J[source] | kept_J[placed.item]
    source = np.append(np.repeat(np.arange(len(counted.offset) - 1), np.diff(counted.offset)), source[kept])
    item, value = np.append(counted.item, placed.item[kept]), np.append(counted.value, placed.value[kept])
    order = np.lexsort((-value, item, source))
    source, item, value = source[order], item[order], value[order]
    first = np.append(True, (np.diff(source) != 0) | (np.diff(item) != 0))[: len(order)] & (value > 0)
    offset = np.append(0, np.cumsum(np.bincount(source[first], minlength=len(placed.offset) - 1)))
    return replace(counted, offset=offset, item=item[first], value=value[first]).bounded()
