"""Bundles of linear scorers, of one tree and of several: `sparse-cpu` searches as the reference does, with masks, exclusions, traces and
threads.
"""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from numpy.testing import assert_array_equal

from benchmarks.random_bundles import make_bundle, make_linear_bundle, random_masks, random_queries, random_tree
from espalier.bundle import CHUNKS, Bundle
from espalier.bundle_writer import LinearContent, write_bundle
from espalier.engines import open_engine
from espalier.engines.reference import ReferenceEngine
from espalier.errors import BundleCorrupt, DeviceUnavailable, InvalidQuery
from espalier.manifest import ManifestDraft, Ranking
from espalier.queries import FeaturesKind, QueryBatch, blank_queries, encode_features
from espalier.search import SearchParams
from espalier.tree import tree_from_children
from tests.espalier.linear_shapes import draw_linear, linear_shapes
from tests.espalier.test_signature import (
    assert_alone_as_together,
    assert_best_beams,
    assert_same,
    assert_wide_beams_bring_enough,
)

shapes = linear_shapes()


@given(shape=shapes)
def test_it_equals_the_reference_exactly_with_integer_weights(tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any]) -> None:
    bundle, queries, params = draw_linear(tmp_path_factory.mktemp("models"), shape, integer=True)
    engine = open_engine(bundle, "cpu", threads=shape["threads"])
    assert_same(engine.search(queries, params), ReferenceEngine(bundle).search(queries, params))
    engine.close()


@given(shape=shapes)
def test_kept_beams_are_the_best_with_real_weights(tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any]) -> None:
    bundle, queries, params = draw_linear(tmp_path_factory.mktemp("models"), shape | {"batch": min(shape["batch"], 3)}, integer=False)
    rows = queries.features
    queries = QueryBatch(queries.kind, replace(rows, values=rows.values / np.float32(4)))  # logits of a few units, which `rounding` is for
    engine = open_engine(bundle, "cpu", threads=shape["threads"])
    assert_best_beams(engine, bundle, queries, params)
    assert_alone_as_together(engine, queries, params)
    engine.close()


@given(shape=shapes)
def test_a_beam_of_at_least_m_brings_min_of_m_and_eligible(tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any]) -> None:
    bundle, queries, params = draw_linear(tmp_path_factory.mktemp("models"), shape, integer=True)
    assert_wide_beams_bring_enough(open_engine(bundle, "cpu"), bundle, queries, params)


