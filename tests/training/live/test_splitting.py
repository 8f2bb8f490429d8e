"""Nodes of too many children are split until a tree may be written, and what lies below them stays in its order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from espalier.bundle_writer import GraphContent, write_bundle
from espalier.checks.random_bundles import make_bundle
from espalier.errors import InvalidTree
from espalier.items import ItemTable
from espalier.live.fold import content_of, fold_draft
from espalier.tree import tree_from_children
from training.live.splitting import most_children, split_for_padding


def padded(count: list[int], most: int) -> bool:
    """Whether padding is allowed once nodes have at most so many children."""
    parts = [-(-c // -(-c // most)) for c in count]
    return sum(-(-c // most) for c in count) * max(parts) <= 2 * sum(count)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_as_few_nodes_are_split_as_padding_demands(count: list[int]) -> None:
    most = most_children(np.array(count))
    assert padded(count, most)
    assert not any(padded(count, more) for more in range(most + 1, max(count) + 1))


@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_a_split_tree_may_be_written_and_keeps_leaves_under_their_ancestors(seed: int, height: int) -> None:
    rng = np.random.default_rng(seed)
    counts, size = [], 1
    for _ in range(height):
        counts.append(np.where(rng.random(size) < 0.2, rng.integers(5, 30, size), rng.integers(1, 3, size)))
        size = int(counts[-1].sum())
    tree = tree_from_children(counts, rng.permutation(size))
    found = split_for_padding(tree)
    after = found.tree
    assert all(after.level_size(h) * after.max_children[h] <= 2 * after.level_size(h + 1) for h in range(after.height))
    assert_array_equal(after.leaf_item, tree.leaf_item)
    leaves = np.arange(size)
    assert_array_equal(found.source_N[after.ancestors(after.leaf_offset + leaves)], tree.ancestors(tree.leaf_offset + leaves))
    assert (found.split == 0) == (after.node_count == tree.node_count)


def test_splitting_makes_a_bundle_of_what_was_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    small = make_bundle(tmp_path, rng, tree_from_children([[2], [2, 2]], np.arange(4)))
    tree, path = tree_from_children([[4], [2, 2, 2, 30]], np.arange(36)), tmp_path / "tiny" / "2"
    content = content_of(small)
    assert isinstance(content, GraphContent)
    items = ItemTable.build(pa.table({"id": [str(i) for i in range(36)]}))
    crowded = replace(content, tree=tree, node_rows_ND=np.zeros((tree.node_count, 4), np.float32), items=items)
    with pytest.raises(InvalidTree, match="more than twice"):
        write_bundle(path, fold_draft(small, path, 0), crowded)
    after = split_for_padding(tree).tree
    rows_ND = np.zeros((after.node_count, 4), np.float32)
    bundle = write_bundle(path, fold_draft(small, path, 0), replace(crowded, tree=after, node_rows_ND=rows_ND))
    assert bundle.tree.item_count == 36
