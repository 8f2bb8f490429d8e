"""Objectives, pseudo targets and the training beam against plain Python over whole trees.

Every expected value is computed from one table of all nodes' logits by loops that follow the papers' definitions: no batches, no
padding, no walk that skips a subtree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray
from torch import Tensor

import training.deep.objectives.otm as otm_module
import training.deep.objectives.tdm as tdm_module
from benchmarks.papers.otm.regret import regret_at_m
from benchmarks.random_bundles import Rng, random_tree
from espalier.tree import EMPTY_LEAF, Tree, complete_tree
from training.deep.beam import search_states
from training.deep.objectives.levels import DENSE, draw_items, draw_nodes, drawn_sets
from training.deep.objectives.otm import otm_loss, otm_no_bs_loss, otm_no_optest_loss, pseudo_targets
from training.deep.objectives.otm_robust import last_whole_level, otm_robust_loss
from training.deep.objectives.plt import hsm_loss, plt_loss
from training.deep.objectives.tdm import tdm_loss
from training.deep.scorers.encoders import VectorEncoder, WindowEncoder
from training.deep.scorers.heads import MlpHead, ProductHead
from training.deep.scorers.model import NodeScorer
from training.deep.topology import Topology
from training.specification.deep import Objective, OtmObjective, PathObjective, RobustObjective, SampledObjective, TdmObjective

CPU = torch.device("cpu")
WINDOWS = (2, 1, 1)

shapes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "branching_height": st.sampled_from([(2, 1), (2, 5), (3, 3), (4, 3), (5, 2), (8, 2)]),
        "ragged": st.booleans(),
        "empty_share": st.sampled_from([0.0, 0.2, 0.8]),
        "batch": st.integers(1, 4),
        "targets": st.integers(1, 9),
    }
)
Shape = dict[str, Any]


def tree_of(shape: Shape) -> tuple[Rng, Tree]:
    rng = np.random.default_rng(shape["seed"])
    branching, height = shape["branching_height"]
    return rng, random_tree(rng, height, branching, shape["ragged"], shape["empty_share"])


def targets_of(rng: Rng, tree: Tree, shape: Shape) -> Tensor:
    """Random targets with repeats, padding anywhere, and sometimes nothing but padding."""
    return torch.from_numpy(rng.integers(-1, tree.item_count, (shape["batch"], shape["targets"])))


def linear_model(rng: Rng, tree: Tree, batch: int, integer: bool = False) -> tuple[NodeScorer, Tensor]:
    """A linear scorer with its queries; small integers make all logits exact, with many ties."""
    width = 3
    model = NodeScorer(tree.node_count, width + 1, VectorEncoder(width), ProductHead(width, width + 1, None), 1.0)
    rows = rng.integers(-1, 2, (tree.node_count, width + 1)) if integer else rng.normal(size=(tree.node_count, width + 1))
    model.node_rows.data = torch.from_numpy(rows.astype(np.float32))
    vectors = rng.integers(-1, 2, (batch, width)) if integer else rng.normal(size=(batch, width))
    return model, torch.from_numpy(vectors.astype(np.float32))


def history_model(rng: Rng, tree: Tree, batch: int) -> tuple[NodeScorer, Tensor]:
    """The papers' network with its queries, so that query states differ by level and gradients reach the rows twice."""
    torch.manual_seed(int(rng.integers(1 << 30)))
    encoder = WindowEncoder(WINDOWS, 4)
    model = NodeScorer(tree.node_count, 4, encoder, MlpHead(encoder.features, 4, (6, 5)), 1.0)
    history_BT = torch.from_numpy(rng.integers(-1, tree.item_count, (batch, sum(WINDOWS))))
    return model, Topology(tree, CPU).history_nodes(history_BT)


def all_logits(model: NodeScorer, tree: Tree, query: Tensor) -> Tensor:
    """float32[B, N]: g(x, n) of every node (0 for the root, which nobody scores); differentiable."""
    state_BLS = model.state(query)
    parts = [state_BLS.new_zeros((len(state_BLS), 1))]
    for h in range(1, tree.height + 1):
        parts.append(model.logits(state_BLS, torch.tensor([list(tree.level(h))] * len(state_BLS)), h))
    return torch.cat(parts, 1)


