"""NCE's tables: folds, the choice among candidates, resuming, and what rankers are compared with."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.papers.nce import nce_tables
from benchmarks.papers.nce.boosting import BoostingConfig, fit_boosted_trees
from benchmarks.papers.nce.nce_summary import METHODS, markdown, summary
from benchmarks.papers.nce.nce_tables import measure, read_folds
from benchmarks.papers.nce.rank_svm import better_and_worse, fit_rank_svm
from espalier.errors import InvalidData
from tests.training.test_rankers import quality, synthetic
from training.rankers.export import ranker_onnx
from training.rankers.fit import new_ranker
from training.specification.ranker import HighwayConfig, ranker_config

pytestmark = pytest.mark.release


def write_letor(path: Path, seed: int) -> None:
    data = synthetic(seed, 12)
    lines = []
    for query in range(len(data)):
        for row in range(*data.rows_of(query).indices(len(data.grades_R))):
            features = " ".join(f"{i + 1}:{'NULL' if np.isnan(x) else x}" for i, x in enumerate(data.features_RF[row]))
            lines.append(f"{min(data.grades_R[row], 2):g} qid:{seed}-{query} {features} #docid = {row}")
    with gzip.open(path, "wt") as file:
        file.write("\n".join(lines) + "\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part in range(1, 6):
        write_letor(tmp_path / f"S{part}.txt.gz", part)
    return tmp_path


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small candidates of each function."""

    def listed(function: Any, loss: Any, seed: int) -> list[Any]:
        if function == "rank-svm":
            return [{"cost": cost} for cost in (0.1, 1.0)]
        return [ranker_config(kind=function, loss=loss, seed=seed, max_epochs=2, ties=ties) for ties in ("random", "marginal")]

    monkeypatch.setattr(nce_tables, "candidates", listed)


def test_every_part_is_tested_on_once_and_never_learned_from_then(folder: Path) -> None:
    folds = read_folds(folder, "l2r-mq2007-agg", 1)
    tested = [fold.test.query_ids for fold in folds]
    assert len({ids for fold in tested for ids in fold or ()}) == 5 * 12
    for fold in folds:
        sides = [set(part.query_ids or ()) for part in (fold.train, fold.valid, fold.test)]
        assert [len(side) for side in sides] == [36, 12, 12]
        assert len(set.union(*sides)) == 60
    assert {name.split("-")[0] for name in folds[0].train.query_ids or ()} == {"1", "2", "3"}


