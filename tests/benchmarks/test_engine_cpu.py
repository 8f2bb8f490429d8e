"""`engine_cpu --scorer product`: a beam beside HNSW and exact search over its own rows, on a small synthetic model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.papers.product_search.ann import faiss_is_installed
from benchmarks.speed import engine_cpu
from benchmarks.synthetic import diffusion_bundle, diffusion_queries
from espalier.engines import open_engine
from espalier.engines.reference import ReferenceEngine
from espalier.search import SearchParams


def test_every_system_answers_the_same_queries_and_is_timed_in_two_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_cpu, "VECTORS", 6)
    out = tmp_path / "rows.json"
    few = ["--height", "7", "--dim", "5", "--beam", "3,128", "--m", "10", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["engine_cpu", "--scorer", "product", "--models", str(tmp_path), "--json", str(out), *few])
    engine_cpu.main()
    rows = json.loads(out.read_text())["rows"]
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


def test_a_synthetic_model_of_any_width_is_searched_as_the_reference_does(tmp_path: Path) -> None:
    """As exported, with node rows as an input that nothing reads."""
    bundle = diffusion_bundle(tmp_path, 5, dim=3)
    queries, params = diffusion_queries(bundle, 4), SearchParams.uniform(4, 3, 5)
    expected, got = ReferenceEngine(bundle).search(queries, params), open_engine(bundle, "cpu").search(queries, params)
    assert np.array_equal(got.item_rows_BM, expected.item_rows_BM)
