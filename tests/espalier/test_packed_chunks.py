"""Node rows and linear scorers as they are stored: int8 with exponents, float16 in less than half of the bytes. Nothing is rounded twice,
and what is stored is what every engine searches.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from safetensors.numpy import load_file

from benchmarks.random_bundles import make_bundle, make_linear_bundle, random_chunks, random_queries, random_tree, sparse_rows, tree_over
from espalier.bundle import Bundle
from espalier.bundle_files import write_safetensors
from espalier.chunks import ARRAYS, Chunks, TreeChunks
from espalier.engines import open_engine
from espalier.engines.linear import feature_tables
from espalier.engines.linear.beam import BLOCK
from espalier.engines.reference import ReferenceEngine
from espalier.engines.triton.chunk_tiles import ChunkTiles, TileSizes, laid_out
from espalier.errors import BundleCorrupt
from espalier.manifest import Ranking
from espalier.node_rows import HIGHEST, LARGEST_CODE, LOWEST, PackedRows, stored_as, width_of
from espalier.node_rows import rounded as rounded_rows
from espalier.packed_chunks import packed, rounded, unpacked, widened
from espalier.queries import QueryBatch
from espalier.search import SearchParams
from espalier.text.sparse_rows import SparseRows
from espalier.tree import tree_from_children
from tests.espalier.second_stages import rewritten
from tests.espalier.test_signature import assert_same

HINGE = Ranking(activation="l3-hinge", own="log_activation", gamma=0.5)


def in_float16(chunks: Chunks) -> Chunks:
    found = rounded(chunks)
    assert found is not None
    return found


def stored_in_float16(folder: Path, others: int = 0, integer: bool = False, branching: int = 4) -> Bundle:
    rng = np.random.default_rng(3)
    tree = random_tree(rng, 2, branching, empty_share=0.1)
    more = [tree_over(rng, tree.item_count, 3) for _ in range(others)]
    plain = make_linear_bundle(folder, rng, tree, HINGE, integer, others=more)
    return rewritten(plain, folder / "linear" / "2", [TreeChunks(own, in_float16(chunks)) for own, chunks in plain.trees])


@given(seed=st.integers(0, 2**32 - 1), shape=st.sampled_from([(2, 4), (3, 3), (300, 1)]), width=st.sampled_from([1, 30, 700]))
def test_packed_scorers_are_unpacked_as_they_were(seed: int, shape: tuple[int, int], width: int) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, shape[1], shape[0])
    chunks = in_float16(random_chunks(rng, tree, width, integer=False))
    again = unpacked(packed(chunks), width)
    again.check(tree)
    for name in ARRAYS:
        assert_array_equal(getattr(again, name), getattr(chunks, name))
        assert getattr(again, name).dtype == getattr(chunks, name).dtype


def test_every_array_has_the_narrowest_type_that_holds_it() -> None:
    for branching, dtype in ((256, np.uint8), (257, np.uint16)):
        tree = tree_from_children([[branching]], np.arange(branching))
        children = np.arange(branching, dtype=np.uint16)
        weights = np.ones(2 * branching, np.float32)
        entries = np.array([0, branching, 2 * branching])
        chunks = Chunks(np.array([0, 2]), np.array([3, 70_003], np.int32), entries, np.tile(children, 2), weights,
                        np.zeros(tree.node_count, np.float32), 80_000)  # fmt: skip
        arrays = packed(in_float16(chunks))
        assert arrays["entry_child"].dtype == dtype
        assert arrays["row_gap"].dtype == np.int32
        assert arrays["row_count"].dtype == np.uint16
        unpacked(arrays, 80_000).check(tree)


@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize("tables", ["by feature", "by node", "hashed"])
def test_engines_answer_with_the_stored_weights(tmp_path: Path, others: int, tables: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole weights are exact in float16, so that the engines must agree exactly."""
    if tables != "by feature":
        monkeypatch.setattr(feature_tables, "DIRECT_BYTES", 0)
    if tables == "hashed":
        monkeypatch.setattr(feature_tables, "DIRECT_SLOTS", 0)
    bundle = stored_in_float16(tmp_path, others, integer=True, branching=12)
    queries = random_queries(np.random.default_rng(1), bundle, 30)
    for beam in (1, 5, 200):
        params = SearchParams.uniform(30, beam, 20)
        assert_same(open_engine(bundle, "cpu").search(queries, params), ReferenceEngine(bundle).search(queries, params))


