"""The first trees: balance, branching, seeds, and that similar items share subtrees."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from espalier.errors import InvalidConfig, InvalidData
from espalier.tree import EMPTY_LEAF, Tree
from tests.training.logs import log_of
from training.trees import embeddings as embeddings_module
from training.trees.balanced import balanced_tree, category_tree, random_tree
from training.trees.embeddings import item_embeddings, spread_unseen
from training.trees.kmeans import kmeans_tree


def vectors(items: int, width: int = 4, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((items, width)).astype(np.float32)


BUILDERS: dict[str, Callable[[int, int, int], Tree]] = {
    "balanced": lambda items, branching, seed: balanced_tree(np.arange(items), branching),
    "random": lambda items, branching, seed: random_tree(items, branching, seed=seed),
    "category": lambda items, branching, seed: category_tree(np.arange(items, dtype=np.int32) % 7 - 1, branching, seed=seed),
    "kmeans": lambda items, branching, seed: kmeans_tree(vectors(items), branching, seed=seed),
}


@pytest.mark.parametrize("name", BUILDERS)
@given(items=st.integers(1, 300), branching=st.integers(2, 32), seed=st.integers(0, 99))
def test_every_tree_is_balanced_as_low_as_possible_and_without_empty_leaves(name: str, items: int, branching: int, seed: int) -> None:
    tree = BUILDERS[name](items, branching, seed)
    assert_array_equal(np.sort(tree.leaf_item), np.arange(items))
    assert EMPTY_LEAF not in tree.leaf_item
    assert branching**tree.height >= items
    assert tree.height == 1 or branching ** (tree.height - 1) < items
    for h in range(tree.height):
        nodes = tree.level(h)
        assert len(nodes) == branching**h
        below = tree.items_below[nodes.start : nodes.stop]
        assert below.max() - below.min() <= 1
    assert max(tree.max_children) <= branching


@pytest.mark.parametrize("name", ["random", "category", "kmeans"])
def test_the_seed_decides_the_tree(name: str) -> None:
    first, again, other = (BUILDERS[name](200, 3, seed).leaf_item for seed in (1, 1, 2))
    assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("branching", [-1, 0, 1])
def test_a_branching_below_two_is_refused(branching: int) -> None:
    for build in BUILDERS.values():
        with pytest.raises(InvalidConfig) as error:
            build(5, branching, 0)
        assert error.value.field == "branching"


@given(st.lists(st.integers(-1, 5), min_size=1, max_size=80), st.integers(0, 99))
def test_the_items_of_a_category_are_contiguous(categories: list[int], seed: int) -> None:
    category = np.array(categories, np.int32)
    leaves = category[category_tree(category, 2, seed=seed).leaf_item]
    assert np.count_nonzero(np.diff(leaves)) == len(set(categories)) - 1


def test_a_category_below_none_is_refused() -> None:
    with pytest.raises(InvalidData):
        category_tree(np.array([0, -2], np.int32), 2, seed=0)


@pytest.mark.parametrize(("branching", "seed"), [(2, 0), (3, 1), (8, 2)])
def test_kmeans_gives_each_planted_cluster_a_subtree(branching: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cluster = rng.permutation(np.repeat(np.arange(branching), 30))
    points = 10 * np.eye(branching, 16)[cluster] + rng.standard_normal((len(cluster), 16)) * 0.1
    tree = kmeans_tree(points.astype(np.float32), branching, seed=seed)
    leaves = cluster[tree.leaf_item].reshape(branching, 30)
    assert (leaves == leaves[:, :1]).all()


def test_kmeans_looks_at_directions_only() -> None:
    points = vectors(64)
    scale = np.random.default_rng(1).uniform(0.25, 4, (64, 1)).astype(np.float32)
    siblings = [
        {frozenset(tree.leaf_item[2 * k : 2 * k + 2].tolist()) for k in range(32)}
        for tree in (kmeans_tree(points, 2, seed=0), kmeans_tree(points * scale, 2, seed=0))
    ]
    assert len(siblings[0] & siblings[1]) > 24


def test_kmeans_copes_with_zero_and_equal_rows() -> None:
    points = np.zeros((33, 4), np.float32)
    points[:8] = 1
    assert_array_equal(np.sort(kmeans_tree(points, 2, seed=0).leaf_item), np.arange(33))


@pytest.mark.parametrize("points", [np.zeros((0, 3)), np.zeros((3, 0)), np.zeros(3), np.array([[np.nan]]), np.array([[np.inf]])])
def test_kmeans_refuses_what_are_not_vectors(points: np.ndarray) -> None:
    with pytest.raises(InvalidData) as error:
        kmeans_tree(points.astype(np.float32), 2, seed=0)
    assert error.value.field == "embeddings_ID"


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("width", [4, 17])
def test_embeddings_are_the_truncated_svd_of_the_weighted_matrix(width: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with columns in several blocks, and rows in several."""
    monkeypatch.setattr(embeddings_module, "ROWS", 7)
    monkeypatch.setattr(embeddings_module, "BLOCK_BYTES", 4 * 30 * 5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    rng = np.random.default_rng(3)
    lists = [[*rng.integers(0, 29, 4 + user % 9).tolist(), 0] for user in range(60)]
    users = np.arange(0, 60, 2)
    touched_UI = np.zeros((30, 30))
    for row, user in enumerate(users):
        touched_UI[row, lists[user]] = 1
    norm_UI = np.sqrt(np.outer(touched_UI.sum(1), np.maximum(1, touched_UI.sum(0))))
    _, value_D, right_DI = np.linalg.svd(touched_UI / norm_UI)
    expected_ID = right_DI[:width].T * value_D[:width]
    found_ID = item_embeddings(log_of(lists, items=30), users, width, seed=0)
    assert_allclose(np.abs(found_ID.T @ found_ID), np.diag(value_D[:width] ** 2), atol=2e-3)
    assert_allclose(found_ID @ found_ID.T, expected_ID @ expected_ID.T, atol=2e-3)
    assert not found_ID[29].any()


def test_embeddings_of_few_kinds_of_lists_end_in_zeros() -> None:
    """A matrix of rank 2 has no third direction, and none is made of rounding."""
    found = item_embeddings(log_of([[0, 1], [2, 3]] * 8), np.arange(16), 3, seed=0)
    assert_allclose(np.linalg.norm(found, axis=0), [1, 1, 0], atol=1e-5)


def test_threads_change_nothing_of_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = kmeans_tree(vectors(1000), 3, seed=1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    assert_array_equal(kmeans_tree(vectors(1000), 3, seed=1).leaf_item, alone.leaf_item)


def test_a_split_leaves_no_item_that_is_nearer_to_the_other_side() -> None:
    """Two centres, and a cut in the middle of the order by which of them is nearer."""
    points = vectors(600, seed=5)
    halves = kmeans_tree(points, 2, seed=1, max_iterations=1000).leaf_item.reshape(2, -1)
    unit = points / np.linalg.norm(points, axis=1, keepdims=True)
    centres = [unit[half].sum(0) for half in halves]
    axis = centres[1] / np.linalg.norm(centres[1]) - centres[0] / np.linalg.norm(centres[0])
    assert (unit[halves[0]] @ axis).max() < (unit[halves[1]] @ axis).min()


@pytest.mark.parametrize("width", [0, 20])
def test_an_embedding_width_that_the_matrix_does_not_have_is_refused(width: int) -> None:
    with pytest.raises(InvalidConfig) as error:
        item_embeddings(log_of([[0, 1], [2, 19]] * 20), np.arange(40), width, seed=0)
    assert error.value.field == "width"


def test_unseen_items_borrow_from_their_category_and_else_from_anyone() -> None:
    embeddings = np.array([[1, 0], [2, 0], [0, 3], [0, 0], [0, 0], [0, 0], [0, 0]], np.float32)
    category = np.array([0, 0, 1, 1, 0, 7, -1], np.int32)
    for seed in range(10):
        filled = spread_unseen(embeddings, category, seed=seed)
        assert_array_equal(filled[:3], embeddings[:3])
        assert filled[3].tolist() == [0, 3]
        assert filled[4].tolist() in ([1, 0], [2, 0])
        assert filled.any(axis=1).all()
    assert not embeddings[3:].any()
    assert not spread_unseen(np.zeros((3, 2), np.float32), seed=0).any(), "nothing is borrowed where nothing is known"
