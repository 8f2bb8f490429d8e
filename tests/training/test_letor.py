"""Ranking sets and the files that they are read from."""

from __future__ import annotations

import gzip
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from espalier.errors import InvalidData
from tests import ROOT
from training.data.letor import read_letor, read_svmlight
from training.data.ranking_set import RankingSet, concatenated

NAN = np.float32("nan")
TEXT = """2 qid:10 1:0.5 2:NULL 3:7 #docid = GX-1 inc = 1 prob = 0.2

0 qid:10 1:-1e-2 2:3 3:nan #docid = GX-2 inc = 1
1.5 qid:b2 3:4 1:2 #docid = GX-1
"""


def written(folder: Path, text: str, name: str = "rank.txt") -> Path:
    path = folder / name
    with gzip.open(path, "wt") if name.endswith(".gz") else path.open("w") as file:
        file.write(text)
    return path


def small() -> RankingSet:
    features = np.arange(12, dtype=np.float32).reshape(6, 2)
    return RankingSet(
        features,
        np.array([0, 1, 2, 0, 0, 1], np.float32),
        np.array([0, 3, 4, 6]),
        ("x", "y"),
        ("q", "r", "s"),
        ("a", "b", "c", "a", "d", "e"),
    )


@pytest.mark.parametrize("name", ["rank.txt", "rank.txt.gz"])
def test_letors_lines_are_read_with_their_missing_values_and_comments(tmp_path: Path, name: str) -> None:
    data = read_letor(written(tmp_path, TEXT, name))
    assert_array_equal(data.features_RF, np.array([[0.5, NAN, 7], [-0.01, 3, NAN], [2, NAN, 4]], np.float32))
    assert data.grades_R.tolist() == [2, 0, 1.5]
    assert data.query_offset.tolist() == [0, 2, 3]
    assert (data.query_ids, data.item_ids, data.feature_names) == (("10", "b2"), ("GX-1", "GX-2", "GX-1"), ("1", "2", "3"))
    wide = read_letor(written(tmp_path, "1 qid:1 2:5\n0 qid:1 1:NULL\n"), features=3, absent=0)
    assert_array_equal(wide.features_RF, np.array([[0, 5, 0], [NAN, 0, 0]], np.float32))
    assert wide.item_ids is None


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("x qid:1 1:2", "grade"),
        ("-1 qid:1 1:2", "grade"),
        ("inf qid:1 1:2", "grade"),
        ("1 1:2", "query"),
        ("1 qid: 1:2", "query"),
        ("1 qid:1 1:two", "feature:value"),
        ("1 qid:1 1:inf", "feature:value"),
        ("1 qid:1 one:2", "feature:value"),
        ("1 qid:1 1", "feature:value"),
        ("1 qid:1 0:2", "features from 1"),
        ("1 qid:1 4:2", "features from 1 to 3"),
        ("1 qid:1 2:2 2:3", "each once"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(InvalidData, match=rf"line 3: got .*{re.escape(says)}"):
        read_letor(written(tmp_path, f"1 qid:1 1:2\n# a comment\n{line}\n"), features=3)


def test_a_query_in_two_places_an_empty_file_and_a_broken_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="qid:1 in two places"):
        read_letor(written(tmp_path, "1 qid:1 1:2\n1 qid:2 1:2\n0 qid:1 1:2\n"))
    with pytest.raises(InvalidData, match="at least one query"):
        read_letor(written(tmp_path, "\n# nothing\n"))
    with pytest.raises(InvalidData, match="readable"):
        read_letor(tmp_path / "nowhere.txt")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(TEXT.encode() * 100)[:60])
    with pytest.raises(InvalidData, match="readable"):
        read_letor(tmp_path / "cut.gz")


def test_svmlight_lines_with_sizes_of_queries(tmp_path: Path) -> None:
    lines = written(tmp_path, "0 1:0.5\n1 3:2\n2\n", "rank.train.gz")
    data = read_svmlight(lines, written(tmp_path, "1\n2\n", "sizes"))
    assert_array_equal(data.features_RF, np.array([[0.5, 0, 0], [0, 0, 2], [0, 0, 0]], np.float32))
    assert (data.query_offset.tolist(), data.grades_R.tolist(), data.query_ids) == ([0, 1, 3], [0, 1, 2], None)
    with pytest.raises(InvalidData, match="4 lines in all"):
        read_svmlight(lines, written(tmp_path, "1\n3\n", "sizes"))
    with pytest.raises(InvalidData, match="line 2"):
        read_svmlight(lines, written(tmp_path, "3\n0\n", "sizes"))


def test_a_subset_is_its_queries_in_the_order_asked_for() -> None:
    part = small().subset(np.array([2, 0]))
    assert part.features_RF[:, 0].tolist() == [8, 10, 0, 2, 4]
    assert (part.grades_R.tolist(), part.query_offset.tolist()) == ([0, 1, 0, 1, 2], [0, 2, 5])
    assert (part.query_ids, part.item_ids) == (("s", "q"), ("d", "e", "a", "b", "c"))
    for wrong in ([], [3], [-1], [1, 1]):
        with pytest.raises(InvalidData, match="queries"):
            small().subset(np.array(wrong, np.int64))


def test_sets_are_put_end_to_end_and_split_by_query() -> None:
    many = concatenated([replace(small(), query_ids=(f"{i}q", f"{i}r", f"{i}s")) for i in range(10)])
    assert many.query_offset[:7].tolist() == [0, 3, 4, 6, 9, 10, 12]
    assert (many.query_ids or ())[:4] == ("0q", "0r", "0s", "1q")
    rest, part = many.split(0.2, 1)
    assert (len(rest), len(part)) == (24, 6)
    assert set(rest.query_ids or ()) | set(part.query_ids or ()) == set(many.query_ids or ())
    assert many.split(0.2, 1)[1].query_ids == part.query_ids != many.split(0.2, 2)[1].query_ids
    with pytest.raises(InvalidData, match="share"):
        small().split(0.01, 1)
    assert concatenated([small(), replace(small(), query_ids=None)]).query_ids is None
    with pytest.raises(InvalidData, match="same features"):
        concatenated([small(), replace(small(), feature_names=("x", "z"))])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("features_RF", np.zeros((6, 2))),
        ("features_RF", np.full((6, 2), np.inf, np.float32)),
        ("grades_R", np.zeros(5, np.float32)),
        ("grades_R", np.array([0, 1, 2, 0, 0, -1], np.float32)),
        ("grades_R", np.array([0, 1, 2, 0, 0, NAN], np.float32)),
        ("query_offset", np.array([0, 3, 3, 6])),
        ("query_offset", np.array([0, 3, 5])),
        ("query_offset", np.array([1, 3, 6])),
        ("feature_names", ("x",)),
        ("feature_names", ("x", "x")),
        ("query_ids", ("q", "q", "s")),
        ("item_ids", ("a",)),
    ],
)
def test_arrays_that_do_not_fit_are_named(field: str, value: object) -> None:
    with pytest.raises(InvalidData, match=field):
        replace(small(), **{field: value})  # type: ignore[arg-type]  # wrong values are the point


def test_the_documented_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"{place % 3} qid:{query} 1:{place % 3 + query / 10} 2:NULL" for query in range(20) for place in range(6)]
    written(tmp_path, "\n".join(lines), "train.txt.gz")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "train.md").read_text()
    (example,) = [block for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) if "read_letor" in block]
    exec(example, {})
    assert (tmp_path / "ranker.onnx").stat().st_size > 1000
    assert "Epoch(number=1" in capsys.readouterr().out
