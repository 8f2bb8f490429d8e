"""Forests: items rank by the mean of their scores in all trees; bundles of several trees are written, read and checked.

That engines search them as the reference does is in test_sparse_engine.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from benchmarks.random_bundles import make_linear_bundle, random_chunks, random_masks, random_queries, random_tree, tree_over
from espalier.bundle import Bundle
from espalier.bundle_writer import LinearContent, with_parts, write_bundle
from espalier.checks.golden import verify_golden
from espalier.chunks import TreeChunks
from espalier.engines import open_engine, pipeline
from espalier.engines.linear.chunk_search import L3_HINGE
from espalier.engines.pipeline import Pipeline
from espalier.engines.reference import ReferenceEngine
from espalier.engines.stages import Leaves, TreeQuery
from espalier.errors import BundleCorrupt, InvalidQuery
from espalier.manifest import MAX_TREES, Calibration, Manifest, ManifestDraft, Ranking
from espalier.masks.eligibility import forest_mask, node_mask
from espalier.queries import QueryBatch
from espalier.scores import log_scores, scores_of_ranks
from espalier.search import NO_ITEM, SearchParams
from espalier.text.sparse_rows import SparseRows
from espalier.tree import Tree, tree_from_children
from tests.espalier.linear_shapes import draw_linear, linear_shapes
from tests.espalier.test_signature import (
    assert_same,
)
from training.golden import golden_answers
from training.linear.prepare import written_features

SIGMOID = Ranking(own="log_activation", gamma=1)

shapes = linear_shapes(trees=st.integers(2, 4))


def open_sparse_cpu(bundle: Bundle, threads: int = 1) -> Pipeline:
    return open_engine(bundle, "cpu", threads=threads)


def some_forest(folder: Path, trees: int = 3, ranking: Ranking = SIGMOID) -> Bundle:
    rng = np.random.default_rng(5)
    tree = random_tree(rng, 3, 4, empty_share=0.1)
    others = [tree_over(rng, tree.item_count, 3 + place) for place in range(trees - 1)]
    return make_linear_bundle(folder, rng, tree, ranking, integer=False, others=others)


@given(shape=shapes, m=st.integers(1, 30))
def test_a_shorter_answer_begins_the_longer_one(tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any], m: int) -> None:
    bundle, queries, params = draw_linear(tmp_path_factory.mktemp("models"), shape, integer=True)
    engine = open_sparse_cpu(bundle)
    short, long = (engine.search(queries, replace(params, m_B=np.full(len(queries), wanted))) for wanted in (m, 5 * m))
    for name in ("item_rows_BM", "ranks_BM", "scores_BM"):
        assert_array_equal(getattr(short, name), getattr(long, name)[:, :m])


@pytest.mark.parametrize("ranking", [SIGMOID, Ranking(own="logit", gamma=0.5)])
def test_a_score_is_the_mean_over_the_trees_and_0_where_a_tree_did_not_score_the_item(tmp_path: Path, ranking: Ranking) -> None:
    bundle = some_forest(tmp_path, ranking=ranking)
    queries = random_queries(np.random.default_rng(1), bundle, 4)
    params = SearchParams.uniform(4, 2, 100)
    alone = [open_sparse_cpu(tree).search(queries, params) for tree in bundle.alone]
    together = open_engine(bundle, "cpu").search(queries, params)
    for b in range(4):
        mean: dict[int, float] = {}
        for result in alone:
            for row, score in zip(result.item_rows_BM[b].tolist(), result.scores_BM[b].tolist(), strict=True):
                if row != NO_ITEM:
                    mean[row] = mean.get(row, 0.0) + score / 3
        best = sorted(mean, key=lambda row: -mean[row])
        rows = together.item_rows_BM[b, : together.count_B[b]].tolist()
        assert rows == best
        assert len(best) > max(int(result.count_B[b]) for result in alone)  # trees score different items
        assert_allclose(together.scores_BM[b, : len(rows)], [mean[row] for row in rows], rtol=1e-5)
        assert_allclose(np.exp(together.ranks_BM[b, : len(rows)]), together.scores_BM[b, : len(rows)], rtol=1e-6)


def test_items_of_equal_scores_come_by_item_row(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    trees = [tree_over(rng, 9, 3) for _ in range(2)]
    bundle = make_linear_bundle(tmp_path, rng, trees[0], SIGMOID, others=trees[1:], width=2)
    silent = random_queries(rng, bundle, 1)
    silent = QueryBatch(silent.kind, replace(silent.features, values=np.zeros_like(silent.features.values)))
    level = [TreeChunks(tree, replace(chunks, bias=np.zeros_like(chunks.bias))) for tree, chunks in bundle.trees]
    heights = {tree.height for tree in trees}
    assert heights == {trees[0].height}
    even = write_bundle(tmp_path / "linear" / "2", _draft(bundle), _content(bundle, level))
    result = open_sparse_cpu(even).search(silent, SearchParams.uniform(1, 9, 9))
    assert result.item_rows_BM[0].tolist() == list(range(9))
    assert_same(result, ReferenceEngine(even).search(silent, SearchParams.uniform(1, 9, 9)))


def test_scores_too_small_for_floats_keep_their_order(tmp_path: Path) -> None:
    """Hinges of large negative products: scores of e^−1000 are 0, and their ranks are not."""
    bundle = some_forest(tmp_path, ranking=Ranking(activation="l3-hinge", own="log_activation", gamma=1))
    queries = random_queries(np.random.default_rng(2), bundle, 3)
    queries = QueryBatch(queries.kind, replace(queries.features, values=queries.features.values * np.float32(60)))
    engine, params = open_sparse_cpu(bundle), SearchParams.uniform(3, 30, 200)
    result = engine.search(queries, params)
    assert np.any(result.ranks_BM[result.item_rows_BM >= 0] < -1000)
    expected = ReferenceEngine(bundle).search(queries, params)
    assert_allclose(result.ranks_BM, expected.ranks_BM, rtol=1e-4)
    assert result.complete_B.all()


@pytest.mark.parametrize("m", [1, 2, 5])
def test_items_whose_means_are_nearly_equal_are_told_apart(tmp_path: Path, m: int) -> None:
    """Whatever an item's best tree says, it may be the second best by its mean, or tie with it: none that can be may be left out."""
    rng = np.random.default_rng(8)
    trees = [tree_over(rng, 60, 4) for _ in range(3)]
    bundle = make_linear_bundle(
        tmp_path, rng, trees[0], Ranking(activation="l3-hinge", own="log_activation", gamma=0), True, others=trees[1:]
    )
    queries = random_queries(rng, bundle, 200, True)
    scaled = QueryBatch(queries.kind, replace(queries.features, values=queries.features.values / np.float32(8)))
    params = SearchParams.uniform(200, 60, m)
    result = open_sparse_cpu(bundle).search(scaled, params)
    assert_same(result, ReferenceEngine(bundle).search(scaled, params))
    tied = sum(
        len(set(ranks)) < len(ranks)
        for ranks in ReferenceEngine(bundle).search(scaled, SearchParams.uniform(200, 60, 60)).ranks_BM.tolist()
    )
    assert tied > 20


