"""Arrays on disk: written block by block as the library writes them whole, and mapped where the header makes sense. Queries likewise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.testing import assert_array_equal
from safetensors.numpy import save_file

from benchmarks.random_bundles import make_linear_bundle, random_tree
from espalier import bundle_files
from espalier.bundle_files import DTYPES, Gathered, map_safetensors, read_parquet, write_safetensors
from espalier.checks.heldout import read_heldout
from espalier.errors import BundleCorrupt
from espalier.manifest import Ranking


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_the_bytes_are_the_librarys_whatever_the_size_of_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(bundle_files, "BLOCK_BYTES", block)
    rng = np.random.default_rng(block)
    shapes = [(5,), (0,), (3, 4), (2, 0), (1, 2, 3)]
    arrays = {
        f"{'zayb'[i % 4]}{i}": rng.integers(0, 200, shape).astype(dtype)
        for i, (shape, dtype) in enumerate((shape, dtype) for shape in shapes for dtype in DTYPES.values())
    }
    save_file(arrays, tmp_path / "library")
    write_safetensors(tmp_path / "blocks", arrays)
    assert (tmp_path / "blocks").read_bytes() == (tmp_path / "library").read_bytes()
    found = map_safetensors(tmp_path / "blocks")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert_array_equal(found[name], array, strict=True)


def test_arrays_that_are_not_contiguous_are_written_in_the_order_of_their_rows(tmp_path: Path) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    write_safetensors(tmp_path / "file", {"fortran": np.asfortranarray(rows), "steps": rows[::2, ::3]})
    found = map_safetensors(tmp_path / "file")
    assert_array_equal(found["fortran"], rows)
    assert_array_equal(found["steps"], [[0, 3], [8, 11]])


@pytest.mark.parametrize("block", [1, 30, 1 << 20])
def test_gathered_rows_are_those_of_their_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(bundle_files, "BLOCK_BYTES", block)
    rng = np.random.default_rng(0)
    sources = [rng.normal(size=(size, 3)).astype(np.float16) for size in (4, 9, 2)]
    source_R = rng.integers(0, 3, 50)
    row_R = np.array([rng.integers(len(sources[source])) for source in source_R])
    expected = np.stack([sources[source][row] for source, row in zip(source_R, row_R, strict=True)])
    one, several = Gathered(sources[:1], None, row_R % 4), Gathered(sources, source_R, row_R)
    write_safetensors(tmp_path / "file", {"one": one, "several": several})
    found = map_safetensors(tmp_path / "file")
    assert_array_equal(found["several"], expected, strict=True)
    assert_array_equal(found["one"], sources[0][row_R % 4], strict=True)
    assert_array_equal(np.asarray(several), expected)


# -- headers that somebody made -------------------------------------------------------------------------------------------


def safetensors(header: object, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(**changed: object) -> dict[str, object]:
    return {"rows": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | changed}


def test_a_file_with_a_right_header_is_mapped(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(safetensors(entry() | {"__metadata__": {}}, np.arange(4, dtype=np.float32).tobytes()))
    assert_array_equal(map_safetensors(tmp_path / "file")["rows"], [[0, 1], [2, 3]])


@pytest.mark.parametrize(
    "content",
    [
        b"\x10" + bytes(6),
        safetensors(entry(), bytes(16), length=10**6),
        safetensors(entry(), bytes(16), length=2**64 - 1),
        safetensors(b"{not json", bytes(16)),
        safetensors(b"\xff\xfe\xfd", bytes(16)),
        safetensors(b"[" * 100_000, bytes(16)),
        *[safetensors(header, bytes(16)) for header in ([], [1], "text", 3, None)],
        safetensors({"rows": {}}, bytes(16)),
        safetensors({"rows": "F32"}, bytes(16)),
        safetensors({"rows": [1, 2]}, bytes(16)),
        *[safetensors(entry(dtype=dtype), bytes(16)) for dtype in ("BF16", 4)],
        *[safetensors(entry(shape=shape), bytes(16)) for shape in ([3, 2], [-2, -2], "22")],
        *[safetensors(entry(data_offsets=offsets), bytes(16)) for offsets in ([16], [0, 12], [0, 17], ["0", "16"])],
        safetensors(entry(shape=[2**32, 2**32], data_offsets=[0, 0]), bytes(16)),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(BundleCorrupt, match="file: not a readable safetensors file"):
        map_safetensors(tmp_path / "file")


@pytest.mark.parametrize("begin", [-8, -4096, 1, 1 << 20])
def test_arrays_lie_in_their_file(tmp_path: Path, begin: int) -> None:
    (tmp_path / "file").write_bytes(safetensors(entry(data_offsets=[begin, begin + 16]), bytes(16)))
    with pytest.raises(BundleCorrupt, match=rf"rows: bytes {begin} to {begin + 16} are not in the file"):
        map_safetensors(tmp_path / "file")


def test_a_header_of_absurd_size_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = safetensors(entry(), bytes(16))
    (tmp_path / "file").write_bytes(content)
    size = int.from_bytes(content[:8], "little")
    monkeypatch.setattr(bundle_files, "MAX_HEADER_BYTES", size)
    assert map_safetensors(tmp_path / "file").keys() == {"rows"}
    monkeypatch.setattr(bundle_files, "MAX_HEADER_BYTES", size - 1)
    with pytest.raises(BundleCorrupt, match=rf"a header of {size} bytes, expected at most {size - 1}"):
        map_safetensors(tmp_path / "file")


# -- queries --------------------------------------------------------------------------------------------------------------


def test_queries_that_unpack_to_any_size_are_not_read(tmp_path: Path) -> None:
    """Two million equal rows take some kilobytes of a file."""
    for rows in (1 << 20, (1 << 20) + 1):
        pq.write_table(pa.table({"m": np.zeros(rows, np.int64)}), tmp_path / "golden.parquet")
        assert (tmp_path / "golden.parquet").stat().st_size < 20_000
        if rows == 1 << 20:
            assert len(read_parquet(tmp_path / "golden.parquet")) == rows
            continue
        with pytest.raises(BundleCorrupt, match=r"golden\.parquet: 1048577 rows .* expected at most 1048576"):
            read_parquet(tmp_path / "golden.parquet")


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("features", ["text"]),
        ("features", [None]),
        ("relevant", [None]),
        ("relevant", [[1]]),
        ("relevance", [["much"]]),
        ("relevance", [1.0]),
        ("recall@5", ["much"]),
        (f"recall@{'9' * 5000}", [1.0]),
    ],
)
def test_held_out_queries_of_other_things_are_refused(tmp_path: Path, column: str, values: list[Any]) -> None:
    rng = np.random.default_rng(1)
    bundle = make_linear_bundle(tmp_path, rng, random_tree(rng, 2, 3), Ranking(own="logit", gamma=1))
    right: dict[str, list[Any]] = {"features": [{"indices": [0], "values": [1.0]}], "relevant": [["item-0"]], "relevance": [[1.0]]}
    pq.write_table(pa.table(right), bundle.path / "heldout.parquet")
    assert len(read_heldout(bundle).queries) == 1
    pq.write_table(pa.table(right | {column: values}), bundle.path / "heldout.parquet")
    with pytest.raises(BundleCorrupt, match=r"heldout\.parquet: "):
        read_heldout(bundle)
