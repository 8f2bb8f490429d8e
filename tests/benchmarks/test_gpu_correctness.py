"""The correctness stages of `benchmarks.gpu_all`: nothing is wrong with the engines in the interpreter, and broken engines are found."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("triton") is None:  # there are no wheels of it outside Linux
    pytest.skip("triton is not installed", allow_module_level=True)

from benchmarks.gpu import correctness
from benchmarks.gpu.lines import Row
from espalier.engines.stages import TreeQuery
from espalier.engines.triton.graph_engine import TritonSearch
from espalier.engines.triton.linear_engine import SparseCudaSearch

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """No exported scorers, which take seconds each, but where a test names some."""
    monkeypatch.setattr(correctness, "EXPORTED", ())


KNOWN_AND_UNKNOWN = (("product", (8,)), ("attention", (8,)))


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
    assert wrong(correctness.triton("float32", 2, False, "cpu")) == {}
    monkeypatch.setattr(correctness, "TritonSearch", narrower(TritonSearch))
    found = wrong(correctness.triton("float32", 2, False, "cpu"))
    assert {"integer", "replay"} <= set(found)
    assert "candidates kept, expected" in found["replay"]
    monkeypatch.setattr(correctness, "SparseCudaSearch", narrower(SparseCudaSearch))
    assert {"integer", "replay"} <= set(wrong(correctness.sparse_cuda("float32", 4, False, "cpu", seed=2)))


def test_kernels_that_fail_are_no_reason_for_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder that cannot be run looks like an unknown one; of a scorer that `triton` knows it is wrong."""

    def fails(*arguments: Any) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr("espalier.engines.triton.torch_graph.matmul", fails)
    monkeypatch.setattr(correctness, "EXPORTED", KNOWN_AND_UNKNOWN)
    rows = list(correctness.triton("float32", 0, False, "cpu"))
    exported = {row["form"]: row for row in rows if row["check"] == "exported"}
    assert exported["product"]["ok"] is False
    assert "illegal memory access" in exported["product"]["note"]
    assert exported["attention"]["ok"] is None
