"""Sparse rows, and the files of the Extreme Classification Repository that they are read from."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.sparse import random_array

from benchmarks.random_bundles import sparse_rows
from espalier.errors import InvalidData, InvalidQuery
from espalier.text.sparse_rows import SparseRows
from training.data import xmc
from training.data.csr import as_matrix
from training.data.xmc import LabelledPoints, read_xmc


def test_rows_are_taken_and_normalised() -> None:
    rng = np.random.default_rng(0)
    dense = random_array((20, 9), density=0.3, rng=rng).toarray().astype(np.float32)
    dense[[0, 7, 19]] = 0
    rows = sparse_rows(dense)
    rows.check()
    order = np.array([3, 3, 0, 19, 5])
    assert_array_equal(as_matrix(rows.take(order)).toarray(), dense[order])
    lengths = np.linalg.norm(dense, axis=1, keepdims=True)
    assert_allclose(as_matrix(rows.normalised()).toarray(), dense / np.where(lengths > 0, lengths, 1), rtol=1e-6)


@pytest.mark.parametrize(
    ("indptr", "indices", "values", "expected"),
    [
        ([0, 0, 2], [0, 9], [1, 1], r"features.indices: got 9, expected feature numbers from 0 to 8"),
        ([0, 0, 2], [-1, 2], [1, 1], r"features.indices: got -1"),
        ([0, 0, 2], [2, 2], [1, 1], r"features.indices: got 2, expected ascending numbers within a row, none twice"),
        ([0, 0, 2], [1, 2], [1, np.inf], r"features.values: got inf, expected finite numbers"),
        ([0, 3], [0, 1], [1, 1], r"features.indptr: .*expected from 0 to 2, never decreasing"),
        ([0, 2], [0, 1], [1], r"features.values: got '1 numbers', expected 2, one per index"),
    ],
)
def test_rows_that_are_wrong_say_where(indptr: list[int], indices: list[int], values: list[float], expected: str) -> None:
    with pytest.raises(InvalidQuery, match=expected):
        SparseRows(np.array(indptr), np.array(indices, np.int32), np.array(values, np.float32), 9).check()
    with pytest.raises(InvalidQuery, match=r"features.indices: got 'int64\[2\]'"):
        SparseRows(np.array([0, 2]), np.array([0, 1]), np.ones(2, np.float32), 9)


def test_files_of_the_repository_are_read(tmp_path: Path) -> None:
    text = "4 5 3\n2,0 3:0.5 1:2\n 0:1e-1\n1 \n\n\n \n"  # blank lines may follow the points
    (tmp_path / "a.txt").write_text(text)
    with gzip.open(tmp_path / "a.txt.gz", "wt") as file:
        file.write(text)
    for name in ("a.txt", "a.txt.gz"):
        data = read_xmc(tmp_path / name)
        assert_allclose(data.points.toarray(), [[0, 2, 0, 0.5, 0], [0.1, 0, 0, 0, 0], [0.0] * 5, [0.0] * 5], rtol=1e-6)
        assert_array_equal(data.labels.toarray(), [[1, 0, 1], [0, 0, 0], [0, 1, 0], [0, 0, 0]])
        part = data.take(np.array([2, 0]))
        assert_array_equal(part.labels.toarray(), [[0, 1, 0], [1, 0, 1]])


def test_labels_may_have_weights(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("4 5 3\n2:0.5,0:3 3:0.5 1:2\n 0:1e-1\n1:2\n1,0:0 4:1\n")
    data = read_xmc(file)
    assert_allclose(data.points.toarray(), np.array([[0, 2, 0, 0.5, 0], [0.1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]]), rtol=1e-6)
    assert_array_equal(data.labels.toarray(), [[3, 0, 0.5], [0, 0, 0], [0, 2, 0], [0, 1, 0]])
    assert data.labels.nnz == 4, "what has the weight 0 is not relevant"
    assert_array_equal(data.weights_of(0), [3, 0.5])
    file.write_text("2 5 3\n2:0.5 3:0.5\n1:4 2:1\n")
    assert read_xmc(file).labels.nnz == 0, "one pair at the beginning of a line is a feature unless said otherwise"
    assert_array_equal(read_xmc(file, label_weights=True).labels.toarray(), [[0, 0, 0.5], [0, 4, 0]])
    file.write_text("2 5 3\n2:0.5,1:1 3:0.5\n1:4 2:1\n")
    assert_array_equal(read_xmc(file).labels.toarray(), [[0, 1, 0.5], [0, 4, 0]])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4 5\n", r"line 1: got '4 5', expected three numbers: points, features, labels"),
        ("2 5 3\n0 1:1\n", r"got '1 points', expected 2, as its first line says"),
        ("2 5 3\n0 1:1\n0 1:1 2:x\n", r"line 3: got '1:1 2:x', expected feature:value pairs"),
        ("1 5 3\n0 1:1\n\n0 1:1\n", r"got 'more than 1 points', expected 1, as its first line says"),
        (f"{'1' * 5000} 5 3\n0 1:1\n", r"line 1: got '1111.*', expected three numbers: points, features, labels"),
        ("1 5 3000000000\n0 1:1\n", r"line 1: got 3000000000, expected at most 2147483647 features and labels"),
        *(
            (f"1 5 3\n{line}\n", expected)
            for line, expected in (
                ("3 1:1", "line 2: got 3, expected labels from 0 to 2"),
                ("0;1 1:1", "line 2: got '0;1', expected labels with commas between them"),
                ("0 1:1 2", "line 2: got '1:1 2', expected feature:value pairs"),
                ("0 1.5:1", "line 2: got '1.5:1', expected feature:value pairs"),
                ("0 5:1", "got 5, expected features from 0 to 4"),
                ("0 4294967297:1", "got 4294967297, expected features from 0 to 4"),
                ("0 1:1 1:2", "expected features each once in a point"),
                ("0 1:nan", "expected features each once in a point, with finite values"),
                ("0 inf:1", "got inf, expected features from 0 to 4"),
                ("0 1:1e300", "expected features each once in a point, with finite values"),
                ("0:-1,1:1 1:1", "line 2, label 0: got -1.0, expected 0, or a number from 1e-09 to 1e.09"),
                ("0:1,1:nan 1:1", "line 2, label 1: got nan, expected 0, or"),
                ("0:1,1:inf 1:1", "line 2, label 1: got inf, expected 0, or"),
                ("0:1,1:1e10 1:1", "line 2, label 1: got 10000000000.0, expected 0, or"),
                ("0:1,1:1e-10 1:1", "line 2, label 1: got 1e-10, expected 0, or"),
                ("0:1,3:1 1:1", "line 2: got 3, expected labels from 0 to 2"),
                ("0:1,-1:0 1:1", "line 2: got -1, expected labels from 0 to 2"),
                ("0:1,:1 1:1", "line 2: got '0:1,:1', expected labels with commas between them"),
                ("0:1,1: 1:1", "line 2: got '0:1,1:', expected labels with commas between them"),
                ("0:1,1:x 1:1", "line 2: got '0:1,1:x', expected labels with commas between them"),
                ("0:1,1:1,1:2 1:1", "line 2, label 1: got 2.0, expected one weight, and 1 came before"),
            )
        ),
    ],
)
def test_files_that_are_wrong_say_where(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(InvalidData, match=expected):
        read_xmc(tmp_path / "a.txt")


def test_files_are_parsed_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("7 5 3\n" + "".join(f"{b % 3} {b % 5}:{b + 1}\n" for b in range(7)))
    (tmp_path / "none.txt").write_text("0 5 3\n")
    whole, parse, sizes = read_xmc(tmp_path / "a.txt"), xmc.parse_points, []

    def parsed(path: Path, body: Sequence[bytes], *others: Any) -> LabelledPoints:
        sizes.append(len(body))
        return parse(path, body, *others)

    monkeypatch.setattr(xmc, "parse_points", parsed)
    for name, limit, expected in (("BLOCK", 3, [3, 3, 1]), ("BLOCK_BYTES", 10, [2, 2, 2, 1])):
        with monkeypatch.context() as patch:
            patch.setattr(xmc, name, limit)
            found = read_xmc(tmp_path / "a.txt")
        assert sizes == expected
        assert_array_equal(found.points.toarray(), whole.points.toarray())
        assert_array_equal(found.labels.toarray(), whole.labels.toarray())
        sizes.clear()
    assert read_xmc(tmp_path / "none.txt").points.shape == (0, 5)


def test_files_that_cannot_be_read_to_their_end_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gzip.compress(b"1 5 3\n0 1:1\n" * 50)
    for name, data in (("cut.txt.gz", whole[:-9]), ("other.txt.gz", b"plain"), ("spoilt.txt.gz", whole[:12] + b"\xff" * 9 + whole[21:])):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InvalidData, match=name):
            read_xmc(tmp_path / name)
    with pytest.raises(InvalidData, match=r"none\.txt"):
        read_xmc(tmp_path / "none.txt")
    monkeypatch.setattr(xmc, "LONGEST_LINE", 40)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"2 5 3\n0 " + b"1:1 " * 20))
    with pytest.raises(InvalidData, match="line 2: got 'more than 40 bytes', expected a shorter line"):
        read_xmc(tmp_path / "a.txt.gz")
