"""A log with the items of a journal: who joins, who leaves, and what trains new items."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.testing import assert_array_equal

from espalier.errors import InvalidData
from espalier.items import ItemTable
from espalier.live.journal import Journal
from espalier.live.operations import ItemBody, Operation
from tests.training.logs import log_of, split_of
from training.data.splits import EvaluationPair, Split
from training.live.catalogue import JournalItems, read_items
from training.live.joined_log import with_journal, with_live_fields
from training.versions import clear


def put(sequence: int, item_id: str, **body: Any) -> Operation:
    return Operation(sequence, item_id, "put", ItemBody(**body), at=float(sequence))


def delete(sequence: int, item_id: str) -> Operation:
    return Operation(sequence, item_id, "delete", at=float(sequence))


def items_of(*operations: Operation, now: float = 100.0) -> JournalItems:
    return JournalItems.of(operations, now)


def ids(split: Split, user: int) -> list[str]:
    every = split.lists.item_ids.to_pylist()
    return [every[row] for row in split.lists.of(user).tolist()]


@pytest.fixture
def split() -> Split:
    """Six items; users 0 and 1 train, 2 and 3 validate, 4 and 5 test."""
    return split_of(log_of([[0, 1, 2], [3, 4, 5], [0, 1, 2, 3], [2, 3], [4, 5], [0, 5]]), 2, 2, 2)


def test_new_items_join_in_the_order_of_ids_and_their_events_train(split: Split, tmp_path: Path) -> None:
    events = (["i0", "i1", "nobody"], ["nobody"], ["i5", "a-new"])
    journal = items_of(
        put(1, "a-new", events=(["i2"],)), put(2, "i3", events=(["i0"],)), put(3, "z-new", events=events), put(4, "z-like", like=("i1",))
    )
    joined = with_journal(split, journal, tmp_path)
    assert joined.lists.item_ids.to_pylist() == ["a-new", "i0", "i1", "i2", "i3", "i4", "i5", "z-like", "z-new"]
    assert [ids(joined, user) for user in range(6)] == [ids(split, user) for user in range(6)]
    assert [ids(joined, user) for user in range(6, joined.lists.user_count)] == [
        ["i2", "a-new"],
        ["i0", "i1", "z-new"],
        ["i5", "a-new", "z-new"],
    ]
    assert joined.train.tolist() == [0, 1, 6, 7, 8]
    for before, after in zip((*split.validation, *split.test), (*joined.validation, *joined.test), strict=True):
        assert_array_equal(after.history, before.history + 1)
        assert_array_equal(after.relevant, before.relevant + 1)


def test_items_that_are_gone_leave_lists_and_queries(split: Split, tmp_path: Path) -> None:
    journal = items_of(delete(1, "i3"), delete(2, "unknown"), put(3, "i4", valid_until=50.0))
    joined = with_journal(split, journal, tmp_path)
    assert joined.lists.item_ids.to_pylist() == ["i0", "i1", "i2", "i5"]
    assert [ids(joined, user) for user in (0, 1, 2)] == [["i0", "i1", "i2"], ["i5"], ["i0", "i1", "i2"]]
    assert [(pair.history.tolist(), pair.relevant.tolist()) for pair in joined.validation] == [([0, 1], [2])]
    assert [(pair.history.tolist(), pair.relevant.tolist()) for pair in joined.test] == [([0], [3])]


def test_nothing_left_is_an_error(split: Split, tmp_path: Path) -> None:
    joined = with_journal(split, items_of(*(delete(1 + i, f"i{item}") for i, item in enumerate((3, 4, 5)))), tmp_path)
    assert joined.train.tolist() == [0], "a user whose items are all gone is not learned from"
    with pytest.raises(InvalidData, match="items that are gone"):
        with_journal(split, items_of(*(delete(1 + item, f"i{item}") for item in range(6))), tmp_path)


def test_events_of_vectors_are_queries_of_their_own(tmp_path: Path) -> None:
    log = replace(log_of([[0, 1], [1], [0]]), vectors_UF=np.arange(6, dtype=np.float32).reshape(3, 2))
    pair = EvaluationPair(2, np.zeros(0, np.int64), np.array([0]), np.array([4, 5], np.float32))
    split = Split(log, np.array([0, 1]), [pair], [pair], split_of(log_of([[0, 1]] * 3), 1, 1, 1).config)
    journal = items_of(put(1, "new", events=([7.0, 8.0], [9.0])))
    joined = with_journal(split, journal, tmp_path)
    assert joined.lists.vectors_UF is not None
    assert_array_equal(joined.lists.vectors_UF, [[0, 1], [2, 3], [4, 5], [7, 8]])
    assert ids(joined, 3) == ["new"]
    assert joined.train.tolist() == [0, 1, 3]


def test_categories_of_new_items_are_not_known(split: Split, tmp_path: Path) -> None:
    categories = np.array([0, 1, 0, 1, 0, 1], np.int32)
    split = replace(split, lists=replace(split.lists, category_of_item_I=categories))
    joined = with_journal(split, items_of(put(1, "a"), delete(2, "i1")), tmp_path)
    assert joined.lists.category_of_item_I is not None
    assert joined.lists.category_of_item_I.tolist() == [-1, 0, 0, 1, 0, 1]


# -- fields ------------------------------------------------------------------------------------------------------------------


def table() -> ItemTable:
    return ItemTable.build(pa.table({"id": ["a", "b", "c"], "title": ["A", "B", None], "price": pa.array([1, 2, None], pa.int32())}))


def test_fields_that_are_newer_than_the_table_replace_all_fields_of_an_item() -> None:
    journal = items_of(
        put(3, "a", fields={"title": "old"}),
        put(5, "b", fields={"title": "new", "other": 1}),
        put(2, "c", fields={"price": 7}),
        put(6, "gone", fields={}),
    )
    found = with_live_fields(table(), journal, after=4).to_table()
    assert found.column("title").to_pylist() == ["A", "new", None]
    assert found.column("price").to_pylist() == [1, None, 7]
    assert found.schema.field("price").type == pa.int32()


def test_a_value_of_another_type_is_named() -> None:
    with pytest.raises(InvalidData, match=r"items\.price"):
        with_live_fields(table(), items_of(put(1, "a", fields={"price": "cheap"})), after=0)


# -- what a run reads of a journal ---------------------------------------------------------------------------------------------


def test_the_last_operation_of_every_id_counts(tmp_path: Path) -> None:
    file = tmp_path / "live.db"
    assert read_items(file) is None
    journal = Journal.open(file)
    operations = put(0, "a"), put(0, "b", fields={"x": 1}), delete(0, "a"), put(0, "b", fields={"x": 2}), put(0, "c", valid_until=9.0)
    with journal.writing() as transaction:
        for operation in operations:
            transaction.append(replace(operation, at=1.0))
    journal.close()
    found = read_items(file, now=10.0)
    assert found is not None
    assert (found.through, [*found.put], {*found.gone}) == (5, ["b"], {"a", "c"})
    assert found.put["b"].body.fields == {"x": 2}
    found.write(tmp_path / "kept")
    assert JournalItems.read(tmp_path / "kept") == found
    (tmp_path / "kept").write_text("{\n")
    with pytest.raises(InvalidData, match="kept"):
        JournalItems.read(tmp_path / "kept")


def test_a_file_that_a_killed_run_was_writing_goes_when_it_goes_on(split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with_journal(split, items_of(delete(1, "i1")), tmp_path)
    monkeypatch.setattr("training.live.joined_log.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        with_journal(split, items_of(delete(1, "i1")), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    clear(tmp_path, resume=True)
    assert [file.name for file in tmp_path.iterdir()] == ["joined.int32"]