def children_of(tree: Tree, node: int) -> list[int]:
    return list(range(int(tree.first_child[node]), int(tree.first_child[node + 1])))


def ancestors(tree: Tree, leaf: int) -> list[int]:
    """The path from the root to a leaf: one node a level."""
    path = [leaf]
    while path[-1]:
        path.append(int(tree.parent[path[-1]]))
    return path[::-1]


def leaves_of(tree: Tree, target_BP: Tensor, b: int) -> set[int]:
    return {int(tree.leaf_of_item[item]) for item in target_BP[b].tolist() if item >= 0}


def marked(tree: Tree, leaves: set[int]) -> list[int]:
    """z_n of every node: 1 where a target lies below (OTM Eq. 1)."""
    z = [int(node in leaves) for node in range(tree.node_count)]
    for node in reversed(range(tree.leaf_offset)):
        z[node] = max(z[child] for child in children_of(tree, node))
    return z


def expanded(tree: Tree, leaves: set[int], logits: list[float]) -> list[int]:
    """ẑ_n of every node by Eq. 15 over the whole tree: the label of the best child; a tie goes to the label 1; empty subtrees last."""
    z = [int(node in leaves) for node in range(tree.node_count)]
    for node in reversed(range(tree.leaf_offset)):
        below = [child for child in children_of(tree, node) if tree.items_below[child] > 0]
        best = max((logits[child] for child in below), default=0.0)
        z[node] = max((z[child] for child in below if logits[child] == best), default=0)
    return z


def followed(tree: Tree, logits: list[float], beam_size: int, gamma: float, whole: int = 0) -> list[list[int]]:
    """The candidates of every level of a beam search (Eq. 3), rank(n) = g(n) + γ · rank(parent); nothing is pruned above level `whole`."""
    beam = {0: 0.0}
    levels = []
    for h in range(1, tree.height + 1):
        ranks = {
            child: logits[child] + gamma * rank
            for node, rank in beam.items()
            for child in children_of(tree, node)
            if tree.items_below[child]
        }
        levels.append(sorted(ranks))
        best = sorted(ranks, key=lambda node: (-ranks[node], node))
        beam = {node: ranks[node] for node in (best if h < whole else best[:beam_size])}
    return levels


Terms = list[tuple[int, int, int]]
"""(query, node, label) of every term of a loss, repeats as often as they count."""


def cross_entropy(terms: Terms, logits_BN: Tensor, batch: int) -> Tensor:
    """Σ z·log(1+e^{−g}) + (1−z)·log(1+e^{g}) over the terms, ÷ instances; in double precision."""
    wide_BN = logits_BN.double()
    losses = [torch.log1p(torch.exp(-wide_BN[b, n] if label else wide_BN[b, n])) for b, n, label in terms]
    return torch.stack([wide_BN.sum() * 0, *losses]).sum() / batch


# -- topology -----------------------------------------------------------------------------------------------------------


@given(shapes)
def test_positives_are_the_targets_ancestors_once_each_ascending(shape: Shape) -> None:
    rng, tree = tree_of(shape)
    target_BP = targets_of(rng, tree, shape)
    positives = Topology(tree, CPU).positives(target_BP)
    assert len(positives) == tree.height + 1
    for b in range(shape["batch"]):
        z = marked(tree, leaves_of(tree, target_BP, b))
        for h in range(tree.height + 1):
            expected = [node for node in tree.level(h) if z[node]]
            row = positives[h][b].tolist()
            assert row == expected + [tree.node_count] * (len(row) - len(expected))


@given(shapes)
def test_children_are_the_trees_and_padding_has_none(shape: Shape) -> None:
    rng, tree = tree_of(shape)
    topology = Topology(tree, CPU)
    for h in range(tree.height):
        nodes = rng.choice([*tree.level(h), tree.node_count], (2, 5))
        found = topology.children(torch.from_numpy(nodes), h)
        assert found.shape == (2, 5, tree.max_children[h])
        for node, row in zip(nodes.ravel().tolist(), found.flatten(0, 1).tolist(), strict=True):
            expected = [] if node == tree.node_count else children_of(tree, node)
            assert row == expected + [tree.node_count] * (len(row) - len(expected))


