"""The benchmark of the GPU engine for linear scorers, as far as a machine without a GPU can run it."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if importlib.util.find_spec("triton") is None:  # there are no wheels of it outside Linux
    pytest.skip("triton is not installed", allow_module_level=True)

from benchmarks import engine_gpu, sparse_gpu
from benchmarks.sparse_gpu import NON_ZEROS, M, check, compared, main, model_of, queries_of, table
from espalier.engines.chunk_search import L3_HINGE
from espalier.engines.gpu_cells import Grid
from espalier.engines.reference import ReferenceEngine
from espalier.engines.sparse_cpu import SparseCpuEngine
from espalier.engines.sparse_gpu import SparseCudaEngine
from espalier.search import SearchParams
from tests.builders import make_linear_bundle, random_queries, random_tree


@pytest.mark.parametrize("asked", [["--check"], ["--json", "x.json"], ["--check", "--json", "x.json", "--device", "cpu"]])
def test_a_machine_without_a_gpu_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, asked: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["sparse_gpu", *asked])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()


def test_the_model_is_one_and_its_labels_are_found() -> None:
    bundle, own_NF = model_of(3, 8)
    bundle.chunks.check(bundle.tree)
    queries = queries_of(bundle, own_NF, 200)
    queries.features.check()
    counts = np.diff(queries.features.indptr)
    assert 0.9 * NON_ZEROS < counts.mean() <= counts.max() == NON_ZEROS
    found = SparseCpuEngine(bundle).search(queries, SearchParams.uniform(200, 10, M))
    leaves = np.random.default_rng(1).integers(bundle.tree.leaf_offset, bundle.tree.node_count, 200)  # as the queries are drawn
    assert np.mean(found.item_rows_BM[:, 0] == bundle.tree.leaf_item[leaves - bundle.tree.leaf_offset]) > 0.9


def test_the_check_finds_nothing_wrong_with_the_engine() -> None:
    assert check("cpu", 2, large=False) == []
    assert list(compared("cpu", 2, 4, 3)) == []


def test_the_check_finds_a_wrong_engine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Worse(SparseCudaEngine):
        def search(self, queries: Any, params: Any) -> Any:
            return super().search(queries, replace(params, beam_size_B=np.maximum(params.beam_size_B // 2, 1)))

    monkeypatch.setattr(sparse_gpu, "SparseCudaEngine", Worse)
    assert check("cpu", 3, large=False, seed=1)
    assert "WRONG" in capsys.readouterr().out


def test_the_table_times_each_engine_on_the_same_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_gpu, "ROUNDS", 1)
    monkeypatch.setattr(sparse_gpu, "milliseconds", lambda run, least=1: engine_gpu.milliseconds(run, 1))
    model, *rows = table([2], [1, 2], ["float32"], "cpu", 2, 4, singles=2)
    assert model["labels"] == 16
    assert rows.pop(2)["precision"] == "float32"
    assert [(row["engine"], row["batch"]) for row in rows] == [
        ("sparse-cpu", 1), ("sparse-cpu", 2), ("sparse-cuda", 1), ("sparse-cuda-call", 1), ("sparse-cuda", 2), ("sparse-cuda-call", 2)
    ]  # fmt: skip
    assert all(row["ms"] > 0 for row in rows)
    assert all(row["as_sparse_cpu"] == 1 for row in rows if row["engine"] == "sparse-cuda")


def test_queries_that_begin_at_different_levels_are_replayed(tmp_path: Path) -> None:
    """The level that only the narrow beam visits is empty in the other query's trace, which is no mistake."""
    rng = np.random.default_rng(3)
    bundle = make_linear_bundle(tmp_path, rng, random_tree(rng, 3, 2, ragged=False), L3_HINGE, integer=False)
    queries, params = random_queries(rng, bundle, 2, integer=False), SearchParams(np.array([1, 4]), np.array([3, 3]), trace=True)
    engine = SparseCudaEngine(bundle, "cpu", grid=Grid(batches=(1,), wanted=(8,)))
    assert list(engine_gpu.replayed(ReferenceEngine(bundle), queries, params, engine.search(queries, params), engine.rounding)) == []
