"""Trees with a sequence encoder: one state wherever padding stands, the loss against its formula, unbiased estimates, targets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from onnx.reference import ReferenceEvaluator

from espalier.arrays import Bool
from espalier.engines.encoder import takes_any_length
from espalier.engines.graphs import read_graph
from espalier.masks.eligibility import node_mask
from tests.training.logs import log_of
from training.data.splits import EvaluationPair
from training.deep.scorers.heads import ProductHead
from training.deep.scorers.model import NodeScorer, export_graphs, new_scorer, sequence_parts
from training.deep.scorers.sequence import SequenceQuery
from training.deep.scorers.window_states import windows_of
from training.deep.sequence.batches import SequenceSource, _skip_counts, trained_positions
from training.deep.sequence.level_softmax import ColumnSource, level_softmax_loss
from training.deep.sequence.rules import dropout_of, epochs_of, nearness_of, steps_of, width_of
from training.deep.topology import Topology
from training.specification.networks import ProductScorer, SequenceScorer
from training.trees.balanced import random_tree

ITEMS, WIDTH = 21, 8
TREE = random_tree(ITEMS, 3, seed=1)
TOPOLOGY = Topology(TREE, torch.device("cpu"))


def encoder(length: int = 6, layers: int = 2, encoders: tuple[str, ...] = ("transformer",)) -> tuple[SequenceQuery, torch.Tensor]:
    """With random weights, and node rows."""
    torch.manual_seed(5)
    scorer = SequenceScorer.model_validate(
        {"encoders": encoders, "node_dim": WIDTH, "layers": layers, "heads": 2, "window_hidden": 5, "dropout": 0.0}
    )
    made = SequenceQuery(length, sequence_parts(scorer, length, TREE.height + 1))
    for parameter in made.parameters():
        parameter.data = torch.randn_like(parameter) * 0.4
    return made, torch.randn(TREE.node_count, WIDTH)


def padded(*histories: list[int], length: int = 6) -> torch.Tensor:
    """int64[B, T]: leaves, padding in front."""
    return torch.tensor([[-1] * (length - len(history)) + history for history in histories]) if histories else torch.empty(0)


# -- the encoder ----------------------------------------------------------------------------------------------------------


@given(history=st.lists(st.integers(0, ITEMS - 1), max_size=6), layers=st.integers(1, 3), more=st.integers(0, 3))
def test_a_history_has_one_state_however_much_padding_it_has_and_whichever_way_it_is_computed(
    history: list[int], layers: int, more: int
) -> None:
    made, rows_ND = encoder(length=9, layers=layers)
    (part,) = made.typed_parts
    leaves = (torch.tensor(history, dtype=torch.int64) + TREE.leaf_offset).tolist()
    behind = torch.tensor([leaves + [-1] * (6 - len(leaves))])
    with torch.no_grad():
        (state_BXD,) = made.states(behind, rows_ND, None)
        expected_LD = part.scale_LD * state_BXD[0, len(leaves), :-1]
        found_BLD = made(padded(leaves, length=6 + more), rows_ND)
    torch.testing.assert_close(found_BLD, expected_LD.expand_as(found_BLD), rtol=1e-4, atol=1e-5)


@given(history=st.lists(st.integers(0, ITEMS - 1), max_size=6))
def test_each_part_reads_its_own_columns_and_its_state_ends_in_a_one(history: list[int]) -> None:
    made, rows_ND = encoder(encoders=("windows", "transformer"))
    leaves = padded([TREE.leaf_offset + item for item in history])
    half = WIDTH // 2
    with torch.no_grad():
        feature_BLF = made(leaves, rows_ND)
        behind = torch.tensor([[TREE.leaf_offset + item for item in history] + [-1] * (6 - len(history))])
        states = made.states(behind, rows_ND, None)
        for number, (part, state_BXD) in enumerate(zip(made.typed_parts, states, strict=True)):
            found_LD = feature_BLF[0, :, number * half : (number + 1) * half - 1]
            torch.testing.assert_close(found_LD, part.scale_LD * state_BXD[0, len(history), :-1], rtol=1e-4, atol=1e-5)
            other_ND = rows_ND.clone()
            other_ND[:, part.columns] += torch.randn(TREE.node_count, half)
            changed_BLF = made(leaves, other_ND)
            kept = torch.ones(WIDTH - 1, dtype=torch.bool)
            kept[number * half : (number + 1) * half - 1] = False
            torch.testing.assert_close(changed_BLF[..., kept], feature_BLF[..., kept])
    assert_array_equal(feature_BLF[..., half - 1], 1)


def test_windows_cover_the_whole_history_and_are_the_papers_where_it_is_long_enough() -> None:
    assert windows_of(69) == (1, 1, 1, 2, 2, 2, 10, 10, 20, 20)
    assert windows_of(200) == (1, 1, 1, 2, 2, 2, 10, 10, 20, 20, 131)
    assert windows_of(5) == (1, 1, 1, 2)
    assert windows_of(1) == (1,)


# -- the loss -------------------------------------------------------------------------------------------------------------


def dense_loss(
    state_ND: torch.Tensor, rows_ND: torch.Tensor, scale_LD: torch.Tensor, target_NP: torch.Tensor, inner_N: torch.Tensor, gamma: float
) -> torch.Tensor:
    """The formula, place by place over all nodes."""
    total = torch.zeros(())
    rank_Nn = torch.zeros(len(state_ND), 1)
    for h in range(1, TREE.height + 1):
        span = TREE.level(h)
        own_Nn = (state_ND[:, :-1] * scale_LD[h]) @ rows_ND[span.start : span.stop, :-1].T + rows_ND[span.start : span.stop, -1]
        rank_Nn = own_Nn + gamma * TOPOLOGY.inherited(rank_Nn, h)
        losses = []
        for n in range(len(state_ND)) if h == TREE.height else inner_N.tolist():
            ancestors = [int(TREE.ancestors(TREE.leaf_of_item[[item]])[0, h]) - span.start for item in target_NP[n].tolist() if item >= 0]
            with_items_n = torch.from_numpy(TREE.items_below[span.start : span.stop] > 0)
            losses.append(rank_Nn[n][with_items_n].logsumexp(0) - rank_Nn[n][ancestors].mean())
        total = total + 0.7 ** (TREE.height - h) * torch.stack(losses).mean()
    return total


@given(seed=st.integers(0, 2**32 - 1), gamma=st.sampled_from([0.0, 0.5, 1.0]), targets=st.integers(1, 3))
def test_over_whole_levels_the_loss_and_its_gradients_are_the_formulas(seed: int, gamma: float, targets: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    state_ND = torch.randn(5, WIDTH, generator=rng).requires_grad_()
    rows_ND = torch.randn(TREE.node_count, WIDTH, generator=rng).requires_grad_()
    scale_LD = torch.randn(TREE.height + 1, WIDTH - 1, generator=rng).requires_grad_()
    target_NP = torch.randint(ITEMS, (5, targets), generator=rng)
    target_NP[2, 1:] = target_NP[2, 0]  # several times the same
    inner_N = torch.tensor([0, 2, 3])
    levels = ColumnSource(TOPOLOGY, np.ones(ITEMS), 4, whole=1000).levels(target_NP, rng)
    rows = [rows_ND[level.nodes_M] for level in levels]
    mine = level_softmax_loss(state_ND, rows, scale_LD, levels, inner_N, gamma, 0.7)
    mine.backward()
    parts = state_ND, rows_ND, scale_LD
    found = [part.grad for part in parts]
    expected = dense_loss(state_ND, rows_ND, scale_LD, target_NP, inner_N, gamma)
    torch.testing.assert_close(mine, expected)
    for gradient, wanted in zip(found, torch.autograd.grad(expected, parts), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)


ALL_ITEMS = np.ones(ITEMS, np.bool_)
SOME_ITEMS = np.isin(np.arange(ITEMS), [4, 9, *range(12, ITEMS)])


@pytest.mark.parametrize("eligible_I", [ALL_ITEMS, SOME_ITEMS])
def test_sampled_levels_estimate_their_sums_without_bias(eligible_I: Bool) -> None:
    """Z of every level, over many draws: the mean of the estimates is the sum over the nodes with eligible items."""
    rng = torch.Generator().manual_seed(3)
    topology = Topology(TREE, torch.device("cpu"), eligible_I)
    source = ColumnSource(topology, np.arange(1.0, ITEMS + 1), 5, whole=0)
    score_N = torch.randn(TREE.node_count, generator=rng)
    target_NP = torch.tensor([[4], [9]])
    sums = torch.zeros(TREE.height, 2)
    draws = 1500
    for _ in range(draws):
        for h, level in enumerate(source.levels(target_NP, rng)):
            assert level.column_S is not None
            assert level.own_N is not None
            column_S = level.nodes_M[level.column_S]
            weight_S = (score_N[column_S] + level.offset_S).exp()
            for n in range(2):
                target = level.nodes_M[level.target_NP[n, 0]]
                kept_S = torch.arange(len(column_S)) != level.own_N[n]
                assert (column_S[~kept_S] == target).all()
                assert target not in column_S[kept_S]
                sums[h, n] += weight_S[kept_S].sum() + score_N[target].exp()
    for h in range(TREE.height):
        span = TREE.level(h + 1)
        counts_N = node_mask(TREE, eligible_I).eligible_N[span.start : span.stop]
        expected = float(score_N[span.start : span.stop][torch.from_numpy(counts_N)].exp().sum())
        assert (sums[h] / draws).tolist() == pytest.approx([expected, expected], rel=0.08)


# -- places and targets ---------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32 - 1), targets=st.integers(1, 6), length=st.integers(1, 12), nearness=st.sampled_from([0.0, 0.5, 1.0, 3.0]))
def test_a_place_predicts_items_that_follow_it(seed: int, targets: int, length: int, nearness: float) -> None:
    rng = np.random.default_rng(seed)
    lists = [(100 * user + np.arange(rng.integers(2, 15))).tolist() for user in range(6)]
    log = log_of(lists, items=600)
    for batch in SequenceSource(log, np.arange(6), length, 40, seed).epoch(0):
        places = trained_positions(log, batch, targets, nearness, 0.3, rng)
        for sequence, place, target_P in zip(places.sequence_N, places.position_N, places.target_NP, strict=True):
            whole = lists[batch.history_BT[sequence, 0] // 100]
            first = whole.index(batch.history_BT[sequence, 0])
            left = whole[first + place :]
            assert place > 0 or first == 0, "only the first item of a list is found without a history"
            found = target_P.tolist()
            assert len(found) == targets
            assert set(found) <= set(left)
            assert sorted(found) == found, "a list's items ascend here: nearest first"
            if targets == 1 and place > 0:
                assert found[0] == left[0]
        wanted = round((places.position_N > 0).sum() * 0.3 / 0.7)
        begins = int((batch.history_BT[:, 0] % 100 == 0).sum())
        assert (places.position_N == 0).sum() == min(wanted, begins)


@pytest.mark.parametrize("nearness", [0.0, 0.5, 1.0, 1.5, 4.0])
def test_targets_are_as_likely_as_nearness_says(nearness: float) -> None:
    log = log_of([list(range(30))])
    rng = np.random.default_rng(1)
    batch = next(SequenceSource(log, np.arange(1), 100, 100, 1).epoch(0))
    drawn = [trained_positions(log, batch, 5, nearness, 0.0, rng).target_NP[0] for _ in range(4000)]
    share_I = np.bincount(np.concatenate(drawn), minlength=30)[1:] / 20_000
    t = np.linspace(0.5, 29.5, 29 * 1000 + 1)
    chance_I = ((t[:-1] + t[1:]) / 2)[:, None] ** -nearness
    expected_I = chance_I.reshape(29, 1000).sum(1) / chance_I.sum()
    np.testing.assert_allclose(share_I, expected_I, atol=0.006)
    for own_P in drawn[:50]:  # systematic: each as often as it is likely, rounded up or down
        assert np.all(np.abs(np.bincount(own_P, minlength=30)[1:] - 5 * expected_I) < 1 + 1e-6)


@pytest.mark.parametrize("nearness", [0.0, 1.0, 1.0 + 1e-9, 2.0, 5.0])
def test_the_largest_share_is_the_last_item_at_most(nearness: float) -> None:
    left = np.array([[1], [2], [1000]])
    drawn = _skip_counts(np.array([[0.0, 1.0]]), left, nearness)
    np.testing.assert_array_equal(drawn[:, 0], 0)
    np.testing.assert_array_equal(drawn[:, 1], left[:, 0] - 1)


@pytest.mark.parametrize("targets", [1, 5])
def test_without_a_history_any_item_of_a_list_is_as_likely(targets: int) -> None:
    log = log_of([list(range(10))])
    rng = np.random.default_rng(1)
    batch = next(SequenceSource(log, np.arange(1), 100, 100, 1).epoch(0))
    places = [trained_positions(log, batch, targets, 1.0, 0.3, rng) for _ in range(1000)]
    count_I = np.bincount(np.concatenate([made.target_NP[made.position_N == 0][0] for made in places]), minlength=10)
    assert count_I.min() > 60 * targets, "each about 100 times, for each target"


# -- what the log says ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("relevant", "nearness"), [([2, 2], 1), ([3, 1], 1), ([2, 1], 2), ([1, 1, 1], 2), ([], 2)])
def test_near_targets_are_likelier_where_queries_have_one_relevant_item(relevant: list[int], nearness: float) -> None:
    queries = [EvaluationPair(user, np.zeros(1, np.int64), np.arange(count)) for user, count in enumerate(relevant)]
    assert nearness_of(queries) == nearness


@pytest.mark.parametrize(
    ("epochs", "places", "most", "steps"),
    [(4.0, 100, 4000, 2000), (8.0, 100, 4000, 4000), (8.0, 100, 3000, 3000), (4.0, 1000, 4000, 1000), (4.0, 1000, 400, 400)],
)
def test_updates_are_so_many_passes_over_the_lists(epochs: float, places: int, most: int, steps: int) -> None:
    log = log_of([[0, 1] * 25_000, [1] * 40], items=2)
    assert steps_of(log, np.array([0]), epochs, places, most) == steps, "the second user is no training user"


@pytest.mark.parametrize(
    ("events", "epochs", "most", "steps"),
    [(1024, 4, 8000, 100), (10_240, 4, 8000, 1000), (1024, 150, 8000, 150), (1, 4, 8000, 1), (1024, 4, 60, 60)],
)
def test_a_tiny_log_is_not_passed_over_a_thousand_times(events: int, epochs: float, most: int, steps: int) -> None:
    assert steps_of(log_of([[0] * events], items=1), np.array([0]), epochs, 1024, most) == steps


@pytest.mark.parametrize(
    ("items", "events", "encoders", "epochs", "dropout", "width"),
    [
        (2, 99, ("windows",), 4, 0.5, 256),
        (2, 100, ("windows",), 16, 0.2, 256),
        (65_536, 99, ("windows",), 4, 0.5, 256),
        (65_537, 99, ("windows",), 2, 0.5, 128),
        (65_537, 99, ("windows", "transformer"), 4, 0.5, 256),
    ],
)
def test_a_log_of_few_events_an_item_is_passed_over_less_often_and_with_more_dropout_and_rows_of_many_items_are_narrower(
    items: int, events: int, encoders: tuple[str, ...], epochs: float, dropout: float, width: int
) -> None:
    log = log_of([[0, 1] * (events // 2) + [0] * (events % 2), [1] * 40], items=items)
    assert epochs_of(log, np.array([0]), encoders) == epochs, "the second user is no training user"
    assert dropout_of(log, np.array([0])) == dropout
    assert width_of(items, encoders) == width


@pytest.mark.parametrize("name", ["history_leaves", "history_nodes"])
def test_an_exported_encoder_gives_a_history_of_any_length_its_states_without_padding(name: str) -> None:
    """ONNX's own evaluator, which answers golden queries, cannot do with more than 64 places all that it can with fewer."""
    torch.manual_seed(3)
    length = 70 if name == "history_leaves" else 6
    leaves_BT = padded([], [TREE.leaf_offset], [TREE.leaf_offset + k % 20 for k in range(length - 1)], length=length)
    if name == "history_leaves":
        scorer = SequenceScorer(node_dim=WIDTH, layers=1, heads=2, window_hidden=5, dropout=0.0)
        query = SequenceQuery(length, sequence_parts(scorer, length, TREE.height + 1))
        model, asked = NodeScorer(TREE.node_count, WIDTH, query, ProductHead(WIDTH, WIDTH, None), init_std=1.0), leaves_BT
    else:
        model = new_scorer(ProductScorer(node_dim=WIDTH, hidden=(7,), dropout=0.0), (3, 2, 1), TREE.node_count)
        asked = torch.from_numpy(np.moveaxis(TREE.ancestors(leaves_BT.numpy()), 2, 1).copy())
    graph = read_graph("query.onnx", export_graphs(model, name, asked).query_onnx)
    assert takes_any_length(graph)
    rows_ND = model.node_rows.detach().numpy()
    with torch.no_grad():
        expected_BLS = model.state(asked).numpy()
    for b, items in enumerate((0, 1, length - 1)):
        for own_length in {max(items, 1), 5, length} - set(range(1, items)):
            own = asked[b : b + 1, ..., length - own_length :].numpy()
            (found,) = ReferenceEvaluator(graph).run(None, {name: own, "node_rows": rows_ND})
            np.testing.assert_allclose(np.asarray(found)[0], expected_BLS[b], rtol=1e-4, atol=1e-5)
