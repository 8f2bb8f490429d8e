"""SASRec: the encoder's causality, the losses against torch's, batches against their lists, and planted sequences."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from espalier.errors import InvalidConfig, InvalidData
from espalier.items import ItemTable
from tests.training.logs import log_of
from training.baselines import sasrec
from training.baselines.methods import METHODS
from training.baselines.popularity import fit_popularity
from training.baselines.sasrec import fit_sasrec, grid
from training.baselines.sasrec_model import SasRecConfig, Training, start_table
from training.data.splits import EvaluationPair, Split
from training.deep.scorers.transformer import Dropout, SequenceEncoder
from training.deep.sequence import blocked_softmax
from training.deep.sequence.batches import SequenceSource
from training.deep.sequence.blocked_softmax import places_of, softmax_loss
from training.retrieval.task import Deadline, Metric, Task
from training.specification.deep import InstanceConfig
from training.specification.splits import LastSplit
from training.trees.embeddings import item_embeddings

ITEMS = 30
ITEM_TABLE = ItemTable.build(pa.table({"id": [f"i{row}" for row in range(ITEMS)]}))
TINY = SasRecConfig(
    init="random",
    init_std=0.02,
    width=16,
    layers=1,
    heads=2,
    length=8,
    dropout=0.0,
    places=128,
    learning_rate=1e-2,
    warm_steps=5,
    average=10,
    max_rounds=20,
)


def encoder(length: int = 12) -> SequenceEncoder:
    torch.manual_seed(3)
    return SequenceEncoder(8, 2, 2, length)


def planted_task(order: Any = "file", seed: int = 1, seconds: float | None = None, users: int = 150) -> Task:
    """Each item's successor is one fixed item. The next item is known from the last one alone, and no item is more popular by much."""
    rng = np.random.default_rng(7)
    after_I = np.roll(rng.permutation(ITEMS), 1)
    successor = dict(zip(np.sort(after_I).tolist(), after_I.tolist(), strict=True))
    lists = []
    for start, length in zip(rng.integers(ITEMS, size=users).tolist(), rng.integers(4, 14, users).tolist(), strict=True):
        items = [start]
        while len(items) < length:
            items.append(successor[items[-1]])
        lists.append(items)
    log = log_of(lists, order=order, items=ITEMS)
    train, held = np.arange(users - 50), np.arange(users - 50, users)
    pairs = [EvaluationPair(user, log.of(user)[:-1], log.of(user)[-1:]) for user in held.tolist()]
    split = Split(log, train, validation=pairs[:25], test=pairs[25:], config=LastSplit())
    return Task(split, ITEM_TABLE, Metric("recall", 1), exclude_seen=False, instances=InstanceConfig(), seed=seed, seconds=seconds)


def unit(rows_ID: NDArray[np.float32]) -> NDArray[np.float32]:
    scaled_ID: NDArray[np.float32] = rows_ID / np.linalg.norm(rows_ID, axis=1, keepdims=True)
    return scaled_ID


# -- the encoder ----------------------------------------------------------------------------------------------------------


def test_a_later_item_changes_no_earlier_state() -> None:
    items_BTD = torch.randn(3, 7, 8, generator=torch.Generator().manual_seed(1))
    changed_BTD = items_BTD.clone()
    changed_BTD[:, 4] = torch.randn(3, 8, generator=torch.Generator().manual_seed(2))
    before, after = encoder()(items_BTD), encoder()(changed_BTD)
    alike_TD = encoder()(torch.ones(1, 4, 8) * torch.arange(8.0))[0]
    assert all((alike_TD[t] - alike_TD[t + 1]).abs().max() > 1e-4 for t in range(3)), "places differ where items do not"
    torch.testing.assert_close(after[:, :4], before[:, :4])
    assert (after[:, 4:] - before[:, 4:]).abs().amax(-1).min() > 1e-4, "and every state from there on depends on it"


