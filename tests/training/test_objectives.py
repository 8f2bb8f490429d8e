"""Objectives, pseudo targets and the training beam against plain Python over whole trees.

Every expected value is computed from one table of all nodes' logits by loops that follow the papers' definitions: no batches, no
padding, no walk that skips a subtree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from torch import Tensor

import training.deep.objectives.otm as otm_module
import training.deep.objectives.tdm as tdm_module
from benchmarks.random_bundles import Rng, random_tree
from espalier.tree import Tree, complete_tree
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


# -- topology -----------------------------------------------------------------------------------------------------------


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


class Asked(NamedTuple):
    """A query: its targets, the logits of all nodes, and the nodes that were drawn for it on each level."""

    tree: Tree
    leaves: set[int]
    logits: list[float]
    drawn: dict[int, list[int]]

    def of_targets(self) -> list[int]:
        return marked(self.tree, self.leaves)

    def of_best_children(self) -> list[int]:
        return expanded(self.tree, self.leaves, self.logits)


Terms = Callable[[Asked], list[tuple[int, int]]]
"""(node, label) of every term of a query's loss, repeats as often as they count."""


def value_and_gradients(loss: Tensor, model: NodeScorer) -> tuple[float, dict[str, Tensor | None]]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_alike(got: tuple[float, dict[str, Tensor | None]], expected: tuple[float, dict[str, Tensor | None]]) -> None:
    assert_allclose(got[0], expected[0], rtol=1e-4, atol=1e-5)
    for name, gradient in expected[1].items():
        found = got[1][name]
        assert (found is None) == (gradient is None), name
        if found is not None and gradient is not None:
            assert_allclose(found, gradient, rtol=1e-3, atol=1e-4, err_msg=name)


def problem(shape: Shape) -> tuple[Tree, Tensor, NodeScorer, Tensor]:
    """A tree, targets, and one of the two models with its queries."""
    rng, tree = tree_of(shape)
    target_BP = targets_of(rng, tree, shape)
    make = linear_model if rng.random() < 0.5 else history_model
    return tree, target_BP, *make(rng, tree, shape["batch"])


def check_loss(loss: Loss, shape: Shape, config: Objective, terms: Terms, first_targets: int | None = None) -> None:
    """The value and every gradient are those of Σ z·log(1+e^{−g}) + (1−z)·log(1+e^{g}) over the terms, ÷ instances."""
    tree, target_BP, model, query = problem(shape)
    drawn: dict[int, list[list[int]]] = {}

    def noted(topology: Topology, h: int, batch: int, count: int, generator: torch.Generator) -> Tensor:
        nodes_BC = draw_nodes(topology, h, batch, count, generator)
        drawn[h] = nodes_BC.tolist()
        return nodes_BC

    with pytest.MonkeyPatch.context() as patch:
        for module in (otm_module, tdm_module):
            patch.setattr(module, "draw_nodes", noted)
        got = value_and_gradients(loss(model, Topology(tree, CPU), query, target_BP, config, torch.Generator().manual_seed(1)), model)
    logits_BN = all_logits(model, tree, query)
    wide_BN, losses = logits_BN.double(), []
    for b, logits in enumerate(logits_BN.tolist()):
        asked = Asked(tree, leaves_of(tree, target_BP[:, :first_targets], b), logits, {h: nodes[b] for h, nodes in drawn.items()})
        losses += [torch.log1p(torch.exp(-wide_BN[b, n] if label else wide_BN[b, n])) for n, label in terms(asked)]
    expected = torch.stack([wide_BN.sum() * 0, *losses]).sum() / len(target_BP)
    assert_alike(got, value_and_gradients(expected, model))


@pytest.mark.parametrize("optimal", [True, False])
@given(shape=shapes, beam_size=st.integers(1, 12), gamma=st.sampled_from([0.0, 0.8]))
def test_otm_is_the_cross_entropy_of_the_beams_candidates_with_pseudo_targets_or_any_target_below(
    optimal: bool, shape: Shape, beam_size: int, gamma: float
) -> None:
    """Eq. 16; labels and beam are constants, so gradients flow through the candidates' logits only."""

    def terms(asked: Asked) -> list[tuple[int, int]]:
        z = asked.of_best_children() if optimal else asked.of_targets()
        return [(node, z[node]) for level in followed(asked.tree, asked.logits, beam_size, gamma) for node in level]

    check_loss(otm_loss if optimal else otm_no_optest_loss, shape, OtmObjective(beam_size=beam_size, gamma=gamma), terms)


@given(shapes, st.integers(1, 5), st.integers(1, 6))
def test_otm_counts_random_nodes_with_their_pseudo_targets(shape: Shape, beam_size: int, random_nodes: int) -> None:
    def terms(asked: Asked) -> list[tuple[int, int]]:
        z, tree, found = asked.of_best_children(), asked.tree, []
        for h, level in enumerate(followed(tree, asked.logits, beam_size, 0), start=1):
            unpruned = h == 1 or beam_size >= tree.level_size(h - 1)  # then the whole level is there already
            extra = [] if unpruned else [node for node in asked.drawn[h] if tree.items_below[node]]
            assert unpruned or len(asked.drawn[h]) == min(random_nodes, tree.level_size(h))
            found += [(node, z[node]) for node in [*level, *extra]]
        return found

    check_loss(otm_loss, shape | {"ragged": False}, OtmObjective(beam_size=beam_size, random_nodes=random_nodes), terms)