def test_logs_of_scores_are_those_of_the_scores() -> None:
    ranks = np.array([-30, -3, -0.5, 0.0], np.float32)
    for ranking in (
        SIGMOID,
        Ranking(own="logit", gamma=0),
        Ranking(own="logit", gamma=0.5, calibration=Calibration(slope=2, intercept=-1, knots=((-4, -9), (0, 1)))),
    ):
        assert_allclose(np.exp(log_scores(ranking, ranks)), scores_of_ranks(ranking, ranks), rtol=1e-6, atol=1e-40)
        far = log_scores(ranking, np.array([-1e30, -np.inf], np.float32))
        assert np.isfinite(far[0])
        assert far[1] == -np.inf


def test_a_large_call_is_searched_in_blocks_and_answers_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = some_forest(tmp_path)
    rng = np.random.default_rng(7)
    queries = random_queries(rng, bundle, 23)
    masks = random_masks(rng, bundle.tree, 23, 0.5, [tree for tree, _ in bundle.trees[1:]])
    params = SearchParams(rng.integers(1, 20, 23), rng.integers(1, 20, 23), mask_B=masks)
    engine = open_sparse_cpu(bundle)
    whole = engine.search(queries, params)
    monkeypatch.setattr(pipeline, "BLOCK", 500)
    sizes: list[int] = []
    search = engine.tree_search.search

    def counted(query: TreeQuery) -> Leaves:
        sizes.append(len(query))
        return search(query)

    monkeypatch.setattr(engine.tree_search, "search", counted)
    assert_same(engine.search(queries, params), whole)
    assert len(sizes) > 3
    assert sum(sizes) == 23


