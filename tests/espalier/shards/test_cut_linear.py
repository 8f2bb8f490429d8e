"""Shards of bundles of linear scorers, of forests, with tails, weights in float16: what they hold."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from benchmarks.random_bundles import make_linear_bundle, random_queries, random_tree, tree_over
from espalier.bundle import LABEL_COUNTS, Bundle
from espalier.bundle_writer import LinearContent, write_bundle
from espalier.chunks import TreeChunks
from espalier.engines.reference import ReferenceEngine
from espalier.label_counts import LabelCounts
from espalier.live.fold import content_of
from espalier.manifest import Ranking
from espalier.packed_chunks import rounded
from espalier.search import SearchParams
from espalier.shards.cut import Cut
from tests.espalier.bundle.parts import draft_of
from tests.espalier.second_stages import F, random_tail, with_stacking
from tests.espalier.shards.merging import answers_of, merged
from tests.espalier.shards.test_cut_graphs import cut, drawn_cut

NUMBER = itertools.count()
shapes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "trees": st.integers(1, 3),
        "tail": st.booleans(),
        "dtype": st.sampled_from(["float32", "float16"]),
        "gamma": st.sampled_from([0.5, 1.0]),
    }
)


def made(folder: Path, shape: dict[str, Any]) -> Bundle:
    rng = np.random.default_rng(shape["seed"])
    tree = random_tree(rng, 3, 4, empty_share=0.2)
    others = [tree_over(rng, tree.item_count, 5) for _ in range(shape["trees"] - 1)]
    ranking = Ranking(own="log_activation", gamma=shape["gamma"])
    bundle = make_linear_bundle(
        folder, rng, tree, ranking, shape.get("integer", True), name=f"m{next(NUMBER)}", width=F, others=others, max_m=1000
    )
    changed: dict[str, Any] = {}
    if shape["dtype"] == "float16":
        narrow = [TreeChunks(tree, rounded(chunks) or chunks) for tree, chunks in bundle.trees]
        changed |= {"chunks": narrow[0].chunks, "others": narrow[1:]}
    if shape["tail"] and others:
        changed["tail"] = random_tail(rng, tree.item_count, "gaussian", 0.5)
    return rewritten(bundle, folder / f"m{next(NUMBER)}" / "1", **changed) if changed else bundle


def rewritten(bundle: Bundle, path: Path, **changed: Any) -> Bundle:
    """The bundle with other parts."""
    content = content_of(bundle)
    assert isinstance(content, LinearContent)
    return write_bundle(path, draft_of(bundle), replace(content, **changed))


@given(shapes, st.integers(1, 3))
def test_a_shard_has_the_weights_and_the_tail_of_its_items(
    tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any], count: int
) -> None:
    bundle = made(tmp_path_factory.mktemp("cut"), shape)
    every = np.arange(F, dtype=np.int32)
    for shard in drawn_cut(bundle, count):
        opened = Bundle.open(shard.path)
        assert opened.shard is not None
        for (tree, chunks), (whole, of_whole), nodes in zip(opened.trees, bundle.trees, opened.shard.nodes, strict=True):
            assert_array_equal(nodes[tree.leaf_of_item], whole.leaf_of_item[opened.shard.items])
            assert_array_equal(chunks.bias, of_whole.bias[nodes])
            assert chunks.entry_weight.dtype == of_whole.entry_weight.dtype
            assert np.diff(chunks.row_entry).min(initial=1) > 0
            for node in range(1, tree.node_count):
                assert_array_equal(chunks.weights_of(tree, node, every), of_whole.weights_of(whole, int(nodes[node]), every))
        assert (opened.tail is None) == (bundle.tail is None)
        if opened.tail is not None and bundle.tail is not None:
            for row, item in enumerate(opened.shard.items.tolist()):
                values = np.ones(F, np.float32)
                assert opened.tail.part(every, values, row) == pytest.approx(bundle.tail.part(every, values, item))


def test_what_stays_with_the_whole_bundle_is_not_in_a_shard(tmp_path: Path) -> None:
    shape = {"seed": 1, "trees": 1, "tail": False, "dtype": "float16", "gamma": 1.0}
    bundle = made(tmp_path, shape)
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
