"""Shards of a bundle: what they hold and refuse, and that together they answer as the whole bundle does.

Of graphs and of linear scorers, one tree and forests, with every engine.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from benchmarks.random_bundles import random_masks, random_queries
from espalier.bundle import LABEL_COUNTS, SHARD, Bundle
from espalier.bundle_files import sha256_of
from espalier.engines import open_engine
from espalier.engines.reference import ReferenceEngine
from espalier.errors import BundleCorrupt, InvalidQuery
from espalier.label_counts import LabelCounts
from espalier.live.fold import content_of
from espalier.manifest import GraphScorer
from espalier.queries import blank_queries
from espalier.search import SearchParams
from espalier.shards.cut import Cut
from tests.espalier import drawn_bundles
from tests.espalier.drawn_bundles import drawn_bundle, rewritten
from tests.espalier.second_stages import with_stacking
from tests.espalier.shards.merging import answers_of, merged, with_states

SHAPE = {"seed": 1, "branching_height": (4, 3), "ragged": True, "empty_share": 0.0, "gamma": 1.0, "dtype": "float32"}
SHAPES = st.one_of(drawn_bundles.graphs, drawn_bundles.linear.filter(lambda shape: "stacking" not in shape["kind"]))
"""Stacking is the router's."""


def made(folder: Path, shape: dict[str, Any]) -> Bundle:
    return drawn_bundle(folder, np.random.default_rng(shape["seed"]), shape)


def cut(bundle: Bundle, count: int) -> list[Bundle]:
    """Into so many shards; at least as many parents of leaves have items."""
    path = bundle.path.parent.parent / f"{bundle.manifest.name}-{count}-shards"
    whole = Cut(bundle, count)
    return [whole.write(path / str(index) / "1", index) for index in range(count)]


def drawn_cut(bundle: Bundle, count: int) -> list[Bundle]:
    """Into as many shards as were drawn, where so many parents of leaves have items."""
    assume(count <= len(np.unique(bundle.tree.parent[bundle.tree.leaf_of_item])))
    return cut(bundle, count)


def engines_of(bundle: Bundle) -> tuple[str, ...]:
    return ("onnx-cpu", "compiled-cpu", "reference") if isinstance(bundle.manifest.scorer, GraphScorer) else ("sparse-cpu", "reference")


@given(SHAPES, st.sampled_from([1, 3, 20]), st.sampled_from([1, 4, 30]), st.booleans())
def test_one_shard_answers_as_the_whole_bundle(
    tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any], beam_size: int, m: int, filtered: bool
) -> None:
    bundle = made(tmp_path_factory.mktemp("cut"), shape)
    rng = np.random.default_rng(shape["seed"])
    queries, params = random_queries(rng, bundle, 4), SearchParams.uniform(4, beam_size, m)
    if filtered and "kind" not in shape and len(bundle.alone) == 1:
        params = SearchParams(params.beam_size_B, params.m_B, mask_B=random_masks(rng, bundle.tree, 4, 0.3))
    (shard,) = cut(bundle, 1)
    for engine in engines_of(bundle):
        expected = answers_of(bundle, open_engine(bundle, engine=engine), queries, params)
        assert merged(bundle, [shard], queries, params, partial(open_engine, engine=engine)) == expected


@given(SHAPES, st.integers(2, 3))
def test_shards_whose_beams_cut_nothing_answer_together_as_the_whole_bundle(
    tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any], count: int
) -> None:
    """Ties included: equal keys are frequent with integer weights."""
    bundle = made(tmp_path_factory.mktemp("cut"), shape)
    queries = random_queries(np.random.default_rng(shape["seed"]), bundle, 4)
    params = SearchParams.uniform(4, max(alone.tree.node_count for alone in bundle.alone), 7)
    shards = drawn_cut(bundle, count)
    for engine in engines_of(bundle):
        expected = answers_of(bundle, open_engine(bundle, engine=engine), queries, params)
        assert merged(bundle, shards, queries, params, partial(open_engine, engine=engine)) == expected


@given(SHAPES, st.integers(2, 3), st.integers(1, 3))
def test_every_item_of_a_shard_has_the_rank_and_key_that_it_has_in_the_whole_bundle(
    tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any], count: int, beam_size: int
) -> None:
    """Of one tree. In a forest the rank depends on how many of the trees scored an item, and thus on the beam."""
    bundle = made(tmp_path_factory.mktemp("cut"), shape | {"trees": 1, "kind": shape["kind"].removesuffix(" tail")})
    queries = random_queries(np.random.default_rng(shape["seed"]), bundle, 4)
    every = SearchParams.uniform(4, bundle.tree.node_count, bundle.tree.item_count)
    expected = [{entry[0]: entry for entry in found} for found in answers_of(bundle, ReferenceEngine(bundle), queries, every)]
    shards, params = drawn_cut(bundle, count), SearchParams.uniform(4, beam_size, 6)
    answers = merged(bundle, shards, queries, params)
    for found, right in zip(answers, expected, strict=True):
        assert found == [right[row] for row, _, _ in found]
    for engine in engines_of(bundle) if "kind" in shape else ():  # whose ranks are exact
        assert merged(bundle, shards, queries, params, partial(open_engine, engine=engine)) == answers


