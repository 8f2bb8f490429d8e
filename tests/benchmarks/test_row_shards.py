"""The benchmark of shared node rows, on few items: it runs two processes, and says what each held."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT


@pytest.mark.slow
def test_two_processes_hold_half_of_the_rows_each_and_have_the_losses_of_one(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    given = ["--items", "300", "--users", "40", "--dims", "8", "--steps", "5", "--json", str(file)]
    subprocess.run([sys.executable, "-m", "benchmarks.row_shards", *given], cwd=ROOT, check=True, capture_output=True)
    report = json.loads(file.read_text())
    assert [row["kind"] for row in report["rows"]] == ["otm-sequence", "otm-robust"]
    for row in report["rows"]:
        assert row["row_bytes"]["one"] == 24 * row["nodes"] * 8
        assert row["row_bytes_ratio"] < 0.51
        assert row["loss_difference"] < 1e-6
