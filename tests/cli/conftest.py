"""Queries of the sample, as a file."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import ROOT

SAMPLE = ROOT / "models/debian-depends/1"
HISTORIES = [["nginx", "postgresql"], ["libsdl2-2.0-0", "libgl1"], [], ["perl"], ["libc6"]]


@pytest.fixture
def queries(tmp_path: Path) -> Path:
    filters = [None, json.dumps({"section": ["libs"]}), None, json.dumps({"section": ["perl"]}), None]
    table = pa.table({"user": list("abcde"), "history": HISTORIES, "most": [1, 2, 3, 4, 5], "only": filters})
    pq.write_table(table, tmp_path / "users.parquet")
    return tmp_path / "users.parquet"
