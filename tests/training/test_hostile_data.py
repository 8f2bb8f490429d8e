"""Data files that somebody else made are read, or refused by name: no crash, no memory for what a few bytes claim."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from numpy.testing import assert_array_equal
from scipy.sparse import csc_array, csr_array, save_npz

from espalier.errors import EspalierError, InvalidData
from espalier.text.sparse_rows import MAX_FEATURES
from training import __main__ as commands
from training.data.csr import read_by_columns, read_by_rows
from training.data.log_values import BadRows
from training.data.query_logs import read_log
from training.linear import prepare as preparing
from training.linear.prepare import prepare
from training.specification.linear import LinearConfig
from training.specification.log_format import TextTable
from training.specification.models import read_config

# -- matrices ---------------------------------------------------------------------------------------------------------------

MATRIX = csr_array(np.array([[0, 2, 0], [1, 0, 4]], np.float32))
ARRAYS = {"format": b"csr", "shape": (2, 3), "data": MATRIX.data, "indices": MATRIX.indices, "indptr": MATRIX.indptr}
NO_MATRIX: dict[str, dict[str, Any]] = {
    "a column that is not there": {"indices": [1, 0, 1 << 30]},
    "a negative column": {"indices": [-(1 << 30), 0, 2]},
    "rows that descend": {"indptr": [0, 1 << 30, 3]},
    "rows that begin below 0": {"indptr": [0, -(1 << 30), 3]},
    "more rows than are there": {"shape": (1 << 30, 3)},
    "columns that no 32 bits can number": {"shape": (2, 1 << 33)},
    "three dimensions": {"shape": (2, 3, 4)},
    "a negative shape": {"shape": (-2, 3)},
    "texts": {"data": ["a", "b", "c"]},
    "complex numbers": {"data": [1j, 2, 3]},
    "objects": {"data": np.array([1, None, 3], object)},
    "numbers that 32 bits make infinite": {"data": [1.0, 1e300, 2.0]},
    "NaN": {"data": [1.0, np.nan, 2.0]},
    "another format": {"format": b"none"},
    "several formats": {"format": [1, 2]},
    "a cell for each of 2^60": {"format": b"coo", "shape": (1 << 60, 3), "row": [0], "col": [0], "data": [1.0]},
    "a diagonal of any length": {"format": b"dia", "shape": (1 << 60, 1 << 60), "data": [[1.0]], "offsets": [0]},
}


@pytest.mark.parametrize("read", [read_by_rows, read_by_columns])
@pytest.mark.parametrize("what", NO_MATRIX)
def test_a_file_that_is_no_matrix_is_refused(tmp_path: Path, what: str, read: Callable[[Path], object]) -> None:
    arrays: dict[str, Any] = {name: np.asarray(array) for name, array in (ARRAYS | NO_MATRIX[what]).items()}
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(InvalidData, match=r"x\.npz: got"):
        read(tmp_path / "x.npz")
    (tmp_path / "x.npz").write_bytes((tmp_path / "x.npz").read_bytes()[:200])
    with pytest.raises(InvalidData, match=r"x\.npz: got"):
        read(tmp_path / "x.npz")


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.int64, np.float64])
def test_matrices_of_all_number_types_and_formats_are_read(tmp_path: Path, dtype: type[np.generic]) -> None:
    whole: Any = MATRIX.astype(dtype)
    for stored in (whole, csc_array(whole), whole.tocoo(), whole.tobsr()):
        save_npz(tmp_path / "x.npz", stored)
        for found in (read_by_rows(tmp_path / "x.npz"), read_by_columns(tmp_path / "x.npz")):
            assert found.dtype == np.float32
            assert_array_equal(found.toarray(), whole.toarray())


# -- logs -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [
        ("query", [{"a": 1}, {"a": 2}], None),
        ("query", [b"\xff", b"\xfe"], "t.parquet.*query.*"),
        ("item", [["a"], ["b"]], r"t.parquet, item: got 'a column of List\(String\)'"),
        ("weight", [[1.0], [2.0]], r"t.parquet, weight: got 'a column of List\(Float64\)'"),
        ("weight", ["1", "x"], "t.parquet: row 2, column weight: got 'x'"),
    ],
)
def test_columns_that_hold_no_such_values_are_named(tmp_path: Path, column: str, values: list[Any], expected: str | None) -> None:
    columns: dict[str, list[Any]] = {"query": ["a", "b"], "item": ["x", "y"], "weight": [1.0, 2.0]}
    pl.DataFrame(columns | {column: values}).write_parquet(tmp_path / "t.parquet")
    if expected is None:
        assert len(read_log(tmp_path / "t.parquet", "query", "item", {"weight": "weight"}, TextTable(), BadRows("refuse", "data"))) == 2
        return
    with pytest.raises(InvalidData, match=expected):
        read_log(tmp_path / "t.parquet", "query", "item", {"weight": "weight"}, TextTable(), BadRows("refuse", "data"))


def prepared(folder: Path, data: str) -> None:
    (folder / "any.toml").write_text(f'kind = "xr-linear"\nname = "any"\n[data]\n{data}')
    config = read_config(folder / "any.toml")
    assert isinstance(config, LinearConfig)
    prepare(config)


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (None, r"items\.parquet: got .*No such file"),
        (b"PAR1 and nothing else", r"items\.parquet: got .*, expected a readable Parquet file"),
        ([{"a": 1}, {"a": 2}], "data.items: got 'ids of type struct.*', expected strings or numbers"),
    ],
)
def test_a_table_that_has_no_items_is_named(tmp_path: Path, items: Any, expected: str) -> None:
    (tmp_path / "log.csv").write_text("query,item\na b,x\nc d,y\n")
    if isinstance(items, bytes):
        (tmp_path / "items.parquet").write_bytes(items)
    elif items is not None:
        pl.DataFrame({"id": items}).write_parquet(tmp_path / "items.parquet")
    with pytest.raises(EspalierError, match=expected):
        prepared(tmp_path, f'format = "log"\ntrain = "{tmp_path}/log.csv"\nitems = "{tmp_path}/items.parquet"\n')


# -- points -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["", "1:0,2:0"])
def test_points_without_any_label_teach_nothing(tmp_path: Path, first: str) -> None:
    (tmp_path / "p.txt").write_text("20 5 3\n" + f"{first} 1:1\n" * 20)
    with pytest.raises(InvalidData, match="got '18 training points without a label of a weight above 0', expected labels to learn from"):
        prepared(tmp_path, f'format = "xmc"\ntrain = "{tmp_path}/p.txt"\n')


@pytest.mark.parametrize(("what", "first"), [("labels", "20 5 {}"), ("features", "20 {} 5")])
def test_a_first_line_cannot_ask_for_any_number_of_items_or_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, first: str
) -> None:
    assert preparing.MAX_LABELS == MAX_FEATURES == 67_108_864
    monkeypatch.setattr(preparing, f"MAX_{what.upper()}", 1000)
    data = f'format = "xmc"\ntrain = "{tmp_path}/p.txt"\n'
    (tmp_path / "p.txt").write_text(first.format(1001) + "\n" + "0 1:1\n" * 20)
    with pytest.raises(InvalidData, match=rf"p\.txt: got '1001 {what}', expected at most 1000"):
        prepared(tmp_path, data)
    (tmp_path / "p.txt").write_text(first.format(1000) + "\n" + "0 1:1\n" * 20)
    prepared(tmp_path, data)


def test_points_without_features_are_refused(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("20 0 5\n" + "0\n" * 20)
    with pytest.raises(InvalidData, match=r"p\.txt: got '0 features', expected at least 1"):
        prepared(tmp_path, f'format = "xmc"\ntrain = "{tmp_path}/p.txt"\n')
    save_npz(tmp_path / "x.npz", csr_array((20, 0), dtype=np.float32))
    save_npz(tmp_path / "y.npz", csr_array(np.eye(20, dtype=np.float32)))
    with pytest.raises(InvalidData, match=r"x\.npz: got '0 features', expected at least 1"):
        prepared(tmp_path, f'format = "npz"\ntrain = "{tmp_path}/x.npz"\ntrain_labels = "{tmp_path}/y.npz"\n')


def test_a_command_without_memory_ends_with_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def without_memory() -> None:
        raise MemoryError("Unable to allocate 8.00 TiB")

    monkeypatch.setattr(commands, "app", without_memory)
    with pytest.raises(SystemExit) as ended:
        commands.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == "error: out of memory Unable to allocate 8.00 TiB\n"
