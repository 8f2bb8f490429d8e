"""Shards of bundles of graphs: what they hold, what they cannot encode, and which bundles can be cut."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from benchmarks.random_bundles import make_bundle, random_memory, random_tree
from espalier.bundle import SHARD, Bundle
from espalier.bundle_files import sha256_of
from espalier.engines import open_engine
from espalier.errors import BundleCorrupt, InvalidQuery
from espalier.queries import blank_queries
from espalier.search import SearchParams
from espalier.shards.cut import Cut
from tests.espalier.shards.merging import with_states

KINDS = ("history", "product", "vector", "history sequence", "product memory", "product sequence memory")
NUMBER = itertools.count()
shapes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "kind": st.sampled_from(KINDS),
        "gamma": st.sampled_from([0.0, 0.5, 1.0]),
        "empty_share": st.sampled_from([0.0, 0.4]),
        "dtype": st.sampled_from(["float32", "float16", "int8"]),
    }
)


def made(folder: Path, shape: dict[str, Any]) -> Bundle:
    rng = np.random.default_rng(shape["seed"])
    tree = random_tree(rng, 3, 4, empty_share=shape["empty_share"])
    kind: Any
    kind, *parts = shape["kind"].split()
    memory = random_memory(rng, tree.item_count, 3) if "memory" in parts else None
    return make_bundle(
        folder, rng, tree, kind, shape["gamma"], dtype=shape["dtype"], name=f"m{next(NUMBER)}", memory=memory,
        encoder="sequence" if "sequence" in parts else "levels",
    )  # fmt: skip


def cut(bundle: Bundle, count: int) -> list[Bundle]:
    """Into so many shards; at least as many parents of leaves have items."""
    path = bundle.path.parent.parent / f"{bundle.manifest.name}-{count}-shards"
    whole = Cut(bundle, count)
    return [whole.write(path / str(index) / "1", index) for index in range(count)]


def drawn_cut(bundle: Bundle, count: int) -> list[Bundle]:
    """Into as many shards as were drawn, where so many parents of leaves have items."""
    assume(count <= len(np.unique(bundle.tree.parent[bundle.tree.leaf_of_item])))
    return cut(bundle, count)


@given(shapes, st.integers(1, 3))
def test_a_shard_has_the_rows_the_ids_and_the_memory_of_its_items(
    tmp_path_factory: pytest.TempPathFactory, shape: dict[str, Any], count: int
) -> None:
    bundle = made(tmp_path_factory.mktemp("cut"), shape)
    for index, shard in enumerate(drawn_cut(bundle, count)):
        opened = Bundle.open(shard.path)
        parts, info = opened.shard, opened.manifest.shard
        assert parts is not None
        assert info is not None
        assert (info.of, info.version, info.index, info.count) == (bundle.manifest.name, 1, index, count)
        assert info.digest == sha256_of(bundle.path / "manifest.json")
        assert (opened.manifest.name, opened.manifest.search) == (str(index), bundle.manifest.search)
        assert opened.items.ids_of(np.arange(len(parts.items))) == bundle.items.ids_of(parts.items)
        assert_array_equal(opened.items.rows_of(bundle.items.ids_of(parts.items)), np.arange(len(parts.items)))
        (nodes,) = parts.nodes
        assert_array_equal(opened.node_rows_ND, bundle.node_rows_ND[nodes], strict=True)
        assert_array_equal(nodes[opened.tree.parent[1:]], bundle.tree.parent[nodes[1:]])
        assert_array_equal(nodes[opened.tree.leaf_of_item], bundle.tree.leaf_of_item[parts.items])
        assert len(opened.golden()) == len(opened.heldout()) == 0
        if bundle.memory is not None:
            assert opened.memory is not None
            for source in range(bundle.tree.item_count):
                for row, item in enumerate(parts.items.tolist()):
                    assert opened.memory.value_of(source, row) == bundle.memory.value_of(source, item)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("whole")
    return made(folder, {"seed": 5, "kind": "product memory", "gamma": 0.5, "empty_share": 0.0, "dtype": "float32"})


@pytest.mark.parametrize("name", ["reference", "compiled-cpu", "onnx-cpu"])
def test_a_shard_cannot_encode_histories_but_those_without_an_item(whole: Bundle, tmp_path: Path, name: str) -> None:
    engine = open_engine(Cut(whole, 2).write(tmp_path / "0" / "1", 0), engine=name)
    queries, params = blank_queries(whole.manifest.query, 2), SearchParams.uniform(2, 3, 3)
    assert engine.search(queries, params).count_B.tolist() == [3, 3]
    queries.array[1, -1] = 0
    with pytest.raises(InvalidQuery, match=r"states_BLS: got None, expected the queries' states: shard 0 of 2 of m\d+ has not"):
        engine.search(queries, params)
    queries.array[1, -1] = whole.tree.item_count - 1  # a row of the whole bundle, which the shard has not
    with_rows = with_states(whole, queries)
    assert engine.search(with_rows, params).count_B.tolist() == [3, 3]
    queries.array[1, -1] = whole.tree.item_count
    with pytest.raises(InvalidQuery, match="item rows from 0 to"):
        engine.search(with_rows, params)


def test_a_shard_is_not_cut_again_but_the_only_one_of_a_bundle_is(whole: Bundle, tmp_path: Path) -> None:
    with pytest.raises(BundleCorrupt, match="shard 1 of 2, expected a bundle of all items"):
        Cut(Cut(whole, 2).write(tmp_path / "two" / "1" / "1", 1), 2)
    only = Cut(whole, 1).write(tmp_path / "one" / "0" / "1", 0)
    for index in range(2):
        first, second = (Cut(bundle, 2).write(tmp_path / name / str(index) / "1", index) for bundle, name in ((whole, "a"), (only, "b")))
        assert first.manifest.shard == second.manifest.shard
        for name in ("items.arrow", "memory.safetensors", "nodes.safetensors", "tree.safetensors", SHARD):
            assert first.manifest.files[name] == second.manifest.files[name]
