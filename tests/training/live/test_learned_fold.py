"""What a fold learns from a log: lists in its rows, the memory and the counts anew, and fitted rows of live items."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from benchmarks.random_bundles import make_bundle, random_tree
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.engines.encoder import QueryEncoder
from espalier.items import ItemTable
from espalier.live.fold import content_of
from espalier.manifest import MemoryFormula
from espalier.memory import Memory
from espalier.queries import HistoryKind, pad_histories
from espalier.search import SearchParams
from tests.training.commands import command
from tests.training.live.test_fold import JournalOf, items_of, put
from tests.training.logs import log_of, split_of
from tests.training.test_earlier import CLUSTERS, ITEMS, settings, write_log
from tests.training.test_earlier import trained as trained_model
from training.data.splits import Split
from training.live import fitted_rows as fitting
from training.live.counted_memory import counted_anew
from training.live.fitted_rows import Evidence, fitted_rows, mean_states
from training.live.fold_log import fold_log, given_counts


@pytest.fixture
def split() -> Split:
    """Six items; users 0 and 1 train, 2 and 3 validate, 4 and 5 test."""
    return split_of(log_of([[0, 1, 2], [3, 4, 5], [0, 1, 2, 3], [2, 3], [4, 5], [0, 5]]), 2, 2, 2)


def table(*ids: str) -> ItemTable:
    return ItemTable.build(pa.table({"id": pa.array(ids, pa.string())}))


# -- the log of a fold ------------------------------------------------------------------------------------------------------


def test_lists_are_in_the_rows_of_the_fold_and_lack_what_it_lacks(split: Split, tmp_path: Path) -> None:
    journal = items_of(put(1, "new", events=(["i0", "i9"], ["i4"])), put(2, "i1", events=(["i5"],)))
    found = fold_log(split, journal, table("new", "i4", "i2", "i1", "i0", "unknown"), tmp_path)
    assert found.users.tolist() == [0, 1, 6, 7]
    assert [found.lists.of(user).tolist() for user in (0, 1, 6, 7)] == [[4, 3, 2], [1], [4, 0], [1, 0]]
    assert found.logged_J.tolist() == [False, True, True, True, True, False]


def test_an_event_of_an_ordered_list_has_what_came_before_it(split: Split, tmp_path: Path) -> None:
    found = fold_log(split, items_of(put(1, "new")), table("i0", "i1", "i2", "new"), tmp_path)
    of_n, histories = found.events_of(np.array([2, 3, 0]), 5, np.random.default_rng(0))
    assert (of_n.tolist(), [history.tolist() for history in histories]) == ([0], [[0, 1]])
    assert {tuple(history.tolist()) for history in found.drawn(20, np.random.default_rng(0))} == {(0,), (0, 1)}


def test_an_event_of_a_list_without_an_order_has_all_others(split: Split, tmp_path: Path) -> None:
    split = replace(split, lists=replace(split.lists, order="none"))
    found = fold_log(split, items_of(put(1, "new")), table("i0", "i1", "i2", "new"), tmp_path)
    of_n, histories = found.events_of(np.array([0, 2]), 1, np.random.default_rng(0))
    assert (of_n.tolist(), [history.tolist() for history in histories]) == ([0, 1], [[1, 2], [0, 1]])


def test_no_more_events_of_an_item_are_drawn_than_are_wanted(tmp_path: Path) -> None:
    log = log_of([[user % 3, 3, 4] for user in range(12)] + [[0, 1]] * 2)
    found = fold_log(split_of(log, 12, 1, 1), items_of(put(1, "new")), table("i0", "i1", "i2", "i3", "i4"), tmp_path)
    of_n, histories = found.events_of(np.array([3, 4]), 5, np.random.default_rng(3))
    assert np.bincount(of_n).tolist() == [5, 5]
    assert {len(history) for history in histories} == {1, 2}


# -- the memory ---------------------------------------------------------------------------------------------------------------


FORMULA = MemoryFormula(row=0.5, column=0.5, power=1.0, shrink=0, user=0, back=1, decay=1, window=2000, unit=0.5)


def with_memory(folder: Path, ids: list[str], entries: dict[tuple[int, int], float], counts: list[int] | None = None) -> Bundle:
    tree = random_tree(np.random.default_rng(0), 2, 3, items=len(ids))
    offset, item, value = [0], list[int](), list[float]()
    for source in range(len(ids)):
        row = sorted((b, s) for (a, b), s in entries.items() if a == source)
        item += [b for b, _ in row]
        value += [s for _, s in row]
        offset.append(len(item))
    arrays = np.array(offset, np.int64), np.array(item, np.int32), np.array(value, np.float16), np.ones(4, np.float32)
    memory = Memory(*arrays, key_weight=1.0, formula=FORMULA)
    bundle = make_bundle(folder, np.random.default_rng(0), tree, "product", integer=True, memory=memory)
    return bundle


def test_entries_and_counts_are_those_of_the_lists_and_placed_ones_stay_where_they_know_more(split: Split, tmp_path: Path) -> None:
    ids = ["i0", "i1", "i2", "few", "many", "like"]
    journal = items_of(put(1, "few", events=(["i0"],)), put(2, "many", events=(["i1"],), count=9), put(3, "like", like=("i2",)))
    entries = {(0, 1): 9.0, (0, 3): 7.0, (1, 4): 5.0, (2, 5): 3.0, (2, 3): 8.0}
    content = replace(content_of(with_memory(tmp_path / "bundle", ids, entries)), items=table(*ids))
    (tmp_path / "work").mkdir()
    lists = fold_log(split, journal, content.items, tmp_path / "work")
    after = counted_anew(content, lists, given_counts(journal, content.items))  # type: ignore[arg-type]  # of graphs
    memory = after.memory
    assert memory is not None
    assert after.counts is not None
    assert after.counts.counts_I.tolist() == [2, 2, 1, 1, 9, 0] or after.counts.counts_I.tolist() == [2, 2, 1, 1, 1, 0]
    assert memory.value_of(0, 1) == pytest.approx(1 / 2 / FORMULA.unit, rel=1e-3), "counted in one list; placed said 9"
    assert memory.value_of(0, 3) == pytest.approx(1 / 2**0.5 / FORMULA.unit, rel=1e-3)
    assert memory.value_of(2, 3) == 0, "no list holds both"
    assert memory.value_of(1, 4) == 5, "made with its count"
    assert memory.value_of(2, 5) == 3, "made without events"
    memory.check(len(ids))
