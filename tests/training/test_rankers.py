"""Rank functions, the choice models that they are fitted by, the sets that they are fitted to, and the graph that serves them."""

from __future__ import annotations

import gzip
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from torch import Tensor, nn

from espalier.engines.runtime import ort
from espalier.errors import InvalidData
from espalier.metrics import ndcg
from tests import ROOT
from training.data.letor import read_letor, read_svmlight
from training.data.ranking_set import RankingSet
from training.rankers import fit
from training.rankers.choice_models import (
    elimination_loss,
    plackett_luce_loss,
    random_order,
    tied_elimination_loss,
    tied_plackett_luce_loss,
)
from training.rankers.export import ranker_onnx
from training.rankers.fit import VALIDATE_AT, Descent, Epoch, Ranker, fit_ranker, new_ranker, query_losses
from training.rankers.rank_functions import HighwayFunction
from training.rankers.standardise import Standardise
from training.specification.ranker import ChoiceModel, HighwayConfig, LinearRankerConfig, RankerConfig, Ties, ranker_config

NAN = np.float32("nan")


def synthetic(seed: int, queries: int = 60, curved: bool = True) -> RankingSet:
    """Four features of different scales, the last one noise, the third with values missing; grades 0 to 3 from the first two."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(3, 15, queries)
    x = rng.standard_normal((int(sizes.sum()), 4)).astype(np.float32)
    worth = -((x[:, 0] - 0.5) ** 2) + x[:, 1] if curved else x[:, 0] - 2 * x[:, 1]
    grades = np.digitize(worth, np.quantile(worth, [0.4, 0.7, 0.9])).astype(np.float32)
    x[rng.random(len(x)) < 0.3, 2] = NAN
    features = (x * [1, 1000, 0.01, 1] + [0, 5000, 1, 0]).astype(np.float32)
    return RankingSet(features, grades, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), ("a", "b", "c", "d"))


def quality(ranker: Ranker, data: RankingSet) -> float:
    return float(ndcg(ranker.scores(data.features_RF), data.grades_R, data.query_offset, VALIDATE_AT).mean())


FAST = HighwayConfig(learning_rate=0.03, max_epochs=40, hidden=16, patience=None)
FREE = Descent(batch_queries=8, max_norm=None)


def fitted(config: RankerConfig = FAST, descent: Descent = FREE, data: RankingSet | None = None, **changes: Any) -> Ranker:
    """A ranker trained in large steps; `changes` to the configuration."""
    return fit_ranker(synthetic(1) if data is None else data, None, config.model_copy(update=changes), descent=descent)


# -- rank functions -------------------------------------------------------------------------------------------------------


def highway(layers: int, dropout: float = 0.0, std: float = 0.5) -> HighwayFunction:
    return HighwayFunction(6, 4, layers, dropout, std, torch.Generator().manual_seed(2))


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_the_highway_network_is_that_of_the_paper(layers: int) -> None:
    function = highway(layers)
    x = np.random.default_rng(1).standard_normal((7, 6))
    p = {name: parameter.detach().double().numpy() for name, parameter in function.named_parameters()}
    z = np.maximum(x @ p["input_KF"].T + p["transform_bias"], 0)
    for _ in range(layers - 1):
        h = np.maximum(z @ p["transform_KK"].T + p["transform_bias"], 0)
        t = 1 / (1 + np.exp(-(z @ p["gate_KK"].T + p["gate_bias"])))
        z = h * t + z * (1 - t)
    assert_allclose(function(torch.from_numpy(x).float()).detach(), z @ p["weight"], rtol=1e-5, atol=1e-6)


def test_max_norm_shortens_what_is_too_long_and_nothing_else_and_holds_after_training() -> None:
    function = highway(3)
    assert (function.gate_bias.tolist(), function.transform_bias.tolist()) == ([-1] * 4, [0] * 4)
    with torch.no_grad():
        function.input_KF[0] *= 100
        function.gate_KK[1] *= 0.001
    before = {name: parameter.detach().clone() for name, parameter in function.named_parameters()}
    function.limit_norms(1.0)
    assert longest(function) <= 1 + 1e-6
    assert function.input_KF[0].norm().item() == pytest.approx(1)
    torch.testing.assert_close(torch.cosine_similarity(function.input_KF, before["input_KF"]), torch.ones(4))
    torch.testing.assert_close(function.gate_KK[1], before["gate_KK"][1])
    torch.testing.assert_close(function.weight, before["weight"])
    bounded, free = (fitted(descent=replace(FREE, max_norm=norm), learning_rate=0.3, max_epochs=3).function for norm in (1.0, None))
    assert longest(bounded) <= 1 + 1e-6
    assert longest(free) > 1.1


def longest(function: nn.Module) -> float:
    """The length of the longest incoming weights of a unit or gate."""
    assert isinstance(function, HighwayFunction)
    return max(float(w.detach().norm(dim=1).max()) for w in (function.input_KF, function.transform_KK, function.gate_KK))


def awake(function: HighwayFunction) -> HighwayFunction:
    """The same with positive weights, so that no unit is silent on positive features."""
    for parameter in function.parameters():
        parameter.data.abs_()
    return function


def test_dropout_is_drawn_per_item_once_for_all_layers_and_never_in_serving() -> None:
    function = awake(highway(6, dropout=0.5))
    x = torch.ones(4000, 6)
    assert len(function(x).unique()) <= 2  # rounding may differ between the ends of a batch
    scores = function(x, torch.Generator().manual_seed(1))
    assert len((scores * 1e4).round().unique()) == 2**4  # one score for each mask of four units
    again = function(x, torch.Generator().manual_seed(1))
    assert_array_equal(scores.detach(), again.detach())
    shallow = awake(highway(1, dropout=0.5))
    assert shallow(x, torch.Generator().manual_seed(1)).mean().item() == pytest.approx(shallow(x[:1]).item(), rel=0.05)


def test_both_forms_of_a_feature_have_mean_0_and_deviation_1_and_what_is_missing_is_0_and_said_beside() -> None:
    data = synthetic(3).features_RF
    standardise = Standardise(data)
    out = standardise(torch.from_numpy(data)).numpy()
    assert (standardise.outputs, out.shape[1]) == (9, 9)  # an indicator of the third feature alone
    known = np.tile(~np.isnan(data), 2)
    for column in range(8):
        assert_allclose([out[known[:, column], column].mean(), out[known[:, column], column].std()], [0, 1], atol=1e-4)
    assert (out[:, :8][~known] == 0).all()
    missing = np.isnan(data[:, 2])
    assert out[missing, 8].min() > 0 > out[~missing, 8].max()
    assert_allclose([out[:, 8].mean(), out[:, 8].std()], [0, 1], atol=1e-5)


def test_a_value_that_was_rarely_missing_in_training_is_no_large_input_when_it_is_missing() -> None:
    data = np.linspace(0, 1, 10_000, dtype=np.float32)[:, None]
    data[7] = NAN
    out = Standardise(data)(torch.from_numpy(data))
    assert 4.9 < out[7, 2] < 5.1


def test_constant_and_wholly_missing_features_are_0_for_any_value() -> None:
    data = np.tile(np.array([[0.1, NAN, 3e8]], np.float32), (50, 1))
    standardise = Standardise(data)
    out = standardise(torch.tensor([[0.1, 5.0, -1.0], [7.0, NAN, 3e8]]))
    assert out.abs().max() == 0
    assert standardise.outputs == 6


def test_a_value_far_from_all_in_training_is_no_larger_an_input_than_five_deviations() -> None:
    data = np.array([[2024, 1e-39, 5]] * 999 + [[2025, 0, 6]], np.float32)
    standardise = Standardise(data)
    out = standardise(torch.tensor([[2026, 1e-39, 1e30], [1e-30, 1e30, -1e30]]))
    assert out[:, [0, 2]].tolist() == [[5, 5], [-5, -5]]
    assert out[:, 1].tolist() == [0, 0]  # its deviation is too small to divide by


@given(seed=st.integers(0, 200), exponent=st.floats(0.2, 5))
def test_the_second_form_rises_and_hardly_depends_on_units(seed: int, exponent: float) -> None:
    rng = np.random.default_rng(seed)
    raw = rng.random((500, 1)).astype(np.float32) + 0.01
    other = (raw**exponent * 1e3).astype(np.float32)
    first = Standardise(raw)(torch.from_numpy(raw)).numpy()[:, 1]
    second = Standardise(other)(torch.from_numpy(other)).numpy()[:, 1]
    assert (np.diff(first[np.argsort(raw[:, 0])]) >= -1e-6).all()
    assert np.abs(first - second).mean() < 0.1
    assert np.abs(first).max() < 4


def test_rows_are_standardised_and_scored_as_alone_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    data = synthetic(3)
    ranker = new_ranker(data, FAST)
    whole = ranker.scores(data.features_RF)
    monkeypatch.setattr("training.rankers.standardise.BLOCK_ROWS", 7)
    assert_allclose(ranker.scores(data.features_RF), whole, rtol=1e-5, atol=1e-6)
    assert_allclose(new_ranker(data, FAST).scores(data.features_RF), whole, rtol=1e-5, atol=1e-6)
    assert ranker.scores(data.features_RF[:0]).shape == (0,)


# -- fit ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss", "ties"), [("elimination", "random"), ("elimination", "marginal"), ("plackett-luce", "random")])
def test_a_network_learns_what_a_line_cannot(loss: ChoiceModel, ties: Ties) -> None:
    train, test = synthetic(1, 120), synthetic(2, 60)
    network = quality(fitted(data=train, loss=loss, ties=ties), test)
    config = LinearRankerConfig(loss=loss, ties=ties, learning_rate=0.03, max_epochs=40)
    line = quality(fitted(config, data=train), test)
    assert network > 0.93
    assert network > line + 0.05
    assert line > quality(new_ranker(train, config).eval(), test)


@pytest.mark.parametrize("loss", ["elimination", "plackett-luce"])
@pytest.mark.parametrize("ties", ["random", "marginal"])
def test_the_loss_is_that_of_the_configuration(loss: ChoiceModel, ties: Ties) -> None:
    f, grades, real = torch.randn(1, 4), torch.tensor([[3.0, 2, 1, 0]]), torch.ones(1, 4, dtype=torch.bool)
    expected = (elimination_loss if loss == "elimination" else plackett_luce_loss)(f, real)
    config = LinearRankerConfig(loss=loss, ties=ties)
    torch.testing.assert_close(query_losses(config, f, grades, real, torch.Generator()), expected, atol=1e-5, rtol=1e-5)


def test_the_rate_is_halved_where_an_epoch_is_no_better_and_ends_the_training() -> None:
    train, test = synthetic(1, 100, curved=False), synthetic(2, 50, curved=False)
    epochs: list[Epoch] = []
    config, descent = LinearRankerConfig(learning_rate=0.1, max_epochs=500), Descent(batch_queries=2, least_rate=0.01)
    ranker = fit_ranker(train, None, config, epochs.append, descent=descent)
    assert quality(ranker, test) > 0.95
    rates = [epoch.learning_rate for epoch in epochs]
    assert (rates[0], rates[-1]) == (0.1, 0.0125)
    losses = [epoch.loss for epoch in epochs]
    for i in range(1, len(epochs)):
        halved = losses[i - 1] >= min(losses[: i - 1], default=np.inf)
        assert rates[i] == rates[i - 1] / (2 if halved else 1)


def test_a_fit_is_a_function_of_its_seed() -> None:
    first, second, other = (fitted(dropout=0.3, max_epochs=3, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    mean = fitted(dropout=0.3, max_epochs=3, seed=1, descent=replace(FREE, average=2)).state_dict()
    assert not torch.equal(first["function.weight"], mean["function.weight"]), "averaged weights are the ones kept"
    assert not torch.equal(first["function.input_KF"], other["function.input_KF"])


def test_validation_queries_choose_the_epoch_and_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    train, valid = synthetic(1, 30), synthetic(2, 30)
    epochs: list[Epoch] = []
    config = FAST.model_copy(update={"learning_rate": 0.1, "patience": 4, "max_epochs": 200})
    ranker = fit_ranker(train, valid, config, epochs.append, descent=FREE)
    values = [epoch.validation for epoch in epochs]
    best = max(value for value in values if value is not None)
    assert quality(ranker, valid) == pytest.approx(best, abs=1e-6)
    assert len(values) == values.index(best) + 1 + 4 < 200
    monkeypatch.setattr(fit, "_ndcg", lambda *_: math.nan)
    with pytest.raises(FloatingPointError, match="validation NDCG of epoch 1 is nan"):
        fit_ranker(train, valid, config)


def test_queries_of_one_item_or_of_equal_grades_are_passed_over() -> None:
    data = synthetic(1, 20)
    rows = data.rows_of(0)
    extra = RankingSet(
        np.concatenate([data.features_RF[:1], data.features_RF[rows], data.features_RF]),
        np.concatenate([np.ones(1, np.float32), np.ones(rows.stop, np.float32), data.grades_R]),
        np.concatenate([[0, 1], data.query_offset + rows.stop + 1]),
        data.feature_names,
    )
    epochs: list[Epoch] = []
    fit_ranker(extra, None, FAST.model_copy(update={"max_epochs": 2}), epochs.append)
    assert np.isfinite(epochs[-1].loss)
    with pytest.raises(InvalidData, match="different grades"):
        fit_ranker(replace(data, grades_R=np.ones_like(data.grades_R)), None, FAST)


def test_other_features_are_refused() -> None:
    data = synthetic(1)
    with pytest.raises(InvalidData, match=r"valid\.feature_names"):
        fit_ranker(data, replace(data, feature_names=("a", "b", "c", "x")), FAST)
    with pytest.raises(InvalidData, match="features_RF"):
        new_ranker(data, FAST).scores(data.features_RF[:, :3])


# -- ONNX -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "highway"])
def test_the_graph_scores_as_the_ranker_does_or_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    data = synthetic(1)
    ranker = fit_ranker(data, None, ranker_config(kind=kind, max_epochs=5))
    (tmp_path / "ranker.onnx").write_bytes(ranker_onnx(ranker))
    model = onnx.load(tmp_path / "ranker.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert {opset.domain: opset.version for opset in model.opset_import}[""] == 20
    assert not {"If", "Loop", "Scan"} & {node.op_type for node in model.graph.node}
    assert not any(tensor.HasField("data_location") and tensor.data_location for tensor in model.graph.initializer)
    session = ort.InferenceSession(tmp_path / "ranker.onnx", providers=["CPUExecutionProvider"])
    assert [(i.name, i.type, i.shape[1]) for i in session.get_inputs()] == [("features", "tensor(float)", 4)]
    for rows in (1, 2, len(data.features_RF)):
        (found,) = session.run(["scores"], {"features": data.features_RF[:rows]})
        assert found.dtype == np.float32
        assert_allclose(found, ranker.scores(data.features_RF[:rows]), rtol=1e-4, atol=1e-5)
    (alone,) = session.run(["scores"], {"features": np.full((1, 4), NAN)})
    assert np.isfinite(alone).all()
    honest = ranker.scores
    monkeypatch.setattr(Ranker, "scores", lambda self, features: honest(features) + 0.5)
    with pytest.raises(FloatingPointError, match=r"difference of 0\.5"):
        ranker_onnx(ranker)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("ties", ["random", "marginal"])
def test_a_gpu_trains_as_well(ties: Ties) -> None:
    config = FAST.model_copy(update={"ties": ties, "dropout": 0.1, "patience": 5})
    found = fit_ranker(synthetic(1, 120), synthetic(3, 40), config, device=torch.device("cuda"))
    assert quality(found, synthetic(2)) > 0.9


# -- choice models: probabilities of orders, their gradients, and ties ----------------------------------------------------


Loss = Callable[[Tensor, Tensor], Tensor]
Tied = Callable[[Tensor, Tensor, Tensor], Tensor]
LOSSES = pytest.mark.parametrize("loss", [elimination_loss, plackett_luce_loss])
BOTH = pytest.mark.parametrize(("tied", "loss"), [(tied_elimination_loss, elimination_loss), (tied_plackett_luce_loss, plackett_luce_loss)])


def scores(seed: int, *shape: int, spread: float = 2.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread


def all_real(scores_BN: Tensor) -> Tensor:
    return torch.ones_like(scores_BN, dtype=torch.bool)


def printed_elimination(f: Tensor) -> Tensor:
    """Eq. 5, term by term."""
    return torch.stack([f[i] + torch.log(torch.exp(-f[: i + 1]).sum()) for i in range(len(f))]).sum()


def printed_plackett_luce(f: Tensor) -> Tensor:
    """Eq. 2, term by term."""
    terms = [-f[i] + torch.log(torch.exp(f[i:]).sum()) for i in range(len(f) - 1)]
    return torch.stack(terms).sum() if terms else f.sum() * 0


@pytest.mark.parametrize(("loss", "printed"), [(elimination_loss, printed_elimination), (plackett_luce_loss, printed_plackett_luce)])
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_values_and_gradients_are_those_of_the_printed_formula_for_queries_of_different_lengths(
    loss: Loss, printed: Callable[[Tensor], Tensor], sizes: list[int], seed: int
) -> None:
    f = scores(seed, len(sizes), max(sizes)).requires_grad_()
    real = torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]
    expected = torch.stack([printed(row[:size]) for row, size in zip(f, sizes, strict=True)])
    found = loss(f, real)
    torch.testing.assert_close(found, expected)
    weights = torch.arange(1.0, len(sizes) + 1, dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(found @ weights, f), torch.autograd.grad(expected @ weights, f))


@LOSSES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_scores_give_finite_values_and_gradients(loss: Loss, dtype: torch.dtype) -> None:
    f = torch.tensor([[1e4, -1e4, 0, 1e4, -1e4], [-1e4, -1e4, -1e4, -1e4, 1e4]], dtype=dtype, requires_grad=True)
    value = loss(f, all_real(f))
    (gradient,) = torch.autograd.grad(value.sum(), f)
    assert value.isfinite().all()
    assert gradient.isfinite().all()
    assert (value > 1e4).all()


# -- ties -----------------------------------------------------------------------------------------------------------------


def marginal_of_grades(loss: Loss, f: Tensor, grades: Tensor) -> Tensor:
    """−log Σ of the probabilities of all orders in which grades fall."""
    orders = [list(order) for order in itertools.permutations(range(len(f))) if (grades[list(order)].diff() <= 0).all()]
    ordered = torch.stack([f[order] for order in orders])
    return -(-loss(ordered, all_real(ordered))).logsumexp(0)


@BOTH
@pytest.mark.parametrize("grades", [[0, 0, 1, 1, 0, 2], [0, 1, 2, 3, 4, 5], [1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0], [1] * 6])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_marginal_ties_are_the_sum_over_all_orders_that_agree_with_the_grades(
    tied: Tied, loss: Loss, grades: list[int], spread: float
) -> None:
    f = scores(6, 6, spread=spread).requires_grad_()
    expected = marginal_of_grades(loss, f, torch.tensor(grades))
    found = tied(f[None], torch.tensor([grades]), all_real(f[None]))[0]
    assert found.item() == pytest.approx(expected.item(), abs=2e-7)
    torch.testing.assert_close(torch.autograd.grad(found, f)[0], torch.autograd.grad(expected, f)[0], atol=2e-7, rtol=0)


@BOTH
def test_marginal_ties_stay_finite_with_extreme_scores_and_large_groups(tied: Tied, loss: Loss) -> None:
    generator = torch.Generator().manual_seed(1)
    for spread in (1e-3, 30.0, 1e4):
        f = (torch.randn(2, 1000, generator=generator) * spread).requires_grad_()
        value = tied(f, torch.randint(0, 3, (2, 1000), generator=generator), all_real(f))
        (gradient,) = torch.autograd.grad(value.sum(), f)
        assert value.isfinite().all()
        assert gradient.isfinite().all()
        assert (value > 0).all()


def test_random_order_sorts_by_grade_and_shuffles_equal_ones() -> None:
    grades = torch.tensor([[0.0, 2, 0, 1, 2, 0, 9, 9]])
    real = torch.tensor([[True] * 6 + [False] * 2])
    generator = torch.Generator().manual_seed(3)
    seen = set()
    for _ in range(200):
        order = random_order(grades, real, generator)[0].tolist()
        assert sorted(order) == list(range(8))
        assert set(order[:2]) == {1, 4}
        assert order[2] == 3
        assert set(order[3:6]) == {0, 2, 5}
        seen.add(tuple(order[:6]))
    assert len(seen) == 2 * 6


# -- ranking sets and their files -----------------------------------------------------------------------------------------


TEXT = """2 qid:10 1:0.5 2:NULL 3:7 #docid = GX-1 inc = 1 prob = 0.2

