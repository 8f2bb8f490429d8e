"""Shards of a bundle answer together as the whole bundle does: of graphs and of linear scorers, one tree and forests, with every engine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.random_bundles import random_masks, random_queries
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.engines.reference import ReferenceEngine
from espalier.manifest import GraphScorer
from espalier.search import SearchParams
from tests.espalier.shards import test_cut_graphs, test_cut_linear
from tests.espalier.shards.merging import answers_of, merged
from tests.espalier.shards.test_cut_graphs import cut, drawn_cut

SHAPES = st.one_of(test_cut_graphs.shapes, test_cut_linear.shapes)


def made(folder: Path, shape: dict[str, Any]) -> Bundle:
    return test_cut_graphs.made(folder, shape) if "kind" in shape else test_cut_linear.made(folder, shape)


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
    bundle = made(tmp_path_factory.mktemp("cut"), shape | {"trees": 1})
    queries = random_queries(np.random.default_rng(shape["seed"]), bundle, 4)
    every = SearchParams.uniform(4, bundle.tree.node_count, bundle.tree.item_count)
    expected = [{entry[0]: entry for entry in found} for found in answers_of(bundle, ReferenceEngine(bundle), queries, every)]
    shards, params = drawn_cut(bundle, count), SearchParams.uniform(4, beam_size, 6)
    answers = merged(bundle, shards, queries, params)
    for found, right in zip(answers, expected, strict=True):
        assert found == [right[row] for row, _, _ in found]
    for engine in engines_of(bundle) if "kind" in shape else ():  # whose ranks are exact
        assert merged(bundle, shards, queries, params, partial(open_engine, engine=engine)) == answers
