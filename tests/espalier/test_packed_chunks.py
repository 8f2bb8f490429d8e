"""Linear scorers in float16: what is stored is what every engine searches, in less than half of the bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from safetensors.numpy import load_file

from benchmarks.random_bundles import make_linear_bundle, random_chunks, random_queries, random_tree, tree_over
from espalier.bundle import Bundle
from espalier.bundle_writer import LinearContent, write_bundle
from espalier.chunks import ARRAYS, Chunks, TreeChunks
from espalier.engines import open_engine
from espalier.engines.linear import feature_tables
from espalier.engines.reference import ReferenceEngine
from espalier.engines.triton.chunk_tiles import ChunkTiles, TileSizes, laid_out
from espalier.manifest import ManifestDraft, Ranking
from espalier.packed_chunks import packed, rounded, unpacked, widened
from espalier.search import SearchParams
from espalier.tree import tree_from_children
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
    draft = ManifestDraft(**{name: getattr(plain.manifest, name) for name in ManifestDraft.model_fields})
    first, *rest = [TreeChunks(own, in_float16(chunks)) for own, chunks in plain.trees]
    content = LinearContent(*first, plain.items, plain.golden(), plain.heldout(), others=rest)
    return write_bundle(folder / "linear" / "2", draft, content)


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
