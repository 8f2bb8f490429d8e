"""The tail of a forest: how near a query is to an item's training points enters the item's score."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from benchmarks.random_bundles import make_linear_bundle, random_queries, random_tree, tree_over
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.engines.reference import ReferenceEngine, log_near
from espalier.manifest import Ranking, TailInfo
from espalier.search import NO_ITEM, SearchParams
from espalier.tail import FLOOR, Tail
from espalier.tree import tree_from_children
from tests.espalier.second_stages import with_second_stage
from tests.espalier.test_signature import assert_alone_as_together

F = 12
Form = Literal["product", "gaussian"]


def random_tail(rng: np.random.Generator, items: int, form: Form, alpha: float) -> Tail:
    dense = rng.normal(size=(items, F)) * (rng.random((items, F)) < 0.4)
    dense[0] = 0
    dense /= np.maximum(np.linalg.norm(dense, axis=1, keepdims=True), 1e-9)
    row, feature = np.nonzero(dense)
    begin = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=items))])
    info = TailInfo(form=form, alpha=alpha, gamma=3.0, entries=len(row))
    return Tail(info, begin, feature.astype(np.int32), dense[row, feature].astype(np.float32), F)


def with_tail(
    folder: Path, seed: int, form: Form = "product", alpha: float = 0.5, trees: int = 2, full: bool = False
) -> tuple[Bundle, Bundle]:
    """A forest with a tail, and without; `full`: its leaves all hold items."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 3, 3, empty_share=0.0 if full else 0.1)
    others = [tree_over(rng, tree.item_count, 4) for _ in range(trees - 1)]
    if full:
        others = [tree_from_children([[3], [tree.item_count - 4, 2, 2]], rng.permutation(tree.item_count))]
    ranking = Ranking(own="log_activation", gamma=1)
    plain = make_linear_bundle(folder, rng, tree, ranking, integer=False, width=F, others=others)
    tail = random_tail(rng, tree.item_count, form, alpha)
    return with_second_stage(plain, folder / "tailed" / "1", tail=tail), plain


@given(st.integers(0, 1000), st.sampled_from(["product", "gaussian"]), st.sampled_from([0.1, 0.5, 0.95]), st.integers(2, 3), st.booleans())
def test_engines_rank_with_the_tail_as_its_formula_says(
    tmp_path_factory: pytest.TempPathFactory, seed: int, form: Form, alpha: float, trees: int, full: bool
) -> None:
    bundle, plain = with_tail(tmp_path_factory.mktemp("models"), seed, form, alpha, trees, full)
    rng = np.random.default_rng(seed)
    queries, items = random_queries(rng, bundle, 9, integer=False), bundle.manifest.tree.items
    params = SearchParams(rng.integers(1, 9, 9), rng.integers(1, items + 3, 9))
    found, of_reference = (engine.search(queries, params) for engine in (open_engine(bundle, "cpu"), ReferenceEngine(bundle)))
    everything = open_engine(plain, "cpu").search(queries, SearchParams(params.beam_size_B, np.full(9, items)))
    rows_IF = np.zeros((items, F))
    tail = bundle.tail
    assert tail is not None
    rows_IF[np.repeat(np.arange(items), np.diff(tail.row_begin)), tail.feature] = tail.value
    for b in range(9):
        own = slice(queries.features.indptr[b], queries.features.indptr[b + 1])
        query_F = np.zeros(F)
        query_F[queries.features.indices[own]] = queries.features.values[own]
        near_I = np.maximum(rows_IF @ query_F, FLOOR) if form == "product" else 1 / (1 + np.exp(1.5 * ((query_F - rows_IF) ** 2).sum(1)))
        came = everything.item_rows_BM[b, : everything.count_B[b]]
        ranks = alpha * everything.ranks_BM[b, : len(came)] + (1 - alpha) * np.log(near_I[came])
        expected = np.sort(ranks)[::-1][: params.m_B[b]]
        for result in (found, of_reference):
            rows = result.item_rows_BM[b, : result.count_B[b]]
            assert_allclose(result.ranks_BM[b, : len(rows)], expected, atol=1e-4)
            order = np.argsort(came)
            assert_allclose(ranks[order][np.searchsorted(came[order], rows)], result.ranks_BM[b, : len(rows)], atol=1e-4)
            assert (result.item_rows_BM[b, len(rows) :] == NO_ITEM).all()
            assert_allclose(result.scores_BM[b, : len(rows)], np.exp(np.minimum(expected, 0)), rtol=1e-3)
    assert_alone_as_together(open_engine(bundle, "cpu"), queries, params)


@pytest.mark.parametrize("form", ["product", "gaussian"])
def test_an_items_part_is_what_the_reference_adds(form: Form) -> None:
    rng = np.random.default_rng(2)
    tail, query_F = random_tail(rng, 20, form, 0.3), rng.normal(size=F) * (rng.random(F) < 0.6)
    features = np.flatnonzero(query_F).astype(np.int32)
    for item in range(20):
        part = tail.part(features, query_F[features].astype(np.float32), item)
        assert part == pytest.approx(0.7 * log_near(tail, query_F, item), abs=1e-6)


def test_a_forest_without_a_tail_says_nothing_of_one(tmp_path: Path) -> None:
    bundle, plain = with_tail(tmp_path, 3)
    assert plain.tail is None
    assert '"tail"' not in (plain.path / "manifest.json").read_text()
    assert bundle.manifest.tail is not None
    assert [alone.manifest.tail for alone in bundle.alone] == [None, None]
