"""The benchmark of writes runs, on a version of a few items."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.speed import live_writes


def test_puts_and_filters_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["live_writes", "--live", "30", "--height", "2", "--repeats", "3", "--json", str(out)])
    live_writes.main()
    rows = json.loads(out.read_text())["rows"]
    assert [row["what"] for row in rows] == ["put", "filter", "put, a trained item deleted"]
    assert all(row["live"] == 30 and 0 < row["min_us"] <= row["median_us"] for row in rows)
