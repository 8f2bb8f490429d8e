"""What people's queries choose of items' own texts: weights of columns, and what queries of an item say beside its texts."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from numpy.testing import assert_allclose
from scipy.sparse import csr_array

from espalier.arrays import Float32
from espalier.live.operations import ItemBody
from espalier.placement.evidence import Evidence
from espalier.placement.linear_placement import LinearPlacement
from espalier.text.blocks import TextBlock
from espalier.text.vectoriser import Vectoriser
from tests.training.commands import trained
from training.data.csr import Csr, as_matrix
from training.data.xmc import LabelledPoints
from training.linear import own_choices
from training.linear.own_choices import chosen_queries, chosen_weights, weighted_ndcg
from training.linear.own_texts import column_weights, text_rows
from training.specification.linear import LinearOptions

WORDS = (TextBlock(unit="word", n=1), TextBlock(unit="word", n=2))
OPTIONS = LinearOptions()


def _by_notes(items: int) -> tuple[Vectoriser, list[list[str]], list[str]]:
    """Titles whose words are other items' notes' too, and queries of three words of each note."""
    rng = np.random.default_rng(5)
    vocabulary = np.array([f"{first}{second}" for first in "bcdfghklmnprst" for second in ("an", "er", "o", "ik", "en", "ul")])
    titles = [" ".join(rng.permutation(vocabulary)[:4]) for _ in range(items)]
    notes = [" ".join(rng.permutation(vocabulary)[:24]) for _ in range(items)]
    asked = [" ".join(rng.permutation(note.split())[:3]) for note in notes]
    return Vectoriser.fit([*titles, *notes], WORDS), [titles, notes], asked


def _asked(vectoriser: Vectoriser, texts: list[str], labels: Csr) -> LabelledPoints:
    return LabelledPoints(as_matrix(vectoriser.transform(texts)), labels)


def _one_each(items: int) -> Csr:
    return csr_array(np.eye(items, dtype=np.float32))


def test_people_who_ask_by_descriptions_change_what_columns_weigh() -> None:
    vectoriser, columns, texts = _by_notes(120)
    asked, usual = _asked(vectoriser, texts, _one_each(120)), column_weights(columns)
    chosen = chosen_weights(vectoriser, columns, asked)
    assert chosen[1] / chosen[0] > 2 * usual[1] / usual[0]
    few = own_choices.LEAST_QUERIES - 1
    assert chosen_weights(vectoriser, columns, asked.take(np.arange(few))) == usual
    assert chosen_weights(vectoriser, columns, asked.take(np.arange(few + 1))) != usual
    seen_B = np.arange(120) >= few
    assert chosen_weights(vectoriser, columns, LabelledPoints(asked.points, asked.labels, seen_B)) == usual, "texts of items choose nothing"
    assert chosen_weights(vectoriser, columns[:1], asked) == usual[:1], "one column has nothing to choose"
    at_random = csr_array(np.eye(120, dtype=np.float32)[np.random.default_rng(1).permutation(120)])
    assert chosen_weights(vectoriser, columns, _asked(vectoriser, texts, at_random)) == usual, "what is not clearly better is left"


def test_weights_are_judged_by_what_all_items_scored_would_find() -> None:
    vectoriser, columns, texts = _by_notes(60)
    columns[1] = [" ".join(note.split()[: 4 + row % 21]) for row, note in enumerate(columns[1])]  # rows of several lengths
    labels = np.zeros((40, 60), np.float32)
    labels[np.arange(40), np.arange(40)], labels[:, 59] = 2, 1
    asked = _asked(vectoriser, texts[:40], csr_array(labels))
    ndcg_of = weighted_ndcg(vectoriser, columns, asked)
    for weights in ([1, 1.2], [0.3, 0.9]):
        scores_BI = (asked.points @ text_rows(vectoriser, columns, weights)[0].T).toarray()
        first_BM = np.argsort(-scores_BI, axis=1, kind="stable")[:, :10]
        discount = 1 / np.log2(np.arange(10) + 2)
        gains_BM = np.where(np.take_along_axis(scores_BI, first_BM, 1) > 0, np.take_along_axis(labels, first_BM, 1), 0)
        assert_allclose(ndcg_of(weights), gains_BM @ discount / (2 * discount[0] + discount[1]), atol=1e-5)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Of each call of `_figures`, which now finds nothing: the queries and items, and the relevant pairs."""
    calls: list[tuple[int, ...]] = []

    def figures(asked: LabelledPoints, rows: list[Csr]) -> Float32:
        assert {len(rows_IF.indptr) - 1 for rows_IF in rows} == {asked.labels.shape[1]}
        calls.append((*asked.labels.shape, asked.labels.nnz))
        return np.zeros((len(rows), len(asked)), np.float32)

    monkeypatch.setattr(own_choices, "_figures", figures)
    return calls


