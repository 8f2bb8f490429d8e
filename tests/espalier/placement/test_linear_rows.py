"""The weights of a new item's leaf in a model of linear scorers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose

from benchmarks.random_bundles import random_chunks, random_tree, sparse_rows
from espalier.placement.linear_rows import LinearRows
from espalier.placement.near_items import NearItems


@pytest.mark.parametrize("length", [0.7, 1e6])
def test_weights_are_rounded_to_what_a_fold_stores(length: float) -> None:
    rng = np.random.default_rng(3)
    tree = random_tree(rng, 2, 5)
    chunks = random_chunks(rng, tree, 10, integer=False)
    halves = replace(chunks, entry_weight=chunks.entry_weight.astype(np.float16))
    own = sparse_rows(rng.random((1, 10))).normalised()
    values = LinearRows(tree, halves).row((own.indices, np.float32(length) * own.values), (), ()).values
    with np.errstate(over="ignore"):
        is_half = values.astype(np.float16) == values
    assert is_half.all() == (length < 1)


def test_weights_are_the_text_and_the_neighbours() -> None:
    rng = np.random.default_rng(3)
    tree, width = random_tree(rng, 2, 5, empty_share=0.2), 10
    chunks = random_chunks(rng, tree, width, integer=False)
    old, new = (sparse_rows((rng.random((n, width)) < 0.5) * rng.random((n, width))).normalised() for n in (tree.item_count, 6))
    features = np.arange(width, dtype=np.int32)
    weights_I = np.array([chunks.weights_of(tree, leaf, features) for leaf in tree.leaf_of_item.tolist()])
    length = np.median(np.linalg.norm(weights_I, axis=1))
    item_nK, cosine_nK = NearItems(old).nearest(new, 3)
    leaves = LinearRows(tree, chunks)
    assert leaves.bias == pytest.approx(np.quantile(chunks.bias[tree.leaf_of_item], 0.25))
    for i in range(len(new)):
        own = new.between(i, i + 1)
        x = np.zeros(width)
        x[own.indices] = own.values
        for near, near_part in ((((), ()), 0), ((item_nK[i], cosine_nK[i]), cosine_nK[i] @ weights_I[item_nK[i]] / 3 / 2)):
            expected = length * x + near_part
            expected[np.abs(expected) < np.abs(weights_I[weights_I != 0]).min()] = 0
            row = leaves.row((own.indices, leaves.length * own.values), *near)
            found = np.zeros(width)
            found[row.feature] = row.values
            assert_allclose(found, expected, atol=1e-5)
            assert row.bias == np.float32(leaves.bias)