def test_no_queries_bring_no_answers(tmp_path: Path) -> None:
    bundle = some_forest(tmp_path)
    queries = random_queries(np.random.default_rng(1), bundle, 3).take(np.empty(0, np.int64))
    assert open_sparse_cpu(bundle).search(queries, SearchParams.uniform(0, 1, 1)).item_rows_BM.shape[0] == 0


def full_tree(rng: np.random.Generator, items: int, clusters: int) -> Tree:
    """A tree without empty leaves, whose clusters differ in size by at most one."""
    sizes = [len(part) for part in np.array_split(np.arange(items), clusters)]
    return tree_from_children([[clusters], sizes], rng.permutation(items))


@pytest.mark.parametrize("integer", [True, False])
def test_a_single_query_answers_as_in_a_batch(tmp_path: Path, integer: bool) -> None:
    rng = np.random.default_rng(11)
    trees = [full_tree(rng, 300, clusters) for clusters in (3, 7, 40)]
    ranking = Ranking(activation="l3-hinge", own="log_activation", gamma=0.5)
    bundle = make_linear_bundle(tmp_path, rng, trees[0], ranking, integer, width=300, others=trees[1:])
    engine, queries = open_sparse_cpu(bundle), random_queries(rng, bundle, 40, integer)
    for beam, m in ((1, 1), (4, 10), (300, 50), (4, 10)):
        params = SearchParams.uniform(1, beam, m)
        together = engine.search(queries, SearchParams.uniform(40, beam, m))
        for b in range(40):
            alone, query = engine.search(queries.take(np.array([b])), params), queries.take(np.array([b]))
            for name in ("item_rows_BM", "ranks_BM", "scores_BM", "count_B", "complete_B"):
                assert_array_equal(getattr(alone, name)[0], getattr(together, name)[b])
            if integer:
                assert_same(alone, ReferenceEngine(bundle).search(query, params))


def test_a_single_query_with_a_filter_exclusions_or_a_trace_finds_what_the_reference_finds(tmp_path: Path) -> None:
    rng = np.random.default_rng(12)
    trees = [full_tree(rng, 60, 4 + place) for place in range(2)]
    bundle = make_linear_bundle(tmp_path, rng, trees[0], L3_HINGE, True, others=trees[1:])
    engine, query = open_sparse_cpu(bundle), random_queries(rng, bundle, 1)
    eligible_I = np.arange(60) % 3 == 0
    excluded = np.arange(20)[None]
    for params in (
        SearchParams.uniform(1, 3, 60, mask=forest_mask(trees, eligible_I)),
        SearchParams.uniform(1, 3, 60, excluded),
        SearchParams.uniform(1, 3, 60, trace=True),
    ):
        assert_same(engine.search(query, params), ReferenceEngine(bundle).search(query, params))


