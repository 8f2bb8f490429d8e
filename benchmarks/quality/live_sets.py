"""A log without some items, and for each of them the few events of training users that a live service gets.

Knows a prepared log. Does not know models.

    hidden items   a share of those that at least `events` training users touched after an old item, drawn by a seed
    an event       the old items of a training user, drawn by the seed, before the hidden item; of a list without order, all its others

Legend: I items of the whole log, n hidden items, E events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from espalier.arrays import Bool, Int64
from espalier.errors import InvalidConfig
from espalier.items import ItemTable
from training.data.interactions import Interactions
from training.data.item_content import item_content
from training.data.splits import EvaluationPair, Split
from training.deep.prepare import Prepared
from training.neighbours.cooccurrence import lists_of
from training.specification.deep import DeepConfig


@dataclass(frozen=True)
class HiddenItems:
    """A log with all items, the same log without some, and events of these.

    whole, old  training data; `old` has no hidden items and no rows for them. Its held-out queries are validation users, so nothing
                that is derived from a bundle's held-out queries comes from test users
    hidden_n    int64[n]: item rows of `whole`, ascending
    events      by hidden item: histories, item rows of `old`, oldest first
    users       by hidden item: the training users that the events are of
    """

    whole: Prepared
    old: Prepared
    hidden_n: Int64
    events: tuple[tuple[Int64, ...], ...]
    users: tuple[tuple[int, ...], ...]

    @cached_property
    def counts(self) -> list[int]:
        """By hidden item: its number of events of training users."""
        lists = self.whole.split.lists
        return [int(count) for count in lists_of(lists, self.whole.split.train).events_I[self.hidden_n]]

    @cached_property
    def new_row_I(self) -> Int64:
        """int64[I]: rows of `whole` → rows in which the hidden items follow the old ones."""
        old_I = np.ones(len(self.whole.items), np.bool_)
        old_I[self.hidden_n] = False
        row_I = np.empty(len(old_I), np.int64)
        row_I[old_I] = np.arange(int(old_I.sum()))
        row_I[self.hidden_n] = len(self.old.items) + np.arange(len(self.hidden_n))
        return row_I

    @cached_property
    def ids(self) -> list[str]:
        """The ids in the order of `new_row_I`."""
        rows = np.argsort(self.new_row_I)
        return self.whole.items.ids_of(rows)

    @cached_property
    def items(self) -> ItemTable:
        """The items in the order of `ids`."""
        return ItemTable.build(self.whole.items.to_table().take(pa.array(np.argsort(self.new_row_I))))

    @cached_property
    def fields(self) -> list[dict[str, Any]]:
        """By hidden item: its fields in the table, without its id."""
        rows = self.whole.items.to_table().take(pa.array(self.hidden_n)).drop_columns("id").to_pylist()
        return [{name: value for name, value in row.items() if value is not None} for row in rows]

    def with_events(self) -> Split:
        """The data for neighbours: the whole log in the rows of `new_row_I`, with only the chosen events of hidden items."""
        split, lists = self.whole.split, self.whole.split.lists
        is_hidden_I = np.zeros(lists.item_count, np.bool_)
        is_hidden_I[self.hidden_n] = True
        kept_E = ~is_hidden_I[lists.item_of_event_E]
        for item, users in zip(self.hidden_n.tolist(), self.users, strict=True):
            for user in users:
                positions = np.flatnonzero(lists.of(user) == item)
                first = positions[0] if lists.order == "none" else positions[positions > 0][0]
                kept_E[lists.offset_U1[user] + first] = True
        renumbered_lists = _with_events(lists, kept_E, self.new_row_I, pa.array(self.ids, lists.item_ids.type))
        return replace(split, lists=renumbered_lists, validation=self.moved(split.validation), test=self.moved(split.test), final=None)

    def moved(self, pairs: Sequence[EvaluationPair]) -> list[EvaluationPair]:
        """Queries of `whole` in the rows of `new_row_I`."""
        return [replace(pair, history=self.new_row_I[pair.history], relevant=self.new_row_I[pair.relevant]) for pair in pairs]


def hide(config: DeepConfig, whole: Prepared, share: float, events: int, seed: int) -> HiddenItems:
    """Hide a share of the items. Raises InvalidConfig if no item has `events` events."""
    lists, train = whole.split.lists, whole.split.train
    rng = np.random.default_rng([seed, 7])
    counts_I = np.zeros(lists.item_count, np.int64)
    for user in train.tolist():
        counts_I[np.unique(lists.of(user)[0 if lists.order == "none" else 1 :])] += 1
    hideable_items = np.flatnonzero(counts_I >= events)
    drawn_items = np.sort(rng.permutation(hideable_items)[: max(1, int(share * len(hideable_items)))])
    is_hidden_I = np.zeros(lists.item_count, np.bool_)
    is_hidden_I[drawn_items] = True
    pairs_of: dict[int, list[tuple[int, Int64]]] = {int(item): [] for item in drawn_items}
    for user, item, history in _events(lists, train, is_hidden_I):
        before = history[~is_hidden_I[history]]
        if len(before) and (not pairs_of[item] or pairs_of[item][-1][0] != user):
            pairs_of[item].append((user, before))
    usable = [item for item, item_events in pairs_of.items() if len(item_events) >= events]
    if not usable:
        raise InvalidConfig("--events", events, "few enough for some item to have as many")
    hidden = np.array(usable, np.int64)
    is_hidden_I[:] = False
    is_hidden_I[hidden] = True
    old_of_I = np.cumsum(~is_hidden_I) - 1
    chosen = [[pairs_of[item][k] for k in np.sort(rng.choice(len(pairs_of[item]), events, replace=False))] for item in usable]
    histories = tuple(tuple(old_of_I[before[~is_hidden_I[before]]] for _, before in item_events) for item_events in chosen)
    old = _without(config, whole, is_hidden_I, old_of_I)
    return HiddenItems(whole, old, hidden, histories, tuple(tuple(user for user, _ in item_events) for item_events in chosen))


def _without(config: DeepConfig, whole: Prepared, is_hidden_I: Bool, old_of_I: Int64) -> Prepared:
    split = whole.split
    kept_E, category_I = ~is_hidden_I[split.lists.item_of_event_E], split.lists.category_of_item_I
    lists = _with_events(split.lists, kept_E, old_of_I, split.lists.item_ids.filter(pa.array(~is_hidden_I)))
    lists = replace(lists, category_of_item_I=None if category_I is None else category_I[~is_hidden_I])
    has_events_U = np.diff(lists.offset_U1)[split.train] > 0

    def queries(pairs: Sequence[EvaluationPair]) -> list[EvaluationPair]:
        old_pairs = []
        for pair in pairs:
            history, relevant = (old_of_I[rows[~is_hidden_I[rows]]] for rows in (pair.history, pair.relevant))
            if len(history) and len(relevant):
                old_pairs.append(replace(pair, history=history, relevant=relevant))
        return old_pairs

    items = ItemTable.build(whole.items.to_table().filter(pa.array(~is_hidden_I)))
    validation = queries(split.validation)
    old_split = Split(lists, split.train[has_events_U], validation, validation, split.config)
    return Prepared(old_split, items, None, item_content(items, config.content))


def _with_events(lists: Interactions, kept_E: Bool, row_I: Int64, item_ids: pa.Array) -> Interactions:
    """The lists with only some events, items in other rows, without categories and times."""
    return replace(
        lists,
        item_ids=item_ids,
        offset_U1=np.concatenate([[0], np.cumsum(kept_E)])[lists.offset_U1],
        item_of_event_E=row_I[lists.item_of_event_E[kept_E]].astype(np.int32),
        category_of_item_I=None,
        time_of_event_E=None,
    )


def histories_of(whole: Prepared, max_histories: int, rng: np.random.Generator) -> dict[int, list[Int64]]:
    """Item row → histories of at most `max_histories` random training users before it, oldest first. Items without one are left out."""
    histories_by_item: dict[int, list[Int64]] = {}
    for _, item, before in _events(whole.split.lists, rng.permutation(whole.split.train), np.ones(len(whole.items), np.bool_)):
        if len(before) and len(histories_by_item.setdefault(item, [])) < max_histories:
            histories_by_item[item].append(before)
    return {item: histories for item, histories in histories_by_item.items() if histories}


def _events(lists: Interactions, users: Int64, counted_I: Bool) -> Iterator[tuple[int, int, Int64]]:
    """(user, item, the user's items before it) of each event of `counted_I`; of a list without order, all the user's other items."""
    for user in users.tolist():
        items = lists.of(user)
        for position in np.flatnonzero(counted_I[items]).tolist():
            yield user, int(items[position]), np.delete(items, position) if lists.order == "none" else items[:position]
