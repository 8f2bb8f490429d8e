"""Bundles taken apart and put together again with something changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa

from benchmarks.random_bundles import make_bundle, make_linear_bundle, random_memory, random_tree, tree_over
from espalier.bundle import Bundle
from espalier.bundle_files import sha256_of
from espalier.bundle_writer import GraphContent, write_bundle
from espalier.engines.graphs import load_graph
from espalier.engines.reference import ReferenceEngine
from espalier.live import fold
from espalier.manifest import GraphScorer, ManifestDraft, Ranking, ShardInfo
from espalier.queries import HistoryKind, pad_histories
from espalier.search import SearchParams
from espalier.shard_parts import ShardParts
from tests.espalier.second_stages import with_stacking, with_tail
from tests.espalier.test_packed_chunks import stored_in_float16


def content_of(bundle: Bundle, **changed: Any) -> GraphContent:
    """All that a bundle of graphs was written from but its ranker, its golden queries included."""
    content = fold.content_of(bundle)
    assert isinstance(content, GraphContent)
    return replace(content, **{"golden": bundle.golden()} | changed)


def draft_of(bundle: Bundle, **changed: Any) -> ManifestDraft:
    return ManifestDraft(**{name: getattr(bundle.manifest, name) for name in ManifestDraft.model_fields} | changed)


def reseal(path: Path, **changed: Any) -> None:
    """Give the files as they are now their sizes and checksums, so that only their content can be refused."""
    manifest = json.loads((path / "manifest.json").read_text()) | changed
    for name in manifest["files"]:
        manifest["files"][name] = {"sha256": sha256_of(path / name), "size": (path / name).stat().st_size}
    (path / "manifest.json").write_text(json.dumps(manifest))


def read_everything(bundle: Bundle) -> None:
    """Every part of a bundle, each as whoever needs it reads it."""
    _ = bundle.tree, bundle.items, bundle.memory, bundle.shard, bundle.tail, bundle.stacking, bundle.golden(), bundle.heldout()
    if isinstance(bundle.manifest.scorer, GraphScorer):
        _ = bundle.node_rows_ND
        for name in ("query.onnx", "scorer.onnx"):
            load_graph(name, bundle.graph(name))
    else:
        _ = bundle.trees


def with_golden(bundle: Bundle, path: Path, margin: float, **changed: Any) -> Bundle:
    """The bundle with ten golden queries that the reference answered on it, then perhaps other parts."""
    kind = bundle.manifest.query
    assert isinstance(kind, HistoryKind)
    rng = np.random.default_rng(5)
    histories = [rng.integers(0, bundle.tree.item_count, size) for size in range(10)]
    params = SearchParams.uniform(10, 4, 5)
    result = ReferenceEngine(bundle).search(pad_histories(kind, histories), params)
    golden = pa.table(
        {
            "history": pa.array([bundle.items.ids_of(history) for history in histories], pa.list_(pa.string())),
            "beam_size": params.beam_size_B,
            "m": params.m_B,
            "item_rows": result.item_rows_BM.tolist(),
            "ranks": result.ranks_BM.tolist(),
            "margin": np.full(10, margin),
        }
    )
    return write_bundle(path, draft_of(bundle), content_of(bundle, golden=golden, **changed))


def model_with(bundle: Bundle, change: Callable[[onnx.ModelProto], None], part: str = "scorer.onnx") -> bytes:
    model = onnx.load_from_string(bundle.graph(part))
    change(model)
    data: bytes = model.SerializeToString()
    return data


# -- a bundle of each kind ------------------------------------------------------------------------------------------------


def remembering(folder: Path) -> Bundle:
    rng = np.random.default_rng(5)
    tree = random_tree(rng, 3, 3)
    return make_bundle(folder, rng, tree, memory=random_memory(rng, tree.item_count, 4))


def linear(folder: Path, trees: int = 1) -> Bundle:
    rng = np.random.default_rng(2)
    tree = random_tree(rng, 3, 4)
    others = [tree_over(rng, tree.item_count, 3) for _ in range(trees - 1)]
    return make_linear_bundle(folder, rng, tree, Ranking(own="log_activation", gamma=1), others=others)


def shard_info(bundle: Bundle, items: int, nodes: int) -> ShardInfo:
    """The bundle as the first of two shards of a bundle with so many items and nodes."""
    return ShardInfo(of="whole", version=3, digest="a" * 64, index=0, count=2, items=items, nodes=nodes)


def shard(folder: Path) -> Bundle:
    """As if the bundle were all that a shard holds of one with twice as many items and nodes."""
    rng = np.random.default_rng(11)
    whole = make_bundle(folder, rng, random_tree(rng, 3, 3, empty_share=0.2))
    tree = whole.tree
    info = shard_info(whole, 2 * tree.item_count, 2 * tree.node_count)
    parts = ShardParts(np.arange(tree.item_count) * 2, (np.arange(tree.node_count) * 2,))
    draft = draft_of(whole).model_copy(update={"name": "0", "shard": info})
    return write_bundle(folder / "0" / "1", draft, content_of(whole, shard=parts))


MADE: Mapping[str, Callable[[Path], Bundle]] = {
    "graphs": lambda folder: make_bundle(folder, np.random.default_rng(1), random_tree(np.random.default_rng(1), 3, 3, empty_share=0.2)),
    "memory": remembering,
    "shard": shard,
    "linear": linear,
    "float16": stored_in_float16,
    "forest": lambda folder: linear(folder, trees=2),
    "tail": lambda folder: with_tail(folder, 4)[0],
    "stacking": lambda folder: with_stacking(folder, 4)[0],
}
"""Bundles with every part that a bundle may have, but texts and content, whose arrays have tests of their own."""
