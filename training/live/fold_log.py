"""The lists that a fold learns from: the log's training users, in the item rows of the fold, with the events of live items.

Events come as in `joined_log.py`: an item that the log lacks has the events of its put operation, other items only those of the log. Knows
logs and item tables. Does not know trees, rows or memories.

Legend: J items of the fold, U users, E events, n events that are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from espalier.arrays import Bool, Int64
from espalier.items import ItemTable

from ..data.interactions import Interactions
from ..data.splits import Split
from ..data.user_item_matrix import events_of_items
from ..live.catalogue import JournalItems
from ..live.joined_log import renumbered_lists, with_journal

SPARE = 4
"""Events to draw for each wanted one: some have no history, or are held out."""


@dataclass(frozen=True, eq=False)
class FoldLog:
    """lists: in the fold's item rows; users: rows of the training users; logged_J: bool[J], the items that training lists of the log
    have."""

    lists: Interactions
    users: Int64
    logged_J: Bool

    def events_of(self, items: Int64, most: int, rng: np.random.Generator) -> tuple[Int64, list[Int64]]:
        """Draw at most `most` events of each item without replacement: int64[n], positions of their items in `items`, and histories.

        Events without a history are left out.
        """
        position_of_J = np.full(self.lists.item_count, -1, np.int64)
        position_of_J[items] = np.arange(len(items))
        event_n, histories = self._histories(rng.permutation(np.flatnonzero(position_of_J[self.lists.item_of_event_E] >= 0)))
        position_n = position_of_J[self.lists.item_of_event_E[event_n]]
        order = np.argsort(position_n, kind="stable")
        number_n = np.arange(len(order)) - np.searchsorted(position_n[order], position_n[order])
        drawn = order[number_n < most]
        return position_n[drawn], [histories[n] for n in drawn.tolist()]

    def draw_histories(self, count: int, rng: np.random.Generator) -> list[Int64]:
        """The histories of at most `count` events, drawn from all."""
        return self._histories(rng.integers(self.lists.event_count, size=SPARE * count))[1][:count]

    def _histories(self, event_n: Int64) -> tuple[Int64, list[Int64]]:
        """Training users' events among `event_n`, and the history of each: the items before it, or without an order all others."""
        lists = self.lists
        learned_U = np.zeros(lists.user_count, np.bool_)
        learned_U[self.users] = True
        user_n = np.searchsorted(lists.offset_U1, event_n, side="right") - 1
        size_n = lists.offset_U1[user_n + 1] - lists.offset_U1[user_n] - 1
        before_n = event_n - lists.offset_U1[user_n]
        unordered = lists.order == "none"
        usable = np.flatnonzero(learned_U[user_n] & ((size_n if unordered else before_n) > 0))
        histories = []
        for user, before in zip(user_n[usable].tolist(), before_n[usable].tolist(), strict=True):
            items = lists.of(user)
            histories.append(np.delete(items, before) if unordered else items[:before])
        return event_n[usable], histories


def fold_log(split: Split, journal: JournalItems, items: ItemTable, work: Path) -> FoldLog:
    """The log of a split, renumbered to the item rows of a fold. Files are written to `work`.
    Raises InvalidData if nothing is left to learn from.
    """
    joined = with_journal(split, journal, work)
    row_I = items.rows_of(joined.lists.item_ids.to_pylist())
    ids = items.column("id").combine_chunks()
    lists = renumbered_lists(joined.lists, ids, row_I, [], [], work)
    logged_J = np.zeros(len(items), np.bool_)
    logged_rows = items.rows_of(split.lists.item_ids.to_pylist())[events_of_items(split.lists, split.train) > 0]
    logged_J[logged_rows[logged_rows >= 0]] = True
    has_events = np.flatnonzero(np.diff(lists.offset_U1))
    return FoldLog(lists, np.intersect1d(joined.train, has_events), logged_J)


def stated_counts(journal: JournalItems, items: ItemTable) -> Int64:
    """int64[J]: the event counts that put operations state, 0 where they state none."""
    stated = {item_id: operation.body.count for item_id, operation in journal.put.items() if operation.body.count is not None}
    row_n, count_n = items.rows_of([*stated]), np.array([*stated.values()], np.int64)
    counts_J = np.zeros(len(items), np.int64)
    counts_J[row_n[row_n >= 0]] = count_n[row_n >= 0]
    return counts_J
