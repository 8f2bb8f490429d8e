"""ONNX Runtime as the engines start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT


@pytest.mark.slow
def test_a_search_writes_nothing_below_the_home_folder(models: Path, tmp_path: Path) -> None:
    """ONNX Runtime's telemetry would write a device id there, and what it has seen."""
    code = "import sys, pathlib, espalier as e; e.open_engine(e.Bundle.open(pathlib.Path(sys.argv[1])), 'cpu').warm_up()"
    environment = {name: text for name, text in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"} | {"HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code, str(models / "books" / "1")], cwd=ROOT, env=environment, check=True)
    assert list(tmp_path.rglob("*")) == []
