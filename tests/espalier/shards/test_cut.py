"""Shards of a bundle: which holds which subtree, its own rows, numbers and masks, what it refuses, and that together they answer as the
whole bundle does.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from benchmarks.random_bundles import make_bundle, random_masks, random_memory, random_queries, random_tree
from espalier.bundle import LABEL_COUNTS, SHARD, Bundle
from espalier.bundle_files import sha256_of
from espalier.engines import open_engine
from espalier.engines.reference import ReferenceEngine
from espalier.errors import BundleCorrupt, InvalidConfig, InvalidMessage, InvalidQuery
from espalier.label_counts import LabelCounts
from espalier.live.fold import content_of
from espalier.manifest import GraphScorer
from espalier.masks.eligibility import eligible_nodes
from espalier.memory_lists import MemoryLists, MemoryTree
from espalier.queries import blank_queries
from espalier.search import NodeMask, SearchParams
from espalier.shards.cut import Cut
from espalier.shards.layout import NO_SHARD, SUBTREES, cut_level, node_shards, nodes_above_items, shard_items, with_ancestors
from espalier.shards.local import LocalShard
from espalier.shards.messages import MaskBits
from espalier.tree import EMPTY_LEAF, Tree, complete_tree
from service.models.shard_version import MaskCache
from service.shards.local_query import with_levels_above
from tests.espalier import drawn_bundles
from tests.espalier.drawn_bundles import drawn_bundle
from tests.espalier.second_stages import rewritten, with_stacking
from tests.espalier.shards.merging import answers_of, merged, with_states

SEEDS = st.integers(0, 10_000)


def a_tree(seed: int) -> Tree:
    return random_tree(np.random.default_rng(seed), 4, 5, empty_share=0.3)


@given(SEEDS, st.integers(1, 6))
def test_every_item_is_in_one_shard_and_a_shards_nodes_are_whole_subtrees_and_their_ancestors(seed: int, count: int) -> None:
    tree = a_tree(seed)
    level, shard_N = cut_level(tree, count), node_shards(tree, count)
    assert (shard_N[: tree.level_offset[level]] == NO_SHARD).all()
    below = np.arange(tree.level_offset[level + 1], tree.node_count)
    assert np.array_equal(shard_N[below], shard_N[tree.parent[below]])
    for shard in range(count):
        kept = set(with_ancestors(tree, shard_N == shard).tolist())
        paths = {int(node) for leaf in np.flatnonzero(shard_N == shard) for node in path_up(tree, int(leaf))}
        assert kept == paths
    items = shard_items(tree, count)
    assert min(map(len, items)) > 0
    assert np.array_equal(np.sort(np.concatenate(items)), np.arange(tree.item_count))
    assert all((np.diff(own) > 0).all() and own.dtype == np.int64 for own in items)


def path_up(tree: Tree, node: int) -> list[int]:
    return [node] if node == 0 else [node, *path_up(tree, int(tree.parent[node]))]


def test_neighbouring_subtrees_go_to_different_shards_in_turn() -> None:
    tree = complete_tree(np.arange(4**5), 4)
    assert cut_level(tree, 4) == 4
    assert tree.level_size(4) == SUBTREES * 4
    assert node_shards(tree, 4)[tree.level_offset[4] : tree.level_offset[5]].tolist() == [0, 1, 2, 3] * SUBTREES
    assert cut_level(tree, 1) == 3
    small = complete_tree(np.arange(16), 4)  # it is cut above the leaves
    assert [cut_level(small, count) for count in (1, 4)] == [1, 1]
    assert [items.tolist() for items in shard_items(small, 4)] == [[4 * i + j for j in range(4)] for i in range(4)]


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


def test_a_mask_opens_what_lies_above_eligible_items_and_above_open_nodes(shard: Bundle) -> None:
    local, tree = local_of(shard), shard.tree
    eligible_I = np.arange(tree.item_count) == 3
    above = tree.level(tree.height - 1)
    opened = [above.start, above.stop - 1]
    mask = local.mask(MaskBits(np.packbits(eligible_I), (local.parts.nodes[0][opened],)))
    right = {above for node in (int(tree.leaf_of_item[3]), *opened) for above in path_up(tree, node)}
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
    made = with_levels_above(tree, lists.select(lists.nodes >= tree.level(tree.height - 1).start))
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
        (both.select(both.nodes != 5), [0, 1, 2, 3, 3, 4], [6, 4, 4, 6]),
        (MemoryLists.joined([]), [0], []),
    ):
        assert (found.offset_B.tolist(), found.nodes.tolist()) == (offset, nodes)
        assert found.values.tolist() == [node - 3 for node in nodes]


def test_masks_that_were_used_last_are_kept_up_to_some_bytes_and_a_larger_one_is_not() -> None:
    cache, forest = MaskCache(25), NodeMask(np.ones(10, np.bool_), 1, (NodeMask(np.ones(20, np.bool_), 1),))
    a, b, c = (NodeMask(np.ones(10, np.bool_), 1) for _ in range(3))
    assert cache.put("a", a) is cache.put("a", NodeMask(np.ones(10, np.bool_), 1)) is a
    cache.put("b", b)
    assert cache.get("a") is a
    cache.put("c", c)
    assert cache.put("forest", forest) is forest
    assert [cache.get(name) for name in ("a", "b", "c", "forest")] == [a, None, c, None]
    assert cache.bytes == 20 < 25 < forest.nbytes, "a mask of a forest counts with all its trees"


# -- the parts of shards, and their answers together ----------------------------------------------------------------------


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


@given(SHAPES, st.integers(1, 3), st.sampled_from([1, 3, 20]), st.sampled_from([1, 7, 30]), st.booleans())
def test_one_shard_and_shards_whose_beams_cut_nothing_answer_as_the_whole_bundle(
    tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any], count: int, beam_size: int, m: int, filtered: bool
) -> None:
    """Ties included: equal keys are frequent with integer weights."""
    bundle = made(tmp_path_factory.mktemp("cut"), shape)
    rng = np.random.default_rng(shape["seed"])
    whole_beam = max(alone.tree.node_count for alone in bundle.alone)
    queries, params = random_queries(rng, bundle, 4), SearchParams.uniform(4, beam_size if count == 1 else whole_beam, m)
    if filtered and len(bundle.alone) == 1 and count == 1:
        params = SearchParams(params.beam_size_B, params.m_B, mask_B=random_masks(rng, bundle.tree, 4, 0.3))
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
    for engine in engines_of(bundle):
        assert merged(bundle, shards, queries, params, partial(open_engine, engine=engine)) == answers


# -- what a shard holds ---------------------------------------------------------------------------------------------------


@settings(max_examples=8)
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
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("whole")
    return made(folder, SHAPE | {"seed": 5, "kind": "product memory", "gamma": 0.5})


@pytest.mark.parametrize("name", ["reference", "compiled-cpu", "onnx-cpu"])
def test_a_shard_cannot_encode_histories_but_those_without_an_item(graphs: Bundle, tmp_path: Path, name: str) -> None:
    engine = open_engine(Cut(graphs, 2).write(tmp_path / "0" / "1", 0), engine=name)
    queries, params = blank_queries(graphs.manifest.query, 2), SearchParams.uniform(2, 3, 3)
    assert engine.search(queries, params).count_B.tolist() == [3, 3]
    queries.array[1, -1] = 0
    with pytest.raises(InvalidQuery, match=r"states_BLS is missing; expected the queries' states: shard 0 of 2 of m\d+ has not"):
        engine.search(queries, params)
    queries.array[1, -1] = graphs.tree.item_count - 1  # a row of the whole bundle, which the shard has not
    with_rows = with_states(graphs, queries)
    assert engine.search(with_rows, params).count_B.tolist() == [3, 3]
    queries.array[1, -1] = graphs.tree.item_count
    with pytest.raises(InvalidQuery, match="item rows from 0 to"):
        engine.search(with_rows, params)


def test_a_shard_is_not_cut_again_but_the_only_one_of_a_bundle_is(graphs: Bundle, tmp_path: Path) -> None:
    with pytest.raises(BundleCorrupt, match="shard 1 of 2, expected a bundle of all items"):
        Cut(Cut(graphs, 2).write(tmp_path / "two" / "1" / "1", 1), 2)
    only = Cut(graphs, 1).write(tmp_path / "one" / "0" / "1", 0)
    for index in range(2):
        first, second = (Cut(bundle, 2).write(tmp_path / name / str(index) / "1", index) for bundle, name in ((graphs, "a"), (only, "b")))
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
