"""The paper's synthetic experiments: their parts against brute force, and their claims in the small."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from benchmarks.papers.otm import otm_table1, otm_table2
from benchmarks.papers.otm.otm_table2 import (
    HEIGHT,
    LEAVES,
    Data,
    level,
    make_data,
    optimal_labels,
    ranks,
)

pytestmark = pytest.mark.slow


def test_a_node_is_relevant_where_an_item_below_is() -> None:
    rng = np.random.default_rng(0)
    leaves = rng.random((3, 8)) < 0.3
    levels = otm_table1.upward(leaves, np.logical_or)
    assert [found.shape[1] for found in levels] == [1, 2, 4, 8]
    for h, found in enumerate(levels):
        np.testing.assert_array_equal(found, leaves.reshape(3, 1 << h, -1).any(2))


def test_exact_probabilities_are_those_of_all_outcomes() -> None:
    eta = np.array([0.1, 0.5, 0.9, 0.3])
    outcomes = np.array(list(itertools.product([False, True], repeat=4)))
    chance = np.where(outcomes, eta, 1 - eta).prod(1)
    expected = [chance @ z for z in otm_table1.upward(outcomes, np.logical_or)]
    found = otm_table1.scores(np.random.default_rng(0), eta)
    for level_, wanted in zip(found["inf"], expected, strict=True):
        np.testing.assert_allclose(1 - np.exp(-level_), wanted)
    for level_, wanted in zip(found["inf float32"], expected, strict=True):
        np.testing.assert_allclose(level_, wanted, rtol=1e-6)


def test_beam_search_keeps_the_best_children_and_of_equals_the_lower() -> None:
    levels = [np.zeros(1), np.array([1.0, 1.0]), np.array([0.1, 0.5, 0.9, 0.5])]
    assert otm_table1.beam_search(levels, 1).tolist() == [1]
    assert otm_table1.beam_search(levels, 2).tolist() == [1, 2]
    assert otm_table1.beam_search(levels, 3).tolist() == [1, 2, 3]


def test_optimal_labels_follow_the_child_of_the_larger_logit() -> None:
    generator = torch.Generator().manual_seed(1)
    y_BM = (torch.rand(4, LEAVES, generator=generator) < 0.1).float()
    g_BN = torch.randint(-1, 2, (4, 2 * LEAVES - 1), generator=generator).float()  # with ties
    labels_BN = optimal_labels(y_BM, g_BN)
    torch.testing.assert_close(level(labels_BN, HEIGHT), y_BM)
    for b in range(4):
        for node in [0, 1, 2, 17, 100, 511, 1022]:
            left, right = 2 * node + 1, 2 * node + 2
            children = (
                [left, right] if g_BN[b, left] == g_BN[b, right] else [left if g_BN[b, left] > g_BN[b, right] else right]
            )  # of equals the positive one
            assert labels_BN[b, node] == max(labels_BN[b, child] for child in children)


@pytest.mark.parametrize("method", otm_table2.METHODS)
def test_every_method_learns(method: str) -> None:
    """A few epochs take most of the regret of untrained nodes away."""
    train, test = make_data(torch.Generator().manual_seed(6), -5.0)
    few = Data(*(part[: 2 * otm_table2.BATCH] for part in (train.x_BD, train.eta_BM, train.y_BM)))
    theta_DN = otm_table2.fit(method, few, torch.Generator().manual_seed(7), epochs=3)
    untrained = otm_table2.regrets(0.01 * torch.randn(len(test.x_BD), 2 * LEAVES - 1, generator=torch.Generator().manual_seed(8)), test)
    assert otm_table2.regrets(ranks(method, test.x_BD @ theta_DN), test)[-1] < 0.8 * untrained[-1]