def test_nothing_of_a_search_is_left_for_the_next(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    bundle = make_linear_bundle(tmp_path, rng, random_tree(rng, 3, 4), Ranking(activation="l3-hinge", own="log_activation", gamma=1))
    engine, queries = open_engine(bundle, "cpu"), random_queries(rng, bundle, 4)
    params = SearchParams.uniform(4, 3, 5)
    before = engine.search(queries, params)
    masks = random_masks(rng, bundle.tree, 4, 0.3)
    engine.search(queries, SearchParams.uniform(4, 40, 50, exclude_BE=rng.integers(0, bundle.tree.item_count, (4, 9))))
    engine.search(queries, SearchParams(np.full(4, 9), np.full(4, 9), trace=True, mask_B=masks))
    assert_same(engine.search(queries, params), before)


def test_a_trace_takes_memory_for_what_was_scored_and_no_more(tmp_path: Path) -> None:
    """One request with `explain` over a forest of many leaves took gigabytes: arrays as wide on all levels as the leaves are many."""
    rng = np.random.default_rng(8)
    children = [[2] * 2**h for h in range(7)] + [[25] * 2**7]
    tree = tree_from_children(children, rng.permutation(25 * 2**7))
    bundle = make_linear_bundle(tmp_path, rng, tree, Ranking(own="log_activation", gamma=1), integer=False)
    queries, engine = random_queries(rng, bundle, 8), open_engine(bundle, "cpu")
    plain = engine.search(queries, SearchParams.uniform(8, 200, 10))
    tracemalloc.start()
    traced = engine.search(queries, SearchParams.uniform(8, 200, 10, trace=True))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert_array_equal(traced.item_rows_BM, plain.item_rows_BM)
    assert traced.trace is not None
    scored = sum(level.candidates_BC.size for level in traced.trace)
    assert scored == 8 * tree.leaf_count
    assert peak < 3 * 12 * scored, "12 bytes for each node that was scored, and room for the levels of one query"


def test_queries_must_be_the_bundles(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    bundle = make_linear_bundle(tmp_path, rng, random_tree(rng, 2, 4), Ranking(own="log_activation", gamma=1))
    engine = open_engine(bundle, "cpu")
    with pytest.raises(InvalidQuery, match=r"queries: got .*width=21.*expected .*width=20"):
        engine.search(blank_queries(FeaturesKind(width=21), 1), SearchParams.uniform(1, 1, 1))
    dense = make_bundle(tmp_path, rng, random_tree(rng, 2, 4), "vector")
    with pytest.raises(InvalidQuery, match=r"queries: got .*, expected .*features"):
        engine.search(random_queries(rng, dense, 1), SearchParams.uniform(1, 1, 1))
    with pytest.raises(InvalidQuery, match=r"queries: got .*features.*, expected kind='vector'"):
        open_engine(dense, "cpu", "onnx-cpu").search(random_queries(rng, bundle, 1), SearchParams.uniform(1, 1, 1))


def test_each_kind_of_scorer_has_its_engines(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    tree = random_tree(rng, 2, 4)
    linear = make_linear_bundle(tmp_path, rng, tree, Ranking(own="log_activation", gamma=1))
    graphs = make_bundle(tmp_path, rng, tree)
    assert open_engine(linear).name == open_engine(linear, "cpu").name == "sparse-cpu"
    with pytest.raises(
        DeviceUnavailable, match="onnx-cpu cannot search linear, which has linear scorers: expected one of sparse-cuda, sparse-cpu"
    ):
        open_engine(linear, engine="onnx-cpu")
    with pytest.raises(
        DeviceUnavailable,
        match="engine sparse-cpu cannot search tiny, which has graphs scorers: expected one of triton, onnx",
    ):
        open_engine(graphs, engine="sparse-cpu")


def test_damaged_chunks_are_refused_with_the_reason(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    tree = random_tree(rng, 2, 4)
    bundle = make_linear_bundle(tmp_path, rng, tree, Ranking(own="log_activation", gamma=1))
    chunks = bundle.chunks
    assert not chunks.entry_weight.flags.writeable
    content = LinearContent(tree, chunks, bundle.items, bundle.golden(), bundle.heldout())
    draft = ManifestDraft(
        **{name: getattr(bundle.manifest, name) for name in ManifestDraft.model_fields} | {"query": FeaturesKind(width=19)}
    )
    with pytest.raises(ValueError, match="scorers of 20 features cannot answer queries of 19"):
        write_bundle(tmp_path / "linear" / "2", draft, content)
    raw = bytearray((bundle.path / CHUNKS).read_bytes())
    begin = raw.index(b"row_feature")
    assert begin > 0
    raw[begin : begin + 3] = b"col"
    (bundle.path / CHUNKS).write_bytes(raw)
    with pytest.raises(BundleCorrupt, match=rf"{CHUNKS}: arrays .*col_feature.*, expected .*row_feature"):
        Bundle.open(bundle.path, verify=False).chunks  # noqa: B018


def test_features_are_checked_and_sorted() -> None:
    kind = FeaturesKind(width=5)
    rows = encode_features(kind, [([3, 0], [1.0, 2.0]), ([], [])]).features
    assert (rows.indptr.tolist(), rows.indices.tolist(), rows.values.tolist()) == ([0, 2, 2], [0, 3], [2.0, 1.0])
    unit = encode_features(FeaturesKind(width=5, unit=True), [([3, 0], [3.0, 4.0]), ([], [])]).features
    assert_array_equal(unit.values, np.array([0.8, 0.6], np.float32))
    for indices, values, message in (
        ([1, 2], [1.0], r"queries\[0\].features.values: got '1 numbers', expected 2, one for each index"),
        ([1, 5], [1.0, 1.0], r"queries\[0\].features.indices: got 5, expected feature numbers from 0 to 4"),
        ([-1, 2], [1.0, 1.0], r"queries\[0\].features.indices: got -1, expected feature numbers from 0 to 4"),
        ([1, 10**30], [1.0, 1.0], r"queries\[0\].features.indices: got 1000000000000000000000000000000, expected feature numbers from 0"),
        ([-(10**30), 2], [1.0, 1.0], r"queries\[0\].features.indices: got -1000000000000000000000000000000, expected feature numbers"),
        ([2, 2], [1.0, 1.0], r"queries\[0\].features.indices: got 2, expected each feature number once"),
        ([1, 2], [1.0, 1e39], r"queries\[0\].features.values: got 1e\+39, expected finite 32-bit numbers"),
    ):
        with pytest.raises(InvalidQuery, match=message):
            encode_features(kind, [(indices, values)])