@given(shapes)
def test_history_nodes_are_the_ancestors_on_every_level(shape: Shape) -> None:
    rng, tree = tree_of(shape)
    history_BT = rng.integers(-1, tree.item_count, (shape["batch"], 4))
    found_BLT = Topology(tree, CPU).history_nodes(torch.from_numpy(history_BT)).numpy()
    leaf_BT = np.where(history_BT >= 0, tree.leaf_of_item[history_BT], -1)
    assert_array_equal(found_BLT, np.moveaxis(tree.ancestors(leaf_BT), -1, 1))


@given(shapes)
def test_find_says_where_a_node_is_and_never_finds_padding(shape: Shape) -> None:
    rng, tree = tree_of(shape)
    topology = Topology(tree, CPU)
    sorted_BP = topology.positives(targets_of(rng, tree, shape))[tree.height]
    nodes_BC = torch.from_numpy(rng.integers(tree.leaf_offset, tree.node_count + 1, (shape["batch"], 7)))
    place_BC, found_BC = topology.find(sorted_BP, nodes_BC)
    for b in range(shape["batch"]):
        listed = sorted_BP[b].tolist()
        for node, place, found in zip(nodes_BC[b].tolist(), place_BC[b].tolist(), found_BC[b].tolist(), strict=True):
            assert found == (node in listed and node != tree.node_count)
            assert not found or listed[place] == node
            assert 0 <= place < len(listed)


# -- pseudo targets -----------------------------------------------------------------------------------------------------


@given(shapes, st.booleans())
def test_pseudo_targets_equal_the_expansion_of_the_whole_tree(shape: Shape, integer: bool) -> None:
    rng, tree = tree_of(shape)
    topology, target_BP = Topology(tree, CPU), targets_of(rng, tree, shape)
    model, query = linear_model(rng, tree, shape["batch"], integer)
    positives = topology.positives(target_BP)
    labels = pseudo_targets(model, topology, model.state(query), positives)
    logits_BN = all_logits(model, tree, query).tolist()
    for b in range(shape["batch"]):
        expected = expanded(tree, leaves_of(tree, target_BP, b), logits_BN[b])
        got = [0.0] * tree.node_count
        for nodes_BP, label_BP in zip(positives, labels, strict=True):
            for node, label in zip(nodes_BP[b].tolist(), label_BP[b].tolist(), strict=True):
                if node == tree.node_count:
                    assert label == 0
                else:
                    got[node] = label
        assert got == expected


# -- losses -------------------------------------------------------------------------------------------------------------

Loss = Callable[[NodeScorer, Topology, Tensor, Tensor, Any, torch.Generator], Tensor]


def check_loss(
    loss: Loss, model: NodeScorer, tree: Tree, query: Tensor, target_BP: Tensor, config: Objective, terms: Callable[[Tensor], Terms]
) -> None:
    """The value and every gradient equal those of the terms, whose nodes and labels are plain numbers."""
    generator = torch.Generator().manual_seed(1)
    got = loss(model, Topology(tree, CPU), query, target_BP, config, generator)
    got.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    logits_BN = all_logits(model, tree, query)
    expected = cross_entropy(terms(logits_BN.detach()), logits_BN, len(target_BP))
    expected.backward()
    assert_allclose(got.item(), expected.item(), rtol=1e-4)
    for name, parameter in model.named_parameters():
        gradient = gradients[name]
        assert (gradient is None) == (parameter.grad is None), name
        if gradient is not None and parameter.grad is not None:
            assert_allclose(gradient, parameter.grad, rtol=1e-3, atol=1e-4, err_msg=name)


def some_model(rng: Rng, tree: Tree, batch: int) -> tuple[NodeScorer, Tensor]:
    return linear_model(rng, tree, batch) if rng.random() < 0.5 else history_model(rng, tree, batch)


@pytest.mark.parametrize("optimal", [True, False])
@given(shape=shapes, beam_size=st.integers(1, 12), gamma=st.sampled_from([0.0, 0.8]))
def test_otm_is_the_cross_entropy_of_the_beams_candidates_with_pseudo_targets_or_any_target_below(
    optimal: bool, shape: Shape, beam_size: int, gamma: float
) -> None:
    """Eq. 16; labels and beam are constants, so gradients flow through the candidates' logits only."""
    rng, tree = tree_of(shape)
    target_BP = targets_of(rng, tree, shape)
    model, query = some_model(rng, tree, shape["batch"])

    def terms(logits_BN: Tensor) -> Terms:
        found: Terms = []
        for b, logits in enumerate(logits_BN.tolist()):
            leaves = leaves_of(tree, target_BP, b)
            z = expanded(tree, leaves, logits) if optimal else marked(tree, leaves)
            found += [(b, node, z[node]) for level in followed(tree, logits, beam_size, gamma) for node in level]
        return found

    loss = otm_loss if optimal else otm_no_optest_loss
    check_loss(loss, model, tree, query, target_BP, OtmObjective(beam_size=beam_size, gamma=gamma), terms)


