"""The first trees: balance, branching, seeds, similar items side by side; and JTM, which moves items to where the likelihood is larger."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from torch import Tensor

from benchmarks.random_bundles import random_tree
from espalier.arrays import Float64, Int64
from espalier.errors import InvalidConfig, InvalidData
from espalier.tree import EMPTY_LEAF, Tree
from tests.training.logs import log_of
from training.deep import jtm_samples
from training.deep.jtm import Likelihood, Matching, assign, learn_tree, sum_below
from training.deep.jtm_samples import Samples, draw_samples
from training.deep.scorers.model import NodeScorer, new_scorer
from training.deep.topology import Topology
from training.specification.log_format import Order
from training.specification.networks import ProductScorer
from training.trees import embeddings as embeddings_module
from training.trees.balanced import balanced_tree, category_tree
from training.trees.balanced import random_tree as shuffled_tree
from training.trees.embeddings import item_embeddings, spread_unseen
from training.trees.kmeans import kmeans_tree


def vectors(items: int, width: int = 4, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((items, width)).astype(np.float32)


BUILDERS: dict[str, Callable[[int, int, int], Tree]] = {
    "balanced": lambda items, branching, seed: balanced_tree(np.arange(items), branching),
    "random": lambda items, branching, seed: shuffled_tree(items, branching, seed=seed),
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


@given(st.lists(st.integers(-1, 5), min_size=1, max_size=80), st.integers(0, 99))
def test_the_items_of_a_category_are_contiguous(categories: list[int], seed: int) -> None:
    category = np.array(categories, np.int32)
    leaves = category[category_tree(category, 2, seed=seed).leaf_item]
    assert np.count_nonzero(np.diff(leaves)) == len(set(categories)) - 1


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


def test_a_split_leaves_no_item_that_is_nearer_to_the_other_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two centres, and a cut in the middle of the order by which of them is nearer."""
    monkeypatch.setattr("training.trees.kmeans.ITERATIONS", 1000)
    points = vectors(600, seed=5)
    halves = kmeans_tree(points, 2, seed=1).leaf_item.reshape(2, -1)
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


# -- JTM ------------------------------------------------------------------------------------------------------------------


Rng = np.random.Generator
T = 5


def random_model(rng: Rng, tree: Tree, std: float = 1.0) -> NodeScorer:
    torch.manual_seed(int(rng.integers(1 << 30)))
    return new_scorer(ProductScorer(node_dim=4, hidden=(8, 4), init_std=std), (3, 2), tree.node_count)


def random_samples(rng: Rng, items: int, count: int) -> Samples:
    return Samples(rng.integers(-1, items, (count, T)).astype(np.int32), np.sort(rng.integers(0, items, count)))


def log_p(model: NodeScorer, tree: Tree, samples: Samples, gamma: float, likelihood: Likelihood) -> Float64:
    """float64[S, N]: log p̂ of every node, one level after the other, from the formula; of a softmax without its normaliser."""
    topology = Topology(tree, torch.device("cpu"))
    with torch.no_grad():
        state_BLS = model.state(topology.history_nodes(torch.from_numpy(samples.history_ST.astype(np.int64))))
        rank_SN = np.zeros((len(samples.target_S), tree.node_count))
        for h in range(1, tree.height + 1):
            nodes = np.array(tree.level(h))
            logits = model.logits(state_BLS, topology.level_nodes(h).expand(len(samples.target_S), -1), h).double().numpy()
            term = -np.logaddexp(0, -logits) if likelihood == "path" else logits
            discount = 1.0 if likelihood == "path" else gamma
            rank_SN[:, nodes] = term + discount * rank_SN[:, tree.parent[nodes]]
    return -np.logaddexp(0, -rank_SN) if likelihood == "sigmoid" else rank_SN


def along_paths(log_p_SN: Float64, tree: Tree, leaf_I: Int64, samples: Samples) -> float:
    path_SL = tree.ancestors(leaf_I[samples.target_S])[:, 1:]
    return float(np.take_along_axis(log_p_SN, path_SL, axis=1).sum())


SCALES: list[tuple[float, Likelihood]] = [(0.0, "sigmoid"), (0.8, "sigmoid"), (0.0, "path"), (0.5, "softmax")]


