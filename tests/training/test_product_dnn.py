"""The product-DNN against hand-computed losses and a planted structure."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from numpy.typing import NDArray
from torch import Tensor

from espalier.errors import InvalidConfig, InvalidData
from espalier.items import ItemTable
from espalier.metrics import precision_recall_f
from tests.training.logs import log_of, split_of
from training.baselines import product_dnn as product_dnn_method
from training.baselines.popularity import fit_popularity
from training.baselines.product_dnn import ProductDnn, ProductDnnConfig, build_network, fit_product_dnn
from training.baselines.sampled_softmax import Proposal, full_softmax_loss, sampled_softmax_loss
from training.data.interactions import Interactions
from training.data.splits import Split
from training.data.user_item_matrix import events_of_items
from training.retrieval.task import Deadline, Metric, Task
from training.specification.deep import InstanceConfig

Float32 = NDArray[np.float32]
CPU = torch.device("cpu")
ITEMS, GROUPS = 120, 12
ITEM_TABLE = ItemTable.build(pa.table({"id": [f"i{row}" for row in range(ITEMS)]}))
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
    lists = [(rng.permutation(ITEMS // GROUPS)[:8] * GROUPS + group).tolist() for group in groups]
    log = log_of(lists, items=ITEMS)
    return log, split_of(log, 200, 50, 50)


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
    loss = full_softmax_loss(*scores([one, two]), torch.tensor([[3, 1], [0, -1]]))
    expected = [math.log(sum(map(math.exp, one))) - (3.0 + 2.0) / 2, math.log(sum(map(math.exp, two))) - 0.0]
    assert float(loss) == pytest.approx(np.mean(expected), rel=1e-6)


def test_a_negative_counts_by_how_often_it_was_drawn_and_how_rarely_it_is() -> None:
    # q = (1/2, 1/4, 1/8, 1/8); of 4 draws, item 0 came up twice and item 3 twice. Expected were 2 and 1/2 times.
    log_weight_S = torch.tensor([2 / 2, 2 / 0.5]).log()
    loss = sampled_softmax_loss(*scores([[1.0, 2.0, 0.5, 3.0]]), torch.tensor([[1]]), torch.tensor([0, 3]), log_weight_S)
    assert float(loss) == pytest.approx(math.log(math.exp(2) + 1 * math.exp(1) + 4 * math.exp(3)) - 2.0, rel=1e-6)


def test_an_instances_own_targets_are_no_negatives_of_it_and_enter_the_sum_once() -> None:
    one, two = [1.0, 2.0, 0.5, 3.0], [0.0, 0.0, -1.0, 1.0]
    log_weight_S = torch.tensor([0.3, 0.7])
    loss = sampled_softmax_loss(*scores([one, two]), torch.tensor([[3, 1, 3], [2, -1, -1]]), torch.tensor([0, 3]), log_weight_S)
    first = math.log(math.exp(2) + math.exp(3) + math.exp(1 + 0.3)) - (3 + 2 + 3) / 3
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
    histories = [rng.integers(-1, ITEMS, rng.integers(0, 9)) for _ in range(4)]
    length = sum(windows)
    known = [history[history >= 0][-length:] for history in histories]
    history_BT = np.stack([np.concatenate([np.full(length - len(rows), -1), rows]) for rows in known]).astype(np.int64)
    expected = torch.addmm(network.bias_I, network(torch.from_numpy(history_BT), torch.Generator()), network.item_ID.T)
    model = network.frozen()
    assert_allclose(model.user_vectors(histories) @ model.item_vectors.T, expected.detach().numpy(), rtol=1e-4, atol=1e-5)


def two_towers(item_vectors: list[list[float]]) -> ProductDnn:
    """A model whose user vector is the input vector of the last history item (and 0 without one)."""
    table_IE = np.array(item_vectors, np.float32)
    layer = (np.eye(table_IE.shape[1], dtype=np.float32), np.zeros(table_IE.shape[1], np.float32))
    return ProductDnn((1,), table_IE, (layer,), np.concatenate([table_IE, np.zeros((len(table_IE), 1), np.float32)], axis=1))


def test_ranks_by_inner_product_with_ties_by_row_and_leaves_out_what_was_seen() -> None:
    model = two_towers([[1, 0], [2, 0], [0, 1], [2, 0]])
    histories = [np.array([2, 0]), np.array([], np.int64), np.array([-1, 3])]
    assert model.rank(histories, 3, exclude_seen=False).tolist() == [[1, 3, 0], [0, 1, 2], [1, 3, 0]]
    assert model.rank(histories, 5, exclude_seen=True).tolist() == [[1, 3, -1, -1, -1], [0, 1, 2, 3, -1], [1, 0, 2, -1, -1]]


def test_biases_start_at_the_log_of_the_training_users_popularity() -> None:
    log = log_of([[0, 0, 1], [1, 2], [2, 2]], items=4)
    assert events_of_items(log, np.array([0, 1])).tolist() == [2, 2, 1, 0]
    bias_I = build_network(log, np.array([0, 1]), replace(SMALL, init="random"), 1).frozen().item_vectors[:, -1]
    assert_allclose(bias_I - bias_I[3], np.log([3, 3, 2, 1]), rtol=1e-6)


# -- training -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["full", "sampled"])
def test_learns_a_planted_structure_that_popularity_cannot_see(loss: Literal["full", "sampled"]) -> None:
    log, split = planted_log()
    model = fit_product_dnn(split, replace(SMALL, loss=loss, init="random", init_std=0.3, dropout=0.1), seed=1)
    pairs = split.test
    histories, relevant = [pair.history for pair in pairs], [pair.relevant for pair in pairs]
    by_popularity, learned = (
        precision_recall_f(rank(histories, 6, True), relevant, 6)[1].mean() for rank in (fit_popularity(log, split.train).rank, model.rank)
    )
    assert learned > 0.8 > 0.4 > by_popularity


def test_the_weights_of_the_best_round_are_kept_and_training_ends_after_the_patience() -> None:
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


def test_queries_and_splits_that_make_no_sense_are_refused_by_name() -> None:
    model, (_, split) = two_towers([[1.0, 0.0]]), planted_log()
    cases: list[tuple[str, Callable[[], object]]] = [
        ("m", lambda: model.rank([np.array([0])], 0, exclude_seen=False)),
        ("histories", lambda: model.user_vectors([np.array([1])])),
        ("split.validation", lambda: fit_product_dnn(replace(split, validation=()), SMALL, seed=1)),
    ]
    with pytest.raises(FloatingPointError, match="lower learning_rate"):
        fit_product_dnn(split, replace(SMALL, learning_rate=1e30), seed=1)
    for field, refused in cases:
        with pytest.raises((InvalidConfig, InvalidData)) as error:
            refused()
        assert error.value.field == field


def test_the_method_is_chosen_by_the_tasks_metric_and_answers_as_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """One target an instance, or as many as the task's: the better of both."""
    _, split = planted_log()

    def short(split: Split, config: ProductDnnConfig, **more: Any) -> ProductDnn:
        return fit_product_dnn(split, replace(config, max_steps=90, round_steps=45, batch=64, learning_rate=2e-2), **more)

    monkeypatch.setattr(product_dnn_method, "fit_product_dnn", short)
    instances = SMALL.instances.model_copy(update={"targets": 3})
    task = Task(split, ITEM_TABLE, Metric("ndcg", 5), exclude_seen=True, instances=instances, seed=1)
    fitted = product_dnn_method.product_dnn(task)
    assert [trial.options["instances"]["targets"] for trial in fitted.trials] == [1, 3]
    best = max(fitted.trials, key=lambda trial: trial.figure)
    assert fitted.options == best.options
    assert best.figure == pytest.approx(task.measured(fitted.rank, task.validation_pairs()))
    assert best.figure > 0.5
    assert fitted.options["loss"] == "full"
    assert fitted.options["metric"] == {"name": "ndcg", "m": 5}
    assert fitted.bytes > 4 * ITEMS * 2 * 128


def test_a_deadline_ends_training_with_a_measurement_and_the_rate_falls_towards_it() -> None:
    _, split = planted_log()
    model = fit_product_dnn(split, replace(SMALL, max_steps=10**6, round_steps=10**6), seed=1, deadline=Deadline(time.monotonic() + 0.3))
    assert len(model.curve) == 1
    assert 1 <= model.curve[0][0] < 10**5
    model = fit_product_dnn(split, SMALL, seed=1, deadline=Deadline(time.monotonic()))
    assert model.curve[0][0] == 1, "one step at least"