0 qid:10 1:-1e-2 2:3 3:nan #docid = GX-2 inc = 1
1.5 qid:b2 3:4 1:2 #docid = GX-1
"""


def written(folder: Path, text: str, name: str = "rank.txt") -> Path:
    path = folder / name
    with gzip.open(path, "wt") if name.endswith(".gz") else path.open("w") as file:
        file.write(text)
    return path


def small() -> RankingSet:
    features = np.arange(12, dtype=np.float32).reshape(6, 2)
    return RankingSet(
        features,
        np.array([0, 1, 2, 0, 0, 1], np.float32),
        np.array([0, 3, 4, 6]),
        ("x", "y"),
        ("q", "r", "s"),
    )


@pytest.mark.parametrize("name", ["rank.txt", "rank.txt.gz"])
def test_letors_lines_are_read_with_their_missing_values_and_comments(tmp_path: Path, name: str) -> None:
    data = read_letor(written(tmp_path, TEXT, name))
    assert_array_equal(data.features_RF, np.array([[0.5, NAN, 7], [-0.01, 3, NAN], [2, NAN, 4]], np.float32))
    assert data.grades_R.tolist() == [2, 0, 1.5]
    assert data.query_offset.tolist() == [0, 2, 3]
    assert (data.query_ids, data.feature_names) == (("10", "b2"), ("1", "2", "3"))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("x qid:1 1:2", "grade"),
        ("-1 qid:1 1:2", "grade"),
        ("inf qid:1 1:2", "grade"),
        ("1030 qid:1 1:2", "a grade from 0 to 32"),
        ("1 1:2", "query"),
        ("1 qid: 1:2", "query"),
        ("1 qid:1 1:two", "feature:value"),
        ("1 qid:1 1:inf", "feature:value"),
        ("1 qid:1 1:-1e39", "feature:value"),
        ("1 qid:1 one:2", "feature:value"),
        (f"1 qid:1 {'9' * 5000}:2", "feature:value"),
        ("1 qid:1 1", "feature:value"),
        ("1 qid:1 0:2", "features from 1"),
        ("1 qid:1 1000001:2", "features from 1 to 1000000"),
        ("1 qid:1 2:2 2:3", "each once"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(InvalidData, match=rf"line 3: got .*{re.escape(says)}"):
        read_letor(written(tmp_path, f"1 qid:1 1:2\n# a comment\n{line}\n"))


def test_a_query_in_two_places_an_empty_file_and_a_broken_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="qid:1 in two places"):
        read_letor(written(tmp_path, "1 qid:1 1:2\n1 qid:2 1:2\n0 qid:1 1:2\n"))
    with pytest.raises(InvalidData, match="at least one query"):
        read_letor(written(tmp_path, "\n# nothing\n"))
    with pytest.raises(InvalidData, match="readable"):
        read_letor(tmp_path / "nowhere.txt")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(TEXT.encode() * 100)[:60])
    with pytest.raises(InvalidData, match="readable"):
        read_letor(tmp_path / "cut.gz")


def test_svmlight_lines_with_sizes_of_queries(tmp_path: Path) -> None:
    lines = written(tmp_path, "0 1:0.5\n1 3:2\n2\n", "rank.train.gz")
    data = read_svmlight(lines, written(tmp_path, "1\n2\n", "sizes"))
    assert_array_equal(data.features_RF, np.array([[0.5, 0, 0], [0, 0, 2], [0, 0, 0]], np.float32))
    assert (data.query_offset.tolist(), data.grades_R.tolist(), data.query_ids) == ([0, 1, 3], [0, 1, 2], None)
    with pytest.raises(InvalidData, match="4 lines in all"):
        read_svmlight(lines, written(tmp_path, "1\n3\n", "sizes"))
    for size in ("0", "9" * 19, "9" * 5000):
        with pytest.raises(InvalidData, match="line 2"):
            read_svmlight(lines, written(tmp_path, f"3\n{size}\n", "sizes"))


def test_a_set_is_split_by_query() -> None:
    rest, part = small().split(0.4, 1)
    assert (len(rest), len(part)) == (2, 1)
    assert {*(rest.query_ids or ()), *(part.query_ids or ())} == {"q", "r", "s"}
    for one in (rest, part):
        rows = [small().rows_of("qrs".index(query)) for query in one.query_ids or ()]
        assert_array_equal(one.features_RF, np.concatenate([small().features_RF[own] for own in rows]))
        assert_array_equal(one.grades_R, np.concatenate([small().grades_R[own] for own in rows]))
        assert_array_equal(np.diff(one.query_offset), [own.stop - own.start for own in rows])
    assert len({small().split(0.4, seed)[1].query_ids for seed in range(20)}) == 3
    with pytest.raises(InvalidData, match="share"):
        small().split(0.01, 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("features_RF", np.zeros((6, 2))),
        ("features_RF", np.full((6, 2), np.inf, np.float32)),
        ("grades_R", np.zeros(5, np.float32)),
        ("grades_R", np.array([0, 1, 2, 0, 0, -1], np.float32)),
        ("grades_R", np.array([0, 1, 2, 0, 0, NAN], np.float32)),
        ("grades_R", np.array([0, 1, 33, 0, 0, 0], np.float32)),
        ("query_offset", np.array([0, 3, 3, 6])),
        ("query_offset", np.array([0, 3, 5])),
        ("query_offset", np.array([1, 3, 6])),
        ("feature_names", ("x",)),
        ("feature_names", ("x", "x")),
        ("query_ids", ("q", "q", "s")),
    ],
)
def test_arrays_that_do_not_fit_are_named(field: str, value: object) -> None:
    with pytest.raises(InvalidData, match=field):
        replace(small(), **{field: value})  # type: ignore[arg-type]  # wrong values are the point


def test_the_documented_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"{place % 3} qid:{query} 1:{place % 3 + query / 10} 2:NULL" for query in range(20) for place in range(6)]
    written(tmp_path, "\n".join(lines), "train.txt.gz")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "train.md").read_text()
    (example,) = [block for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) if "read_letor" in block]
    exec(example, {})
    assert (tmp_path / "ranker.onnx").stat().st_size > 1000
    assert "Epoch(number=1" in capsys.readouterr().out
