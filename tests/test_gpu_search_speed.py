"""The GPU engine's benchmark, as far as a machine without a GPU can run it."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

if importlib.util.find_spec("triton") is None:  # there are no wheels of it outside Linux
    pytest.skip("triton is not installed", allow_module_level=True)

from benchmarks import engine_gpu
from benchmarks.engine_gpu import TorchSearch, check, main, model_of, plot_growth
from espalier.engines.gpu import TritonEngine
from espalier.engines.gpu_cells import Grid
from espalier.queries import QueryBatch
from espalier.search import SearchParams


def test_a_machine_without_a_gpu_is_told_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["engine_gpu", "--check"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err


def test_the_check_finds_nothing_wrong_with_the_engine() -> None:
    assert check("cpu", 2, large=False) == []


def test_the_check_finds_a_wrong_engine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Worse(TritonEngine):
        def search(self, queries: Any, params: Any) -> Any:
            return super().search(queries, replace(params, beam_size_B=np.maximum(params.beam_size_B // 2, 1)))

    monkeypatch.setattr(engine_gpu, "TritonEngine", Worse)
    assert check("cpu", 2, large=False, seed=8)
    assert "WRONG" in capsys.readouterr().out


def test_the_search_in_torch_finds_what_the_engine_finds() -> None:
    bundle = model_of(7)
    engine = TritonEngine(bundle, "cpu", "float16", Grid(batches=(2,), wanted=(64,)))
    queries = QueryBatch(bundle.manifest.query, np.random.default_rng(1).integers(0, 128, (2, 69)))
    found = engine.search(queries, SearchParams.uniform(2, 10, 10)).item_rows_BM
    states = engine.cell(2, 3, 10).launch_encoder().half()
    search = TorchSearch(engine, bundle.tree, states, bundle.tree.start_level(8))
    leaves = search.search(10, 10).numpy()
    rows = bundle.tree.leaf_item[leaves - bundle.tree.leaf_offset]
    assert np.mean([np.isin(a, b).mean() for a, b in zip(rows, found, strict=True)]) >= 0.8
    every = bundle.tree.leaf_item[search.exhaustive(20).numpy()]
    assert np.mean([np.isin(a, b).mean() for a, b in zip(rows, every, strict=True)]) > 0.3


def test_growth_is_plotted(tmp_path: Any) -> None:
    plot_growth([{"items": 1 << h, "batch": b, "ms": h * b} for h in (16, 18) for b in (1, 512)], tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size > 1000
