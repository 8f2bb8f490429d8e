"""Logs of query vectors: what is read and refused, how queries are held out, and what batches are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.testing import assert_array_equal

import training.data.vector_files as vector_files
from espalier.errors import InvalidConfig, InvalidData
from espalier.queries import MAX_VECTOR_WIDTH
from tests.training.vector_logs import CLUSTERS, FORMAT, QUERIES, SIZE, WIDTH, table, write_log
from training.data.interactions import Interactions, read_interactions
from training.data.splits import split_log
from training.deep.instances import source_of
from training.deep.jtm_samples import draw_samples
from training.specification.deep import InstanceConfig
from training.specification.log_format import VectorsFormat
from training.specification.splits import FileSplit, UserSplit


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("data"))


def written(folder: Path, vectors: Any, items: Any) -> Path:
    file = folder / "log.parquet"
    pq.write_table(pa.table({"vector": vectors, "items": items}), file)
    return file


def read(file: Path, work: Path, **keys: Any) -> Interactions:
    return read_interactions(file, VectorsFormat(**keys), work)


def as_pairs(log: Interactions) -> dict[tuple[float, ...], list[str]]:
    ids = log.item_ids.to_pylist()
    assert log.vectors_UF is not None
    return {tuple(log.vectors_UF[user].tolist()): [ids[row] for row in log.of(user)] for user in range(log.user_count)}


# -- reading --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vectors", [pa.list_(pa.float32(), 2), pa.list_(pa.float64()), pa.large_list(pa.float16()), pa.list_(pa.int8())])
@pytest.mark.parametrize("items", [pa.list_(pa.string()), pa.large_list(pa.int64())])
def test_vectors_and_items_may_be_lists_of_any_kind(tmp_path: Path, vectors: pa.DataType, items: pa.DataType) -> None:
    ids = [[1, 2], [2]] if pa.types.is_integer(items.value_type) else [["1", "2"], ["2"]]
    numbers: list[list[Any]] = [[np.float16(1), np.float16(-2)], [np.float16(3), np.float16(4)]]
    if not pa.types.is_float16(vectors.value_type):
        numbers = [[int(value) for value in row] for row in numbers]
    file = written(tmp_path, pa.array(numbers, vectors), pa.array(ids, items))
    assert as_pairs(read(file, tmp_path)) == {(1.0, -2.0): ["1", "2"], (3.0, 4.0): ["2"]}


def test_rows_with_one_item_are_read_and_rows_with_equal_vectors_are_one_query(tmp_path: Path) -> None:
    file = tmp_path / "pairs.parquet"
    pq.write_table(pa.table({"embedding": [[0.0, 1.0], [5.0, 6.0], [-0.0, 1.0]], "product": ["a", "b", "c"]}), file)
    log = read(file, tmp_path, vector="embedding", items="product")
    assert as_pairs(log) == {(0.0, 1.0): ["a", "c"], (5.0, 6.0): ["b"]}
    blocks = written(tmp_path, [[1.0], [2.0], [1.0], [3.0], [2.0]], [["a"], ["b"], ["c"], ["d"], ["e"]])
    log = read_interactions(blocks, FORMAT, tmp_path, block_bytes=2 * 4)
    assert as_pairs(log) == {(1.0,): ["a", "c"], (2.0,): ["b", "e"], (3.0,): ["d"]}, "of different blocks, too"


def test_rows_without_items_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = written(tmp_path, [[1.0], [2.0], [3.0]], [["a"], [], None])
    assert as_pairs(read(file, tmp_path)) == {(1.0,): ["a"]}
    assert "2 of 3 vectors have no items" in caplog.text


def test_the_size_of_blocks_changes_nothing(log: Path, tmp_path: Path) -> None:
    whole = read_interactions(log, FORMAT, tmp_path / "whole")
    small = read_interactions(log, FORMAT, tmp_path / "small", block_bytes=7 * 4 * WIDTH)
    assert whole.user_ids.equals(small.user_ids)
    assert as_pairs(whole) == as_pairs(small)
    assert whole.user_count == QUERIES
    assert whole.item_count == CLUSTERS * SIZE
    ordered = vector_files.vectors_in_order(tmp_path / "whole" / "vector_of_user.float32", np.array([5, 3]), QUERIES, tmp_path / "two")
    assert whole.vectors_UF is not None
    assert_array_equal(ordered, whole.vectors_UF[[5, 3]])


def test_rare_items_and_short_lists_are_dropped(tmp_path: Path) -> None:
    file = written(tmp_path, [[1.0], [2.0], [3.0]], [["a", "b"], ["b", "c"], ["a", "b"]])
    assert as_pairs(read(file, tmp_path, min_item_events=2, min_user_events=2)) == {(1.0,): ["a", "b"], (3.0,): ["a", "b"]}


@pytest.mark.parametrize(
    ("vectors", "items", "expected"),
    [
        ([[0.0] * (MAX_VECTOR_WIDTH + 1)], [["a"]], "column vector: got '65537 numbers', expected 1 to 65536"),
        ([[1.0, 2.0], [1.0]], [["a"], ["a"]], "row 2, column vector: got '1 numbers', expected 2 numbers, as in the first row"),
        ([[1.0], [float("nan")]], [["a"], ["a"]], "row 2, column vector: got nan, expected finite 32-bit numbers"),
        ([[1.0], [1e39]], [["a"], ["a"]], "row 2, column vector: got 1e[+]39, expected finite"),
        ([[1.0, None]], [["a"]], "row 1, column vector: got nan, expected finite"),
        ([[1.0], None], [["a"], ["a"]], "row 2, column vector: got None, expected a list of numbers"),
        ([[]], [["a"]], "column vector: got '0 numbers', expected 1 to 65536"),
        ([1.0], [["a"]], "column vector: got 'double', expected lists of numbers"),
        ([["x"]], [["a"]], "column vector: got 'string', expected numbers"),
        ([[1.0], [2.0]], [["a"], [""]], "row 2, column items: got '', expected ids"),
        ([[1.0], [2.0]], [["a"], ["b", None]], "row 2, column items: got None, expected ids"),
        ([[1.0]], [[0.5]], "column items: got 'double', expected strings or integers"),
        ([[1.0]], [[]], "no events"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, vectors: Any, items: Any, expected: str) -> None:
    item_type = pa.list_(pa.string()) if items == [[]] else None
    with pytest.raises(InvalidData, match=expected):
        read(written(tmp_path, vectors, pa.array(items, item_type)), tmp_path)


def test_a_missing_column_is_named(log: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match=r"column vector: got 'embedding', expected one of \['vector', 'items'\]"):
        read(log, tmp_path, vector="embedding")
    with pytest.raises(InvalidData, match=r"column items: got 'item', expected one of"):
        read(log, tmp_path, items="item")


# -- splits and batches ---------------------------------------------------------------------------------------------------


def test_whole_queries_are_held_out(log: Path, tmp_path: Path) -> None:
    interactions = read_interactions(log, FORMAT, tmp_path)
    split = split_log(interactions, UserSplit(), FORMAT, tmp_path, seed=3)
    users = [set(split.train.tolist()), {pair.user for pair in split.validation}, {pair.user for pair in split.test}]
    assert [len(part) for part in users] == [320, 40, 40]
    assert len(set.union(*users)) == QUERIES
    assert interactions.vectors_UF is not None
    for pair in (*split.validation, *split.test):
        assert_array_equal(pair.relevant, interactions.of(pair.user))
        assert pair.vector is not None
        assert len(pair.history) == 0
        assert_array_equal(pair.vector, interactions.vectors_UF[pair.user])


def test_a_second_file_holds_the_test_queries(log: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    second, learned = table(2, 30), table(1).slice(0, 2)
    unknown = pa.table({"vector": second.column("vector").slice(0, 1), "items": [["item-1", "new"]]}, schema=second.schema)
    test = tmp_path / "test.parquet"
    pq.write_table(pa.concat_tables([unknown, second.slice(1), learned]), test)
    interactions = read_interactions(log, FORMAT, tmp_path)
    split = split_log(interactions, FileSplit(test=test, validation_share=0.25), FORMAT, tmp_path, seed=3)
    assert "1 items are not in the log and are left out; 2 queries are in the log, too" in caplog.text
    assert len(split.validation) == 100
    assert len(split.train) == 300
    assert len(split.test) == 32
    assert not {pair.user for pair in split.validation} & set(split.train.tolist())
    ids, found = interactions.item_ids.to_pylist(), {}
    for pair in split.test:
        assert pair.vector is not None
        assert pair.user >= QUERIES
        found[tuple(pair.vector.tolist())] = {ids[row] for row in pair.relevant}
    assert found[tuple(second.column("vector")[0].as_py())] == {"item-1"}
    assert found[tuple(second.column("vector")[5].as_py())] == set(second.column("items")[5].as_py())


def test_a_second_file_of_other_vectors_is_refused(log: Path, tmp_path: Path) -> None:
    interactions = read_interactions(log, FORMAT, tmp_path)
    test = written(tmp_path, [[1.0]], [["item-1"]])
    with pytest.raises(InvalidData, match=r"column vector: got '1 numbers', expected 10, as in the log"):
        split_log(interactions, FileSplit(test=test), FORMAT, tmp_path, seed=3)
    with pytest.raises(InvalidConfig, match="a file that exists"):
        split_log(interactions, FileSplit(test=tmp_path / "none"), FORMAT, tmp_path, seed=3)


@pytest.mark.parametrize("targets", [1, 4, 50])
def test_a_batch_has_queries_with_some_of_their_items(log: Path, tmp_path: Path, targets: int) -> None:
    interactions = read_interactions(log, FORMAT, tmp_path)
    users = np.arange(100)
    source = source_of(interactions, users, InstanceConfig(targets=targets), 1)
    batch, vectors = source.batch(3, 500), interactions.vectors_UF
    assert vectors is not None
    assert batch.query.dtype == np.float32
    row_of = {tuple(vectors[user].tolist()): user for user in users.tolist()}
    drawn = [row_of[tuple(query.tolist())] for query in batch.query]
    assert len(set(drawn)) > 90
    seen: set[tuple[int, int]] = set()
    for user, items in zip(drawn, batch.target_BP.tolist(), strict=True):
        named = [item for item in items if item >= 0]
        assert len(named) == len(set(named)) == min(targets, 9)
        assert set(named) <= set(interactions.of(user).tolist())
        seen |= {(user, item) for item in named}
    if targets == 1:
        assert (
            len({place for user, item in seen for place in np.flatnonzero(interactions.of(user) == item)}) == 9
        )  # any item, not the first
    assert_array_equal(source.batch(3, 500).target_BP, batch.target_BP)


def test_samples_of_vectors_are_all_events(log: Path, tmp_path: Path) -> None:
    interactions = read_interactions(log, FORMAT, tmp_path)
    samples = draw_samples(interactions, np.array([4, 7]), 5, 1000, seed=1)
    assert interactions.vectors_UF is not None
    assert samples.query_S is not None
    events = {(user, item) for user in (4, 7) for item in interactions.of(user).tolist()}
    assert set(zip(samples.query_S.tolist(), samples.target_S.tolist(), strict=True)) == events
    assert_array_equal(samples.queries(slice(2, 9)), interactions.vectors_UF[samples.query_S[2:9]])
