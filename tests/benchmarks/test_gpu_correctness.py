"""The correctness stages of `benchmarks.gpu_all`: nothing is wrong with the engines in the interpreter, and broken engines are found."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("triton") is None:  # there are no wheels of it outside Linux
    pytest.skip("triton is not installed", allow_module_level=True)

from benchmarks.gpu import catalogue_checks, correctness
from benchmarks.gpu.lines import Row
from benchmarks.gpu.memory_accesses import sanitized
from espalier.engines.onnx import engine as onnx_graph
from espalier.engines.onnx.engine import OnnxSearch
from espalier.engines.stages import Leaves, TreeQuery
from espalier.engines.triton import cells as gpu_cells
from espalier.engines.triton.graph_engine import TritonSearch
from espalier.engines.triton.linear_engine import SparseCudaSearch

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """No exported scorers, which take seconds each, but where a test names some."""
    monkeypatch.setattr(correctness, "EXPORTED", ())


KNOWN_AND_UNKNOWN = (("product", (8,)), ("attention", (8,)))


def checks(rows: list[Row]) -> dict[tuple[str, str], set[bool | None]]:
    """(scorer form, check) → what was found."""
    found: dict[tuple[str, str], set[bool | None]] = {}
    for row in rows:
        found.setdefault((row["form"], row["check"]), set()).add(row["ok"])
    return found


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_nothing_is_wrong_with_triton(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected: dict[tuple[str, str], set[bool | None]] = {(form, check): {True} for form in correctness.GRAPH_FORMS for check in CHECKS}
    if precision == "float32":
        monkeypatch.setattr(correctness, "EXPORTED", KNOWN_AND_UNKNOWN)
        expected |= {(form, "exported"): {None if form == "attention" else True} for form, _ in KNOWN_AND_UNKNOWN}
    if precision == "float16":
        expected |= {("mlp", "large"): {True}}
    rows = list(correctness.triton(precision, 3 if precision == "float32" else 1, precision == "float16", "cpu"))
    if precision == "bfloat16":  # whose matrices the interpreter cannot multiply
        expected = {key: found for key, found in expected.items() if not key[0].startswith("mlp")} | {("mlp", ""): {None}}
    assert checks(rows) == expected
    assert {row["precision"] for row in rows} == {precision}
    said = " ".join(row["case"] for row in rows)
    if precision == "float32":
        assert all(word in said for word in ("masks", "40 exclusions", "3 exclusions", "ragged", "γ 0.5"))


CHECKS = ("integer", "replay")


def test_nothing_is_wrong_with_sparse_cuda() -> None:
    for precision in ("float32", "bfloat16"):
        rows = list(correctness.sparse_cuda(precision, 3 if precision == "float32" else 1, False, "cpu"))
        assert checks(rows) == {("linear", check): {True} for check in (*CHECKS, "alone")}
    assert [row["ok"] for row in correctness.compared("float16", "cpu", 2, 4, 3)] == [True]


def test_nothing_is_wrong_with_onnx_and_where_it_has_no_cuda_a_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correctness, "EXPORTED", KNOWN_AND_UNKNOWN)
    rows = list(correctness.onnx_cuda(2, "cpu"))
    forms = {(form, check): {True} for form in correctness.GRAPH_FORMS for check in (*CHECKS, "alone")}
    assert checks(rows) == forms | {(form, "exported"): {True} for form, _ in KNOWN_AND_UNKNOWN}
    assert {row["engine"] for row in rows} == {"onnx-cpu"}
    (row,) = correctness.onnx_cuda(2)
    assert (row["ok"], row["note"]) == (None, "not installed: ONNX Runtime here has no CUDA")


def test_nothing_is_wrong_with_shards_live_items_and_forests() -> None:
    rows = list(catalogue_checks.catalogues(2, "cpu"))
    forms = {(form, check): {True} for form in correctness.GRAPH_FORMS for check in ("shard", "live")}
    assert checks(rows) == forms | {("forest", check): {True} for check in ("integer", "shard", "live")}
    assert {row["engine"] for row in rows} == {"triton", "onnx-cpu", "sparse-cuda"}
    assert {row["precision"] for row in rows if row["engine"] != "onnx-cpu"} == {"float32", "float16"}


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
    monkeypatch.setattr(correctness, "TritonSearch", narrower(TritonSearch))
    found = wrong(correctness.triton("float32", 2, False, "cpu"))
    assert {"integer", "replay"} <= set(found)
    assert "candidates kept, expected" in found["replay"]
    monkeypatch.setattr(correctness, "SparseCudaSearch", narrower(SparseCudaSearch))
    assert {"integer", "replay"} <= set(wrong(correctness.sparse_cuda("float32", 4, False, "cpu")))


def test_narrower_beams_are_found_in_shards_under_live_items_and_in_forests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue_checks, "TritonSearch", narrower(TritonSearch))
    monkeypatch.setattr(catalogue_checks, "SparseCudaSearch", narrower(SparseCudaSearch))
    monkeypatch.setattr(catalogue_checks, "GRAPH_FORMS", {"product": "product"})
    rows = [row for row in catalogue_checks.catalogues(3, "cpu") if not row["engine"].startswith("onnx")]
    found = {(row["engine"], row["check"]) for row in rows if row["ok"] is False}
    assert found == {("triton", "shard"), ("triton", "live"), ("sparse-cuda", "integer"), ("sparse-cuda", "shard")}


def test_answers_that_depend_on_the_batch_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Uneven(OnnxSearch):
        def search(self, query: TreeQuery) -> Leaves:
            leaves = super().search(query)
            return replace(leaves, ranks_BTM=leaves.ranks_BTM + np.float32(len(query) - 1) / 64)

    monkeypatch.setattr(onnx_graph, "OnnxSearch", Uneven)
    assert "differs between alone and in a batch of 2" in wrong(correctness.onnx_cuda(6, "cpu"))["alone"]


def test_ranks_that_are_rounded_more_than_they_may_be_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real weights are exact in every precision, so that ranks in float16 have to be as good as in float32."""

    def part(self: Any, count: int, width: int) -> Any:
        nodes, *numbers = whole(self, count, width)
        return nodes, *(part.astype(np.float16).astype(np.float32) for part in numbers)

    monkeypatch.setattr(correctness, "GRAPH_FORMS", {"product": "product"})
    whole = gpu_cells.Beam.part
    monkeypatch.setattr(gpu_cells.Beam, "part", part)
    assert "away, rounding 0.001" in wrong(correctness.triton("float16", 2, False, "cpu"))["replay"]


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


# -- memory accesses ------------------------------------------------------------------------------------------------------


def test_without_a_checker_of_memory_accesses_a_row_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list(sanitized(10)) == [{"case": "compute-sanitizer", "ok": None, "note": "not installed"}]


@pytest.mark.parametrize("finds", [False, True])
def test_what_the_checker_of_memory_accesses_finds_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, finds: bool) -> None:
    """A stand-in for the tool: it runs what it is given, or finds something at once."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\necho "========= ERROR SUMMARY: 2 errors"\nexit 3\n' if finds else '#!/bin/sh\nshift 2\nexec "$@"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (row,) = sanitized(400, ["sparse_cuda"], "cpu")
    assert (row["case"], row["ok"]) == ("compute-sanitizer, sparse_cuda", not finds)
    assert (row["cases"] > 5) == (not finds)
    assert ("ERROR SUMMARY: 2 errors" in row["note"]) == finds
