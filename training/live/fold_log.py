"""The lists that a fold learns from: those of a log's training users, in the item rows of the fold, with the events of live items.

Events come as in `joined_log.py`: an item that the log lacks has those that it was put with, others those of the log alone. Knows logs and
item tables. Does not know trees, rows or memories.

Legend: J items of the fold, U users, E events, n events that are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from espalier.items import ItemTable

from ..arrays import Int64
from ..data.interactions import Interactions
from ..data.splits import Split
from ..live.catalogue import JournalItems
from ..live.joined_log import in_rows_of, with_journal

SPARE = 4
"""Events that are drawn at random, in multiples of those wanted: some have no history, or are held out."""


@dataclass(frozen=True, eq=False)
class FoldLog:
    """lists: with the fold's item rows; users: the rows of those that are learned from; logged_J: bool[J], the items that the log has."""

    lists: Interactions
    users: Int64
    logged_J: NDArray[np.bool_]

    def events_of(self, items: Int64, most: int, rng: np.random.Generator) -> tuple[Int64, list[Int64]]:
        """At most so many events of each of some items, drawn without replacement: int64[n], which of `items` each is of, and histories.

        Events without a history are left out.
        """
        place_of_J = np.full(self.lists.item_count, -1, np.int64)
        place_of_J[items] = np.arange(len(items))
        places_n, histories = self._histories(rng.permutation(np.flatnonzero(place_of_J[self.lists.item_of_event_E] >= 0)))
        of_n = place_of_J[self.lists.item_of_event_E[places_n]]
        order = np.argsort(of_n, kind="stable")
        number_n = np.arange(len(order)) - np.searchsorted(of_n[order], of_n[order])
        kept = order[number_n < most]
        return of_n[kept], [histories[n] for n in kept.tolist()]

    def drawn(self, count: int, rng: np.random.Generator) -> list[Int64]:
        """The histories of at most so many events, drawn from all."""
        return self._histories(rng.integers(self.lists.event_count, size=SPARE * count))[1][:count]

    def _histories(self, places_n: Int64) -> tuple[Int64, list[Int64]]:
        """Which events at some places are learned from, and what their users had before each; of a list without an order all others."""
        lists = self.lists
        learned_U = np.zeros(lists.user_count, np.bool_)
        learned_U[self.users] = True
        user_n = np.searchsorted(lists.offset_U1, places_n, side="right") - 1
        size_n = lists.offset_U1[user_n + 1] - lists.offset_U1[user_n] - 1
        before_n = places_n - lists.offset_U1[user_n]
        unordered = lists.order == "none"
        kept = np.flatnonzero(learned_U[user_n] & ((size_n if unordered else before_n) > 0))
        histories = []
        for user, before in zip(user_n[kept].tolist(), before_n[kept].tolist(), strict=True):
            items = lists.of(user)
            histories.append(np.delete(items, before) if unordered else items[:before])
        return places_n[kept], histories


def fold_log(split: Split, journal: JournalItems, items: ItemTable, work: Path) -> FoldLog:
    """The log of a split, whose rows are other ones, for a fold of these items. Files lie in `work`.

    Raises InvalidData where nothing is left to learn from.
    """
    joined = with_journal(split, journal, work)
    row_I = items.rows_of(joined.lists.item_ids.to_pylist())
    ids = items.column("id").combine_chunks()
    lists = in_rows_of(joined.lists, ids, row_I, [], [], work)
    logged_J = np.zeros(len(items), np.bool_)
    known = items.rows_of(split.lists.item_ids.to_pylist())
    logged_J[known[known >= 0]] = True
    has_events = np.flatnonzero(np.diff(lists.offset_U1))
    return FoldLog(lists, np.intersect1d(joined.train, has_events), logged_J)


def given_counts(journal: JournalItems, items: ItemTable) -> Int64:
    """int64[J]: how many events callers say that items have had, 0 where nobody says."""
    given = {item_id: operation.body.count for item_id, operation in journal.put.items() if operation.body.count is not None}
    row_n, count_n = items.rows_of([*given]), np.array([*given.values()], np.int64)
    counts_J = np.zeros(len(items), np.int64)
    counts_J[row_n[row_n >= 0]] = count_n[row_n >= 0]
    return counts_J
