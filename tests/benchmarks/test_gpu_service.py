"""The service stage of `benchmarks.gpu_all`, over the engines of the CPU."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("triton") is None:  # there are no wheels of it outside Linux
    pytest.skip("triton is not installed", allow_module_level=True)

from benchmarks.gpu import gpu_service
from benchmarks.gpu.gpu_service import serve
from loadtest.loops import Answered

pytestmark = pytest.mark.slow


def test_the_service_is_measured_reloaded_and_asked_for_two_models() -> None:
    rows = {row["case"]: row for row in serve(5, 8, 0.2, [1], "cpu")}
    assert list(rows) == [
        "ready, 2^5 items and a linear model",
        "two models by turns",
        "closed loop, 1 clients",
        *(f"open loop, {share}% of the capacity" for share in (50, 80, 90)),
        "reload under load, twice",
        "memory given back",
        "out of memory",
    ]
    assert [case for case, row in rows.items() if row["ok"] is False] == []
    assert rows["two models by turns"]["engines"] == ["onnx-cpu", "sparse-cpu"]
    assert rows["closed loop, 1 clients"]["inside"].keys() == set(gpu_service.STAGES)
    assert rows["closed loop, 1 clients"]["ms"] > 0
    assert "200" in rows["reload under load, twice"]["statuses"]
    assert {rows[case]["note"] for case in ("memory given back", "out of memory")} == {"needs a GPU"}


# -- what needs a GPU, over a pretended one -------------------------------------------------------------------------------


def answered(status: int) -> list[Answered]:
    return [Answered(0, 0.0, 0.0, 0.001, status, b"{}")]


@pytest.mark.parametrize(("kept_mb", "ok"), [(2, True), (180, False)])
def test_memory_that_a_former_version_keeps_is_wrong(monkeypatch: pytest.MonkeyPatch, kept_mb: int, ok: bool) -> None:
    used = iter([1_000_000_000, 1_200_000_000, 1_200_000_000])
    monkeypatch.setattr(gpu_service, "_used", lambda: next(used))
    monkeypatch.setattr(gpu_service, "_settled", lambda before: before + kept_mb * 1_000_000)
    monkeypatch.setattr(gpu_service, "_admin", lambda port, action, version: (200, "{}"))
    monkeypatch.setattr(gpu_service, "closed_loop", lambda *given: answered(200))
    reload, memory = gpu_service._reload(1, [b""], "cuda")
    assert reload["ok"]
    assert (memory["ok"], memory["kept_mb"], memory["with_both_mb"]) == (ok, kept_mb, 1200)