@pytest.mark.parametrize("slots", [0, feature_tables.DIRECT_SLOTS])
def test_queries_of_more_features_than_are_looked_up_at_a_time_are_answered(
    tmp_path: Path, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_tables, "DIRECT_BYTES", 0)
    monkeypatch.setattr(feature_tables, "DIRECT_SLOTS", slots)
    rng = np.random.default_rng(5)
    bundle = make_linear_bundle(tmp_path, rng, random_tree(rng, 3, 4), HINGE, width=600)
    rows = np.diff(bundle.chunks.chunk_row)
    for features in (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 3, 200):
        assert (rows >= features).any(), "else a node's rows are looked up in the query"
        indices = np.sort(rng.permutation(600)[:features]).astype(np.int32)
        values = rng.integers(1, 3, features).astype(np.float32)
        queries = QueryBatch(bundle.manifest.query, SparseRows(np.array([0, features]), indices, values, 600))
        params = SearchParams.uniform(1, 5, 20)
        assert_same(open_engine(bundle, "cpu").search(queries, params), ReferenceEngine(bundle).search(queries, params))


def test_a_gpu_gets_the_same_tiles_of_stored_as_of_widened_weights() -> None:
    rng = np.random.default_rng(4)
    tree = random_tree(rng, 2, 9)
    narrow = in_float16(random_chunks(rng, tree, 30, integer=False))
    wide = widened(narrow)
    (tiles, stored), (others, expected) = (next(iter(laid_out(tree, own, TileSizes.of(tree, own)))) for own in (narrow, wide))
    assert tiles == others
    for name in ChunkTiles._fields:
        assert_array_equal(getattr(stored, name), getattr(expected, name))


def test_a_bundle_of_float32_is_written_as_before_and_twice_as_large(tmp_path: Path) -> None:
    narrow = stored_in_float16(tmp_path)
    wide = Bundle.open(tmp_path / "linear" / "1")
    assert narrow.manifest.scorer.model_dump()["dtype"] == "float16"
    assert "dtype" not in wide.manifest.scorer.model_dump()
    assert set(load_file(wide.path / "chunks.safetensors")) == set(ARRAYS)
    assert 2 * sum(array.nbytes for array in packed(narrow.chunks).values()) < wide.chunks.nbytes
    assert_array_equal(narrow.chunks.entry_weight, wide.chunks.entry_weight.astype(np.float16))
    assert widened(narrow.chunks).entry_weight.dtype == np.float32
    assert widened(wide.chunks) is wide.chunks


def test_weights_that_float16_cannot_hold_stay_float32() -> None:
    rng = np.random.default_rng(2)
    chunks = random_chunks(rng, random_tree(rng, 2, 3), 20, integer=False)
    for factor in (1e6, 1e-7):
        assert rounded(replace(chunks, entry_weight=chunks.entry_weight * np.float32(factor))) is None
    assert rounded(chunks) is not None


def test_scorers_are_rounded_alike_in_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    tree = random_tree(rng, 3, 3)
    chunks = random_chunks(rng, tree, 20, integer=False)
    first_lost = chunks.entry_weight.copy()
    first_lost[: len(first_lost) // 2] *= np.float32(1e6)
    rows = sparse_rows(rng.normal(size=(12, 30)) * (rng.random((12, 30)) < 0.05))
    assert 0 in np.diff(rows.indptr), "some rows are empty"
    whole, unit = rounded(chunks), rows.normalised().values
    monkeypatch.setattr("espalier.stored_arrays.BLOCK", 3)
    monkeypatch.setattr("espalier.packed_chunks.BLOCK", 3)
    in_blocks = rounded(chunks)
    assert whole is not None
    assert in_blocks is not None
    assert_array_equal(in_blocks.entry_weight, whole.entry_weight)
    assert_array_equal(rows.normalised().values, unit)
    small = np.full(9, 1e-7, np.float32)
    small[-3:] = 1
    for order in (slice(None), slice(None, None, -1)):
        tiny = replace(chunks, entry_weight=np.concatenate([small[order], np.zeros(len(chunks.entry_weight) - 9, np.float32)]))
        assert rounded(tiny) is not None, "next to nothing of the sum is lost, in whichever block"
    with np.errstate(over="ignore"):
        assert rounded(replace(chunks, entry_weight=first_lost)) is None


# -- node rows ----------------------------------------------------------------------------------------------------------


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
    packed, all_ND = PackedRows(stored_as(rows_ND, "int8")), rounded_rows(rows_ND, "int8")
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
