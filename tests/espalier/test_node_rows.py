"""Node rows as they are stored: what int8 with exponents holds, that nothing is rounded twice, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from benchmarks.random_bundles import make_bundle, random_tree
from espalier.bundle import Bundle
from espalier.bundle_files import write_safetensors
from espalier.errors import BundleCorrupt
from espalier.node_rows import HIGHEST, LARGEST_CODE, LOWEST, PackedRows, rounded, stored_as, width_of


@given(st.integers(0, 2**32 - 1), st.integers(-30, 8))
def test_int8_is_off_by_half_a_step_at_most_and_rounds_to_itself(seed: int, size: int) -> None:
    rows_ND = np.ldexp(np.random.default_rng(seed).normal(size=(7, 5)), size).astype(np.float32)
    stored_NE = stored_as(rows_ND, "int8")
    found_ND = np.asarray(PackedRows(stored_NE), np.float32)
    step_N = 2.0 ** np.maximum(np.ceil(np.log2(np.abs(rows_ND).max(1) / LARGEST_CODE)), LOWEST)
    assert np.all(np.abs(found_ND - rows_ND) <= step_N[:, None] / 2)
    assert_array_equal(np.asarray(PackedRows(stored_as(found_ND, "int8")), np.float32), found_ND)
    assert_array_equal(found_ND.astype(np.float16).astype(np.float32), found_ND)


def test_the_largest_code_and_the_exponents_at_both_ends() -> None:
    largest = LARGEST_CODE * 2.0**HIGHEST
    rows_ND = np.array([[largest, 0], [127, -127], [127.001, 0], [2.0**LOWEST, -(2.0**LOWEST) / 3], [0, 0]])
    stored_NE = stored_as(rows_ND, "int8")
    assert stored_NE.tolist() == [[127, 0, HIGHEST], [127, -127, 0], [64, 0, 1], [1, 0, LOWEST], [0, 0, 0]]
    assert (width_of(stored_NE), width_of(rows_ND)) == (2, 2)


@pytest.mark.parametrize(("dtype", "too_large"), [("int8", LARGEST_CODE * 2.0**HIGHEST * 1.001), ("float16", 65_520.0), ("int8", np.nan)])
def test_what_cannot_be_held_is_refused(dtype: str, too_large: float) -> None:
    with pytest.raises(FloatingPointError, match=f"node rows are not finite in {dtype}"):
        stored_as(np.array([[0, too_large]]), dtype)


def test_rows_are_read_by_any_index() -> None:
    rows_ND = np.random.default_rng(1).normal(size=(9, 4)).astype(np.float32)
    packed, all_ND = PackedRows(stored_as(rows_ND, "int8")), rounded(rows_ND, "int8")
    assert (packed.shape, len(packed), str(packed.dtype)) == ((9, 4), 9, "float16")
    for nodes in (3, slice(2, 5), np.array([8, 0, 8]), np.array([[1, 2], [3, 4]]), slice(0, 0)):
        assert_array_equal(packed[nodes], all_ND[nodes])
    with pytest.raises(IndexError, match="by nodes alone"):
        _ = packed[3, :-1]


def test_every_code_of_every_exponent_is_a_float16() -> None:
    codes, exponents = np.meshgrid(np.arange(-128, 128), np.arange(LOWEST, HIGHEST + 1))
    found_ND = PackedRows(np.stack([codes.ravel(), exponents.ravel()], 1).astype(np.int8))[:]
    assert_array_equal(found_ND[:, 0].astype(np.float64), (codes * 2.0**exponents).ravel())


@pytest.mark.parametrize("exponent", [LOWEST - 1, HIGHEST + 1])
def test_an_exponent_that_float16_does_not_hold_is_a_damaged_bundle(tmp_path: Path, exponent: int) -> None:
    rng = np.random.default_rng(1)
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 2, 3), dtype="int8")
    stored = np.array(bundle.stored_rows)
    for changed, is_right in ((min(max(exponent, LOWEST), HIGHEST), True), (exponent, False)):
        stored[-1, -1] = changed
        write_safetensors(bundle.path / "nodes.safetensors", {"node_rows": stored})
        opened = Bundle(bundle.path, bundle.manifest)
        if is_right:
            assert opened.stored_rows[-1, -1] == changed
        else:
            with pytest.raises(BundleCorrupt, match=r"nodes\.safetensors: node_rows: expected exponents from -24 to 8"):
                _ = opened.stored_rows
