"""Rank functions, what they are fitted to, and the graph that serves them."""

from __future__ import annotations

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
from torch import nn

from espalier.engines.runtime import ort
from espalier.errors import InvalidData
from espalier.metrics import ndcg
from training.data.ranking_set import RankingSet
from training.rankers.choice_models import elimination_loss, plackett_luce_loss
from training.rankers.export import ranker_onnx
from training.rankers.fit import Descent, Epoch, Ranker, fit_ranker, new_ranker, query_losses
from training.rankers.rank_functions import HighwayFunction
from training.rankers.standardise import Standardise
from training.specification.ranker import ChoiceModel, HighwayConfig, LinearRankerConfig, RankerConfig, Scaling, Ties, ranker_config

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
    return float(ndcg(ranker.scores(data.features_RF), data.grades_R, data.query_offset, 5).mean())


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


def test_z_scores_have_mean_0_and_deviation_1_and_what_is_missing_is_0_and_said_beside() -> None:
    data = synthetic(3).features_RF
    standardise = Standardise(data, "z-score", missing=True)
    out = standardise(torch.from_numpy(data)).numpy()
    assert (standardise.outputs, out.shape[1]) == (5, 5)  # of the third feature alone
    known = ~np.isnan(data)
    for column in range(4):
        assert_allclose([out[known[:, column], column].mean(), out[known[:, column], column].std()], [0, 1], atol=1e-4)
    assert (out[:, :4][~known] == 0).all()
    missing = np.isnan(data[:, 2])
    assert out[missing, 4].min() > 0 > out[~missing, 4].max()
    assert_allclose([out[:, 4].mean(), out[:, 4].std()], [0, 1], atol=1e-5)


@pytest.mark.parametrize("scaling", ["z-score", "quantile"])
def test_constant_and_wholly_missing_features_are_0_for_any_value(scaling: Scaling) -> None:
    data = np.tile(np.array([[0.1, NAN, 3e8]], np.float32), (50, 1))
    standardise = Standardise(data, scaling, missing=True)
    out = standardise(torch.tensor([[0.1, 5.0, -1.0], [7.0, NAN, 3e8]]))
    assert out.abs().max() == 0
    assert standardise.outputs == 3


@given(seed=st.integers(0, 200), exponent=st.floats(0.2, 5))
def test_quantile_scaling_rises_and_hardly_depends_on_units(seed: int, exponent: float) -> None:
    rng = np.random.default_rng(seed)
    raw = rng.random((500, 1)).astype(np.float32) + 0.01
    other = (raw**exponent * 1e3).astype(np.float32)
    first = Standardise(raw, "quantile", missing=False)(torch.from_numpy(raw)).numpy()[:, 0]
    second = Standardise(other, "quantile", missing=False)(torch.from_numpy(other)).numpy()[:, 0]
    assert (np.diff(first[np.argsort(raw[:, 0])]) >= -1e-6).all()
    assert np.abs(first - second).mean() < 0.1
    assert np.abs(first).max() < 4


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


def test_validation_queries_choose_the_epoch_and_the_end() -> None:
    train, valid = synthetic(1, 30), synthetic(2, 30)
    epochs: list[Epoch] = []
    config = FAST.model_copy(update={"learning_rate": 0.1, "patience": 4, "max_epochs": 200})
    ranker = fit_ranker(train, valid, config, epochs.append, descent=replace(FREE, validate_at=5))
    values = [epoch.validation for epoch in epochs]
    best = max(value for value in values if value is not None)
    assert quality(ranker, valid) == pytest.approx(best, abs=1e-6)
    assert len(values) == values.index(best) + 1 + 4 < 200


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


def test_other_features_and_none_are_refused() -> None:
    data = synthetic(1)
    with pytest.raises(InvalidData, match="features_RF"):
        Standardise(np.zeros((0, 3), np.float32), "z-score", missing=False)
    with pytest.raises(InvalidData, match=r"valid\.feature_names"):
        fit_ranker(data, replace(data, feature_names=("a", "b", "c", "x")), FAST)
    with pytest.raises(InvalidData, match="features_RF"):
        new_ranker(data, FAST).scores(data.features_RF[:, :3])


# -- ONNX -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "scaling", "missing"), [("linear", "z-score", False), ("highway", "quantile", True)])
def test_the_graph_scores_as_the_ranker_does_or_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, scaling: Scaling, missing: bool
) -> None:
    data = synthetic(1)
    ranker = fit_ranker(data, None, ranker_config(kind=kind, scaling=scaling, missing=missing, max_epochs=5))
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
    with pytest.raises(ArithmeticError, match=r"difference of 0\.5"):
        ranker_onnx(ranker)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("ties", ["random", "marginal"])
def test_a_gpu_trains_as_well(ties: Ties) -> None:
    config = FAST.model_copy(update={"ties": ties, "dropout": 0.1, "patience": 5})
    found = fit_ranker(synthetic(1, 120), synthetic(3, 40), config, device=torch.device("cuda"))
    assert quality(found, synthetic(2)) > 0.9