def test_a_sequence_beyond_the_encoders_length_is_refused() -> None:
    with pytest.raises(InvalidData, match="at most 4"):
        encoder(length=4)(torch.zeros(1, 5, 8))
    with pytest.raises(InvalidConfig, match="a multiple of heads, 3"):
        SequenceEncoder(8, 1, 3, 4)


def test_dropout_keeps_the_mean_and_drops_its_share() -> None:
    dropped = Dropout(0.25, torch.Generator().manual_seed(1))(torch.ones(300, 301))
    assert float((dropped == 0).float().mean()) == pytest.approx(0.25, abs=0.01)
    assert float(dropped.mean()) == pytest.approx(1, abs=0.01)
    assert_allclose(dropped[dropped > 0].numpy(), 4 / 3, rtol=1e-6)


# -- losses ---------------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32 - 1), logits=st.integers(1, 100))
def test_the_whole_softmax_is_torchs_cross_entropy_in_blocks_of_any_size(seed: int, logits: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    state_ND, item_ID = (torch.randn(rows, 4, generator=rng).requires_grad_() for rows in (9, 7))
    target_N = torch.randint(7, (9,), generator=rng)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked_softmax, "LOGITS", logits)
        mine = softmax_loss(state_ND, item_ID[target_N], item_ID, target_N)
    expected = torch.nn.functional.cross_entropy(state_ND @ item_ID.T, target_N)
    torch.testing.assert_close(mine, expected)
    for one, other in zip(
        torch.autograd.grad(2 * mine, (state_ND, item_ID)), torch.autograd.grad(2 * expected, (state_ND, item_ID)), strict=True
    ):
        torch.testing.assert_close(one, other)


