"""Relevance of labels as data: what is made of clicks, rare labels and thresholds, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy.sparse import csr_array

from espalier.errors import InvalidData
from espalier.label_counts import LabelCounts
from training.data import query_logs
from training.data.log_values import BadRows
from training.data.query_logs import labelled
from training.data.relevance import LabelRelevance, Smoothing, distribution, inverse_propensities, is_graded, scale_of
from training.linear.prepare import read_points
from training.specification.linear import RELEVANCE_OPTIONS, LogData, NpzData


def read_log(file: Path, query: str, item: str, numbers: dict[str, str], **form: str) -> pl.DataFrame:
    data = LogData.model_validate({"format": "log", "train": file, **form})
    return query_logs.read_log(file, query, item, numbers, data, BadRows(data.bad_rows, "data"))


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("weight", [-0.5, 1e10, 1e-10])
def test_wrong_weights_of_a_matrix_say_where(tmp_path: Path, weight: float) -> None:
    scipy.sparse.save_npz(tmp_path / "x.npz", csr_array(np.eye(2)))
    scipy.sparse.save_npz(tmp_path / "y.npz", csr_array(np.array([[1.0, 0, 2], [0, weight, 0]])))
    data = NpzData(format="npz", train=tmp_path / "x.npz", train_labels=tmp_path / "y.npz")
    with pytest.raises(InvalidData, match=r"y\.npz, row 1, label 1: got .*, expected 0, or a number from 1e-09 to 1e.09"):
        read_points(data)


# -- clicks ---------------------------------------------------------------------------------------------------------------


def test_views_and_clicks_of_equal_pairs_are_added_up_and_smoothed(tmp_path: Path) -> None:
    rows = [("a", "x", 3, 1), ("a", "x", 1, 1), ("a", "y", 6, 0), ("b", "y", 10, 3)]
    pl.DataFrame(rows, schema=["text", "ad", "shown", "hit"], orient="row").write_parquet(tmp_path / "log.parquet")
    pairs = read_log(tmp_path / "log.parquet", "text", "ad", {"views": "shown", "clicks": "hit"})
    smoothing = Smoothing.of(pairs["views"].to_numpy(), pairs["clicks"].to_numpy(), 5)
    assert smoothing.prior == 5 / 20
    texts = labelled(pairs, {"x": 0, "y": 1}, smoothing)
    prior = 5 * 5 / 20
    assert_allclose(texts.labels.toarray(), [[(2 + prior) / (4 + 5), 0], [0, (3 + prior) / (10 + 5)]], rtol=1e-6)
    assert texts.labels.nnz == 2, "what nobody clicked is not relevant, however often it was shown"


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 1)), min_size=1, max_size=9), st.floats(0, 1e9))
def test_rates_lie_between_the_pair_and_the_log(counts: list[tuple[int, float]], strength: float) -> None:
    views = np.array([n for n, _ in counts], np.float64)
    clicks = np.floor(views * [share for _, share in counts])
    smoothing = Smoothing.of(views, clicks, strength)
    rates = smoothing.rates(views, clicks)
    low, high = np.minimum(clicks / views, smoothing.prior), np.maximum(clicks / views, smoothing.prior)
    clicked = clicks > 0
    assert (rates[~clicked] == 0).all()
    assert (rates[clicked] >= low[clicked] - 1e-9).all()
    assert (rates[clicked] <= high[clicked] + 1e-9).all()


WEIGHTS = r"expected 0, or a number from 1e-09 to 1e\+09 in column 'times'"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("query,item\nq,x\n\n,y\n", "line 4, column query: got None"),
        ('\nquery,item\n"q\nq",x\nq,y\n\n,z\n', "line 7, column query: got None"),
        ("query,item\r\nq,x\r\n,y\r\n", "line 3, column query: got None, expected a text in column 'query'"),
        ("query,item\nx,y\ny,\n", "line 3, column item: got None, expected an item id in column 'item'"),
        ("query,bought\nx,y\n", r"column item: got 'item', expected one of \['query', 'bought'\]"),
        *(
            (f"query,item,times\nq,y,1\nq,x,{times}\n", f"line 3, column weight: got '{times}', {WEIGHTS}")
            for times in ("-2", "nan", "many")
        ),
        *(
            (f"query,item,views,clicks\nq,y,1,1\nq,x,{row}\n", f"line 3, column {expected}")
            for row, expected in (
                ("0,0", "views: got '0', expected a number above 0"),
                ("-1,0", "views: got '-1', expected a number above 0"),
                ("2,3", "clicks: got '3', expected a number from 0 to that of the views"),
                ("2,-1", "clicks: got '-1', expected a number from 0 to"),
                ("2,nan", "clicks: got 'nan', expected a number from 0 to"),
                ("many,1", "views: got 'many', expected a number above 0"),
                ("1e10,1", "views: got '1e10', expected a number above 0, at most 1e.09"),
                (",1", "views: got None, expected a number above 0"),
            )
        ),
    ],
)
def test_a_wrong_log_says_which_line_of_an_editor(tmp_path: Path, text: str, expected: str) -> None:
    numbers = {"weight": "times"} if "times" in text else {"views": "views", "clicks": "clicks"} if "views" in text else {}
    with pytest.raises(InvalidData, match=expected):
        read_log(write(tmp_path / "log.csv", text), "query", "item", numbers)


@pytest.mark.parametrize("mark", [";", "\t"])
@pytest.mark.parametrize("row", ["lamp{}x", "lamp, red{}x\nlamp, red, old{}y"])
def test_another_separator_than_the_names_is_named_with_the_key_that_mends_it(tmp_path: Path, mark: str, row: str) -> None:
    file = write(tmp_path / "log.csv", f"query{mark}item\n{row.replace('{}', mark)}\n")
    with pytest.raises(InvalidData, match=f"first line has {mark!r} between fields: say so with data.separator = ".replace("\\", "\\\\")):
        read_log(file, "query", "item", {})
    assert read_log(file, "query", "item", {}, separator=mark)["item"][0] == "x"
    with pytest.raises(InvalidData, match=r"column query: got 'text', expected one of \['query', 'item'\], once$"):
        read_log(file, "text", "item", {}, separator=mark)


# -- propensities, thresholds ---------------------------------------------------------------------------------------------


def test_inverse_propensities_are_those_of_the_published_sets() -> None:
    """The constants C of EURLex-4K and Amazon-670K, and the inverse propensity of a label with one training point."""
    for points, a, b, c, of_one in ((15_539, 0.55, 1.5, 14.320, 9.65), (490_449, 0.6, 2.6, 26.102, 13.10)):
        inverse = inverse_propensities(LabelCounts(np.array([0, 1, 10**9]), points), a, b)
        assert inverse[1] == pytest.approx(1 + c * (1 + b) ** -a, abs=1e-3)
        assert inverse[1] == pytest.approx(of_one, abs=5e-3)
        assert inverse[0] > inverse[1] > inverse[2] >= 1


@given(st.integers(0, 10**9), st.floats(1e-3, 2), st.floats(0.01, 1000))
def test_inverse_propensities_can_be_weights(points: int, a: float, b: float) -> None:
    counts = np.unique(np.array([0, min(1, points), points], np.int64))
    inverse = inverse_propensities(LabelCounts(counts, points), a, b)
    assert (inverse >= 1).all()
    assert (inverse <= 1e9).all()
    assert (np.diff(inverse) <= 0).all()


def test_relevance_is_what_the_configuration_says() -> None:
    training = csr_array(np.array([[2.0, 0, 0, 0], [0.5, 1, 0, 0], [1, 0, 0, 0]], np.float32))
    test = csr_array(np.array([[0, 3.0, 0.25, 0]], np.float32))

    def relevance(**keys: object) -> LabelRelevance:
        return LabelRelevance.of_training(RELEVANCE_OPTIONS.checked(keys), training)

    plain = relevance()
    assert_array_equal(plain.of(test).toarray(), test.toarray())
    assert scale_of(plain.of(training)) == 2
    assert_array_equal(relevance(source="binary").of(test).toarray(), [[0, 1, 1, 0]])
    assert_array_equal(relevance(threshold=1).of(training).toarray(), [[2, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]])
    assert relevance(threshold=1).of(training).nnz == 3
    scored = relevance(source="inverse-propensity", propensity_a=0.6, propensity_b=2)
    inverse = inverse_propensities(LabelCounts(np.array([3, 1, 0, 0]), 3), 0.6, 2)
    assert_allclose(scored.of(test).toarray(), [[0, inverse[1], inverse[2], 0]], rtol=1e-6)
    assert_array_equal(training.toarray()[1], [0.5, 1, 0, 0], "what was read is not changed")
    assert_array_equal(relevance(threshold=1).counts.counts_I, [3, 1, 0, 0], "training points before the threshold")


def test_the_distribution_of_relevance() -> None:
    relevance = csr_array(np.array([[1, 2, 0], [3, 4, 5]], np.float32))
    assert is_graded(relevance)
    assert not is_graded(csr_array(np.ones((2, 2), np.float32)))
    assert not is_graded(csr_array(np.zeros((2, 2), np.float32)))
    told = distribution(relevance)
    assert (told["labels"], told["mean"]) == (5, 3)
    assert told["quantiles"] == pytest.approx({"0": 1, "0.05": 1.2, "0.25": 2, "0.5": 3, "0.75": 4, "0.95": 4.8, "1": 5})
    assert distribution(csr_array(np.zeros((2, 2), np.float32))) == {"labels": 0}
