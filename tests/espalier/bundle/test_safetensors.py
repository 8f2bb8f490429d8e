"""Arrays are written block by block, as the library writes them whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from safetensors.numpy import save_file

from espalier import bundle_files
from espalier.bundle_files import DTYPES, Gathered, map_safetensors, write_safetensors


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
