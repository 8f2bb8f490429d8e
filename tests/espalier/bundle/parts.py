"""Bundles taken apart and put together again with something changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa

from espalier.bundle import Bundle
from espalier.bundle_files import sha256_of
from espalier.bundle_writer import GraphContent, write_bundle
from espalier.engines.onnx.graphs import load_graph
from espalier.engines.reference import ReferenceEngine
from espalier.manifest import ManifestDraft
from espalier.queries import HistoryKind, pad_histories
from espalier.search import SearchParams


def content_of(bundle: Bundle, **changed: Any) -> GraphContent:
    scorer = bundle.graph_scorer
    parts: dict[str, Any] = {
        "tree": bundle.tree,
        "node_rows_ND": np.array(bundle.node_rows_ND),
        "state_levels": scorer.state_levels,
        "state_dim": scorer.state_dim,
        "query_onnx": bundle.graph("query.onnx"),
        "scorer_onnx": bundle.graph("scorer.onnx"),
        "items": bundle.items,
        "golden": bundle.golden(),
        "heldout": bundle.heldout(),
        "form": scorer.form,
        "memory": bundle.memory,
        "encoder": scorer.encoder,
    }
    return GraphContent(**(parts | changed))


def draft_of(bundle: Bundle) -> ManifestDraft:
    return ManifestDraft(**{name: getattr(bundle.manifest, name) for name in ManifestDraft.model_fields})


def reseal(path: Path, **changed: Any) -> None:
    """Give the files as they are now their sizes and checksums, so that only their content can be refused."""
    manifest = json.loads((path / "manifest.json").read_text()) | changed
    for name in manifest["files"]:
        manifest["files"][name] = {"sha256": sha256_of(path / name), "size": (path / name).stat().st_size}
    (path / "manifest.json").write_text(json.dumps(manifest))


def read_everything(bundle: Bundle) -> None:
    _ = bundle.tree, bundle.node_rows_ND, bundle.items, bundle.golden(), bundle.heldout()
    for name in ("query.onnx", "scorer.onnx"):
        load_graph(name, bundle.graph(name))


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
