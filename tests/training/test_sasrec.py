"""Networks among the baselines: the product-DNN and SASRec against hand-computed losses, torch's own and planted structures."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from torch import Tensor

from espalier.arrays import Float32
from espalier.errors import InvalidData
from espalier.items import ItemTable
from espalier.metrics import precision_recall_f
from tests.training.logs import log_of, split_of
from training.baselines import popularity, sasrec
from training.baselines import product_dnn as product_dnn_method
from training.baselines.methods import METHODS
from training.baselines.product_dnn import ProductDnn, ProductDnnConfig, build_network, fit_product_dnn, targets_loss
from training.baselines.proposal import Proposal
from training.baselines.sasrec import fit_sasrec, grid
from training.baselines.sasrec_model import SasRecConfig, Training, start_table
from training.data.interactions import Interactions
from training.data.splits import EvaluationPair, Split
from training.deep.directed_start import followers
from training.deep.scorers.transformer import BUCKETS, buckets_of
from training.deep.sequence import blocked_softmax
from training.deep.sequence.batches import SequenceSource
from training.deep.sequence.blocked_softmax import positions_in, softmax_loss
from training.retrieval.task import Deadline, Metric, Task
from training.specification.deep import InstanceConfig
from training.specification.splits import LastSplit
from training.trees.embeddings import item_embeddings

CPU = torch.device("cpu")
PLANTED_ITEMS, GROUPS = 120, 12
PLANTED_TABLE = ItemTable.build(pa.table({"id": [f"i{row}" for row in range(PLANTED_ITEMS)]}))
SMALL = ProductDnnConfig(
    loss="full",
    dropout=0.0,
    average=1,
    instances=InstanceConfig(windows=(3, 2), targets=4, cold_share=0.1),
    input_dim=12,
    hidden=(16,),
    dim=8,
    negatives=60,
    batch=64,
    learning_rate=2e-2,
    max_steps=120,
    round_steps=40,
    metric=Metric("recall", 10),
)


def planted_log() -> tuple[Interactions, Split]:
    """Every user takes 8 of the 10 items of one group; an item's group is its row modulo GROUPS, and low rows are more popular."""
    rng = np.random.default_rng(5)
    groups = rng.choice(GROUPS, 300, p=np.arange(GROUPS, 0, -1) / (GROUPS * (GROUPS + 1) / 2))
    lists = [(rng.permutation(PLANTED_ITEMS // GROUPS)[:8] * GROUPS + group).tolist() for group in groups]
    log = log_of(lists, items=PLANTED_ITEMS)
    return log, split_of(log, 200, 50, 50)


def test_distances_have_buckets_that_widen_and_the_first_place_its_own() -> None:
    bucket_TT = buckets_of(600)
    assert bucket_TT[599, 0] == bucket_TT[0, 0] == BUCKETS - 1
    of_distance = bucket_TT[599, 1:].flip(0)  # distances 0 … 598
    assert of_distance[:16].tolist() == list(range(16))
    steps = of_distance.diff()
    assert ((steps == 0) | (steps == 1)).all()
    assert of_distance.max() == BUCKETS - 2
    assert (bucket_TT[7, 1:8] == of_distance[:7].flip(0)).all()


# -- losses ---------------------------------------------------------------------------------------------------------------


def scores(values: list[list[float]]) -> tuple[Tensor, Tensor, Tensor]:
    """User vectors, item vectors and biases whose scores are `values`, half of the last item's score coming from its bias."""
    user_BD = torch.tensor(values)
    item_ID, bias_I = torch.eye(user_BD.shape[1]), torch.zeros(user_BD.shape[1])
    bias_I[-1] = 0.5
    user_BD[:, -1] -= 0.5
    return user_BD, item_ID, bias_I


def test_the_full_loss_is_the_cross_entropy_against_the_uniform_distribution_of_the_targets() -> None:
    one, two = [1.0, 2.0, 0.5, 3.0], [0.0, 0.0, -1.0, 1.0]
    loss = targets_loss(*scores([one, two]), torch.tensor([[3, 1], [0, -1]]))
    expected = [math.log(sum(map(math.exp, one))) - (3.0 + 2.0) / 2, math.log(sum(map(math.exp, two))) - 0.0]
    assert float(loss) == pytest.approx(np.mean(expected), rel=1e-6)


def test_an_instances_first_target_is_no_negative_of_it_and_enters_the_sum_once() -> None:
    one, two = [1.0, 2.0, 0.5, 3.0], [0.0, 0.0, -1.0, 1.0]
    negatives = torch.tensor([0, 3]), torch.tensor([0.3, 0.7])
    loss = targets_loss(*scores([one, two]), torch.tensor([[3, 1, 3], [2, -1, -1]]), negatives)
    first = math.log(math.exp(3) + math.exp(1 + 0.3)) - (3 + 2 + 3) / 3
    second = math.log(math.exp(-1) + math.exp(0.3) + math.exp(1 + 0.7)) + 1
    assert float(loss) == pytest.approx((first + second) / 2, rel=1e-6)


def test_draws_come_from_the_proposal_and_say_their_weight() -> None:
    proposal = Proposal(np.array([4.0, 2.0, 1.0, 1.0]), CPU)
    negative_S, log_weight_S = proposal.draw(40_000, torch.Generator().manual_seed(3))
    assert negative_S.tolist() == [0, 1, 2, 3]
    assert_allclose(log_weight_S.exp().numpy(), 1, atol=0.05)  # drawn ÷ expected


# -- the model ------------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32 - 1), windows=st.lists(st.integers(1, 3), min_size=1, max_size=3), hidden=st.lists(st.integers(1, 9)))
def test_the_model_that_ranks_computes_what_was_trained(seed: int, windows: list[int], hidden: list[int]) -> None:
    log, split = planted_log()
    config = replace(SMALL, instances=InstanceConfig(windows=tuple(windows)), hidden=tuple(hidden), init="random")
    network = build_network(log, split.train, config, seed)
    rng = np.random.default_rng(seed)
    histories = [rng.integers(-1, PLANTED_ITEMS, rng.integers(0, 9)) for _ in range(4)]
    length = sum(windows)
    known = [history[history >= 0][-length:] for history in histories]
    history_BT = np.stack([np.concatenate([np.full(length - len(rows), -1), rows]) for rows in known]).astype(np.int64)
    expected = torch.addmm(network.bias_I, network(torch.from_numpy(history_BT), torch.Generator()), network.item_ID.T)
    model = network.frozen()
    assert_allclose(model.user_vectors(histories) @ model.item_vectors.T, expected.detach().numpy(), rtol=1e-4, atol=1e-5)


# -- training -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["full", "sampled"])
def test_learns_a_planted_structure_that_popularity_cannot_see(loss: Literal["full", "sampled"]) -> None:
    log, split = planted_log()
    model = fit_product_dnn(split, replace(SMALL, loss=loss, init="random", init_std=0.3, dropout=0.1), seed=1)
    pairs = split.test
    histories, relevant = [pair.history for pair in pairs], [pair.relevant for pair in pairs]
    popular = popularity.rank(popularity.most_popular(log, split.train), histories, 6, True)
    by_popularity, learned = (precision_recall_f(rows, relevant, 6)[1].mean() for rows in (popular, model.rank(histories, 6, True)))
    assert learned > 0.8 > 0.4 > by_popularity


def test_another_seed_gives_another_model_and_rounds_are_measured() -> None:
    _, split = planted_log()
    config = replace(SMALL, loss="sampled", dropout=0.2, max_steps=12, round_steps=5)
    one, other = (fit_product_dnn(split, config, seed=seed) for seed in (1, 2))
    assert [step for step, _ in one.curve] == [5, 10, 12]
    assert np.abs(one.item_vectors - other.item_vectors).max() > 1e-3
    narrow = fit_product_dnn(split, replace(config, bfloat16=True), seed=1).item_vectors
    assert 0 < np.abs(one.item_vectors - narrow).mean() < 0.03


def test_the_product_dnns_weights_of_the_best_round_are_kept_and_training_ends_after_the_patience() -> None:
    _, split = planted_log()
    # At so large a step the model is soon worse than it was.
    config = replace(SMALL, learning_rate=1.0, max_steps=400, round_steps=2, patience=2, init="random")
    model = fit_product_dnn(split, config, seed=3)
    steps, recalls = zip(*model.curve, strict=True)
    best = recalls.index(max(recalls))
    assert len(recalls) == best + 3
    assert steps[-1] < 400
    pairs = split.validation
    found_BM = model.rank([pair.history for pair in pairs], 10, exclude_seen=True)
    assert precision_recall_f(found_BM, [pair.relevant for pair in pairs], 10)[1].mean() == pytest.approx(max(recalls))


def test_no_validation_split_and_a_learning_rate_that_diverges_are_refused() -> None:
    _, split = planted_log()
    with pytest.raises(FloatingPointError, match="lower learning_rate"):
        fit_product_dnn(split, replace(SMALL, learning_rate=1e30), seed=1)
    with pytest.raises(InvalidData, match=r"split\.validation"):
        fit_product_dnn(replace(split, validation=()), SMALL, seed=1)


def test_the_method_is_chosen_by_the_tasks_metric_and_answers_as_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """One target an instance, or as many as the task's: the better of both."""
    _, split = planted_log()

    def short(split: Split, config: ProductDnnConfig, **more: Any) -> ProductDnn:
        return fit_product_dnn(split, replace(config, max_steps=90, round_steps=45, batch=64, learning_rate=2e-2), **more)

    monkeypatch.setattr(product_dnn_method, "fit_product_dnn", short)
    instances = SMALL.instances.model_copy(update={"targets": 3})
    task = Task(split, PLANTED_TABLE, Metric("ndcg", 5), exclude_seen=True, instances=instances, seed=1)
    fitted = product_dnn_method.product_dnn(task)
    assert [trial.options["instances"]["targets"] for trial in fitted.trials] == [1, 3]
    best = max(fitted.trials, key=lambda trial: trial.figure)
    assert fitted.options == best.options
    assert best.figure == pytest.approx(task.measured(fitted.rank, task.validation_pairs()))
    assert best.figure > 0.5
    assert fitted.options["loss"] == "full"
    assert fitted.options["metric"] == {"name": "ndcg", "m": 5}
    assert fitted.bytes > 4 * PLANTED_ITEMS * 2 * 128


def test_a_deadline_ends_training_with_a_measurement_and_the_rate_falls_towards_it() -> None:
    _, split = planted_log()
    model = fit_product_dnn(split, replace(SMALL, max_steps=10**6, round_steps=10**6), seed=1, deadline=Deadline(time.monotonic() + 0.3))
    assert len(model.curve) == 1
    assert 1 <= model.curve[0][0] < 10**5
    model = fit_product_dnn(split, SMALL, seed=1, deadline=Deadline(time.monotonic()))
    assert model.curve[0][0] == 1, "one step at least"


# -- SASRec ---------------------------------------------------------------------------------------------------------------


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


def unit(rows_ID: Float32) -> Float32:
    scaled_ID: Float32 = rows_ID / np.linalg.norm(rows_ID, axis=1, keepdims=True)
    return scaled_ID


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
    mine = softmax_loss(state_ND, item_ID[target_N], item_ID[negative_S], positions_in(target_N, negative_S), weight_S)
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
    popular_I = popularity.most_popular(task.split.lists, task.split.train)
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


def test_training_goes_on_from_the_best_round_with_a_falling_rate_and_the_best_weights_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    figures, models = iter([0.1, 0.5, 0.5, 0.2, 0.4, 0.3, 0.9]), []

    def measured(_: Task, rank: Any, __: Any) -> float:
        models.append(rank.__self__)
        return next(figures)

    monkeypatch.setattr(Task, "measured", measured)
    task, config = planted_task(), replace(TINY, patience=3)
    training = Training(task, config, start_table(task, config))
    rates: list[float] = []
    while not training.is_over:
        before = training.network.item_ID.detach().clone()
        training.round(Deadline(None))
        rates.append(training.optimiser.param_groups[0]["lr"])
        if len(rates) == 5:
            assert_allclose(training.network.item_ID.detach(), models[1].item_ID, err_msg="it goes back to the best weights")
    assert training.curve == [0.1, 0.5, 0.5, 0.2, 0.4, 0.3], "a quarter of five rounds is one"
    assert rates[:5] == [config.learning_rate] * 5
    assert 0 < rates[5] < config.learning_rate / 3, "that of its last step, before 0"
    assert (training.network.item_ID - before).abs().max() > 1e-4
    assert training.best == 0.5
    assert training.best_model is models[1], "the earlier of equals"
    assert (models[1].item_ID - models[2].item_ID).abs().max() > 1e-3, "a model is a copy, which later rounds do not change"


def test_before_a_deadline_the_rate_falls_in_time() -> None:
    now = iter(range(10**6))
    task = replace(planted_task(), clock=lambda: float(next(now)))
    training = Training(task, replace(TINY, patience=10**6), start_table(task, TINY))
    deadline = Deadline(task.clock() + 100, task.clock)
    while not (training.is_over or deadline.is_over()):
        training.round(deadline)
    assert training.steps_left < training.falling_steps / 3
    assert len(training.curve) > 4


def test_items_start_as_vectors_of_what_follows_what_of_sets_as_embeddings_or_at_random() -> None:
    task = planted_task()
    sets = replace(task, split=replace(task.split, lists=replace(task.split.lists, order="none")))
    learned = task.split.lists, task.split.train
    for started, vectors_ID in ((task, followers(*learned, 16, 1)), (sets, item_embeddings(*learned, 16, seed=1))):
        table_ID = start_table(started, replace(TINY, init="embeddings", init_std=0.05)).numpy()
        assert np.sqrt(np.mean(table_ID**2)) == pytest.approx(0.05)
        assert_allclose(unit(table_ID) @ unit(table_ID).T, unit(vectors_ID) @ unit(vectors_ID).T, atol=1e-5)
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
