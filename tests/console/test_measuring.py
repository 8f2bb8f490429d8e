"""The benchmark of the console, with few rounds: every part measures something. What it measures does not gate."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.console]

FEW = ["--loads", "1", "--moves", "3", "--hours", "0.05", "--pairs", "1", "--seconds", "1"]


def test_every_part_of_the_benchmark_measures(browser: Browser, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.console", "--json", str(tmp_path / "found.json"), *FEW]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert 10_000 < found["size"]["bytes_compressed"] <= 60_000
    assert found["first"]["count"] == 1
    assert found["slider"]["painted"]["p50_ms"] >= found["slider"]["changed"]["p50_ms"] > 0
    assert found["redraw"]["levels"] >= 22
    assert found["redraw"]["cpu_ms_each"]["Task"] > 0
    assert found["hours"]["answers"] > 0
    assert len(found["beside"]["ratios"]) == 1
    assert found["beside"]["console_requests_per_s"] > 0