# -- what a shard holds ---------------------------------------------------------------------------------------------------


@given(SHAPES, st.integers(1, 3))
def test_a_shard_says_what_it_is_of_and_stores_numbers_as_the_whole_bundle_does(
    tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any], count: int
) -> None:
    bundle = made(tmp_path_factory.mktemp("cut"), shape)
    for index, shard in enumerate(drawn_cut(bundle, count)):
        opened = Bundle.open(shard.path)
        parts, info = opened.shard, opened.manifest.shard
        assert parts is not None
        assert info is not None
        assert (info.of, info.version, info.index, info.count) == (bundle.manifest.name, 1, index, count)
        assert info.digest == sha256_of(bundle.path / "manifest.json")
        assert (opened.manifest.name, opened.manifest.search) == (str(index), bundle.manifest.search)
        assert opened.items.ids_of(np.arange(len(parts.items))) == bundle.items.ids_of(parts.items)
        assert_array_equal(opened.items.rows_of(bundle.items.ids_of(parts.items)), np.arange(len(parts.items)))
        assert len(opened.golden()) == len(opened.heldout()) == 0
        for mine, whole in zip(opened.alone, bundle.alone, strict=True):
            assert stored_dtype(mine) == stored_dtype(whole)


def stored_dtype(bundle: Bundle) -> Any:
    return bundle.stored_rows.dtype if isinstance(bundle.manifest.scorer, GraphScorer) else bundle.chunks.entry_weight.dtype


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("whole")
    return made(folder, SHAPE | {"seed": 5, "kind": "product memory", "gamma": 0.5})


@pytest.mark.parametrize("name", ["reference", "compiled-cpu", "onnx-cpu"])
def test_a_shard_cannot_encode_histories_but_those_without_an_item(whole: Bundle, tmp_path: Path, name: str) -> None:
    engine = open_engine(Cut(whole, 2).write(tmp_path / "0" / "1", 0), engine=name)
    queries, params = blank_queries(whole.manifest.query, 2), SearchParams.uniform(2, 3, 3)
    assert engine.search(queries, params).count_B.tolist() == [3, 3]
    queries.array[1, -1] = 0
    with pytest.raises(InvalidQuery, match=r"states_BLS: got None, expected the queries' states: shard 0 of 2 of m\d+ has not"):
        engine.search(queries, params)
    queries.array[1, -1] = whole.tree.item_count - 1  # a row of the whole bundle, which the shard has not
    with_rows = with_states(whole, queries)
    assert engine.search(with_rows, params).count_B.tolist() == [3, 3]
    queries.array[1, -1] = whole.tree.item_count
    with pytest.raises(InvalidQuery, match="item rows from 0 to"):
        engine.search(with_rows, params)


def test_a_shard_is_not_cut_again_but_the_only_one_of_a_bundle_is(whole: Bundle, tmp_path: Path) -> None:
    with pytest.raises(BundleCorrupt, match="shard 1 of 2, expected a bundle of all items"):
        Cut(Cut(whole, 2).write(tmp_path / "two" / "1" / "1", 1), 2)
    only = Cut(whole, 1).write(tmp_path / "one" / "0" / "1", 0)
    for index in range(2):
        first, second = (Cut(bundle, 2).write(tmp_path / name / str(index) / "1", index) for bundle, name in ((whole, "a"), (only, "b")))
        assert first.manifest.shard == second.manifest.shard
        for name in ("items.arrow", "memory.safetensors", "nodes.safetensors", "tree.safetensors", SHARD):
            assert first.manifest.files[name] == second.manifest.files[name]


def test_what_stays_with_the_whole_bundle_is_not_in_a_shard(tmp_path: Path) -> None:
    bundle = made(tmp_path, SHAPE | {"kind": "linear", "dtype": "float16", "trees": 1, "own": "log_activation"})
    counts = LabelCounts(np.ones(bundle.tree.item_count, np.int64), bundle.tree.item_count)
    counted = rewritten(bundle, tmp_path / "counted" / "1", counts=counts)
    assert LABEL_COUNTS in counted.manifest.files
    shard = Cut(counted, 2).write(tmp_path / "shards" / "0" / "1", 0)
    assert sorted(shard.manifest.files) == sorted(
        ["chunks.safetensors", "golden.parquet", "heldout.parquet", "items.arrow", "shard.safetensors", "tree.safetensors"]
    )
    assert shard.manifest.metrics == {}
    assert content_of(shard).heldout.schema == counted.heldout().schema


def test_stacking_is_the_routers_and_shards_give_the_order_of_the_trees(tmp_path: Path) -> None:
    bundle, plain = with_stacking(tmp_path, 3, candidates=6)
    queries, params = random_queries(np.random.default_rng(3), bundle, 4), SearchParams.uniform(4, 100, 9)
    shards = cut(bundle, 2)
    assert shards[0].manifest.stacking is None
    assert merged(bundle, shards, queries, params) == answers_of(plain, ReferenceEngine(plain), queries, params)
