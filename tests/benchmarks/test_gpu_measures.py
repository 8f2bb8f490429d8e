"""The stages of `benchmarks.gpu_all` where there is no GPU: in the interpreter, tiny. Engines that were broken are found to be wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="there are no wheels of it outside Linux")

from benchmarks.gpu import correctness, profiling, search_speed, sparse_speed, timing
from benchmarks.gpu.graph_models import TorchSearch
from benchmarks.gpu.lines import Row
from benchmarks.gpu.profiling import Span, profile, summary
from benchmarks.gpu.timing import card
from benchmarks.gpu.training_steps import training
from espalier.engines.stages import Leaves, TreeQuery
from espalier.engines.triton.graph_engine import TritonSearch
from espalier.engines.triton.linear_engine import SparseCudaSearch

pytestmark = pytest.mark.release


def once(run: Any, least: int = 1) -> float:
    """In place of a timing: times mean nothing here."""
    run()
    return 2.0


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (search_speed, profiling, sparse_speed):
        monkeypatch.setattr(module, "milliseconds", once)
    monkeypatch.setattr(timing, "ROUNDS", 1)
    monkeypatch.setattr(correctness, "EXPORTED", ())  # which take seconds each


def test_an_engine_that_finds_other_items_than_torch_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def engines() -> list[tuple[str, bool]]:
        return [(row["engine"], row["ok"]) for row in search_speed.search(5, [4], [1], peers=[], masked=False, device="cpu")]

    assert engines() == [("triton", True), ("triton-call", True)]
    monkeypatch.setattr(TorchSearch, "search", lambda self, beam, m: torch.arange(31, 31 + m).expand(len(self._state_BLS), -1))
    assert engines() == [("triton", False), ("triton-call", True)]


def test_each_linear_engine_is_timed_on_the_same_queries_and_one_that_finds_other_labels_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, *rows = sparse_speed.search([2], [1, 2], ["float32"], "cpu", 2, 4, singles=2)
    assert model["labels"] == 16
    engines = ("sparse-cpu", "sparse-cuda", "sparse-cuda-call")
    assert [(row["engine"], row["batch"]) for row in rows] == [(engine, batch) for batch in (1, 2) for engine in engines]
    assert all(row["ms"] > 0 and row["ok"] for row in rows)
    assert all(row["as_sparse_cpu"] == 1 for row in rows if row["engine"] == "sparse-cuda")
    searched = SparseCudaSearch.search

    def shifted(self: Any, query: TreeQuery) -> Leaves:
        leaves = searched(self, query)
        return leaves._replace(rows_BTM=np.where(leaves.rows_BTM >= 0, leaves.rows_BTM + 100, -1))

    monkeypatch.setattr(SparseCudaSearch, "search", shifted)
    rows = list(sparse_speed.search([2], [2], ["float32"], "cpu", 2, 4, singles=1))
    assert [row["ok"] for row in rows if row.get("engine") == "sparse-cuda"] == [False]


def test_launches_and_the_time_between_them() -> None:
    """Two runs of three launches; in each the second begins 2 µs after the first one's end, and the third while the second works."""
    first = [Span("score", 0, 10), Span("select", 12, 20), Span("score", 15, 21)]
    later = [Span(span.name, span.start + 100, span.end + 100) for span in first]
    assert summary(first + later, 2) == {
        "ms": 0.021, "launches": 3, "busy_us": 19, "gap_us": 2, "median_gap_us": 1, "kernels": {"score": [2, 16], "select": [1, 8]}
    }  # fmt: skip
    assert summary([Span("score", 0, 1)] * 3, 2) == {"launches": 1.5, "note": "the runs differ in their launches"}
    assert "note" in summary([], 2)


def test_a_profile_says_what_a_search_needs_and_where_nothing_can_be_traced_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "ceilings", lambda *sizes: {"tflops": 0.5, "gb_per_s": 100.0})
    monkeypatch.setattr(profiling, "traced", lambda run: [])
    rows = {row["case"].split(": ")[-1]: row for row in profile(4, [2], [1], ["mlp"], 2, 4, "cpu")}
    of_graph = rows["against the card"]
    assert of_graph["mflop"] == pytest.approx(3 * 4 * 2 * (24 * 128 + 128 * 64 + 64 * 24 + 24) / 1e6, rel=1e-3)
    assert of_graph["share_of_tflops"] == pytest.approx(of_graph["mflop"] * 1e6 / 2e-3 / 0.5e12, rel=1e-3)
    assert (rows["a call"]["search_ms"], rows["a call"]["run_ms"]) == (2, 2)
    assert rows["a call"]["host_us"]
    for case in ("its CUDA graph", "one by one"):
        assert (rows[case]["ok"], rows[case]["note"]) == (None, "not profiled: the profiler saw no kernel")


def test_the_card_and_the_training_steps_of_all_methods_have_rows() -> None:
    (device,) = card()
    assert (device["gpu"], device["card"], device["ok"], device["versions"]["onnxruntime-gpu"]) == (False, None, None, None)
    *timed, memory = training(60, 40, [6], 4, 1, 40, 5, "cpu")
    assert [row["case"].split(",")[0] for row in timed] == ["ranker", "ranker", "plt", "tdm", "tdm-2k", "otm", "otm-robust"]
    assert all(row["ok"] and row["ms"] > 0 and row["queries_per_s"] > 0 and row["steps_per_s"] > 0 for row in timed)
    assert memory["mib"] > 0


# -- broken engines -------------------------------------------------------------------------------------------------------


def narrower(engine: type) -> Any:
    """An engine that keeps half of every beam, so that some items are missed."""

    class Narrower(engine):  # type: ignore[misc]  # any class
        def search(self, query: TreeQuery) -> Any:
            return super().search(replace(query, beam_size_B=np.maximum(query.beam_size_B // 2, 1)))

    return Narrower


def wrong(rows: Iterator[Row]) -> dict[str, str]:
    """The notes of what is wrong, by check."""
    return {row["check"]: row["note"] for row in rows if row["ok"] is False}


def test_narrower_beams_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correctness, "GRAPH_FORMS", {"product": "product"})
    assert wrong(correctness.triton("float32", 2, False, device="cpu")) == {}
    monkeypatch.setattr(correctness, "TritonSearch", narrower(TritonSearch))
    found = wrong(correctness.triton("float32", 2, False, device="cpu"))
    assert {"integer", "replay"} <= set(found)
    assert "candidates kept, expected" in found["replay"]
    monkeypatch.setattr(correctness, "SparseCudaSearch", narrower(SparseCudaSearch))
    assert {"integer", "replay"} <= set(wrong(correctness.sparse_cuda("float32", 4, False, "cpu", seed=2)))
