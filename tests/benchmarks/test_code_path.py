"""How many files and functions a request crosses: more than these limits, and the way of a request has become longer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

pytestmark = pytest.mark.slow
LIMITS = {
    "/retrieve": (25, 105),
    "/retrieve, by the engine's thread": (26, 124),
    "/retrieve, live item in the history": (37, 132),
    "/retrieve, router of two shards": (45, 214),
    "PUT of an item": (66, 322),
}
"""Walk → most files, most functions: those of a busy machine, where what a thread does after the answer is seen before it."""


def test_no_walk_is_longer_than_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "walks.json"
    subprocess.run([sys.executable, "-m", "benchmarks.code_path", "--walks", "--json", str(file)], cwd=ROOT, check=True, timeout=300)
    found = {row["way"]: (row["files"], row["functions"]) for row in json.loads(file.read_text())}
    assert found.keys() == LIMITS.keys()
    assert {way: counts for way, counts in found.items() if counts[0] > LIMITS[way][0] or counts[1] > LIMITS[way][1]} == {}
    assert all(files >= 20 and functions > 2 * files for files, functions in found.values())  # something was seen
