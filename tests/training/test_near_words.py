"""Words of the nearest items: against dense arithmetic, and a model that finds an item by a word it lacks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.sparse import csr_array

from espalier.arrays import Float64
from espalier.errors import InvalidConfig
from espalier.text.blocks import TextBlock
from espalier.text.vectoriser import Vectoriser
from tests.training.commands import answer_rows, trained
from tests.training.test_own_texts import own
from training.data.csr import Csr
from training.linear import near_words as module
from training.linear.near_words import MOST, near_words

FEATURES, WORDS = 30, range(4, 26)


def drawn_rows(items: int, share: float, seed: int) -> Csr:
    rng = np.random.default_rng(seed)
    rows = rng.random((items, FEATURES), np.float32) * (rng.random((items, FEATURES)) < share)
    rows[3] = 0
    rows[7, WORDS.start : WORDS.stop] = 0
    return csr_array(rows)


def by_formula(rows: Csr, near: int) -> Float64:
    """The module's formula, item by item."""
    words = rows.toarray().astype(np.float64)[:, WORDS.start : WORDS.stop]
    added = np.zeros(rows.shape)
    length_I = np.linalg.norm(words, axis=1)
    unit = words / np.where(length_I > 0, length_I, 1)[:, None]
    for item, cosine_I in enumerate(unit @ unit.T):
        cosine_I[item] = 0
        nearest = [other for other in np.argsort(-cosine_I, kind="stable")[:near] if cosine_I[other] > 0]
        for word in range(words.shape[1]):
            having = [other for other in nearest if words[other, word] > 0]
            if having and words[item, word] == 0:
                mean = np.average(words[having, word], weights=cosine_I[having])
                added[item, WORDS.start + word] = min(MOST, cosine_I[having].sum()) * mean
    return added


@pytest.mark.parametrize("near", [1, 3, 10])
@pytest.mark.parametrize("share", [0.25, 0.5])
@pytest.mark.parametrize("block", [5, 4096])
def test_an_item_gets_the_words_of_its_nearest_items(near: int, share: float, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    rows = drawn_rows(33, share, seed=near)
    before = rows.toarray()
    added = near_words(rows, WORDS, near)
    assert added.dtype == np.float32
    assert_allclose(added.toarray(), by_formula(rows, near), rtol=1e-5, atol=1e-7)
    assert_array_equal(rows.toarray(), before)
    assert added.nnz


def test_nothing_is_added_without_near_items_or_words() -> None:
    rows = drawn_rows(20, 0.3, seed=1)
    alone = csr_array(np.eye(5, FEATURES, WORDS.start, dtype=np.float32))  # no two share a word
    for nothing in (near_words(rows, WORDS, 0), near_words(rows, range(0), 3), near_words(alone, WORDS, 3)):
        assert (nothing.nnz, str(nothing.dtype), nothing.shape[1]) == (0, "float32", FEATURES)


def test_of_many_equal_items_none_is_its_own_neighbour() -> None:
    row = np.zeros(FEATURES, np.float32)
    row[[0, 5, 6]] = [2, 3, 4]
    like = row.copy()
    like[7] = 1
    rows = csr_array(np.stack([like, row, row, row, row]))
    assert near_words(rows, WORDS, 3).nnz == 0, "three equal ones are nearest"
    added = near_words(rows, WORDS, 4)
    assert_array_equal(added.toarray()[:, 7], [0, 0.5, 0.5, 0.5, 0.5])
    assert added.nnz == 4


def test_frequent_words_find_no_neighbours_where_that_would_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    frequent, rare, other, another = 5, 6, 7, 8
    rows = np.zeros((6, FEATURES), np.float32)
    rows[:, frequent] = 1
    rows[[0, 1], rare] = 1
    rows[1, other] = rows[2, another] = 1
    monkeypatch.setattr(module, "LOOKED_UP", 2 + 6)
    assert near_words(csr_array(rows), WORDS, 5).toarray()[0, [other, another]].min() > 0
    monkeypatch.setattr(module, "LOOKED_UP", 5)
    found = near_words(csr_array(rows), WORDS, 5).toarray()
    assert found[0, other] > 0, "by the rare word, which two items have"
    assert found[0, another] == 0
    assert not found[3].any()


def test_words_are_the_features_of_single_words() -> None:
    texts = ["red lamp", "red chair", "a lamp"]
    letters, words = TextBlock(unit="char", n=3, unknown=2), TextBlock(unit="word", n=1, unknown=3)
    vectoriser = Vectoriser.fit(texts, (letters, TextBlock(unit="word", n=2), words))
    assert {*vectoriser.features_of(vectoriser.words)} == {"red", "lamp", "chair", "a"}
    assert vectoriser.words.stop == vectoriser.width - 3
    assert Vectoriser.fit(texts, (letters,)).words == range(0)


def test_a_product_is_found_by_the_word_that_others_like_it_use(tmp_path: Path) -> None:
    titles = ["red teapot", "blue teapot", "lenovo notebook laptop 15 inch ssd", "dell notebook laptop ssd", "acer notebook 15 inch ssd"]
    pl.DataFrame({"id": [f"p{row}" for row in range(5)], "title": titles}).write_parquet(tmp_path / "items.parquet")
    words = {"text": [{"unit": "word", "n": 1}]}
    bundle = trained(tmp_path, own(tmp_path, "title") | words)
    assert answer_rows(bundle, ["laptop"], 100, 3) == [[3, 2, 4]]
    only_own = trained(tmp_path, own(tmp_path, "title", near_items=0) | words, "shop/2")
    assert answer_rows(only_own, ["laptop"], 100, 3) == [[3, 2, 0]]


def test_near_items_without_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"data\.near_items: got 5, expected nothing"):
        trained(tmp_path, {"data": {"format": "log", "train": "log.csv", "near_items": 5}})