@given(seed=st.integers(0, 2**32 - 1))
def test_the_sampled_loss_is_its_formula_and_leaves_the_target_out_of_the_negatives(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    state_ND, item_ID = (torch.randn(rows, 4, generator=rng).requires_grad_() for rows in (6, 9))
    target_N = torch.randint(9, (6,), generator=rng)
    negative_S = torch.randperm(9, generator=rng)[:5].sort().values
    weight_S = torch.randn(5, generator=rng)
    mine = softmax_loss(state_ND, item_ID[target_N], item_ID[negative_S], places_of(target_N, negative_S), weight_S)
    losses = []
    for state_D, target in zip(state_ND, target_N.tolist(), strict=True):
        others = [item_ID[s] @ state_D + w for s, w in zip(negative_S.tolist(), weight_S, strict=True) if s != target]
        losses.append(torch.stack([item_ID[target] @ state_D, *others]).logsumexp(0) - item_ID[target] @ state_D)
    expected = torch.stack(losses).mean()
    torch.testing.assert_close(mine, expected)
    for one, other in zip(torch.autograd.grad(mine, (state_ND, item_ID)), torch.autograd.grad(expected, (state_ND, item_ID)), strict=True):
        torch.testing.assert_close(one, other)


def test_a_block_holds_no_more_logits_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    softmax = blocked_softmax.softmax_in_place

    def counted(score: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(score.numel())
        return softmax(score)

    monkeypatch.setattr(blocked_softmax, "LOGITS", 64)
    monkeypatch.setattr(blocked_softmax, "softmax_in_place", counted)
    softmax_loss(torch.randn(50, 4), torch.randn(50, 4), torch.randn(7, 4), torch.zeros(50, dtype=torch.int64))
    assert max(seen) == 64
    assert sum(seen) == 50 * 8
    seen.clear()
    softmax_loss(torch.randn(3, 4), torch.randn(3, 4), torch.randn(100, 4), torch.zeros(3, dtype=torch.int64))
    assert seen == [101] * 3, "at least one position at a time"


# -- batches --------------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32 - 1), length=st.integers(1, 9), places=st.integers(1, 40))
def test_an_epoch_holds_every_pair_of_neighbours_once_in_batches_within_the_limit(seed: int, length: int, places: int) -> None:
    rng = np.random.default_rng(seed)
    lists = [rng.integers(50, size=rng.integers(1, 25)).tolist() for _ in range(12)]
    source = SequenceSource(log_of([*lists, [51, 51]], items=52), np.arange(12), length, places, seed)
    pairs = []
    for batch in source.epoch(int(rng.integers(5))):
        real_BT = batch.target_BT >= 0
        assert_array_equal(real_BT, batch.history_BT >= 0)
        assert real_BT.shape[1] <= length
        assert real_BT.size <= places or len(real_BT) == 1
        assert_array_equal(batch.history_BT[:, 1:][real_BT[:, 1:]], batch.target_BT[:, :-1][real_BT[:, 1:]])
        pairs += list(zip(batch.history_BT[real_BT].tolist(), batch.target_BT[real_BT].tolist(), strict=True))
    assert sorted(pairs) == sorted(pair for items in lists for pair in itertools.pairwise(items))


def test_short_lists_do_not_cost_what_the_longest_one_costs() -> None:
    lists = [[1, 2, 3]] * 40 + [list(range(40))]
    source = SequenceSource(log_of(lists), np.arange(41), length=50, places=60, seed=1)
    computed = sum(batch.history_BT.size for batch in source.epoch(0))
    assert computed <= 1.3 * (40 * 2 + 39)


def test_a_list_without_order_is_shuffled_for_each_epoch() -> None:
    lists = [[5, 6], list(range(9)), [7, 8, 5]]
    source = SequenceSource(log_of(lists, order="none"), np.array([1]), length=20, places=60, seed=1)
    epochs = [next(iter(source.epoch(number))) for number in range(3)]
    assert len({tuple(batch.history_BT[0].tolist()) for batch in epochs}) == 3
    for batch in epochs:
        assert sorted([*batch.history_BT[0].tolist(), batch.target_BT[0, -1]]) == list(range(9))
        assert_array_equal(batch.events_E[2:11], [*batch.history_BT[0], batch.target_BT[0, -1]])
        assert sorted(batch.events_E[:2]) == [5, 6]
        assert sorted(batch.events_E[11:]) == [5, 7, 8]
    again = next(iter(source.epoch(2)))
    assert_array_equal(again.history_BT, epochs[2].history_BT)


def test_lists_of_one_event_teach_nothing() -> None:
    with pytest.raises(InvalidData, match="at least one with two events or more"):
        SequenceSource(log_of([[1], [2]]), np.arange(2), 4, 8, 1)


# -- fits -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["full", "sampled"])
def test_it_learns_what_only_the_order_says(loss: Any) -> None:
    task = planted_task(users=300)
    fitted = fit_sasrec(task, [replace(TINY, loss=loss, negatives=20)])
    popular_I = fit_popularity(task.split.lists, task.split.train).best_I
    test = task.split.test
    assert task.measured(fitted.rank, test) > 0.9
    assert np.mean([pair.relevant[0] == popular_I[0] for pair in test]) < 0.3
    shuffled = fit_sasrec(planted_task("none", users=300), [replace(TINY, loss=loss, negatives=20)])
    assert task.measured(shuffled.rank, test) < 0.6, "an order-blind model does not know which of the neighbours comes next"


def test_a_deadline_ends_training_early_with_what_there_is() -> None:
    fitted = fit_sasrec(planted_task(seconds=0.0), [replace(TINY, max_rounds=10**6, patience=10**6)] * 2)
    assert fitted.ended == "1 of 140 steps of configuration 1 of 2"
    assert fitted.share == pytest.approx(1 / 140)
    assert len(fitted.trials) == 1
    assert fitted.rank([np.array([3])], 4, exclude_seen=True).min() >= 0


def test_of_several_configurations_the_best_by_the_metric_is_kept() -> None:
    hopeless = replace(TINY, learning_rate=1e-9, init="random")
    fitted = fit_sasrec(planted_task(), [hopeless, TINY])
    assert fitted.options["learning_rate"] == TINY.learning_rate
    assert [trial.options["learning_rate"] for trial in fitted.trials] == [1e-9, 1e-2]
    assert fitted.trials[1].figure > fitted.trials[0].figure


def test_the_weights_of_the_best_round_are_kept_and_training_ends_after_the_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    figures, models = iter([0.1, 0.5, 0.5, 0.2, 0.4, 0.9]), []

    def measured(_: Task, rank: Any, __: Any) -> float:
        models.append(rank.__self__)
        return next(figures)

    monkeypatch.setattr(Task, "measured", measured)
    task, config = planted_task(), replace(TINY, patience=3)
    training = Training(task, config, start_table(task, config))
    while not training.is_over:
        training.round(Deadline(None))
    assert training.curve == [0.1, 0.5, 0.5, 0.2, 0.4]
    assert training.best == 0.5
    assert training.kept is models[1], "the earlier of equals"
    assert (models[1].item_ID - models[2].item_ID).abs().max() > 1e-3, "a model is a copy, which later rounds do not change"


def test_items_start_as_co_occurrence_embeddings_or_at_random() -> None:
    task = planted_task()
    table_ID = start_table(task, replace(TINY, init="embeddings", init_std=0.05)).numpy()
    assert np.sqrt(np.mean(table_ID**2)) == pytest.approx(0.05)
    embeddings_ID = item_embeddings(task.split.lists, task.split.train, 16, seed=1)
    assert_allclose(unit(table_ID) @ unit(table_ID).T, unit(embeddings_ID) @ unit(embeddings_ID).T, atol=1e-5)
    assert np.abs(unit(start_table(task, TINY).numpy()) - unit(table_ID)).max() > 0.1


def test_a_loss_that_is_not_finite_ends_the_fit() -> None:
    with pytest.raises(FloatingPointError, match="lower learning_rate"):
        fit_sasrec(planted_task(), [replace(TINY, learning_rate=1e30, warm_steps=0)])


# -- the method -----------------------------------------------------------------------------------------------------------


def test_the_method_tries_both_dropouts_and_is_measured_as_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    task = planted_task()
    monkeypatch.setattr(sasrec, "SasRecConfig", partial(SasRecConfig, max_rounds=1, warm_steps=1))
    fitted = METHODS["sasrec"](task)
    assert [trial.options["dropout"] for trial in fitted.trials] == [0.5, 0.2], "some 35 events an item: the strong one first"
    assert fitted.options["loss"] == "full"
    assert max(trial.figure for trial in fitted.trials) == task.measured(fitted.rank, task.validation_pairs())
    assert fitted.bytes > 4 * ITEMS * 128
    assert fitted.ended is None or "deadline" not in fitted.ended


def test_a_large_catalogue_has_a_sampled_softmax_and_narrower_rows_until_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    task = planted_task()
    assert [config.dropout for config in grid(planted_task(users=1000), "full")] == [0.2, 0.5], "of a dense log the weaker dropout first"
    assert [(config.width, config.loss) for config in grid(task, "sampled")] == [(128, "sampled")] * 2
    monkeypatch.setattr(sasrec, "WHOLE_ITEMS", ITEMS - 1)
    monkeypatch.setattr(sasrec, "MAX_BYTES", 40 * ITEMS * 64)
    monkeypatch.setattr(sasrec, "SasRecConfig", partial(SasRecConfig, max_rounds=1))
    assert {name: METHODS["sasrec"](task).options[name] for name in ("width", "loss")} == {"width": 64, "loss": "sampled"}
    monkeypatch.setattr(sasrec, "MAX_BYTES", 40 * ITEMS * 32 - 1)
    with pytest.raises(InvalidData, match="30 items, whose training takes 38400 bytes at width 32"):
        METHODS["sasrec-full"](task)
