"""Benchmarks from their command lines, on small logs and synthetic models: what they write. Others have tests of their own."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.papers.nce import reranking
from benchmarks.papers.product_search import xrlinear_scale
from benchmarks.quality import cold_start, filtered_recall, live_churn
from benchmarks.speed import engine_cpu
from tests import ROOT
from tests.training.content_logs import write_log

pytestmark = pytest.mark.slow

CONFIG = """
kind = "otm-robust"
name = "kinds"
data = {{ log = "{log}", items = "{items}" }}
instances = {{ windows = [16], targets = 10 }}
scorer = {{ node_dim = 16, dropout = 0.0 }}
objective = {{ beam_size = 10 }}
optimiser = {{ steps = 60, batch = 64, learning_rate = 0.01, average = 10, validate_every = 30 }}
memory = {{ weight = 0 }}
search = {{ beam_size = 20, m = 10, max_m = 120, max_beam_size = 128, gamma = 0.5 }}
"""
CHURN = {"events", "round", "recall", "recall_old", "recall_came", "recall_trained", "shown", "share"}
FILTERED = {"model", "filter", "eligible", "beam_size", "rule", "widened", "overlap", "ms_per_query"}
SCALE = {"system", "beam_size", "recall10", "ms_p50", "ms_p99", "queries_per_s"}
SAMPLE = str(ROOT / "models" / "debian-depends" / "1")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options that name a log of users who like items of one kind each."""
    folder = tmp_path_factory.mktemp("log")
    file, items = write_log(folder)
    (folder / "kinds.toml").write_text(CONFIG.format(log=file, items=items))
    return ["--log", str(file), "--config", str(folder / "kinds.toml"), "--threads", "1"]


def report_of(benchmark: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", [benchmark.__name__, "--json", str(folder / "report.json"), *options])
    benchmark.main()
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


@pytest.mark.parametrize(
    ("benchmark", "options", "keys"),
    [
        (live_churn, "--events 3 --share 0.05 --rounds 2", CHURN),
        (filtered_recall, "--height 10 --rounds 1 --debian nowhere", FILTERED),
        (engine_cpu, "--height 10 --beam 150,200 --batch 1,2 --rounds 1", {"engine", "items", "beam_size", "batch", "ms_per_query"}),
        (xrlinear_scale, "--labels 4096", SCALE),
    ],
    ids=lambda value: value.__name__.split(".")[-1] if isinstance(value, ModuleType) else "",
)
def test_every_row_has_its_figures(
    benchmark: ModuleType, options: str, keys: set[str], log: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = log if benchmark is live_churn else []
    models = [] if benchmark is xrlinear_scale else ["--models", str(tmp_path)]
    report = report_of(benchmark, tmp_path, monkeypatch, *given, *models, *options.split())
    assert report["hardware"]
    for row in report["rows"]:
        assert keys <= row.keys()
        for name, value in row.items():
            assert not isinstance(value, float) or math.isfinite(value), name
            assert "recall" not in name or value is None or 0 <= value <= 1, name
    assert len({tuple(map(str, row.values())) for row in report["rows"]}) == len(report["rows"]) > 1


def test_cold_starts_are_measured_among_all_items_and_among_themselves(
    log: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_start, "BEAMS", (20, 120))
    report = report_of(cold_start, tmp_path, monkeypatch, *log, "--share", "0.2")
    rows = {(row["method"], row["beam_size"], row["among"], row["m"]): row["recall"] for row in report["rows"]}
    at = [("content", None), *((method, beam) for method in ("recipe", "recipe+content") for beam in (20, 120))]
    assert rows.keys() == {(method, beam, among, m) for method, beam in at for among in ("all", "unseen") for m in (10, 50, 200)}
    for method, beam in at:
        assert rows[method, beam, "unseen", 10] >= rows[method, beam, "all", 10]
    assert rows["recipe+content", 120, "unseen", 10] > rows["recipe", 120, "unseen", 10] + 0.2, "the kind is in the fields alone"
    assert {fit["method"]: fit["unseen_items"] for fit in report["fits"]} == dict.fromkeys(cold_start.METHODS, 24)
    ahead = {(row["second"], row["beam_size"], row["among"], row["m"]): row["mean"] for row in report["differences"]}
    mean = rows["recipe+content", 120, "unseen", 10] - rows["recipe", 120, "unseen", 10]
    assert ahead["recipe", 120, "unseen", 10] == pytest.approx(mean)


def test_the_samples_candidates_are_ordered_by_every_ranker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightgbm", reason="LightGBM is not installed (the extra `boosting`)")
    monkeypatch.setattr(reranking, "TREES", ((15, 0.1),))
    report = report_of(reranking, tmp_path, monkeypatch, "--model", SAMPLE, "--queries", "200", "--depth", "20")
    rows = {row["system"]: row for row in report["rows"]}
    assert list(rows) == ["retrieval", "elimination", "plackett-luce", "linear, elimination", "linear, plackett-luce", "lambdamart"]
    assert rows["elimination"]["ms"] > 0
    assert report["p"].keys() == rows.keys() - {"elimination"}
