"""Items that are hidden and put in live: what training sees of them, what a live service is told, and what is measured."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.quality.live_sets import HiddenItems, hide
from espalier.items import ItemTable
from tests.training.logs import log_of, split_of
from training.deep.prepare import Prepared
from training.specification.models import deep_config

ITEMS = 12


@pytest.fixture(scope="module")
def hidden() -> HiddenItems:
    rng = np.random.default_rng(1)
    log = log_of([rng.permutation(ITEMS)[:8].tolist() for _ in range(60)], items=ITEMS)
    items = pa.table({"id": log.item_ids, "title": [None, *(f"book {row}" for row in range(1, ITEMS))]})
    whole = Prepared(split_of(log, 40, 10, 10), ItemTable.build(items))
    return hide(deep_config({"kind": "otm-sequence", "name": "books", "data": {"log": "log.csv"}}), whole, 0.25, 3, seed=1)


def test_training_knows_nothing_of_hidden_items(hidden: HiddenItems) -> None:
    ids = set(hidden.whole.items.ids_of(hidden.hidden_n))
    assert len(ids) == 3
    assert ids.isdisjoint(hidden.old.items.ids_of(np.arange(len(hidden.old.items))))
    old, whole = hidden.old.split, hidden.whole.split
    for user in old.train.tolist():
        before = [item for item in whole.lists.of(user).tolist() if item not in hidden.hidden_n]
        assert hidden.old.items.ids_of(old.lists.of(user)) == hidden.whole.items.ids_of(np.array(before))
    assert {pair.user for pair in old.test} <= {pair.user for pair in whole.validation}


def test_events_are_what_training_users_had_before(hidden: HiddenItems) -> None:
    for item, users, events in zip(hidden.hidden_n.tolist(), hidden.users, hidden.events, strict=True):
        assert len(set(users)) == len(events) == 3
        for user, event in zip(users, events, strict=True):
            items = hidden.whole.split.lists.of(user).tolist()
            before = [other for other in items[: items.index(item)] if other not in hidden.hidden_n]
            assert hidden.old.items.ids_of(event) == hidden.whole.items.ids_of(np.array(before))