def test_a_single_query_that_cannot_be_searched_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(13)
    trees = [full_tree(rng, 60, 4 + place) for place in range(2)]
    bundle = make_linear_bundle(tmp_path, rng, trees[0], L3_HINGE, True, others=trees[1:])
    engine, query = open_sparse_cpu(bundle), random_queries(rng, bundle, 1)
    params = SearchParams.uniform(1, 3, 5)
    expected = engine.search(query, params)
    rows = SparseRows(np.array([0, 2]), np.array([3, 5], np.int32), np.ones(2, np.float32), query.features.width)
    for wrong, why in (
        (replace(rows, values=np.array([1, np.nan], np.float32)), "features.values: got nan, expected finite numbers"),
        (replace(rows, indices=np.array([3, 20], np.int32)), "features.indices: got 20, expected feature numbers from 0 to 19"),
    ):
        with pytest.raises(InvalidQuery, match=why):
            engine.search(QueryBatch(query.kind, wrong), params)
    with pytest.raises(InvalidQuery, match="beam_size_B"):
        engine.search(query, SearchParams.uniform(1, 0, 5))
    assert_same(engine.search(query, params), expected)


def test_a_mask_must_be_of_every_tree(tmp_path: Path) -> None:
    bundle = some_forest(tmp_path)
    eligible_I = np.arange(bundle.tree.item_count) % 2 == 0
    queries, engine = random_queries(np.random.default_rng(1), bundle, 1), open_sparse_cpu(bundle)
    for mask in (node_mask(bundle.tree, eligible_I), forest_mask([tree for tree, _ in bundle.trees[:2]], eligible_I)):
        with pytest.raises(InvalidQuery, match=r"mask_B: got 'a mask of \d trees', expected a mask of at least \d, as the forest has"):
            engine.search(queries, SearchParams.uniform(1, 5, 5, mask=mask))
    wrong = forest_mask([bundle.tree] * 3, eligible_I)
    with pytest.raises(InvalidQuery, match="mask_B"):
        engine.search(queries, SearchParams.uniform(1, 5, 5, mask=wrong))
    right = forest_mask([tree for tree, _ in bundle.trees], eligible_I)
    assert set(engine.search(queries, SearchParams.uniform(1, 500, 500, mask=right)).item_rows_BM[0].tolist()) == {
        *np.flatnonzero(eligible_I).tolist(),
        NO_ITEM,
    }


