"""The benchmark of `triton`, as far as a machine without a GPU can run it: in the interpreter, on tiny trees."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch

if importlib.util.find_spec("triton") is None:  # there are no wheels of it outside Linux
    pytest.skip("triton is not installed", allow_module_level=True)

from benchmarks.gpu import search_speed
from benchmarks.gpu.graph_models import FORMS, TorchSearch, items_of, model_of
from benchmarks.gpu.search_speed import agreement, filled_cell, search
from espalier.engines.triton.cells import FixedShapes
from espalier.engines.triton.graph_engine import TritonEngine
from espalier.queries import QueryBatch
from espalier.search import SearchParams

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to be timed runs once: times mean nothing here."""

    def once(run: Any, least: int = 1) -> float:
        run()
        return 1.0

    monkeypatch.setattr(search_speed, "milliseconds", once)


@pytest.mark.parametrize(("form", "beam"), [("mlp", 10), ("product", 10), ("product", 1)])
def test_the_search_in_torch_finds_what_the_engine_finds(form: str, beam: int) -> None:
    bundle = model_of(7, form)
    engine = TritonEngine(bundle, "cpu", "float16", FixedShapes(batches=(2,), m_sizes=(64,)))
    queries = QueryBatch(bundle.manifest.query, np.random.default_rng(1).integers(0, 128, (2, 69)))
    found_BM = engine.search(queries, SearchParams.uniform(2, beam, 10)).item_rows_BM
    _, state_BLS = filled_cell(engine, 2, beam, 10)
    by_torch = TorchSearch(engine, form, state_BLS, 1 if FORMS[form].gamma else bundle.tree.start_level(1 << (beam.bit_length() - 1)))
    assert agreement(found_BM, items_of(bundle.tree, by_torch.search(beam, min(10, 2 * beam)))) >= 0.8
    every_BM = items_of(bundle.tree, by_torch.exhaustive(20))
    assert every_BM.shape == (2, 20)
    assert len(np.unique(every_BM[0])) == 20


def test_every_peer_is_measured_on_the_same_queries() -> None:
    rows = {row["case"]: row for row in search(5, [4], [1, 2], "mlp", device="cpu")}
    left_out = rows.pop("onnx-cuda-call, 2^5")
    assert left_out["ok"] is None
    assert "not installed" in left_out["note"]
    assert all(row["ok"] and row["ms"] > 0 and row["queries_per_s"] > 0 for row in rows.values())
    alone = {"triton", "triton-call", "torch-graph", "torch-eager", "inner-product", "exhaustive"}
    assert {row["engine"] for row in rows.values() if row["batch"] == 1} == alone | {"onnx-cpu-call"}
    assert {row["engine"] for row in rows.values() if row["batch"] == 2} == alone
    assert {row["engine"] for row in rows.values() if row.get("masked")} == {"triton", "triton-call"}
    shares = [row["as_torch"] for row in rows.values() if "as_torch" in row]
    assert len(shares) == 2
    assert min(shares) >= 0.8


def test_an_engine_that_finds_other_items_than_torch_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchSearch, "search", lambda self, beam, m: torch.arange(31, 31 + m).expand(len(self._state_BLS), -1))
    rows = list(search(5, [4], [1], peers=[], masked=False, device="cpu"))
    assert [(row["engine"], row["ok"]) for row in rows] == [("triton", False), ("triton-call", True)]