def test_of_many_queries_and_items_some_choose(measured: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    vectoriser, columns, texts = _by_notes(60)
    monkeypatch.setattr(own_choices, "MOST_ITEMS", 50)
    monkeypatch.setattr(own_choices, "MOST_QUERIES", 35)
    chosen_weights(vectoriser, columns, _asked(vectoriser, texts, _one_each(60)))
    assert set(measured) == {(35, 50, 35)}, "what a query led to is among the items"


def test_of_many_columns_none_is_weighed_alone(measured: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    vectoriser, columns, texts = _by_notes(40)
    monkeypatch.setattr(own_choices, "MOST_FACTORED", 2)
    trials = []
    for columns_of in (columns, [*columns, columns[0]]):
        chosen_weights(vectoriser, columns_of, _asked(vectoriser, texts, _one_each(40)))
        trials.append(len(measured))
        measured.clear()
    assert trials == [1 + 5 + 2 * 2, 1 + 5]


def test_queries_count_as_much_as_held_out_queries_say() -> None:
    """An item's queries say the same again and again in words that its texts lack; or each says something of its own."""
    vectoriser, columns, _ = _by_notes(60)
    own, _ = text_rows(vectoriser, columns, column_weights(columns))
    rows = np.repeat(np.arange(60), 4)
    labels = csr_array(np.eye(60, dtype=np.float32)[rows])
    titles = columns[0]
    alike = _asked(vectoriser, [" ".join(titles[(row + 1) % 60].split()[:2]) for row in rows.tolist()], labels)
    assert chosen_queries(alike, own, OPTIONS) == 1
    own_words = [titles[row].split()[b % 3 : b % 3 + 2] for b, row in enumerate(rows.tolist())]
    anything = [" ".join(words + columns[1][(7 * b) % 60].split()) for b, words in enumerate(own_words)]
    assert chosen_queries(_asked(vectoriser, anything, labels), own, OPTIONS) > own_choices.DEFAULT_QUERIES, "most is of other items"
    unheard = _asked(vectoriser, ["unheard"] * 240, labels)
    assert chosen_queries(unheard, own, OPTIONS) == own_choices.DEFAULT_QUERIES, "all find as much"
    few = alike.take(np.arange(own_choices.LEAST_QUERIES - 1))
    assert chosen_queries(few, own, OPTIONS) == own_choices.DEFAULT_QUERIES


def test_items_with_equal_texts_are_told_apart_by_the_log() -> None:
    """Variants of a product, of which people want one: of equal keys none comes first."""
    titles = [f"word{product} thing{product}" for product in range(40) for _ in range(10)]
    vectoriser = Vectoriser.fit(titles, WORDS)
    labels = csr_array(np.eye(400, dtype=np.float32)[np.repeat(np.arange(0, 400, 10), 5) + 7])
    asked = _asked(vectoriser, [f"word{product} thing{product}" for product in range(40) for _ in range(5)], labels)
    assert chosen_queries(asked, text_rows(vectoriser, [titles], [1.0])[0], OPTIONS) < math.inf
    keys_TI = np.array([[1, 1, 1, 0], [1, 1 + 1e-7, 1, 0], [1, 2, 1, 0], [0, 0, 0, 0]], np.float32)
    found_T = own_choices._ndcg(keys_TI, np.array([1]), np.ones(1, np.float32))
    assert_allclose(found_T, [1 / np.log2(3), 1 / np.log2(3), 1, 0], rtol=1e-6)


def test_of_the_items_of_a_query_the_most_wanted_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_choices, "MOST_RELEVANT", 2)
    points = csr_array(np.ones((1, 1), np.float32))
    labels = csr_array(np.array([[1, 5, 0, 3]], np.float32))
    items, weights = own_choices._relevant_items(LabelledPoints(points, labels), 0)
    assert (items.tolist(), weights.tolist()) == ([1, 3], [5, 3])


def test_a_query_is_not_answered_by_itself() -> None:
    """One query an item, of a word that no item has: only a query that was not held out would find its item."""
    _, columns, _ = _by_notes(60)
    elsewhere = [f"elsewhere{row}" for row in range(60)]
    vectoriser = Vectoriser.fit([*columns[0], *columns[1], *elsewhere], WORDS)
    own, _ = text_rows(vectoriser, columns, column_weights(columns))
    assert chosen_queries(_asked(vectoriser, elsewhere, _one_each(60)), own, OPTIONS) == own_choices.DEFAULT_QUERIES


def test_a_log_says_what_the_columns_of_a_shop_weigh(tmp_path: Path) -> None:
    _, columns, asked = _by_notes(200)
    ids = [f"p{row:03d}" for row in range(200)]
    pl.DataFrame({"id": ids, "title": columns[0], "notes": columns[1]}).write_parquet(tmp_path / "items.parquet")
    pl.DataFrame({"query": asked, "item": ids}).write_parquet(tmp_path / "log.parquet")
    data = {"format": "log", "items": str(tmp_path / "items.parquet"), "own_texts": ["title", "notes"]}
    bundle = trained(tmp_path, {"data": data | {"train": str(tmp_path / "log.parquet")}})
    weights, usual = bundle.manifest.data["own_weights"], column_weights(columns)
    assert weights[1] / weights[0] > 2 * usual[1] / usual[0]
    fields = {"title": columns[0][3], "notes": columns[1][3]}
    evidence = Evidence.of(bundle, ItemBody(fields=fields), bundle.items, takes_fields=True)
    features, length = LinearPlacement(bundle)._document_features(evidence)
    assert_allclose(length * as_matrix(features).toarray()[0], text_rows(bundle.vectoriser, columns, weights)[0].toarray()[3], atol=1e-6)
