"""Which shard holds which subtree; a shard's own rows and numbers, its masks, and memory that comes with queries."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from benchmarks.random_bundles import make_bundle, random_memory, random_queries, random_tree
from espalier.bundle import Bundle
from espalier.errors import InvalidConfig, InvalidMessage
from espalier.masks.eligibility import eligible_nodes
from espalier.memory_lists import MemoryLists, MemoryTree
from espalier.search import NodeMask, SearchParams
from espalier.shards.cut import Cut
from espalier.shards.layout import NO_SHARD, SUBTREES, cut_level, kept_nodes, node_shards, nodes_above_items, shard_items
from espalier.shards.local import LocalShard
from espalier.shards.messages import MaskBits
from espalier.tree import EMPTY_LEAF, Tree, complete_tree
from service.models.shard_version import MaskCache
from service.shards.given import with_levels_above

SEEDS = st.integers(0, 10_000)


def a_tree(seed: int) -> Tree:
    return random_tree(np.random.default_rng(seed), 4, 5, empty_share=0.3)


@given(SEEDS, st.integers(1, 6))
def test_subtrees_are_whole_and_a_shards_nodes_are_they_and_their_ancestors(seed: int, count: int) -> None:
    tree = a_tree(seed)
    level, shard_N = cut_level(tree, count), node_shards(tree, count)
    assert (shard_N[: tree.level_offset[level]] == NO_SHARD).all()
    below = np.arange(tree.level_offset[level + 1], tree.node_count)
    assert np.array_equal(shard_N[below], shard_N[tree.parent[below]])
    for shard in range(count):
        kept = set(kept_nodes(tree, shard_N, shard).tolist())
        paths = {int(node) for leaf in np.flatnonzero(shard_N == shard) for node in path_up(tree, int(leaf))}
        assert kept == paths


def path_up(tree: Tree, node: int) -> list[int]:
    return [node] if node == 0 else [node, *path_up(tree, int(tree.parent[node]))]


def test_neighbouring_subtrees_go_to_different_shards_in_turn() -> None:
    tree = complete_tree(np.arange(4**5), 4)
    assert cut_level(tree, 4) == 4
    assert tree.level_size(4) == SUBTREES * 4
    assert node_shards(tree, 4)[tree.level_offset[4] : tree.level_offset[5]].tolist() == [0, 1, 2, 3] * SUBTREES
    assert cut_level(tree, 1) == 3


def test_a_large_subtree_is_made_up_for_by_the_next_ones() -> None:
    leaf_item = np.full(16, EMPTY_LEAF)
    leaf_item[[0, 1, 2, 3, 4, 8, 12]] = np.arange(7)  # four subtrees of 4, 1, 1 and 1 items
    tree = complete_tree(leaf_item, 4)
    assert [items.tolist() for items in shard_items(tree, 2)] == [[0, 1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("count", [0, -1, 4])
def test_a_number_of_shards_that_the_tree_cannot_fill_is_refused_with_the_largest_that_it_can(count: int) -> None:
    leaf_item = np.full(16, EMPTY_LEAF)
    leaf_item[[0, 1, 4, 8]] = np.arange(4)  # the last subtree is vacant
    with pytest.raises(InvalidConfig, match=f"shards: got {count}, expected 1 to 3, the subtrees"):
        shard_items(complete_tree(leaf_item, 4), count)


@given(SEEDS)
def test_nodes_above_items_are_the_paths_of_their_leaves(seed: int) -> None:
    tree, rng = a_tree(seed), np.random.default_rng(seed)
    items = np.flatnonzero(rng.random(tree.item_count) < 0.2)
    expected = np.unique(tree.ancestors(tree.leaf_of_item[items]))
    assert np.array_equal(nodes_above_items(tree, items), expected)


def test_one_shard_keeps_parents_of_vacant_leaves_alone() -> None:
    tree = Tree(np.array([0, 1, 3, 7]), np.array([1, 3, 5, 7, 7, 7, 7, 7]), np.array([0, -1, -1, -1]))
    none = np.empty(0, np.int64)
    assert nodes_above_items(tree, none).tolist() == []
    assert nodes_above_items(tree, none, vacant=True).tolist() == [0, 2, 5, 6]
    assert nodes_above_items(tree, np.array([0]), vacant=True).tolist() == [0, 1, 2, 3, 5, 6]


# -- a shard's own rows and numbers ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    rng = np.random.default_rng(4)
    tree = random_tree(rng, 4, 3, empty_share=0.3)
    memory = random_memory(rng, tree.item_count, 3)
    return make_bundle(tmp_path_factory.mktemp("whole"), rng, tree, "product", 0.5, name="books", memory=memory)


@pytest.fixture(scope="module")
def shard(whole: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return Cut(whole, 2).write(tmp_path_factory.mktemp("shard") / "1" / "1", 1)


def local_of(shard: Bundle) -> LocalShard:
    assert shard.shard is not None
    return LocalShard(shard.shard, [alone.tree for alone in shard.alone])


def above_of(shard: Bundle, node: int) -> set[int]:
    """A node and all above it."""
    found = {node}
    while node:
        node = int(shard.tree.parent[node])
        found.add(node)
    return found


def test_a_mask_opens_what_lies_above_eligible_items_and_above_open_nodes(shard: Bundle) -> None:
    local, tree = local_of(shard), shard.tree
    eligible_I = np.arange(tree.item_count) == 3
    above = tree.level(tree.height - 1)
    opened = [above.start, above.stop - 1]
    mask = local.mask(MaskBits(np.packbits(eligible_I), (local.parts.nodes[0][opened],)))
    right = above_of(shard, int(tree.leaf_of_item[3])).union(*(above_of(shard, node) for node in opened))
    assert set(np.flatnonzero(mask.eligible_N).tolist()) == right
    assert mask.items == 1


def test_open_nodes_of_other_shards_are_ignored_and_those_of_other_levels_refused(whole: Bundle, shard: Bundle) -> None:
    local, tree = local_of(shard), shard.tree
    none = np.packbits(np.zeros(tree.item_count, np.bool_))
    others = np.setdiff1d(np.arange(whole.tree.node_count), local.parts.nodes[0])
    assert not local.mask(MaskBits(none, (others,))).eligible_N.any()
    for node in (0, tree.leaf_offset, tree.level(tree.height - 2).start):
        with pytest.raises(InvalidMessage, match=r"^masks: got 'an open node of another level'"):
            local.mask(MaskBits(none, (local.parts.nodes[0][node : node + 1],)))


def test_mask_bits_of_another_size_or_for_more_trees_are_refused(shard: Bundle) -> None:
    local, size = local_of(shard), (shard.tree.item_count + 7) // 8
    for wrong in (size - 1, size + 1, 0):
        with pytest.raises(InvalidMessage, match=r"^masks: got '\d+ bytes of bits'"):
            local.mask(MaskBits(np.zeros(wrong, np.uint8)))
    with pytest.raises(InvalidMessage, match=r"^masks: got 'open nodes of 2 trees'"):
        local.mask(MaskBits(np.zeros(size, np.uint8), (np.empty(0, np.int64),) * 2))


@given(st.integers(0, 2**32 - 1))
def test_leaves_and_nodes_above_them_make_the_whole_lists_of_a_memory(whole: Bundle, seed: int) -> None:
    tree, rng = whole.tree, np.random.default_rng(seed)
    assert whole.memory is not None
    queries = random_queries(rng, whole, 3)
    params = SearchParams.uniform(3, 5, 5, rng.integers(-1, tree.item_count, (3, 4)))
    lists = MemoryTree(whole.memory, tree).lists(queries.array, eligible_nodes(tree, params, None))
    made = with_levels_above(tree, lists.kept(lists.nodes >= tree.level(tree.height - 1).start))
    assert_array_equal(made.offset_B, lists.offset_B)
    assert_array_equal(made.nodes, lists.nodes)
    assert_array_equal(made.values, lists.values)


def test_lists_of_a_memory_are_taken_joined_and_thinned_by_query() -> None:
    lists = MemoryLists(np.array([0, 1, 1, 3]), np.array([4, 5, 6]), np.array([1, 2, 3], np.float32))
    taken = lists.take(np.array([2, 0]))
    both = MemoryLists.joined([taken, lists])
    for found, offset, nodes in (
        (taken, [0, 2, 3], [5, 6, 4]),
        (both, [0, 2, 3, 4, 4, 6], [5, 6, 4, 4, 5, 6]),
        (both.kept(both.nodes != 5), [0, 1, 2, 3, 3, 4], [6, 4, 4, 6]),
        (MemoryLists.joined([]), [0], []),
    ):
        assert (found.offset_B.tolist(), found.nodes.tolist()) == (offset, nodes)
        assert found.values.tolist() == [node - 3 for node in nodes]


def test_masks_that_were_used_last_are_kept_up_to_some_bytes() -> None:
    cache = MaskCache(25)
    masks = {name: NodeMask(np.ones(10, np.bool_), 1) for name in "abc"}
    assert cache.put("a", masks["a"]) is masks["a"]
    assert cache.put("a", NodeMask(np.ones(10, np.bool_), 1)) is masks["a"]
    cache.put("b", masks["b"])
    assert cache.get("a") is masks["a"]
    cache.put("c", masks["c"])
    assert cache.get("b") is None
    assert cache.get("a") is masks["a"]
    assert cache.bytes == 20


def test_a_mask_that_is_larger_than_all_room_is_used_and_not_kept() -> None:
    cache = MaskCache(9)
    mask = NodeMask(np.ones(10, np.bool_), 1)
    assert cache.put("a", mask) is mask
    assert cache.get("a") is None
    assert cache.bytes == 0


def test_a_mask_of_a_forest_counts_with_all_its_trees() -> None:
    cache = MaskCache(100)
    mask = NodeMask(np.ones(10, np.bool_), 1, (NodeMask(np.ones(20, np.bool_), 1),))
    cache.put("a", mask)
    assert cache.bytes == mask.nbytes >= 30
