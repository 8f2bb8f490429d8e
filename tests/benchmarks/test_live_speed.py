"""Live items' cost beside the same engine without, on a trained model; the live items are found, or their cost would be that of nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.random_bundles import random_queries
from benchmarks.speed import live_speed
from espalier.bundle import Bundle
from espalier.search import SearchParams

MODEL = Path("models/debian-depends/1")

pytestmark = pytest.mark.slow


def test_a_trained_model_is_timed_with_items_that_its_queries_placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_speed, "SAMPLED", 8)
    out = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["live_speed", "--engines", "", "--placed", "20", "--rounds", "1", "--json", str(out)])
    live_speed.main()
    rows = json.loads(out.read_text())["rows"]
    whats = ("no overlay", "0 live", "20 live", "20 gone")
    assert [(row["batch"], row["what"]) for row in rows] == [(batch, what) for batch in (1, 8) for what in whats]
    assert all(row["ms_per_query"] > 0 for row in rows)
    state = live_speed.with_placed_items(Bundle.open(MODEL), 20)
    assert state.live_items == 20
    assert state.overlay().memory is not None


@pytest.mark.parametrize("engine", live_speed.ENGINES)
def test_live_items_are_found(tmp_path: Path, engine: str) -> None:
    bundle = live_speed.bundle_for(engine, tmp_path, 3)
    opened = live_speed.searchers(engine, bundle, [50])
    queries = random_queries(np.random.default_rng(0), bundle, 5, integer=False)
    params = SearchParams.uniform(5, 64, 100)
    found = {name: searched.search(queries, params).item_rows_BM for name, searched in opened.items()}
    assert (found["50 live"] >= bundle.tree.item_count).any(axis=1).all()
    assert (found["0 live"] == found["no overlay"]).all()
