"""The tables of a fold over its items: fields, memory, tails, stacking, counts.

Item rows of a fold: first the trained items that are still there, in their order, then the live items, in the order of their handles.

Legend: I items of the bundle, R handles, J items of the fold, E entries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from espalier.arrays import Array, Int64
from espalier.items import ItemTable
from espalier.label_counts import LabelCounts
from espalier.live.items import LiveItems
from espalier.live.overlay import LiveLeaves, LiveMemory, Overlay
from espalier.memory import Memory
from espalier.stacking import Stacking
from espalier.stored_arrays import spans
from espalier.tail import Tail


@dataclass(frozen=True, eq=False)
class FoldedRows:
    """The items of a fold.

    row_I  int64[I]: each trained item's row in the fold, −1 if it is gone
    row_R  int64[R]: the row in the fold of each handle's item, likewise
    """

    row_I: Int64
    row_R: Int64

    @staticmethod
    def of(overlay: Overlay) -> FoldedRows:
        """The items of a bundle with an overlay that have a leaf that counts."""
        is_trained_R = overlay.item_R < overlay.items
        stays_I = np.ones(overlay.items, np.bool_)
        stays_I[overlay.hidden] = False
        stays_I[overlay.item_R[is_trained_R & overlay.leaf_R]] = True
        row_I = np.where(stays_I, np.cumsum(stays_I) - 1, -1)
        is_new_R = overlay.leaf_R & ~is_trained_R
        row_R = np.where(is_new_R, np.count_nonzero(stays_I) + np.cumsum(is_new_R) - 1, -1)
        row_R[is_trained_R] = row_I[overlay.item_R[is_trained_R]]
        return FoldedRows(row_I, row_R)

    @property
    def kept_rows(self) -> Int64:
        """int64: the trained item rows that are still there, in the order of the fold."""
        return np.flatnonzero(self.row_I >= 0)

    @property
    def new_handles(self) -> Int64:
        """int64: handles of items that the bundle lacks, in the order of the fold."""
        return np.flatnonzero(self.row_R >= len(self.kept_rows))

    @property
    def items(self) -> int:
        """J."""
        return len(self.kept_rows) + len(self.new_handles)

    def of_rows(self, rows: Array) -> Int64:
        """Rows of the fold for item rows of bundle and overlay (I + handle); −1 for an item that is gone, and for −1."""
        new_rows = np.concatenate([self.row_I, self.row_R, [-1]])
        return np.asarray(new_rows[np.where(rows < 0, len(new_rows) - 1, rows)])


def folded_items(trained: ItemTable, table: LiveItems, rows: FoldedRows, changed: Int64) -> ItemTable:
    """The items of the fold with their fields.

    changed  trained item rows that may have other fields than at training
    """
    columns, old_table = {}, trained.to_table()
    live_rows = np.concatenate([changed, len(trained) + rows.new_handles])
    source = np.arange(len(trained))
    source[changed] = len(trained) + np.arange(len(changed))
    source = np.append(source[rows.kept_rows], len(trained) + len(changed) + np.arange(len(rows.new_handles)))
    for name in old_table.column_names:
        kind = old_table.schema.field(name).type
        column = pa.chunked_array([*old_table.column(name).chunks, pa.array(table.values(name, live_rows), kind)], kind)
        columns[name] = column.take(pa.array(source))
    return ItemTable.build(pa.table(columns))


def folded_memory(memory: Memory, live: LiveMemory, rows: FoldedRows) -> Memory:
    """The memory with the entries of live items, without those of items that are gone. Of two values of a pair the larger counts."""
    source = rows.row_I[np.repeat(np.arange(len(memory.offset) - 1), np.diff(memory.offset))]
    live_source, live_target, live_value = live.all
    source = np.concatenate([source, rows.of_rows(live_source)])
    target = np.concatenate([rows.row_I[memory.item], rows.of_rows(live_target.astype(np.int64))])
    value = np.concatenate([memory.value, live_value])
    stays = (source >= 0) & (target >= 0)
    source, target, value = source[stays], target[stays], value[stays]
    order = np.lexsort((-value, target, source))
    first = np.append(True, (np.diff(source[order]) != 0) | (np.diff(target[order]) != 0))[: len(order)]
    source, target, value = source[order][first], target[order][first], value[order][first]
    offset = np.append(0, np.cumsum(np.bincount(source, minlength=rows.items)))
    return replace(memory, offset=offset, item=target.astype(np.int32), value=value.astype(np.float16)).bounded()


def folded_stacking(stacking: Stacking, rows: FoldedRows) -> Stacking:
    """The tables over the items of the fold. Live items have no training points, no items beside them, and the weight 1."""
    tables = stacking.tables
    label_begin, label_entries = _kept_entries(tables.label_begin, np.arange(len(tables.label_begin) - 1), tables.label, rows)
    beside_begin, beside_entries = _kept_entries(tables.beside_begin, rows.kept_rows, tables.beside, rows)
    zeros = np.zeros(len(rows.new_handles))
    return replace(
        stacking,
        tables=tables._replace(
            label_begin=label_begin,
            label=rows.row_I[tables.label[label_entries]].astype(np.int32),
            label_value=tables.label_value[label_entries],
            beside_begin=np.append(beside_begin, np.full(len(zeros), beside_begin[-1])),
            beside=rows.row_I[tables.beside[beside_entries]].astype(np.int32),
            beside_share=tables.beside_share[beside_entries],
            log_count=np.append(tables.log_count[rows.kept_rows], zeros).astype(np.float32),
            log_weight=np.append(tables.log_weight[rows.kept_rows], zeros).astype(np.float32),
        ),
    )


def _kept_entries(begin: Int64, lists: Int64, item: Array, rows: FoldedRows) -> tuple[Int64, Int64]:
    """The begins of some lists without the items that are gone, and the entries that stay."""
    entries = spans(begin[lists], begin[lists + 1])
    stays = rows.row_I[item[entries]] >= 0
    of_list = np.repeat(np.arange(len(lists)), begin[lists + 1] - begin[lists])
    return np.append(0, np.cumsum(np.bincount(of_list[stays], minlength=len(lists)))), entries[stays]


def folded_tail(tail: Tail, rows: FoldedRows, overlay: Overlay) -> Tail:
    """The tail over the items of the fold. Items with a live leaf have its tail row."""
    leaves = overlay.trees[0]
    if leaves.sparse is None:
        raise ValueError("a tail and live leaves without features")
    pool, live_J = leaves.sparse, np.full(rows.items, -1, np.int64)
    live_J[rows.row_R[leaves.handle_X]] = leaves.entry_X
    trained_J = np.append(rows.kept_rows, np.zeros(len(rows.new_handles), np.int64))
    begin_J = np.where(live_J >= 0, pool.tail_begin_P[live_J] + len(tail.feature), tail.row_begin[trained_J])
    end_J = np.where(live_J >= 0, pool.tail_end_P[live_J] + len(tail.feature), tail.row_begin[trained_J + 1])
    entries = spans(begin_J, end_J)
    feature, value = np.append(tail.feature, pool.tail_feature)[entries], np.append(tail.value, pool.tail_value)[entries]
    row_begin = np.append(0, np.cumsum(end_J - begin_J))
    return Tail(tail.info.model_copy(update={"entries": len(feature)}), row_begin, feature, value, tail.width)


def folded_counts(counts: LabelCounts, rows: FoldedRows, leaves: LiveLeaves) -> LabelCounts:
    """The counts of the items of the fold. Live items have the counts of their rows; in linear models 0."""
    counts_J = np.append(counts.counts_I[rows.kept_rows], np.zeros(len(rows.new_handles), np.int64))
    if leaves.count_P is not None:
        counts_J[rows.row_R[leaves.handle_X]] = np.rint(leaves.count_P[leaves.entry_X])
    return LabelCounts(counts_J, max(counts.points, int(counts_J.max(initial=0))))