# -- the whole tree ---------------------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 1 << 30),
    height=st.integers(1, 5),
    branching=st.integers(2, 4),
    gap=st.integers(1, 6),
    scale=st.sampled_from(SCALES),
)
def test_the_new_tree_has_the_same_nodes_each_item_once_and_no_smaller_likelihood(
    seed: int, height: int, branching: int, gap: int, scale: tuple[float, Likelihood]
) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, height, branching, empty_share=0.2)
    model, samples = random_model(rng, tree), random_samples(rng, tree.item_count, 40)
    learned = learn_tree(model, tree, samples, gap=gap, gamma=scale[0], likelihood=scale[1])
    assert_array_equal(learned.tree.first_child, tree.first_child)
    assert learned.tree.item_count == tree.item_count  # Tree checks that each is in exactly one leaf
    assert learned.moved == np.count_nonzero(learned.tree.leaf_of_item != tree.leaf_of_item)
    log_p_SN = log_p(model, tree, samples, *scale)
    assert learned.before == pytest.approx(along_paths(log_p_SN, tree, tree.leaf_of_item, samples), rel=1e-4, abs=1e-4)
    assert learned.after == pytest.approx(along_paths(log_p_SN, tree, learned.tree.leaf_of_item, samples), rel=1e-4, abs=1e-4)
    assert learned.after > learned.before or learned.moved == 0


@given(seed=st.integers(0, 1 << 30), scale=st.sampled_from(SCALES))
def test_weights_of_a_gap_are_the_sums_over_samples_and_levels(seed: int, scale: tuple[float, Likelihood]) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 4, 3)
    model, samples = random_model(rng, tree), random_samples(rng, tree.item_count, 30)
    matching = Matching(model, tree, samples, *scale)
    node_I = tree.ancestors(tree.leaf_of_item)[:, 1]
    spans = matching._spans(1, 2)
    weight_IC = matching._weights(node_I, 1, spans)
    log_p_SN = log_p(model, tree, samples, *scale)
    for item in set(samples.target_S.tolist()):
        first, stop = (int(edge[node_I[item] - 1]) for edge in spans[-1])
        nodes = np.arange(first, stop)
        rows = log_p_SN[samples.target_S == item]
        assert_allclose(weight_IC[item, : len(nodes)], (rows[:, nodes] + rows[:, tree.parent[nodes]]).sum(0), rtol=1e-4, atol=1e-4)


class Planted(torch.nn.Module):
    """A scorer that wants each item at one leaf of `tree`: large logits for the nodes on the way of the history's newest item."""

    encoder = None  # it reads windows

    def __init__(self, wanted: Tree, strength: float) -> None:
        super().__init__()
        self.node_rows = torch.nn.Parameter(torch.zeros(wanted.node_count, 1))
        self.wanted, self.strength = wanted, strength
        self.item_of_leaf: Tensor = torch.zeros(0)

    def state(self, history_nodes: Tensor) -> Tensor:
        return history_nodes[:, :, -1:]

    def logits(self, state_BLS: Tensor, nodes_BC: Tensor, place: int) -> Tensor:
        return torch.where(nodes_BC == state_BLS[:, place], self.strength, -self.strength)


def planted(wanted: Tree, strength: float) -> NodeScorer:
    """What the matching needs of a scorer."""
    return cast(NodeScorer, Planted(wanted, strength))


@pytest.mark.parametrize("gap", [1, 3, 7])
@pytest.mark.parametrize(("branching", "items"), [(2, 45), (4, 64)])
def test_items_find_the_place_that_the_samples_show(branching: int, items: int, gap: int) -> None:
    """Samples say: whoever touched leaf ℓ's item before wants item π(ℓ). So π(ℓ) belongs at leaf ℓ, from wherever the search starts."""
    rng = np.random.default_rng(3)
    tree = balanced_tree(rng.permutation(items).astype(np.int64), branching)
    wish_I = rng.permutation(items)  # item wish_I[i] belongs where item i is
    pairs = np.argsort(wish_I)
    samples = Samples(pairs[:, None].astype(np.int32), np.arange(items))
    learned = learn_tree(planted(tree, 3.0), tree, samples, gap=gap)
    assert_array_equal(learned.tree.leaf_of_item[wish_I], tree.leaf_of_item)
    again = learn_tree(planted(tree, 3.0), tree, Samples(np.arange(items)[:, None].astype(np.int32), np.arange(items)), gap=gap)
    assert (again.moved, again.before) == (0, again.after)
    assert again.tree is tree


