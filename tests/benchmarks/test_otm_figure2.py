"""Figure 2 of OTM: what is counted on a level, against counting by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.otm import otm_figure2
from training.trees.balanced import random_tree


@given(
    pairs=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), min_size=1, max_size=40),
    branching=st.integers(2, 4),
    seed=st.integers(0, 99),
)
def test_a_node_counts_the_instances_that_have_a_target_below(pairs: list[tuple[int, int]], branching: int, seed: int) -> None:
    tree = random_tree(13, branching, seed=seed)
    below: list[set[int]] = [set() for _ in range(tree.node_count)]
    for instance, item in pairs:
        node = int(tree.leaf_of_item[item])
        while node >= 0:
            below[node].add(instance)
            node = int(tree.parent[node])
    instance_E, item_E = np.array(pairs, np.int64).T
    found = otm_figure2.relevant_instances(tree, instance_E, item_E)
    assert [level.tolist() for level in found] == [[len(below[n]) for n in tree.level(h)] for h in range(tree.height + 1)]


def test_shares_fall_and_sum_to_one() -> None:
    np.testing.assert_allclose(otm_figure2.shares(np.array([1, 0, 5, 2])), [5 / 8, 2 / 8, 1 / 8, 0])


def test_an_even_level_has_a_tenth_in_its_head_and_half_in_its_tail() -> None:
    assert otm_figure2.head_and_tail(np.full(256, 1 / 256)) == pytest.approx({"head": 0.1, "tail": 0.5})
    assert otm_figure2.head_and_tail(np.array([0.7, 0.1, 0.1, 0.1])) == pytest.approx({"head": 0.28, "tail": 0.2})