@given(shapes, st.integers(1, 40), st.sampled_from([0.3, 1.0]))
def test_tdm_is_the_cross_entropy_of_ancestors_and_drawn_negatives(shape: Shape, negatives: int, decay: float) -> None:
    def terms(asked: Asked) -> list[tuple[int, int]]:
        z, tree, found = asked.of_targets(), asked.tree, []
        for h in range(1, tree.height + 1):
            count = max(8, round(negatives * decay ** (tree.height - h)))
            assert len(asked.drawn[h]) == min(count, tree.level_size(h))
            found += [(node, 1) for node in tree.level(h) if z[node]]
            found += [(node, 0) for node in asked.drawn[h] if not z[node]]
        return found

    check_loss(tdm_loss, shape, TdmObjective(negatives=negatives, negative_decay=decay), terms)


@pytest.mark.parametrize(("loss", "first_targets"), [(plt_loss, None), (hsm_loss, 1)])
@given(shape=shapes)
def test_plt_is_the_cross_entropy_of_the_children_of_positives_and_hsm_that_of_the_first_target(
    loss: Loss, first_targets: int | None, shape: Shape
) -> None:
    def terms(asked: Asked) -> list[tuple[int, int]]:
        z = asked.of_targets()
        return [(child, z[child]) for node in range(asked.tree.leaf_offset) if z[node] for child in children_of(asked.tree, node)]

    check_loss(loss, shape, PathObjective(), terms, first_targets)


@given(shapes, st.integers(1, 6))
def test_otm_without_beam_search_labels_random_nodes_with_pseudo_targets(shape: Shape, beam_size: int) -> None:
    def terms(asked: Asked) -> list[tuple[int, int]]:
        z, tree = asked.of_best_children(), asked.tree
        assert all(len(nodes) == min(2 * beam_size, tree.level_size(h)) for h, nodes in asked.drawn.items())
        return [(node, z[node]) for nodes in asked.drawn.values() for node in nodes if tree.items_below[node]]

    check_loss(otm_no_bs_loss, shape, SampledObjective(beam_size=beam_size), terms)


@given(shapes, st.integers(1, 12), st.sampled_from([0.0, 0.7]), st.integers(1, 6), st.integers(0, 4))
def test_otm_robust_is_the_softmax_of_levels_whose_unvisited_rest_is_estimated(
    shape: Shape, beam_size: int, gamma: float, random_nodes: int, whole: int
) -> None:
    """Equal to the docstring's formula, node by node; visited nodes count once, a random one as often as its odds demand."""
    tree, target_BP, model, query = problem(shape)
    config = RobustObjective(beam_size=beam_size, gamma=gamma, random_nodes=random_nodes, level_decay=0.8)
    topology = Topology(tree, CPU)
    whole = min(whole, tree.height) if isinstance(model.head, ProductHead) else 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.deep.objectives.otm_robust.last_whole_level", lambda *_: whole)
        loss = otm_robust_loss(model, topology, query, target_BP, config, torch.Generator().manual_seed(1))
    got = value_and_gradients(loss, model)
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
    assert_alike(got, value_and_gradients(expected, model))


def test_levels_are_scored_whole_up_to_a_multiple_of_what_an_instance_would_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = complete_tree(np.arange(64), 2)
    linear, network = (make(np.random.default_rng(5), tree, 1)[0] for make in (linear_model, history_model))
    config = RobustObjective(beam_size=3, random_nodes=2)  # 8 rows an instance on each level
    for whole, level in ((1, 3), (2, 4), (7, 5), (8, 6)):
        monkeypatch.setattr("training.deep.objectives.otm_robust.WHOLE", whole)
        assert last_whole_level(linear, tree, config) == level
        assert last_whole_level(network, tree, config) == 0


@pytest.mark.parametrize(("size", "count"), [(9, 2), (5, 3)], ids=["few of many", "most of few"])
def test_every_set_of_nodes_is_drawn_as_often(size: int, count: int) -> None:
    assert (size < DENSE * count) == (size == 5), "both ways to draw"
    sets = list(combinations(range(size), count))
    drawn = drawn_sets(size, 1000 * len(sets), count, torch.Generator().manual_seed(3), CPU)
    times = Counter(map(tuple, drawn.tolist()))
    assert times.keys() == set(sets), "ascending, and none twice"
    assert_allclose([times[some] for some in sets], 1000, atol=5 * math.sqrt(1000))


def test_the_training_beam_takes_the_lower_node_of_a_tie() -> None:
    tree = complete_tree(np.arange(256), 4)
    model, query = linear_model(np.random.default_rng(1), tree, 3)
    model.node_rows.data.zero_()
    rows_BM, _ = search_states(model, Topology(tree, CPU), model.state(query), 5, 5, 0.0)
    assert rows_BM.tolist() == [[0, 1, 2, 3, 4]] * 3