@given(shapes, st.integers(1, 5), st.integers(1, 6))
def test_otm_counts_random_nodes_with_their_pseudo_targets(shape: Shape, beam_size: int, random_nodes: int) -> None:
    rng, tree = tree_of(shape | {"ragged": False})
    target_BP = targets_of(rng, tree, shape)
    model, query = some_model(rng, tree, shape["batch"])
    drawn: dict[int, list[list[int]]] = {}

    def record(topology: Topology, h: int, batch: int, count: int, generator: torch.Generator) -> Tensor:
        assert count == random_nodes
        nodes_BC = draw_nodes(topology, h, batch, count, generator)
        drawn[h] = nodes_BC.tolist()
        return nodes_BC

    def terms(logits_BN: Tensor) -> Terms:
        found: Terms = []
        for b, logits in enumerate(logits_BN.tolist()):
            z = expanded(tree, leaves_of(tree, target_BP, b), logits)
            for h, level in enumerate(followed(tree, logits, beam_size, 0), start=1):
                unpruned = h == 1 or beam_size >= tree.level_size(h - 1)  # then the whole level is there already
                extra = [] if unpruned else [node for node in drawn[h][b] if tree.items_below[node]]
                found += [(b, node, z[node]) for node in [*level, *extra]]
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(otm_module, "draw_nodes", record)
        config = OtmObjective(beam_size=beam_size, random_nodes=random_nodes)
        check_loss(otm_loss, model, tree, query, target_BP, config, terms)


@given(shapes, st.integers(1, 40), st.sampled_from([0.3, 1.0]))
def test_tdm_is_the_cross_entropy_of_ancestors_and_drawn_negatives(shape: Shape, negatives: int, decay: float) -> None:
    rng, tree = tree_of(shape)
    target_BP = targets_of(rng, tree, shape)
    model, query = some_model(rng, tree, shape["batch"])
    config = TdmObjective(negatives=negatives, negative_decay=decay)
    drawn: dict[int, list[list[int]]] = {}

    def record(topology: Topology, h: int, batch: int, count: int, generator: torch.Generator) -> Tensor:
        assert count == max(8, round(negatives * decay ** (tree.height - h)))
        nodes_BC = draw_nodes(topology, h, batch, count, generator)
        drawn[h] = nodes_BC.tolist()
        return nodes_BC

    def terms(_: Tensor) -> Terms:
        found: Terms = []
        for b in range(len(target_BP)):
            z = marked(tree, leaves_of(tree, target_BP, b))
            for h in range(1, tree.height + 1):
                found += [(b, node, 1) for node in tree.level(h) if z[node]]
                found += [(b, node, 0) for node in drawn[h][b] if not z[node]]
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tdm_module, "draw_nodes", record)
        check_loss(tdm_loss, model, tree, query, target_BP, config, terms)


@pytest.mark.parametrize(("loss", "targets"), [(plt_loss, None), (hsm_loss, 1)])
@given(shape=shapes)
def test_plt_is_the_cross_entropy_of_the_children_of_positives_and_hsm_that_of_the_first_target(
    loss: Loss, targets: int | None, shape: Shape
) -> None:
    rng, tree = tree_of(shape)
    target_BP = targets_of(rng, tree, shape)
    target_BP[0, 0] = 0  # at least one term
    model, query = some_model(rng, tree, shape["batch"])

    def terms(_: Tensor) -> Terms:
        found: Terms = []
        for b in range(len(target_BP)):
            z = marked(tree, leaves_of(tree, target_BP[:, :targets], b))
            found += [(b, child, z[child]) for node in range(tree.leaf_offset) if z[node] for child in children_of(tree, node)]
        return found

    check_loss(loss, model, tree, query, target_BP, PathObjective(), terms)


