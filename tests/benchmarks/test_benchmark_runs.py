"""Benchmarks from their command lines, on small logs and synthetic models: what they write. Others have tests of their own."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.papers.product_search import xrlinear_scale
from benchmarks.papers.product_search.ann import faiss_is_installed
from benchmarks.quality import filtered_recall, live_churn
from benchmarks.speed import engine_cpu
from tests.training.content_logs import write_log

pytestmark = pytest.mark.slow

CONFIG = """
kind = "otm-robust"
name = "kinds"
data = {{ log = "{log}", items = "{items}" }}
instances = {{ windows = [16], targets = 10 }}
scorer = {{ node_dim = 16, dropout = 0.0 }}
objective = {{ beam_size = 10 }}
optimiser = {{ steps = 40, batch = 64, learning_rate = 0.01, average = 10, validate_every = 20 }}
memory = {{ weight = 0 }}
search = {{ beam_size = 20, m = 10, max_m = 120, max_beam_size = 128, gamma = 0.5 }}
"""
CHURN = {"events", "round", "recall", "recall_old", "recall_came", "recall_trained", "shown", "share"}
FILTERED = {"model", "filter", "eligible", "beam_size", "rule", "widened", "overlap", "ms_per_query"}
SCALE = {"system", "beam_size", "recall10", "ms_p50", "ms_p99", "queries_per_s"}


def report_of(benchmark: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, options: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", [benchmark.__name__, "--json", str(folder / "report.json"), *options.split()])
    benchmark.main()
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


@pytest.mark.parametrize(
    ("benchmark", "options", "keys"),
    [
        (live_churn, "--log {log} --config {config} --threads 1 --models {folder} --events 3 --share 0.05 --rounds 1", CHURN),
        (filtered_recall, "--models {folder} --height 10 --rounds 1 --debian nowhere", FILTERED),
        (xrlinear_scale, "--labels 4096", SCALE),
    ],
    ids=lambda value: value.__name__.split(".")[-1] if isinstance(value, ModuleType) else "",
)
def test_every_row_has_its_figures(
    benchmark: ModuleType, options: str, keys: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, items = write_log(tmp_path)
    config = tmp_path / "kinds.toml"
    config.write_text(CONFIG.format(log=log, items=items))
    report = report_of(benchmark, tmp_path, monkeypatch, options.format(folder=tmp_path, log=log, config=config))
    assert report["hardware"]
    for row in report["rows"]:
        assert keys <= row.keys()
        for name, value in row.items():
            assert not isinstance(value, float) or math.isfinite(value), name
            assert "recall" not in name or value is None or 0 <= value <= 1, name
    assert len({tuple(map(str, row.values())) for row in report["rows"]}) == len(report["rows"]) > 1


def test_every_system_answers_the_same_queries_and_is_timed_in_two_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A beam beside HNSW and exact search over its own rows."""
    monkeypatch.setattr(engine_cpu, "VECTORS", 6)
    options = f"--scorer product --models {tmp_path} --height 7 --dim 5 --beam 3,128 --m 10 --rounds 2"
    rows = report_of(engine_cpu, tmp_path, monkeypatch, options)["rows"]
    hnsw = ["hnsw"] if faiss_is_installed() else []
    assert [row["engine"] for row in rows] == ["compiled-cpu", "compiled-cpu", *hnsw, "exact scan"]
    assert [row["knob"] for row in rows if row["engine"] == "compiled-cpu"] == [3, 128]
    for row in rows:
        assert (row["items"], row["m"]) == (128, 10)
        assert min(row["encode_ms"], row["search_ms"]) > 0
        assert row["ms_per_query"] >= max(row["encode_ms"], row["search_ms"])
    by_name = {row["engine"]: row["recall"] for row in rows}
    assert by_name["exact scan"] == by_name["compiled-cpu"] == 1  # the later beam holds every leaf
    assert rows[0]["recall"] < 1
    assert by_name.get("hnsw", 1) >= engine_cpu.RECALL
