"""Which items a query without a filter may get, live and trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from espalier.bundle import Bundle
from espalier.checks.random_bundles import make_bundle
from espalier.live.masks import eligible_rows
from espalier.live.rows import LiveRow, Placement
from espalier.live.state import Change, LiveState
from espalier.tree import complete_tree

ITEMS = 32


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    rng = np.random.default_rng(8)
    return make_bundle(tmp_path / "books" / "1", rng, complete_tree(rng.permutation(ITEMS), 2))


def put(state: LiveState, sequence: int, item_id: str, placed: bool = True, valid_until: float | None = None) -> Change:
    parent = int(state.bundle.tree.level(state.bundle.tree.height - 1)[sequence])
    row = LiveRow(np.zeros(state.bundle.graph_scorer.node_dim, np.float32))
    placements = (Placement(0, parent, state.next_slot(0, parent), row),) if placed else ()
    return Change(sequence, item_id, "put", {"title": "x"}, placements, valid_until)


def test_removed_deleted_and_expired_items_are_not_eligible_and_all_others_are(bundle: Bundle) -> None:
    state = LiveState(bundle)
    state.apply([put(state, 1, "new-1")])
    state.apply([put(state, 2, "new-2")])
    state.apply([put(state, 3, "new-3", valid_until=10.0)])
    state.apply([put(state, 4, "item-4"), put(state, 5, "item-5", placed=False)])  # another row; other fields alone
    state.apply([Change(6, "item-6", "delete"), Change(7, "new-2", "delete")])
    state.set_removed(["item-7", "new-1"])
    state.expire(20.0)
    rows = np.arange(ITEMS + 3)  # those of the trained items and the three new ones
    gone = {*(bundle.items.rows_of(["item-6", "item-7"]).tolist()), *range(ITEMS, ITEMS + 3)}
    assert set(rows[~eligible_rows(bundle.tree, state.overlay(), rows)].tolist()) == gone
    state.set_removed(["item-4"])  # which is live, in the place where it was trained
    again = {*bundle.items.rows_of(["item-4", "item-6"]).tolist(), *(ITEMS + 1, ITEMS + 2)}
    assert set(rows[~eligible_rows(bundle.tree, state.overlay(), rows)].tolist()) == again


def test_everything_is_eligible_where_nothing_was_written(bundle: Bundle) -> None:
    assert eligible_rows(bundle.tree, LiveState(bundle).overlay(), np.arange(ITEMS)).all()
