"""The code of docs/python.md runs as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest

from espalier_cli.__main__ import main
from tests import ROOT

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs/python.md").read_text()


def log(readers: int, first: int = 0) -> pl.DataFrame:
    rng = np.random.default_rng(first)
    rows = [(f"r{first + r}", f"b{r % 8}-{b}", t) for r in range(readers) for t, b in enumerate(rng.permutation(12)[:10].tolist())]
    return pl.DataFrame(rows, ["reader", "book", "at"], orient="row")


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(4)
    ids = [f"b{g}-{b}" for g in range(8) for b in range(12)]
    X = (rng.random((200, 30)) < 0.2) * rng.random((200, 30))
    scope: dict[str, Any] = {
        "log": log(160),
        "new_readers": log(40, first=1000),
        "books": pl.DataFrame({"id": ids, "title": [f"Book {one}" for one in ids], "year": [1980 + i % 40 for i in range(len(ids))]}),
        "queries": pl.DataFrame({"text": ["red planet", "red river", "blue planet"] * 20, "book": ["b1-1", "b1-2", "b1-3"] * 20}),
        "X": X[X[:, :10].any(axis=1)],
        "Y": X[X[:, :10].any(axis=1), :10],
    }
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 9
    for block in blocks:
        exec(block.replace("minutes=10", "minutes=0.001"), scope)
    assert scope["found"]["item"].to_list()
    assert dict(zip(scope["why"]["item"], scope["why"]["outcome"], strict=True))["nothing"] == "unknown"
    assert scope["rows"].shape[0] == len(ids)
    pl.concat([scope["log"], scope["new_readers"]]).write_parquet("events.parquet")
    (command,) = re.findall(r"^espalier (predict .*)$", PAGE, re.MULTILINE)
    assert main(shlex.split(command)) == 0
    answered = pq.read_table("top.parquet")
    assert answered.column_names == ["reader", "items", "scores"]
    assert len(answered) == 200