def test_nothing_moves_where_all_places_are_alike() -> None:
    rng = np.random.default_rng(5)
    tree = random_tree(rng, 5, 2)
    room_N, home_IL = sum_below(tree, np.ones(tree.leaf_count, np.int64), tree.height), tree.ancestors(tree.leaf_of_item)
    for count in (0, 50):
        matching = Matching(planted(tree, 0.0), tree, random_samples(rng, tree.item_count, count), 0.0, "sigmoid")
        assert_array_equal(matching.descend(home_IL, room_N, tree.height, 3), tree.leaf_of_item)


def test_a_gap_is_shortened_where_nodes_have_many_descendants() -> None:
    tree = balanced_tree(np.arange(4096), 16)
    matching = Matching(planted(tree, 1.0), tree, random_samples(np.random.default_rng(1), 4096, 5), 0.0, "sigmoid")
    assert len(matching._spans(0, 3)) == 2
    binary = balanced_tree(np.arange(4096), 2)
    matching = Matching(planted(binary, 1.0), binary, random_samples(np.random.default_rng(1), 4096, 5), 0.0, "sigmoid")
    assert len(matching._spans(0, 7)) == 7


# -- one assignment -----------------------------------------------------------------------------------------------------------


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Some parents, each with columns of some room, and at most as many items as fit; some items are at home, some unseen."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    parents, columns = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    room_PC = rng.integers(0, 4, (parents, columns))
    seats = [(p, c) for p in range(parents) for c in range(columns) for _ in range(room_PC[p, c])]
    kept = [seats[i] for i in np.flatnonzero(rng.random(len(seats)) < draw(st.sampled_from([0.5, 1.0])))]
    parent_I, home_I = np.array([p for p, _ in kept], np.int64), np.array([c for _, c in kept], np.int64)
    home_I[rng.random(len(kept)) < 0.3] = -1
    weight_IC = (-rng.exponential(2.0, (len(kept), columns))).astype(np.float32)
    return {"weight_IC": weight_IC, "parent_I": parent_I, "room_PC": room_PC, "home_I": home_I, "seen_I": rng.random(len(kept)) < 0.8}


def filled(problem: dict[str, Any], slot_I: Int64) -> Int64:
    count_PC: Int64 = np.zeros(problem["room_PC"].shape, np.int64)
    np.add.at(count_PC, (problem["parent_I"], slot_I), 1)
    return count_PC


@given(problems())
def test_every_item_gets_a_column_with_room_and_those_without_weights_stay_where_the_others_leave_some(problem: dict[str, Any]) -> None:
    slot_I = assign(**problem)
    count_PC = filled(problem, slot_I)
    assert slot_I.min(initial=0) >= 0
    assert (count_PC <= problem["room_PC"]).all()
    strayed = ~problem["seen_I"] & (problem["home_I"] >= 0) & (slot_I != problem["home_I"])
    for item in np.flatnonzero(strayed):
        at_home = (problem["parent_I"] == problem["parent_I"][item]) & (slot_I == problem["home_I"][item])
        assert (
            count_PC[problem["parent_I"][item], problem["home_I"][item]]
            == problem["room_PC"][problem["parent_I"][item], problem["home_I"][item]]
        )
        assert (problem["seen_I"] | (problem["home_I"] == slot_I))[at_home].all()


@given(problems())
def test_what_is_won_is_what_was_wanted_where_there_is_room_for_all(problem: dict[str, Any]) -> None:
    problem["room_PC"] = np.where(problem["room_PC"] > 0, len(problem["parent_I"]), 0)
    problem["seen_I"][:] = True
    open_IC = problem["room_PC"][problem["parent_I"]] > 0
    assert_array_equal(assign(**problem), np.where(open_IC, problem["weight_IC"], -np.inf).argmax(1) if len(open_IC) else [])


