"""The benchmark of the GPU engine for linear scorers, as far as a machine without a GPU can run it."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("triton") is None:  # there are no wheels of it outside Linux
    pytest.skip("triton is not installed", allow_module_level=True)


from benchmarks.gpu import sparse_speed, timing
from benchmarks.gpu.sparse_speed import search
from espalier.engines.triton.linear_engine import SparseCudaEngine

pytestmark = pytest.mark.slow


@pytest.fixture
def one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times come from one run: they mean nothing here."""
    monkeypatch.setattr(timing, "ROUNDS", 1)
    monkeypatch.setattr(sparse_speed, "milliseconds", lambda run, least=1: timing.milliseconds(run, 1))


@pytest.mark.usefixtures("one_run")
def test_each_engine_is_timed_on_the_same_queries() -> None:
    model, tables, *rows = search([2], [1, 2], ["float32"], "cpu", 2, 4, singles=2)
    assert model["labels"] == 16
    assert tables["case"] == "the tables, float32"
    assert [(row["engine"], row["batch"]) for row in rows] == [
        ("sparse-cpu", 1), ("sparse-cuda", 1), ("sparse-cuda-call", 1), ("sparse-cpu", 2), ("sparse-cuda", 2), ("sparse-cuda-call", 2)
    ]  # fmt: skip
    assert all(row["ms"] > 0 and row["ok"] for row in rows)
    assert all(row["as_sparse_cpu"] == 1 for row in rows if row["engine"] == "sparse-cuda")


@pytest.mark.usefixtures("one_run")
def test_an_engine_that_finds_other_labels_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = SparseCudaEngine.search

    def shifted(self: Any, queries: Any, params: Any) -> Any:
        result = searched(self, queries, params)
        return replace(result, item_rows_BM=np.where(result.item_rows_BM >= 0, result.item_rows_BM + 100, -1))

    monkeypatch.setattr(SparseCudaEngine, "search", shifted)
    rows = list(search([2], [2], ["float32"], "cpu", 2, 4, singles=1))
    assert [row["ok"] for row in rows if row.get("engine") == "sparse-cuda"] == [False]