def test_a_bundle_of_one_tree_is_written_as_before(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    bundle = make_linear_bundle(tmp_path, rng, random_tree(rng, 2, 4), SIGMOID)
    assert "trees" not in json.loads((bundle.path / "manifest.json").read_text())
    assert not list(bundle.path.glob("*-2.safetensors"))
    assert bundle.alone == (bundle,)
    assert bundle.trees == ((bundle.tree, bundle.chunks),)


def test_another_version_of_a_forest_has_all_its_trees(tmp_path: Path) -> None:
    bundle = some_forest(tmp_path)
    copied = with_parts(bundle, tmp_path / "linear" / "2", {}, {})
    again = Bundle.open(copied.path)
    assert again.manifest.trees == bundle.manifest.trees
    for (tree, chunks), (mine, own) in zip(bundle.trees, again.trees, strict=True):
        assert_array_equal(tree.leaf_item, mine.leaf_item)
        assert_array_equal(chunks.entry_weight, own.entry_weight)
    assert len({file.name for file in copied.path.glob("tree*")}) == 3


def _draft(bundle: Bundle) -> ManifestDraft:
    return ManifestDraft(**{name: getattr(bundle.manifest, name) for name in ManifestDraft.model_fields})


def _content(bundle: Bundle, trees: list[TreeChunks]) -> LinearContent:
    first, *others = trees
    return LinearContent(*first, bundle.items, bundle.golden(), bundle.heldout(), others=others)


def test_a_forest_has_at_most_so_many_trees(tmp_path: Path) -> None:
    bundle = some_forest(tmp_path, 2)
    one = bundle.trees[1]
    full = write_bundle(tmp_path / "linear" / "2", _draft(bundle), _content(bundle, [bundle.trees[0], *[one] * (MAX_TREES - 1)]))
    assert len(full.trees) == MAX_TREES
    with pytest.raises(BundleCorrupt, match=f"a forest of {MAX_TREES + 1} trees: at most {MAX_TREES}"):
        write_bundle(tmp_path / "linear" / "3", _draft(bundle), _content(bundle, [bundle.trees[0], *[one] * MAX_TREES]))
    raw = full.manifest.model_dump()
    with pytest.raises(ValueError, match="at most 15 items"):
        Manifest.model_validate(raw | {"trees": [*raw["trees"], raw["trees"][0]]})


def test_trees_that_do_not_fit_are_refused_with_the_reason(tmp_path: Path) -> None:
    bundle, rng = some_forest(tmp_path), np.random.default_rng(1)

    def with_other(tree: Tree, width: int = 20) -> list[TreeChunks]:
        return [*bundle.trees[:2], TreeChunks(tree, random_chunks(rng, tree, width))]

    fewer, features = tree_over(rng, bundle.tree.item_count - 1, 4), tree_over(rng, bundle.tree.item_count, 4)
    with pytest.raises(ValueError, match=rf"tree 3 holds {fewer.item_count} items, the first one {bundle.tree.item_count}"):
        write_bundle(tmp_path / "linear" / "2", _draft(bundle), _content(bundle, with_other(fewer)))
    with pytest.raises(ValueError, match="tree 3 has scorers of 21 features, the first one of 20"):
        write_bundle(tmp_path / "linear" / "2", _draft(bundle), _content(bundle, with_other(features, 21)))


def test_a_strangers_damaged_tree_is_refused_and_named(tmp_path: Path) -> None:
    bundle = some_forest(tmp_path)
    for name, other in (("tree-3.safetensors", "tree-2.safetensors"), ("chunks-2.safetensors", "chunks.safetensors")):
        whole = (bundle.path / name).read_bytes()
        (bundle.path / name).write_bytes((bundle.path / other).read_bytes())
        with pytest.raises(BundleCorrupt, match=name):
            Bundle.open(bundle.path)
        damaged = Bundle(bundle.path, bundle.manifest)
        with pytest.raises(BundleCorrupt, match=rf"{name}: "):
            damaged.trees  # noqa: B018
        (bundle.path / name).write_bytes(whole)
    (bundle.path / "chunks-3.safetensors").unlink()
    with pytest.raises(Exception, match=r"chunks-3.safetensors: missing"):
        Bundle.open(bundle.path)
    raw = json.loads((bundle.path / "manifest.json").read_text())
    del raw["files"]["tree-2.safetensors"]
    (bundle.path / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(BundleCorrupt, match=r"does not list tree-2.safetensors"):
        Bundle.open(bundle.path)


def test_the_margin_of_a_golden_query_is_the_smallest_of_all_trees_and_of_the_last_cut(tmp_path: Path) -> None:
    bundle = some_forest(tmp_path)
    queries, params = random_queries(np.random.default_rng(4), bundle, 12), SearchParams.uniform(12, 2, 3)
    table = golden_answers(bundle, queries, written_features(queries.features), params)
    reference, of_trees = ReferenceEngine(bundle), set()
    for b, margin in enumerate(table.column("margin").to_pylist()):
        gaps = []
        for place in range(3):
            for step in reference.steps(queries, params, b, place=place)[:-1]:
                kept = np.isin(step.candidates_C, step.kept_K)
                if not kept.all():
                    gaps.append((float(step.keys_C[kept].min() - step.keys_C[~kept].max()), place))
        ranks = reference.search(queries, SearchParams.uniform(12, 2, 4)).ranks_BM[b]
        gaps.append((float(ranks[2] - ranks[3]), 3))
        assert margin == pytest.approx(min(gaps)[0], abs=1e-6)
        of_trees.add(min(gaps)[1])
    assert len(of_trees) > 2, "cuts of several trees should be the closest ones"
    verified = with_parts(bundle, tmp_path / "linear" / "2", {}, {"golden.parquet": table})
    assert verify_golden(verified, open_sparse_cpu(verified)) == 1
    ranks = table.column("ranks").to_pylist()
    ranks[0][0] += 0.1
    damaged = table.set_column(table.column_names.index("ranks"), "ranks", pa.array(ranks, pa.list_(pa.float32())))
    with pytest.raises(BundleCorrupt, match="golden query 0 on sparse-cpu: item row"):
        verify_golden(verified, open_sparse_cpu(verified), damaged)
