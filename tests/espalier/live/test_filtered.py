"""A filter lets live items pass by the fields that they have now, as a fold with these fields would."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from espalier.bundle import Bundle
from espalier.checks.random_bundles import make_bundle, random_tree
from espalier.live import filtered
from espalier.live.filtered import LiveFilters
from espalier.live.rows import LiveRow, Placement
from espalier.live.state import Change, LiveState
from espalier.masks.filters import ItemFilters
from espalier.search import NodeMask

WIDTH = 4


class Catalogue:
    """A version with live items, and what its filters say."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle, self.state = bundle, LiveState(bundle)
        self.trained = ItemFilters([bundle.tree], bundle.items, 1 << 20)
        self.filters = LiveFilters([bundle.tree], self.trained, self.state.table)
        self.parents = [*bundle.tree.level(bundle.tree.height - 1)]

    def put(self, item_id: str, fields: dict[str, Any] | None, placed: bool = True) -> None:
        parent = self.parents[self.state.sequence % len(self.parents)]
        row = LiveRow(np.ones(WIDTH, np.float32))
        placements = (Placement(0, parent, self.state.next_slot(0, parent), row),) if placed else ()
        self.apply(Change(self.state.sequence + 1, item_id, "put", fields, placements))

    def apply(self, change: Change) -> None:
        self.state.apply([change])
        self.filters.touch(change.id)

    def passing(self, wanted: dict[str, Any], barred: dict[str, Any] | None = None) -> set[str]:
        """The items that a mask lets pass: trained leaves, and live ones by their handles."""
        overlay, tree = self.state.overlay(), self.bundle.tree
        mask = self.filters.mask(self.trained.parse(wanted, barred or {}), overlay)
        own = [row for row in range(tree.item_count) if mask.eligible_N[tree.leaf_of_item[row]] and row not in overlay.hidden]
        assert mask.live_R is not None
        live = overlay.item_R[np.flatnonzero(mask.live_R)]
        found = self.state.table.ids_of(np.concatenate([np.array(own, np.int64), live]))
        assert mask.items == len(found) == len({*found})
        self._check_nodes(mask)
        return {*found}

    def _check_nodes(self, mask: NodeMask) -> None:
        """Every node above an eligible leaf is eligible, and no other."""
        tree, overlay = self.bundle.tree, self.state.overlay()
        assert mask.live_R is not None
        leaves = overlay.trees[0]
        live = {int(parent) for parent, handle in zip(leaves.parent_X, leaves.handle_X, strict=True) if mask.live_R[handle]}
        for node in range(tree.leaf_offset - 1, -1, -1):
            below = mask.eligible_N[tree.first_child[node] : tree.first_child[node + 1]].any()
            assert mask.eligible_N[node] == (below or node in live)


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    rng = np.random.default_rng(0)
    tree = random_tree(rng, 3, 3)
    count = tree.item_count
    columns = {"colour": ["red", "blue"] * (count // 2) + ["red"] * (count % 2), "price": np.arange(count, dtype=np.float32)}
    return Catalogue(make_bundle(tmp_path, rng, tree, columns=columns | {"tags": [["a", "b"]] * count}, width=WIDTH))


def test_live_items_pass_by_their_own_fields(catalogue: Catalogue) -> None:
    trained = catalogue.passing({"colour": ["red"]})
    catalogue.put("red", {"colour": "red", "price": 2.5, "tags": ["c"]})
    catalogue.put("blue", {"colour": "blue"})
    catalogue.put("bare", {})
    assert catalogue.passing({"colour": ["red"]}) == trained | {"red"}
    assert catalogue.passing({"price": {"min": 2.2, "max": 2.8}}) == {"red"}
    assert catalogue.passing({"tags": ["c", "d"]}) == {"red"}
    assert catalogue.passing({"id": ["blue", "item-1"]}) == {"blue", "item-1"}
    everything = catalogue.passing({}, {"price": {"min": 1e9}})
    assert catalogue.passing({}, {"colour": ["red"]}) == everything - trained - {"red"}
    assert {"red", "blue", "bare"} < everything


def test_a_trained_item_passes_by_its_changed_fields_with_its_own_row_or_another(catalogue: Catalogue) -> None:
    red = catalogue.passing({"colour": ["red"]})
    kept, moved = sorted(red)[:2]
    catalogue.put(kept, {"colour": "green"}, placed=False)
    catalogue.put(moved, {"colour": "green"})
    assert catalogue.passing({"colour": ["green"]}) == {kept, moved}
    assert catalogue.passing({"colour": ["red"]}) == red - {kept, moved}
    catalogue.put("item-1" if "item-1" not in red else "item-3", {"colour": "red"}, placed=False)
    assert len(catalogue.passing({"colour": ["red"]})) == len(red) - 1


def test_a_mask_follows_puts_deletes_and_removals_and_is_kept_in_between(catalogue: Catalogue) -> None:
    filter = catalogue.trained.parse({"colour": ["red"]}, {})
    red = catalogue.passing({"colour": ["red"]})
    catalogue.put("new", {"colour": "red"})
    assert catalogue.filters.cached(filter, catalogue.state.overlay()) is None
    assert catalogue.passing({"colour": ["red"]}) == red | {"new"}
    kept = catalogue.filters.cached(filter, catalogue.state.overlay())
    assert kept is not None
    assert kept is catalogue.filters.cached(filter, catalogue.state.overlay())
    catalogue.apply(Change(catalogue.state.sequence + 1, min(red), "delete"))
    assert catalogue.passing({"colour": ["red"]}) == red - {min(red)} | {"new"}
    catalogue.put("newer", {"colour": "red"})
    removed = ["new", max(red), "later"]
    catalogue.trained.set_removed(catalogue.bundle.items.rows_of([max(red)]))
    catalogue.state.set_removed(removed)
    catalogue.filters.set_removed(removed)
    catalogue.put("later", {"colour": "red"})
    assert catalogue.passing({"colour": ["red"]}) == red - {min(red), max(red)} | {"newer"}


def test_only_what_has_changed_is_looked_at_again_and_the_log_of_changes_stays_short(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filtered, "LONGEST_LOG", 20)
    looked: list[int] = []
    matches = LiveFilters.matches

    def counted(self: LiveFilters, filter: Any, rows: Any) -> Any:
        looked.append(len(rows))
        return matches(self, filter, rows)

    monkeypatch.setattr(LiveFilters, "matches", counted)
    for i in range(8):
        catalogue.put(f"new-{i}", {"colour": "red"})
    found = catalogue.passing({"colour": ["red"]})
    catalogue.put("new-1", {"colour": "blue"})
    catalogue.put("new-9", {"colour": "red"})
    assert catalogue.passing({"colour": ["red"]}) == found - {"new-1"} | {"new-9"}
    assert looked == [8, 2]
    for i in range(15):
        catalogue.put("new-2", {"colour": "red", "price": float(i)})
    assert len(catalogue.filters._log) < 20
    assert catalogue.passing({"colour": ["red"]}) == found - {"new-1"} | {"new-9"}


def test_masks_take_no_more_than_those_of_trained_items_may_and_keep_no_old_overlay(catalogue: Catalogue) -> None:
    catalogue.put("new", {"colour": "red"})
    catalogue.passing({"colour": ["red"]})
    one = catalogue.filters._bytes
    catalogue.trained.max_bytes = 5 * one // 2
    before = weakref.ref(catalogue.state.overlay())
    for i in range(10):
        catalogue.passing({"price": {"min": float(i)}})
        assert 0 < catalogue.filters._bytes <= catalogue.trained.max_bytes
    catalogue.put("newer", {"colour": "red"})
    catalogue.state.overlay()
    assert before() is None
    catalogue.trained.max_bytes = one // 2
    assert "newer" in catalogue.passing({"colour": ["red"]})  # built again each time
    assert catalogue.filters._bytes == 0