@given(shapes, st.integers(1, 6))
def test_otm_without_beam_search_labels_random_nodes_with_pseudo_targets(shape: Shape, beam_size: int) -> None:
    rng, tree = tree_of(shape)
    target_BP = targets_of(rng, tree, shape)
    model, query = some_model(rng, tree, shape["batch"])
    config = SampledObjective(beam_size=beam_size)

    def terms(logits_BN: Tensor) -> Terms:
        generator, found = torch.Generator().manual_seed(1), []
        for h in range(1, tree.height + 1):
            nodes_BC = draw_nodes(Topology(tree, CPU), h, shape["batch"], 2 * beam_size, generator).tolist()
            for b, logits in enumerate(logits_BN.tolist()):
                z = expanded(tree, leaves_of(tree, target_BP, b), logits)
                found += [(b, node, z[node]) for node in nodes_BC[b] if tree.items_below[node]]
        return found

    check_loss(otm_no_bs_loss, model, tree, query, target_BP, config, terms)


@given(shapes, st.integers(1, 12), st.sampled_from([0.0, 0.7]), st.integers(1, 6), st.integers(0, 4))
def test_otm_robust_is_the_softmax_of_levels_whose_unvisited_rest_is_estimated(
    shape: Shape, beam_size: int, gamma: float, random_nodes: int, whole: int
) -> None:
    """Equal to the docstring's formula, node by node; visited nodes count once, a random one as often as its odds demand."""
    rng, tree = tree_of(shape)
    target_BP = targets_of(rng, tree, shape)
    model, query = some_model(rng, tree, shape["batch"])
    config = RobustObjective(beam_size=beam_size, gamma=gamma, random_nodes=random_nodes, level_decay=0.8)
    topology = Topology(tree, CPU)
    whole = min(whole, tree.height) if isinstance(model.head, ProductHead) else 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.deep.objectives.otm_robust.last_whole_level", lambda *_: whole)
        got = otm_robust_loss(model, topology, query, target_BP, config, torch.Generator().manual_seed(1))
    got.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)

    drawn_BR = draw_items(topology, shape["batch"], random_nodes, torch.Generator().manual_seed(1)).tolist()
    logits_BN = all_logits(model, tree, query).double()
    losses = []
    for b in range(shape["batch"]):
        rank = [logits_BN[b, 0] * 0]
        for node in range(1, tree.node_count):
            rank.append(logits_BN[b, node] + gamma * rank[int(tree.parent[node])])
        z = marked(tree, leaves_of(tree, target_BP, b))
        paths = [ancestors(tree, int(tree.leaf_of_item[item])) for item in drawn_BR[b]]
        for h, level in enumerate(followed(tree, logits_BN[b].tolist(), beam_size, gamma, whole), start=1):
            hits = [node for node in tree.level(h) if z[node]]
            once = {*level, *hits}
            odds = {path[h]: random_nodes * int(tree.items_below[path[h]]) / tree.item_count for path in paths}
            terms = [rank[node].exp() for node in once]
            terms += [rank[path[h]].exp() / odds[path[h]] for path in paths if path[h] not in once]
            weight = 0.8 ** (tree.height - h) / len(hits) if hits else 0
            losses += [(torch.stack(terms).sum().log() - rank[node]) * weight for node in hits]
    expected = torch.stack([logits_BN.sum() * 0, *losses]).sum() / shape["batch"]
    assert_allclose(got.item(), expected.item(), rtol=1e-4, atol=1e-5)
    expected.backward()
    for name, parameter in model.named_parameters():
        gradient = gradients[name]
        if gradient is not None and parameter.grad is not None:
            assert_allclose(gradient, parameter.grad, rtol=1e-3, atol=1e-4, err_msg=name)


def test_levels_are_scored_whole_up_to_a_multiple_of_what_an_instance_would_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = complete_tree(np.arange(64), 2)
    linear, network = (make(np.random.default_rng(5), tree, 1)[0] for make in (linear_model, history_model))
    config = RobustObjective(beam_size=3, random_nodes=2)  # 8 rows an instance on each level
    for whole, level in ((1, 3), (2, 4), (7, 5), (8, 6)):
        monkeypatch.setattr("training.deep.objectives.otm_robust.WHOLE", whole)
        assert last_whole_level(linear, tree, config) == level
        assert last_whole_level(network, tree, config) == 0


