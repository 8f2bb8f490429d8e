"""Benchmarks from their command lines, on small logs and models: what they write, and what they refuse. Some have tests of their own."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.papers.product_search import xrlinear_scale
from benchmarks.papers.product_search.ann import faiss_is_installed
from benchmarks.quality import filtered_recall, live_churn, long_tail, shard_recall
from benchmarks.random_bundles import random_queries
from benchmarks.speed import engine_cpu, live_speed
from espalier.bundle import Bundle
from espalier.bundle_writer import with_parts
from espalier.engines import open_engine
from espalier.search import SearchParams
from tests import ROOT
from tests.training.content_logs import write_log
from tests.training.shard.test_shard import made

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
LIVE = {"engine", "model", "items", "parents", "beam_size", "m", "batch", "what", "ms_per_query", "added_ms", "ratio"}


def report_of(benchmark: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, options: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", [benchmark.__name__, "--json", str(folder / "report.json"), *options.split()])
    benchmark.main()
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


@pytest.mark.release
@pytest.mark.parametrize(
    ("benchmark", "options", "keys"),
    [
        (live_churn, "--log {log} --config {config} --threads 1 --models {folder} --events 3 --share 0.05 --rounds 1", CHURN),
        (
            live_churn,
            "--log {log} --config {config} --threads 1 --models {folder} --events 3 --share 0.05 --rounds 1 --learn today --users test",
            CHURN,
        ),
        (filtered_recall, "--models {folder} --height 10 --rounds 1 --debian nowhere", FILTERED),
        (xrlinear_scale, "--labels 4096", SCALE),
        (live_speed, "--engines= --placed 20 --rounds 1", LIVE),
        (
            engine_cpu,
            "--models {folder} --height 10 --beam 20 --batch 1,8 --rounds 1",
            {"engine", "items", "beam_size", "batch", "ms_per_query"},
        ),
    ],
    ids=lambda value: value.__name__.split(".")[-1] if isinstance(value, ModuleType) else "",
)
def test_every_row_has_its_figures(
    benchmark: ModuleType, options: str, keys: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_speed, "SAMPLED", 8)
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


@pytest.mark.release
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


@pytest.mark.release
@pytest.mark.parametrize("engine", live_speed.ENGINES)
def test_live_items_are_found(tmp_path: Path, engine: str) -> None:
    """Or their cost would be that of nothing."""
    bundle = live_speed.bundle_for(engine, tmp_path, 3)
    opened, found = open_engine(bundle, "cpu", engine), {}
    queries = random_queries(np.random.default_rng(0), bundle, 5, integer=False)
    for name, overlay in live_speed.overlays(bundle, [50]).items():
        opened.set_overlay(overlay)
        found[name] = opened.search(queries, SearchParams.uniform(5, 64, 100)).item_rows_BM
    assert (found["50 live"] >= bundle.tree.item_count).any(axis=1).all()
    assert (found["0 live"] == found["no overlay"]).all()


# -- shards ---------------------------------------------------------------------------------------------------------------


def with_heldout(folder: Path, kind: str) -> Bundle:
    """A bundle with held-out queries for which random items are relevant."""
    rng, bundle = np.random.default_rng(0), made(folder, kind)
    ids = [bundle.items.ids_of(rng.integers(0, bundle.tree.item_count, 3)) for _ in range(6)]
    heldout = pa.table({bundle.manifest.query.kind: bundle.golden().column(bundle.manifest.query.kind), "relevant": ids})
    return with_parts(bundle, folder / "heldout" / "1", {}, {"heldout.parquet": heldout})


def test_recall_is_reported_by_shards_and_beams_and_passes_where_nothing_is_lost(tmp_path: Path) -> None:
    bundle = with_heldout(tmp_path, "product memory")
    arguments = ["--model", str(bundle.path), "--shards", "1,2", "--beam", "2,64", "--m", "3", "--json", str(tmp_path / "report.json")]
    code = shard_recall.main(arguments)
    report = json.loads((tmp_path / "report.json").read_text())
    assert [(row["shards"], row["beam_size"], row["m"]) for row in report["rows"]] == [(1, 2, 3), (1, 64, 3), (2, 2, 3), (2, 64, 3)]
    assert [row["same"] for row in report["rows"] if row["shards"] == 1 or row["beam_size"] == 64] == [1, 1, 1]
    assert code == (min(row["difference"] for row in report["rows"]) < -shard_recall.MAX_RECALL_LOSS)
    assert report["passed"] is (code == 0)
    assert report["queries"] == 6
    assert [row["standard_error"] for row in report["rows"] if row["same"] == 1] == [0] * sum(row["same"] == 1 for row in report["rows"])


# -- a long tail ----------------------------------------------------------------------------------------------------------


def test_every_item_has_an_event_and_one_user_a_long_list() -> None:
    lists = long_tail.long_tail(20_000)
    assert len(lists) == 1 + 3 * 20_000 // 100
    assert sorted(set(np.concatenate(lists).tolist())) == list(range(20_000))
    assert all((np.diff(rows) > 0).all() for rows in lists), "each item once"
    lengths = [len(rows) for rows in lists]
    assert lengths[0] == max(lengths) == 20_000 // 10
    assert 2 * 20_000 < sum(lengths) <= 3 * 20_000


def test_all_users_of_a_long_tail_count(tmp_path: Path) -> None:
    lists = long_tail.long_tail(2000)
    config = long_tail.write_log(lists, tmp_path)
    pairs = len({(a, b) for rows in lists for a in rows.tolist() for b in rows.tolist() if a != b})
    for method in long_tail.COUNTED:
        found = long_tail.counting(config, method)
        assert (found["method"], found["users"], found["pairs"]) == (method, len(lists), pairs)
        assert found["cpu_seconds"] >= 0
        assert found["most_mib"] > 50


# -- the way of a request -------------------------------------------------------------------------------------------------

LIMITS = {
    "/retrieve": (28, 119),
    "/retrieve, by the engine's thread": (30, 143),
    "/retrieve, live item in the history": (36, 149),
    "/retrieve, router of two shards": (47, 228),
    "PUT of an item": (64, 302),
}
"""Walk → most files, most functions: those of a busy machine, where what a thread does after the answer is seen before it."""


@pytest.mark.release
def test_no_walk_through_the_code_is_longer_than_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "walks.json"
    subprocess.run([sys.executable, "-m", "benchmarks.speed.code_path", "--json", str(file)], cwd=ROOT, check=True, timeout=300)
    found = {row["way"]: (row["files"], row["functions"]) for row in json.loads(file.read_text())}
    assert found.keys() == LIMITS.keys()
    assert {way: counts for way, counts in found.items() if counts[0] > LIMITS[way][0] or counts[1] > LIMITS[way][1]} == {}
    assert all(files >= 20 and functions > 2 * files for files, functions in found.values())  # something was seen
