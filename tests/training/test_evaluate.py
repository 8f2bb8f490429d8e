"""What `evaluate` says of recall and beams: a fall that is more than noise, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import espalier.engines
from espalier.bundle import Bundle
from espalier.checks.random_bundles import make_bundle, random_queries
from espalier.queries import QueryBatch
from espalier.search import NO_ITEM, SearchParams, SearchResult
from espalier.tree import complete_tree
from training.__main__ import evaluate as evaluate_command
from training.evaluate import MIN_QUERIES, LabelledQueries, falls, measure


class Scripted:
    """An engine that finds item 0, which is relevant, for the queries that a script names for a beam size."""

    name, rounding = "scripted", 0.0

    def __init__(self, finds_B: dict[int, NDArray[np.bool_]]) -> None:
        self.finds_B, self.at = finds_B, dict.fromkeys(finds_B, 0)

    def search(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
        beam, batch = int(params.beam_size_B[0]), len(queries)
        found_B = self.finds_B[beam]
        assert batch == len(found_B), "one call has all queries"
        rows_BM = np.where(found_B[:, None], 0, 1).astype(np.int64)
        width = int(params.m_B[0])
        rows_BM = np.concatenate([rows_BM, np.full((batch, width - 1), NO_ITEM)], axis=1)
        scores = np.ones(rows_BM.shape, np.float32)
        return SearchResult(rows_BM, scores, scores, scores, np.ones(batch, np.int64), np.ones(batch, np.bool_))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    rng = np.random.default_rng(1)
    return make_bundle(tmp_path_factory.mktemp("models"), rng, complete_tree(rng.permutation(8), 2))


def rows_of(bundle: Bundle, **found: NDArray[np.bool_]) -> list[dict[str, Any]]:
    """The rows of measuring `beam_K=queries that find what they should`."""
    finds_B = {int(name.removeprefix("beam_")): found_B for name, found_B in found.items()}
    count = len(next(iter(finds_B.values())))
    queries = random_queries(np.random.default_rng(1), bundle, count)
    engine: Any = Scripted(finds_B)
    return measure(bundle, engine, LabelledQueries(queries, [np.zeros(1, np.int64)] * count), list(finds_B), [1, 2], batch=count)


def shares(count: int, share: float, seed: int) -> NDArray[np.bool_]:
    return np.random.default_rng(seed).random(count) < share


def test_a_fall_beyond_noise_is_told_with_its_figures(bundle: Bundle) -> None:
    found_B = shares(400, 0.6, 1)
    fewer_B = found_B & shares(400, 0.9, 2)
    rows = rows_of(bundle, beam_10=found_B, beam_40=fewer_B, beam_20=found_B)
    told = falls(rows, 400)
    lost = float(found_B.mean() - fewer_B.mean())
    assert len(told) == 2, "one for each m"
    assert told[0].startswith(
        f"recall@1 falls as the beam grows: {fewer_B.mean():.4f} at beam 40, {lost:.4f} less than at beam 10 (standard"
    )
    against = next(row["recall_against"] for row in rows if row["beam_size"] == 40)
    assert against["difference"] == pytest.approx(-lost)
    assert against["standard_error"] == pytest.approx(np.std(1.0 * fewer_B - found_B, ddof=1) / 20)
    assert "recall_against" not in rows[0], "nothing is smaller than the smallest"


def test_a_slow_fall_is_told_against_the_beam_that_finds_most(bundle: Bundle) -> None:
    found_B = shares(1000, 0.8, 3)
    steps = {f"beam_{10 * (step + 1)}": found_B & (np.arange(1000) >= 4 * step) for step in range(6)}
    told = falls(rows_of(bundle, **steps), 1000)
    assert len(told) == 2
    assert "at beam 60" in told[0]
    assert "than at beam 10" in told[0]


def test_noise_is_not_told() -> None:
    """Queries that win and lose by chance: differences of three standard errors are rarer than one of 700."""
    rng = np.random.default_rng(4)
    warned = 0
    for _ in range(400):
        difference_B = rng.choice([-1.0, 0.0, 1.0], 200)
        error = float(difference_B.std(ddof=1)) / np.sqrt(200)
        against = {"beam_size": 10, "difference": float(difference_B.mean()), "standard_error": error}
        warned += len(falls([{"m": 10, "beam_size": 20, "recall": 0.5, "recall_against": against}], 200))
    assert warned <= 4


def test_a_rise_few_queries_and_one_beam_are_not_told(bundle: Bundle) -> None:
    found_B = shares(400, 0.9, 5)
    fewer_B = found_B & shares(400, 0.5, 6)
    assert falls(rows_of(bundle, beam_10=fewer_B, beam_40=found_B), 400) == []
    assert falls(rows_of(bundle, beam_40=found_B), 400) == []
    few = MIN_QUERIES - 1
    assert falls(rows_of(bundle, beam_10=found_B[:few], beam_40=fewer_B[:few]), few) == []
    assert falls(rows_of(bundle, beam_10=found_B[: few + 1], beam_40=fewer_B[: few + 1]), few + 1) != []


def test_the_command_warns_on_standard_error_and_in_its_report(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found_B = shares(60, 0.9, 7)
    engine = Scripted({10: found_B, 20: found_B & (np.arange(60) % 3 > 0)})
    monkeypatch.setattr(espalier.engines, "open_engine", lambda *_, **__: engine)
    queries = random_queries(np.random.default_rng(1), bundle, 60)
    from training import evaluate as evaluate_module
    from training.data.splits import EvaluationPair

    pairs = [EvaluationPair(i, row[row >= 0], np.zeros(1, np.int64)) for i, row in enumerate(queries.array.astype(np.int64))]
    monkeypatch.setattr(evaluate_module, "held_out_pairs", lambda _: pairs)
    evaluate_command(
        model=bundle.path, data=None, beam="10,20", m="1", engine=None, device="cpu", precision="float32", exclude_seen=False, batch=60,
        json_file=tmp_path / "rows.json", plot=None,
    )  # fmt: skip
    report = json.loads((tmp_path / "rows.json").read_text())
    assert len(report["warnings"]) == 1
    assert "recall@1 falls as the beam grows" in report["warnings"][0]
    assert f"WARNING: {report['warnings'][0]}" in caplog.text
