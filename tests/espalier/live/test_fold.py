"""A bundle with live items in it: what it knows of its items, and what is refused. That its searches are right is in test_oracle.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.engine_comparison import wrong_beams
from benchmarks.random_bundles import make_bundle, random_memory, random_queries, random_tree
from benchmarks.random_live import random_state
from espalier.bundle import Bundle
from espalier.bundle_writer import write_bundle
from espalier.engines import open_engine
from espalier.errors import InvalidData
from espalier.label_counts import LabelCounts
from espalier.live.fold import folded, write_fold
from espalier.live.folded_chunks import folded_tree
from espalier.live.rows import LiveRow, Placement
from espalier.live.state import Change, LiveState
from espalier.search import SearchParams
from tests.espalier.bundle.parts import content_of, draft_of
from tests.espalier.drawn_bundles import drawn_bundle


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """36 items in six parents of six leaves, with numbers and lists as columns, and a memory."""
    rng = np.random.default_rng(3)
    tree = random_tree(rng, 2, 6, ragged=False)
    columns = {"price": pa.array(range(36), pa.int32()), "tags": pa.array([["a"]] * 36)}
    return make_bundle(tmp_path, rng, tree, memory=random_memory(rng, 36, 3), columns=columns)


def put(state: LiveState, item_id: str, fields: dict[str, Any] | None = None, **memory: Any) -> None:
    parent = 3
    row = LiveRow(np.ones(state.bundle.node_rows_ND.shape[1], np.float32), **memory)
    placement = Placement(0, parent, state.next_slot(0, parent), row)
    state.apply([Change(state.sequence + 1, item_id, "put", fields or {}, (placement,))])


def delete(state: LiveState, item_id: str) -> None:
    state.apply([Change(state.sequence + 1, item_id, "delete")])


def test_items_are_counted_anew_and_carry_their_fields(bundle: Bundle) -> None:
    state = LiveState(bundle)
    delete(state, "item-4")
    put(state, "item-7", {"title": "Other", "price": 70})
    put(state, "new-a", {"title": "New", "tags": ["b", "c"]})
    put(state, "gone")
    put(state, "new-b")
    delete(state, "gone")
    fold = folded(bundle, state.overlay(), state.table)
    items = fold.content.items
    rows = {item_id: row for row, item_id in enumerate(items.column("id").to_pylist())}
    assert len(items) == 37 == fold.content.tree.item_count
    assert {"item-4", "gone"}.isdisjoint(rows)
    assert (rows["item-3"], rows["item-5"], rows["item-35"], rows["new-a"], rows["new-b"]) == (3, 4, 34, 35, 36)
    table = items.to_table().to_pylist()
    assert table[rows["item-7"]] == {"id": "item-7", "title": "Other", "price": 70, "tags": None}
    assert table[rows["new-a"]] == {"id": "new-a", "title": "New", "price": None, "tags": ["b", "c"]}
    assert table[rows["new-b"]] == {"id": "new-b", "title": None, "price": None, "tags": None}
    assert table[rows["item-8"]] == {"id": "item-8", "title": "Title 8", "price": 8, "tags": ["a"]}
    assert items.column("price").type == pa.int32()
    assert fold.rows.row_I[[3, 4, 5]].tolist() == [3, -1, 4]
    handles = [fold.rows.row_R[state.table.entry(item_id).handle] for item_id in ("item-7", "new-a", "gone", "new-b")]  # type: ignore[union-attr]
    assert handles == [rows["item-7"], 35, -1, 36]
    assert fold.rows.of_rows(np.array([35, 4, -1])).tolist() == [34, -1, -1]


def test_a_row_of_the_memory_that_is_too_long_for_a_bundle_keeps_its_largest_entries(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = LiveState(bundle)
    put(state, "new", memory_to=tuple((f"item-{item}", float(item % 7 + 1)) for item in range(30)))
    monkeypatch.setattr("espalier.memory.MAX_ROW", 20)
    memory = folded(bundle, state.overlay(), state.table).content.memory  # type: ignore[union-attr]  # of graphs
    assert memory is not None
    assert np.diff(memory.offset).max() == 20
    largest = sorted(range(30), key=lambda item: (-(item % 7), item))[:20]
    assert memory.item[memory.offset[36] :].tolist() == sorted(largest)
    assert memory.value[memory.offset[36] :].tolist() == [item % 7 + 1 for item in sorted(largest)]


def test_a_live_entry_of_the_memory_counts_as_much_as_after_a_fold(bundle: Bundle) -> None:
    """It is rounded to 16 bit when the item is placed, and no larger than these can be."""
    state = LiveState(bundle)
    put(state, "new", memory_to=(("item-1", 0.3), ("item-2", 1e6)))
    overlay = state.overlay()
    memory = folded(bundle, overlay, state.table).content.memory  # type: ignore[union-attr]  # of graphs
    assert overlay.memory is not None
    assert memory is not None
    values = memory.value[memory.offset[36] :].astype(np.float64).tolist()
    assert values == [float(np.float16(0.3)), float(np.finfo(np.float16).max)]
    assert overlay.memory.value[1:3].tolist() == values


@pytest.mark.parametrize(
    ("leaves", "what"),
    [
        ([(3, 0)], "slot"),
        ([(2, 0)], "slot"),
        ([(0, 3)], "parent"),
        ([(43, 0)], "parent"),
        ([(3, -1)], "slot"),
        ([(3, 8), (3, 8)], "slot 8"),
    ],
)
def test_a_leaf_that_does_not_fit_is_refused(bundle: Bundle, leaves: list[tuple[int, int]], what: str) -> None:
    parent_n, slot_n = np.array(leaves).T
    with pytest.raises(InvalidData, match=what):
        folded_tree(bundle.tree, np.arange(36), parent_n, slot_n, 36 + np.arange(len(leaves)))


def test_a_fold_knows_how_many_events_live_items_have_had(bundle: Bundle, tmp_path: Path) -> None:
    counted = content_of(bundle, counts=LabelCounts(np.arange(36), 100))
    bundle = write_bundle(tmp_path / "counted" / "1", draft_of(bundle), counted)
    state = LiveState(bundle)
    delete(state, "item-4")
    put(state, "gone", count=5.0)
    put(state, "new", count=7.5)
    put(state, "item-7", count=300.0)
    for turn in range(3000):  # rows are written anew where many have gone
        put(state, f"other-{turn}", count=9.0)
        delete(state, f"other-{turn}")
    delete(state, "gone")
    counts = write_fold(tmp_path / "folds" / "2", bundle, state.overlay(), state.table).label_counts()
    assert counts is not None
    assert counts.counts_I.tolist() == [*range(4), 5, 6, 300, *range(8, 36), 8]
    assert counts.points == 300


@pytest.mark.parametrize(
    ("kind", "engine", "dtype"),
    [
        ("product memory", "onnx-cpu", "float32"),
        ("product memory", "compiled-cpu", "float16"),
        ("history", "onnx-cpu", "int8"),
        ("linear", "sparse-cpu", "float32"),
        ("linear tail", "sparse-cpu", "float16"),
    ],
)
def test_engines_open_a_fold_which_is_stored_as_the_bundle_is(tmp_path: Path, kind: str, engine: str, dtype: str) -> None:
    rng, own = np.random.default_rng(11), {"trees": 2, "own": "log_activation"}
    shape = {"kind": kind, "branching_height": (4, 3), "ragged": True, "empty_share": 0.2, "gamma": 1.0, "dtype": dtype} | own
    bundle = drawn_bundle(tmp_path, rng, shape)
    state = random_state(rng, bundle)
    fold = write_fold(bundle.path.with_name("2"), bundle, state.overlay(), state.table)
    live = fold.manifest.live
    assert live is not None
    assert (live.through, live.folded_from) == (state.sequence, 1)
    rows, ids = fold.manifest.trained_items.items, fold.items.ids_of(np.arange(len(fold.items)))
    assert [item_id for item_id in ids if bundle.items.row_of(item_id) >= 0] == ids[:rows] != ids
    again = random_state(rng, fold)
    folded_twice = write_fold(bundle.path.with_name("3"), fold, again.overlay(), again.table)
    trained, ids = folded_twice.manifest.trained_items, folded_twice.items.ids_of(np.arange(len(folded_twice.items)))
    assert (trained.created, trained.through) == (bundle.manifest.created, None)
    assert [item_id for item_id in ids if bundle.items.row_of(item_id) >= 0] == ids[: trained.items]
    assert wrong_beams(open_engine(fold, "cpu", engine), fold, random_queries(rng, fold, 16), SearchParams.uniform(16, 5, 20)) == []
    stored = fold.chunks.entry_weight if engine == "sparse-cpu" else fold.stored_rows
    assert stored.dtype == dtype
