"""The profile and the training stage of `benchmarks.gpu_all`, as far as a machine without a GPU can run them."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:  # there are no wheels of it outside Linux
    pytest.skip("triton is not installed", allow_module_level=True)

from benchmarks.gpu import profiling
from benchmarks.gpu.card import card
from benchmarks.gpu.profiling import Span, profile, summary
from benchmarks.gpu.training_steps import training

pytestmark = pytest.mark.slow


def test_launches_and_the_time_between_them() -> None:
    """Two runs of three launches; in each the second begins 2 µs after the first one's end, and the third while the second works."""
    first = [Span("score", 0, 10), Span("select", 12, 20), Span("score", 15, 21)]
    later = [Span(span.name, span.start + 100, span.end + 100) for span in first]
    found = summary(first + later, 2)
    assert found == {
        "ms": 0.021, "launches": 3, "busy_us": 19, "gap_us": 2, "median_gap_us": 1, "kernels": {"score": [2, 16], "select": [1, 8]}
    }  # fmt: skip
    assert summary([Span("score", 0, 1)] * 3, 2) == {"launches": 1.5, "note": "the runs differ in their launches"}
    assert "note" in summary([], 2)


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
    monkeypatch.setattr(profiling, "traced", lambda run: [Span("score", 0, 5)] * profiling.RUNS)
    assert [row["launches"] for row in profile(4, [2], [1], [], 2, 4, "cpu") if "launches" in row] == [1]


def test_the_card_and_the_training_steps_of_all_methods_have_rows() -> None:
    (device,) = card()
    assert (device["gpu"], device["card"], device["ok"], device["versions"]["onnxruntime-gpu"]) == (False, None, None, None)
    *timed, memory = training(60, 40, [6], 4, 1, 40, 5, "cpu")
    assert [row["case"].split(",")[0] for row in timed] == ["ranker", "ranker", "plt", "tdm", "tdm-2k", "otm", "otm-robust"]
    assert all(row["ok"] and row["ms"] > 0 and row["queries_per_s"] > 0 and row["steps_per_s"] > 0 for row in timed)
    assert memory["mib"] > 0
