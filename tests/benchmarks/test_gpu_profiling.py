"""The profile and the training stage of `benchmarks.gpu_all`, as far as a machine without a GPU can run them."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:  # there are no wheels of it outside Linux
    pytest.skip("triton is not installed", allow_module_level=True)

from benchmarks.gpu import profiling, timing
from benchmarks.gpu.card import card
from benchmarks.gpu.graph_models import model_of
from benchmarks.gpu.profiling import Span, marking, profile, summary, traced
from benchmarks.gpu.search_speed import filled_cell
from benchmarks.gpu.timing import ceilings
from benchmarks.gpu.training_steps import training
from espalier.engines.pipeline import Pipeline
from espalier.engines.triton.cells import FixedShapes
from espalier.engines.triton.graph_engine import TritonSearch
from espalier.queries import blank_queries
from espalier.search import SearchParams

pytestmark = pytest.mark.slow


def test_launches_and_the_time_between_them() -> None:
    """Two runs of three launches; in each the second begins 2 µs after the first one's end, and the third while the second works."""
    first = [Span("score", 0, 10), Span("select", 12, 20), Span("score", 15, 21)]
    later = [Span(span.name, span.start + 100, span.end + 100) for span in first]
    found = summary(first + later, 2)
    assert found == {
        "ms": 0.021, "launches": 3, "busy_us": 19, "gap_us": 2, "median_gap_us": 1, "kernels": {"score": [2, 16], "select": [1, 8]}
    }  # fmt: skip


def test_what_runs_on_the_host_is_no_launch() -> None:
    assert traced(lambda: torch.ones(3) + 1) == []


def test_runs_that_differ_in_their_launches_are_not_compared() -> None:
    assert summary([Span("score", 0, 1)] * 3, 2) == {"launches": 1.5, "note": "the runs differ in their launches"}
    assert "note" in summary([], 2)


def test_every_part_of_a_search_is_marked_and_the_cell_is_left_as_it_was() -> None:
    bundle = model_of(4)
    engine = TritonSearch(bundle, "cpu", "float16", FixedShapes(batches=(1,), m_sizes=(64,)))
    queries, params = blank_queries(bundle.manifest.query, 1), SearchParams.uniform(1, 2, 2)
    search = Pipeline(bundle, engine).search
    before = search(queries, params)
    cell, state_BLS = filled_cell(engine, 1, 2, 2)
    marks: list[str] = []

    def marked(name: str, run: Any, *given: Any) -> None:
        marks.append(name)
        run(*given)

    held = set(vars(cell))
    marking(cell, marked, state_BLS)
    assert marks == ["begin", *(f"{part} {level}" for level in (2, 3, 4) for part in ("score", "select")), "order"]
    assert set(vars(cell)) == held
    assert search(queries, params).item_rows_BM.tolist() == before.item_rows_BM.tolist()


def test_a_profile_says_what_a_search_needs_and_where_nothing_can_be_traced_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(run: Any, least: int = 1) -> float:
        run()
        return 2.0

    monkeypatch.setattr(profiling, "milliseconds", once)
    monkeypatch.setattr(profiling, "ceilings", lambda *sizes: {"tflops": 0.5, "gb_per_s": 100.0})
    monkeypatch.setattr(profiling, "traced", lambda run: [])
    rows = {row["case"].split(": ")[-1]: row for row in profile(4, [2], [1], ["mlp"], 2, 4, "cpu")}
    of_graph = rows["against the card"]
    assert of_graph["mflop"] == pytest.approx(3 * 4 * 2 * (24 * 128 + 128 * 64 + 64 * 24 + 24) / 1e6, rel=1e-3)
    assert of_graph["share_of_tflops"] == pytest.approx(of_graph["mflop"] * 1e6 / 2e-3 / 0.5e12, rel=1e-3)
    assert (rows["a call"]["search_ms"], rows["a call"]["rest_ms"]) == (2, -2)
    for case in ("its CUDA graph", "one by one"):
        assert (rows[case]["ok"], rows[case]["note"]) == (None, "not profiled: the profiler saw no kernel")
    assert rows["parts"]["note"] == "needs CUDA events"

    def unavailable(run: Any) -> Any:
        raise RuntimeError("no CUPTI")

    monkeypatch.setattr(profiling, "traced", unavailable)
    assert "not profiled: RuntimeError: no CUPTI" in {row.get("note") for row in profile(4, [2], [1], [], 2, 4, "cpu")}
    monkeypatch.setattr(profiling, "traced", lambda run: [Span("score", 0, 5)] * profiling.RUNS)
    assert [row["launches"] for row in profile(4, [2], [1], [], 2, 4, "cpu") if "launches" in row] == [1]


def test_what_a_device_does_at_best_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ROUNDS", 1)
    best = ceilings(16, 1 << 12)
    assert set(best) == {"tflops", "gb_per_s"}
    assert min(best.values()) > 0


def test_the_card_stage_names_versions_and_says_where_there_is_no_gpu() -> None:
    (row,) = card()
    assert (row["gpu"], row["card"], row["ok"]) == (False, None, None)
    assert row["versions"]["torch"]
    assert row["versions"]["onnxruntime-gpu"] is None
    assert "cores" in row["host"]


def test_training_steps_of_all_methods_and_rankers() -> None:
    rows = list(training(60, 40, [6], 4, 1, 40, 5, "cpu"))
    methods = [row["case"].split(",")[0] for row in rows]
    assert methods == ["ranker", "ranker", "plt", "tdm", "tdm-2k", "otm", "otm-robust", "memory"]
    *timed, memory = rows
    assert all(row["ok"] and row["ms"] > 0 and row["queries_per_s"] > 0 and row["steps_per_s"] > 0 for row in timed)
    assert memory["mib"] > 0
