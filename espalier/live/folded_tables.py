"""What a bundle knows of its items besides their leaves, with live items in it: fields, memory, tails, stacking, counts.

Item rows of a fold: trained items that are still there, in their order, then live ones, in the order of their handles.

Legend: I items of the bundle, R handles, J items of the fold, E entries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from espalier.items import ItemTable
from espalier.label_counts import LabelCounts
from espalier.live.folded_chunks import spans
from espalier.live.items import LiveItems
from espalier.live.overlay import LiveLeaves, LiveMemory, Overlay
from espalier.memory import Memory
from espalier.stacking import Stacking
from espalier.tail import Tail

Array = NDArray[Any]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class FoldedRows:
    """Which items a fold has.

    row_I  int64[I]: the row that a trained item has in the fold, −1 where it is gone
    row_R  int64[R]: the row of the item of each handle, likewise
    """

    row_I: Int64
    row_R: Int64

    @staticmethod
    def of(overlay: Overlay) -> FoldedRows:
        """Those of an overlay: items that have a leaf that counts."""
        own_R = overlay.item_R < overlay.items  # handles of trained items
        there_I = np.ones(overlay.items, np.bool_)
        there_I[overlay.hidden] = False
        there_I[overlay.item_R[own_R & overlay.leaf_R]] = True
        row_I = np.where(there_I, np.cumsum(there_I) - 1, -1)
        new_R = overlay.leaf_R & ~own_R
        row_R = np.where(new_R, np.count_nonzero(there_I) + np.cumsum(new_R) - 1, -1)
        row_R[own_R] = row_I[overlay.item_R[own_R]]
        return FoldedRows(row_I, row_R)

    @property
    def kept(self) -> Int64:
        """int64: the trained item rows that are still there, in the order of the fold."""
        return np.flatnonzero(self.row_I >= 0)

    @property
    def new(self) -> Int64:
        """int64: handles of items that the bundle lacks, in the order of the fold."""
        return np.flatnonzero(self.row_R >= len(self.kept))

    @property
    def items(self) -> int:
        """J."""
        return len(self.kept) + len(self.new)

    def of_rows(self, rows: Array) -> Int64:
        """Rows of the fold for item rows of bundle and overlay (I + handle); −1 where one is gone, or −1 itself."""
        every = np.concatenate([self.row_I, self.row_R, [-1]])
        return np.asarray(every[np.where(rows < 0, len(every) - 1, rows)])


def folded_items(trained: ItemTable, table: LiveItems, rows: FoldedRows, changed: Int64) -> ItemTable:
    """The items of the fold with their fields.

    changed  trained item rows that may have other fields than at training
    """
    columns, before = {}, trained.to_table()
    others = np.concatenate([changed, len(trained) + rows.new])
    source = np.arange(len(trained))
    source[changed] = len(trained) + np.arange(len(changed))
    source = np.append(source[rows.kept], len(trained) + len(changed) + np.arange(len(rows.new)))
    for name in before.column_names:
        kind = before.schema.field(name).type
        column = pa.chunked_array([*before.column(name).chunks, pa.array(table.values(name, others), kind)], kind)
        columns[name] = column.take(pa.array(source))
    return ItemTable.build(pa.table(columns))


def folded_memory(memory: Memory, live: LiveMemory, rows: FoldedRows) -> Memory:
    """The memory with the rows and columns of live items, without those of items that are gone; of two entries the larger one."""
    source = rows.row_I[np.repeat(np.arange(len(memory.offset) - 1), np.diff(memory.offset))]
    live_source, live_target, live_value = live.all
    source = np.concatenate([source, rows.of_rows(live_source)])
    target = np.concatenate([rows.row_I[memory.item], rows.of_rows(live_target.astype(np.int64))])
    value = np.concatenate([memory.value, live_value])
    there = (source >= 0) & (target >= 0)
    source, target, value = source[there], target[there], value[there]
    order = np.lexsort((-value, target, source))
    first = np.append(True, (np.diff(source[order]) != 0) | (np.diff(target[order]) != 0))[: len(order)]
    source, target, value = source[order][first], target[order][first], value[order][first]
    offset = np.append(0, np.cumsum(np.bincount(source, minlength=rows.items)))
    return replace(memory, offset=offset, item=target.astype(np.int32), value=value.astype(np.float16)).bounded()


def folded_stacking(stacking: Stacking, rows: FoldedRows) -> Stacking:
    """The tables over the items of the fold. Live items have no training points, nothing beside them, and the weight 1."""
    tables = stacking.tables
    label = _kept_entries(tables.label_begin, np.arange(len(tables.label_begin) - 1), tables.label, rows)
    beside = _kept_entries(tables.beside_begin, rows.kept, tables.beside, rows)
    none = np.zeros(len(rows.new))
    return replace(
        stacking,
        tables=tables._replace(
            label_begin=label[0],
            label=rows.row_I[tables.label[label[1]]].astype(np.int32),
            label_value=tables.label_value[label[1]],
            beside_begin=np.append(beside[0], np.full(len(rows.new), beside[0][-1])),
            beside=rows.row_I[tables.beside[beside[1]]].astype(np.int32),
            beside_share=tables.beside_share[beside[1]],
            log_count=np.append(tables.log_count[rows.kept], none).astype(np.float32),
            log_weight=np.append(tables.log_weight[rows.kept], none).astype(np.float32),
        ),
    )


def _kept_entries(begin: Int64, lists: Int64, item: Array, rows: FoldedRows) -> tuple[Int64, Int64]:
    """Where some lists begin once they hold only items that are there, and which entries those are."""
    entries = spans(begin[lists], begin[lists + 1])
    there = rows.row_I[item[entries]] >= 0
    of_list = np.repeat(np.arange(len(lists)), begin[lists + 1] - begin[lists])
    return np.append(0, np.cumsum(np.bincount(of_list[there], minlength=len(lists)))), entries[there]


def folded_tail(tail: Tail, rows: FoldedRows, overlay: Overlay) -> Tail:
    """The tail over the items of the fold: items with a live leaf have the row that came with it."""
    leaves = overlay.trees[0]
    if leaves.sparse is None:
        raise ValueError("a tail and live leaves without features")
    pool, live_J = leaves.sparse, np.full(rows.items, -1, np.int64)
    live_J[rows.row_R[leaves.handle_X]] = leaves.entry_X
    trained_J = np.append(rows.kept, np.zeros(len(rows.new), np.int64))
    begin_J = np.where(live_J >= 0, pool.tail_begin_P[live_J] + len(tail.feature), tail.row_begin[trained_J])
    end_J = np.where(live_J >= 0, pool.tail_end_P[live_J] + len(tail.feature), tail.row_begin[trained_J + 1])
    entries = spans(begin_J, end_J)
    feature, value = np.append(tail.feature, pool.tail_feature)[entries], np.append(tail.value, pool.tail_value)[entries]
    row_begin = np.append(0, np.cumsum(end_J - begin_J))
    return Tail(tail.info.model_copy(update={"entries": len(feature)}), row_begin, feature, value, tail.width)


def folded_counts(counts: LabelCounts, rows: FoldedRows, leaves: LiveLeaves) -> LabelCounts:
    """Live items have the counts that they came with, of linear models none."""
    counts_J = np.append(counts.counts_I[rows.kept], np.zeros(len(rows.new), np.int64))
    if leaves.count_P is not None:
        counts_J[rows.row_R[leaves.handle_X]] = np.rint(leaves.count_P[leaves.entry_X])
    return LabelCounts(counts_J, max(counts.points, int(counts_J.max(initial=0))))
