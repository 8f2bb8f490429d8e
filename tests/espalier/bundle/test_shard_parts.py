"""shard.safetensors and the manifest's `shard`: what they must say, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from espalier import shard_parts
from espalier.bundle import SHARD, Bundle
from espalier.bundle_files import map_safetensors
from espalier.bundle_writer import write_bundle
from espalier.errors import BundleCorrupt, BundleNotFound
from espalier.manifest import ManifestDraft, ShardInfo
from espalier.shard_parts import ShardParts
from tests.espalier.bundle.parts import content_of, draft_of, reseal


def info_of(bundle: Bundle, **changed: Any) -> ShardInfo:
    tree = bundle.tree
    fields: dict[str, Any] = {
        "of": "whole",
        "version": 3,
        "digest": "a" * 64,
        "index": 0,
        "count": 2,
        "items": tree.item_count,
        "nodes": tree.node_count,
    }
    return ShardInfo(**(fields | changed))


def parts_of(bundle: Bundle, **changed: Any) -> ShardParts:
    items, nodes = np.arange(bundle.tree.item_count), np.arange(bundle.tree.node_count)
    arrays: dict[str, Any] = {"items": items, "nodes": (nodes,)}
    return ShardParts(**(arrays | changed))


def draft_with(bundle: Bundle, info: ShardInfo | None) -> ManifestDraft:
    return draft_of(bundle).model_copy(update={"name": "0", "shard": info})


@pytest.fixture(scope="module")
def shard(original: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """As if the bundle were all that a shard holds of one with twice as many items and nodes."""
    tree = original.tree
    info = info_of(original, items=2 * tree.item_count, nodes=2 * tree.node_count)
    parts = ShardParts(np.arange(tree.item_count) * 2, (np.arange(tree.node_count) * 2,))
    path = tmp_path_factory.mktemp("shards") / "0" / "1"
    return write_bundle(path, draft_with(original, info), content_of(original, shard=parts))


@pytest.fixture
def damaged(shard: Bundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shard.path, tmp_path / "0" / "1"))


def test_a_shard_says_of_which_bundle_it_holds_which_items_and_nodes(shard: Bundle) -> None:
    opened = Bundle.open(shard.path)
    assert opened.shard is not None
    assert opened.manifest.shard is not None
    assert opened.shard.items.tolist() == [2 * i for i in range(opened.tree.item_count)]
    assert [nodes.tolist() for nodes in opened.shard.nodes] == [[2 * n for n in range(opened.tree.node_count)]]
    assert (opened.manifest.shard.of, opened.manifest.shard.index, opened.manifest.shard.count) == ("whole", 0, 2)
    assert opened.manifest.history_items == 2 * opened.tree.item_count


def test_a_whole_bundle_has_no_shard_and_its_manifest_does_not_mention_one(original: Bundle) -> None:
    assert original.shard is None
    assert original.manifest.history_items == original.tree.item_count
    assert "shard" not in json.loads((original.path / "manifest.json").read_text())


def test_a_shard_without_its_file_is_refused(damaged: Path) -> None:
    (damaged / SHARD).unlink()
    with pytest.raises(BundleNotFound, match=r"shard\.safetensors: missing"):
        Bundle.open(damaged)


def wrong_arrays() -> dict[str, Any]:
    return {
        "arrays \\['items'\\], expected": lambda a: {"items": a["items"]},
        "arrays .*nodes-2": lambda a: {**a, "nodes-2": a["nodes"]},
        "items: int32": lambda a: {**a, "items": a["items"].astype(np.int32)},
        "items: int64\\[2, .*expected int64": lambda a: {**a, "items": np.stack([a["items"]] * 2)},
        "items: int64.*expected int64": lambda a: {**a, "items": a["items"][1:]},
        "items: expected ascending": lambda a: {**a, "items": a["items"][::-1]},
        "nodes: expected ascending": lambda a: {**a, "nodes": np.where(np.arange(len(a["nodes"])) == 5, 8, a["nodes"])},
        "items: from -1": lambda a: {**a, "items": a["items"] - 1},
        "items: from .* expected numbers from 0 to": lambda a: {**a, "items": a["items"] + 2},
        "nodes: begins with node 1, expected the root": lambda a: {**a, "nodes": a["nodes"] + 1},
        "nodes: from .* expected numbers from 0 to": lambda a: {**a, "nodes": a["nodes"] + np.append(0, np.full(len(a["nodes"]) - 1, 2))},
    }


@pytest.mark.parametrize("block", [1, 3, 1 << 20])
@pytest.mark.parametrize("reason", wrong_arrays())
def test_items_and_nodes_that_do_not_fit_the_manifest_are_refused_with_the_reason(
    damaged: Path, monkeypatch: pytest.MonkeyPatch, reason: str, block: int
) -> None:
    monkeypatch.setattr(shard_parts, "BLOCK", block)
    arrays = {name: np.array(array) for name, array in map_safetensors(damaged / SHARD).items()}
    save_file({name: np.ascontiguousarray(array) for name, array in wrong_arrays()[reason](arrays).items()}, damaged / SHARD)
    reseal(damaged)
    with pytest.raises(BundleCorrupt, match=f"shard.safetensors: {reason}"):
        _ = Bundle.open(damaged).shard


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"index": 2}, "index: expected 0 to 1, got 2"),
        ({"index": -1}, "index"),
        ({"count": 0}, "count"),
        ({"count": 5000}, "count"),
        ({"digest": "A" * 64}, "digest"),
        ({"of": "no/name"}, "of"),
        ({"items": 1}, "cannot be part of"),
        ({"nodes": 2}, "cannot be part of"),
        ({"more": 1}, "more"),
    ],
)
def test_a_shard_of_numbers_that_cannot_be_is_refused(damaged: Path, change: dict[str, Any], reason: str) -> None:
    shard = json.loads((damaged / "manifest.json").read_text())["shard"]
    reseal(damaged, shard=shard | change)
    with pytest.raises(BundleCorrupt, match=reason):
        Bundle.open(damaged)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"live": {"through": 3}}, "a shard has no live"),
        ({"ranker": {"features": ["retrieval.rank"], "depth": 1, "max_depth": 1}}, "a shard has no ranker"),
    ],
)
def test_what_belongs_to_the_whole_bundle_is_refused_in_a_shard(damaged: Path, change: dict[str, Any], reason: str) -> None:
    reseal(damaged, **change)
    with pytest.raises(BundleCorrupt, match=reason):
        Bundle.open(damaged)


def test_a_bundle_is_written_as_a_shard_with_both_of_its_parts_or_with_neither(original: Bundle, tmp_path: Path) -> None:
    whole, shard = draft_with(original, None), draft_with(original, info_of(original))
    for draft, parts in ((whole, parts_of(original)), (shard, None)):
        with pytest.raises(BundleCorrupt, match="shard: expected both an entry of the manifest and the items and nodes, or neither"):
            write_bundle(tmp_path / "0" / "1", draft, content_of(original, shard=parts))
    wrong = parts_of(original, items=np.zeros(original.tree.item_count, np.int64))
    with pytest.raises(BundleCorrupt, match="items: expected ascending"):
        write_bundle(tmp_path / "0" / "1", shard, content_of(original, shard=wrong))
    assert not (tmp_path / "0" / "1").exists()