@pytest.mark.usefixtures("few")
def test_rows_are_measured_once_and_summed_up(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    report = measure("l2r-mq2007-agg", folder, ["linear"], 1, file)
    assert [(row["function"], row["loss"]) for row in report["rows"][:2]] == list(METHODS[1:3])
    assert len(report["rows"]) == 10
    for row in report["rows"]:
        assert row["validation"] == max(tried["validation"] for tried in row["tried"])
        assert {name: row["chosen"][name] for name in row["chosen"]} in [
            {name: value for name, value in tried.items() if name != "validation"} for tried in row["tried"]
        ]
        assert row["err"] == pytest.approx(np.mean(row["per_query"]["err"]), abs=1e-4)
    kept = json.loads(file.read_text())["rows"]
    more = measure("l2r-mq2007-agg", folder, ["linear", "rank-svm"], 1, file)
    assert [row for row in more["rows"] if row["function"] == "linear"] == kept
    assert {name.split(", ")[0] for name in more["summary"]["means"]} == {"linear", "rank-svm"}
    assert "0.503, 0.709, 0.680" in markdown(more), "the paper's figures stand beside ours"
    with pytest.raises(InvalidData, match="--json"):
        measure("l2r-mq2008-partial", folder, ["linear"], 1, file)


def row_of(loss: str, fold: int, seed: int, values: list[float]) -> dict[str, Any]:
    figures = dict.fromkeys(("err", "ndcg1", "ndcg5", "map"), values)
    return {"function": "linear", "loss": loss, "fold": fold, "seed": seed, "train_cpu_s": 1.0, "per_query": figures}


def test_seeds_are_averaged_within_a_query_and_folds_are_put_end_to_end() -> None:
    rows = [
        row_of("elimination", 1, 1, [0.2, 0.4]),
        row_of("elimination", 1, 2, [0.4, 0.4]),
        row_of("elimination", 2, 1, [1.0]),
        row_of("plackett-luce", 2, 1, [0.5]),
        row_of("plackett-luce", 1, 1, [0.1, 0.4]),
    ]
    found = summary(rows)
    assert found["means"]["linear, elimination"]["err"] == [round((0.3 + 0.4 + 1) / 3, 4), round(np.std([0.3, 0.4, 1], ddof=1) / 3**0.5, 4)]
    difference = found["differences"]["linear, elimination − linear, plackett-luce"]["err"]
    assert difference["mean"] == pytest.approx((0.2 + 0 + 0.5) / 3, abs=1e-4)


TREES = BoostingConfig(trees=40, leaves=8, least_rows=5, feature_share=1.0)


def test_pairs_are_of_one_query_and_of_different_grades() -> None:
    data = synthetic(1, 10)
    pairs = better_and_worse(data)
    query = np.repeat(np.arange(len(data)), np.diff(data.query_offset))
    assert (query[pairs[:, 0]] == query[pairs[:, 1]]).all()
    assert (data.grades_R[pairs[:, 0]] > data.grades_R[pairs[:, 1]]).all()
    expected = sum(int((data.grades_R[data.rows_of(q)][:, None] > data.grades_R[data.rows_of(q)]).sum()) for q in range(len(data)))
    assert len(pairs) == len({tuple(pair) for pair in pairs.tolist()}) == expected


def test_rank_svm_finds_the_minimum_of_its_objective() -> None:
    data = synthetic(1, 30, curved=False)
    ranker = fit_rank_svm(data, 2.0)
    x = ranker.standardise(torch.from_numpy(data.features_RF)).double()
    better, worse = torch.from_numpy(better_and_worse(data)).T

    def gradient(weight: torch.Tensor) -> torch.Tensor:
        w = weight.detach().double().requires_grad_()
        value = 0.5 * w.square().sum() + 2.0 / len(data) * (1 - (x[better] - x[worse]) @ w).clamp(min=0).square().sum()
        return torch.autograd.grad(value, w)[0]

    found = next(ranker.function.parameters())
    assert gradient(found).norm() < 1e-3 * gradient(torch.zeros_like(found)).norm()
    assert quality(ranker, synthetic(2, 30, curved=False)) > 0.95
    assert len(ranker_onnx(ranker)) > 0


@pytest.mark.parametrize("loss", ["elimination", "plackett-luce", "lambdarank"])
def test_boosted_trees_learn_and_keep_the_best_number_of_trees(loss: Any) -> None:
    train, valid, test = synthetic(1, 120), synthetic(3, 40), synthetic(2, 60)
    found = fit_boosted_trees(train, valid, replace(TREES, loss=loss))

    class Scores:
        def scores(self, features: np.ndarray) -> np.ndarray:
            return found.scores(features)

    assert quality(Scores(), test) > 0.9  # type: ignore[arg-type]  # scores are all that is asked of it
    assert quality(new_ranker(train, HighwayConfig(hidden=10, dropout=0.3)).eval(), test) < 0.8
    assert 1 <= found.trees <= 40
    assert found.validation is not None
    assert found.validation > 0.8
    ended = fit_boosted_trees(train, valid, replace(TREES, loss=loss, patience=1))
    assert ended.booster.num_trees() == ended.trees + 1 < 40
    again = fit_boosted_trees(train, valid, replace(TREES, loss=loss))
    assert np.array_equal(again.scores(test.features_RF), found.scores(test.features_RF))
