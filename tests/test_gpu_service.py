"""The service stage of `benchmarks.gpu_all`, over the engines of the CPU."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("triton") is None:  # there are no wheels of it outside Linux
    pytest.skip("triton is not installed", allow_module_level=True)

from benchmarks.gpu import service
from benchmarks.gpu.service import serve


def test_the_service_is_measured_reloaded_and_asked_for_two_models() -> None:
    rows = {row["case"]: row for row in serve(5, 8, 0.3, [1, 4], "cpu")}
    assert list(rows) == [
        "ready, 2^5 items and a linear model",
        "two models by turns",
        "closed loop, 1 clients",
        "closed loop, 4 clients",
        *(f"open loop, {share}% of the capacity" for share in (50, 80, 90)),
        "reload under load, twice",
        "memory given back",
        "out of memory",
    ]
    assert [case for case, row in rows.items() if row["ok"] is False] == []
    assert rows["two models by turns"]["engines"] == ["onnx-cpu", "sparse-cpu"]
    assert rows["closed loop, 1 clients"]["inside"].keys() == set(service.STAGES)
    assert rows["closed loop, 1 clients"]["ms"] > 0
    assert set(rows["reload under load, twice"]["statuses"]) == {"200"}
    assert {rows[case]["note"] for case in ("memory given back", "out of memory")} == {"needs a GPU"}


def test_a_reload_that_is_refused_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = service._admin

    def refused(port: int, action: str, version: int) -> tuple[int, str]:
        return (409, "version 2 failed to load") if action == "default" and version == 2 else admin(port, action, version)

    monkeypatch.setattr(service, "_admin", refused)
    rows = {row["case"]: row for row in serve(4, 4, 0.2, [1], "cpu")}
    reload = rows["reload under load, twice"]
    assert (reload["ok"], reload["note"]) == (False, "version 2 failed to load")


def test_without_the_services_packages_a_row_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "NEEDED", ("orjson", "no_such_package"))
    (row,) = serve(4, 4, 0.1, [1], "cpu")
    assert (row["ok"], row["note"]) == (None, "not installed: no_such_package; see benchmarks/gpu/wheels.txt")