@given(st.integers(0, 2**32 - 1), st.integers(1, 70))
def test_drawn_nodes_are_of_their_level_and_a_small_level_is_whole(seed: int, count: int) -> None:
    topology = Topology(complete_tree(np.arange(64), 4), CPU)
    for h in (1, 2, 3):
        nodes = draw_nodes(topology, h, 3, count, torch.Generator().manual_seed(seed))
        level = topology.tree.level(h)
        assert nodes.shape == (3, min(count, len(level)))
        assert set(nodes.flatten().tolist()) <= set(level)
        assert all(len(set(row)) == len(row) for row in nodes.tolist()), "a sample without replacement"
        if count >= len(level):
            assert nodes.tolist() == [list(level)] * 3
        assert torch.equal(nodes, draw_nodes(topology, h, 3, count, torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize(("size", "count"), [(9, 2), (5, 3)], ids=["few of many", "most of few"])
def test_every_set_of_nodes_is_drawn_as_often(size: int, count: int) -> None:
    assert (size < DENSE * count) == (size == 5), "both ways to draw"
    sets = list(combinations(range(size), count))
    drawn = drawn_sets(size, 1000 * len(sets), count, torch.Generator().manual_seed(3), CPU)
    times = Counter(map(tuple, drawn.tolist()))
    assert times.keys() == set(sets), "ascending, and none twice"
    assert_allclose([times[some] for some in sets], 1000, atol=5 * math.sqrt(1000))


def scored_by_hand(scores_BN: NDArray[Any]) -> tuple[NodeScorer, Tensor]:
    """A model whose logit of query b and node n is scores_BN[b, n]: one-hot queries pick a column of the node rows."""
    batch, nodes = scores_BN.shape
    model = NodeScorer(nodes, batch + 1, VectorEncoder(batch), ProductHead(batch, batch + 1, None), 1.0)
    model.node_rows.data = torch.from_numpy(np.concatenate([scores_BN.T, np.zeros((nodes, 1))], 1).astype(np.float32))
    return model, torch.eye(batch)


def bottom_up(tree: Tree, eta_BI: NDArray[Any], combine: Callable[..., Any], empty: float) -> NDArray[Any]:
    """[B, N]: a leaf has its item's η, an empty one `empty`, an inner node what `combine` makes of its children."""
    score_BN = np.full((len(eta_BI), tree.node_count), empty)
    held = tree.leaf_item != EMPTY_LEAF
    score_BN[:, tree.leaf_offset :][:, held] = eta_BI[:, tree.leaf_item[held]]
    for node in reversed(range(tree.leaf_offset)):
        score_BN[:, node] = combine(score_BN[:, tree.first_child[node] : tree.first_child[node + 1]], axis=1)
    return score_BN


def regrets(tree: Tree, eta_BI: NDArray[Any], scores_BN: NDArray[Any], k: int) -> NDArray[np.float64]:
    model, query = scored_by_hand(scores_BN)
    rows_BM, _ = search_states(model, Topology(tree, CPU), model.state(query), k, k, 0.0)
    return regret_at_m(eta_BI, rows_BM.numpy(), k)


@given(shapes)
def test_the_best_target_below_as_the_score_of_a_node_has_no_regret(shape: Shape) -> None:
    """Proposition 1 (Eq. 9), for every k = m."""
    rng, tree = tree_of(shape)
    eta_BI = rng.random((shape["batch"], tree.item_count), np.float32).astype(np.float64)
    scores_BN = bottom_up(tree, eta_BI, np.max, -1.0)
    for k in sorted({1, 2, 3, 5, 8, tree.item_count, *rng.integers(1, tree.item_count + 1, 3).tolist()}):
        assert regrets(tree, eta_BI, scores_BN, k).max() < 1e-12


def test_the_training_beam_takes_the_lower_node_of_a_tie() -> None:
    tree = complete_tree(np.arange(256), 4)
    model, query = scored_by_hand(np.zeros((3, tree.node_count)))
    rows_BM, _ = search_states(model, Topology(tree, CPU), model.state(query), 5, 5, 0.0)
    assert rows_BM.tolist() == [[0, 1, 2, 3, 4]] * 3