def test_at_a_tie_the_item_at_home_stays() -> None:
    weight_IC = np.array([[-1, -2], [-1, -2]], np.float32)
    for home in (0, 1):
        home_I = np.where(np.arange(2) == home, 0, -1)
        slot_I = assign(weight_IC, np.zeros(2, np.int64), np.array([[1, 1]]), home_I, np.ones(2, np.bool_))
        assert slot_I[home] == 0


# -- samples ------------------------------------------------------------------------------------------------------------------


def as_sets(samples: Samples) -> set[tuple[int, tuple[int, ...]]]:
    rows = zip(samples.target_S.tolist(), samples.history_ST.tolist(), strict=True)
    return {(target, tuple(row)) for target, row in rows}


def test_every_event_of_the_users_but_the_first_is_a_sample_with_what_came_before() -> None:
    interactions = log_of([[0, 1, 2], [5, 6], [3, 4, 3, 1], [4]])
    samples = draw_samples(interactions, np.array([0, 2, 3]), 2, 100, seed=1)
    assert as_sets(samples) == {(1, (-1, 0)), (2, (0, 1)), (4, (-1, 3)), (3, (3, 4)), (1, (4, 3))}
    assert (np.diff(samples.target_S) >= 0).all()
    with pytest.raises(InvalidData, match="two events"):
        draw_samples(log_of([[0], [1]]), np.arange(2), 3, 10, seed=1)


@pytest.mark.parametrize("most", [1, 7, 30])
def test_samples_are_bounded_without_repeats_and_seeded(most: int) -> None:
    interactions = log_of([list(range(20 * user, 20 * user + 20)) for user in range(3)])
    users = np.arange(3)
    drawn = draw_samples(interactions, users, 3, most, seed=1)
    assert len(set(drawn.target_S.tolist())) == most
    assert_array_equal(draw_samples(interactions, users, 3, most, seed=1).history_ST, drawn.history_ST)
    assert as_sets(drawn) <= as_sets(draw_samples(interactions, users, 3, 1000, seed=2))
    assert as_sets(drawn) != as_sets(draw_samples(interactions, users, 3, most, seed=3))


def test_lists_without_an_order_give_every_item_with_some_of_the_others() -> None:
    lists: Sequence[list[int]] = [[0, 1, 2, 3], [4, 5], [6]]
    samples = draw_samples(log_of(list(lists), order="none"), np.arange(3), 3, 100, seed=1)
    assert samples.target_S.tolist() == [0, 1, 2, 3, 4, 5]
    sizes = set()
    for target, row in as_sets(samples):
        history = [item for item in row if item >= 0]
        assert 1 <= len(history) == len(set(history))
        assert row == (-1,) * (3 - len(history)) + tuple(history)
        assert set(history) <= set(lists[target // 4]) - {target}
        sizes.add(len(history))
    assert len(sizes) > 1


@pytest.mark.parametrize("order", ["file", "none"])
def test_samples_of_wanted_items_are_all_of_their_events_however_few_are_asked_for(order: Order) -> None:
    """Item 0 once in each of 30 lists of 40, item 1 in the first place of each; 20 samples are fewer than the log has events."""
    interactions = log_of([[1, *range(2, 22), 0, *range(22, 40)] for _ in range(30)], order=order)
    wanted_I = np.arange(40) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jtm_samples, "KEYS", 64)  # several parts
        assert draw_samples(interactions, np.arange(25), 3, 100, seed=1, wanted_I=wanted_I).target_S.tolist() == [0] * 25
    drawn = draw_samples(interactions, np.arange(25), 3, 20, seed=1, wanted_I=wanted_I)
    assert drawn.target_S.tolist() == [0] * 20
    if order == "file":
        assert_array_equal(drawn.history_ST, [[19, 20, 21]] * 20)
    first = draw_samples(interactions, np.arange(25), 3, 100, seed=1, wanted_I=np.arange(40) == 1)
    assert len(first.target_S) == (0 if order == "file" else 25)


def test_memory_does_not_grow_with_the_longest_list_without_an_order() -> None:
    interactions = log_of([list(range(20_000)), [0, 1]], order="none")
    tracemalloc.start()
    try:
        samples = draw_samples(interactions, np.arange(2), 5, 400, seed=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(samples.target_S) == 400
    assert peak < 40e6  # all keys at once, and their order, are 128 MB
