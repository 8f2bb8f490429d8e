"""Bundles with hand-made rankers: a weighted sum of features, where a missing one counts 0."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
from onnx import TensorProto, helper, numpy_helper

from espalier.bundle import RANKER, Bundle
from espalier.bundle_writer import with_parts
from espalier.manifest import RankerInfo
from espalier.rerank.features import RankFeatures
from espalier.rerank.ranker import GOLDEN_SCORES, golden_scores


def weighted_sum(weights: Mapping[str, float]) -> bytes:
    """ranker.onnx of `weights` by feature."""
    names = ["features", "zero", "w", "last"]
    nodes = [
        helper.make_node("IsNaN", ["features"], ["missing"]),
        helper.make_node("Where", ["missing", "zero", "features"], ["known"]),
        helper.make_node("MatMul", ["known", "w"], ["column"]),
        helper.make_node("Squeeze", ["column", "last"], ["scores"]),
    ]
    constants = [np.zeros((), np.float32), np.array([[w] for w in weights.values()], np.float32), np.array([1])]
    graph = helper.make_graph(
        nodes,
        "ranker",
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["N", len(weights)])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N"])],
        [numpy_helper.from_array(array, name) for array, name in zip(constants, names[1:], strict=True)],
    )
    model: bytes = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8).SerializeToString()
    onnx.checker.check_model(onnx.load_from_string(model))
    return model


def with_ranker(bundle: Bundle, path: Path, info: RankerInfo, ranker_onnx: bytes, golden: pa.Table) -> Bundle:
    """Another version of a bundle, with this ranker and these golden queries."""
    return with_parts(bundle, path, {"ranker": info}, {RANKER: ranker_onnx, "golden.parquet": golden})


def add_ranker(bundle: Bundle, weights: Mapping[str, float], version: int = 2, depth: int = 8, max_depth: int = 16) -> Bundle:
    """The next version of a bundle, with that ranker and what it makes of the golden queries."""
    info = RankerInfo(features=tuple(weights), depth=depth, max_depth=max_depth)
    graph, golden = weighted_sum(weights), bundle.golden()
    scores = golden_scores(bundle, golden, RankFeatures(bundle, info.features), graph)
    golden = golden.drop_columns(GOLDEN_SCORES) if GOLDEN_SCORES in golden.column_names else golden
    path: Path = bundle.path.parent / str(version)
    return with_ranker(bundle, path, info, graph, golden.append_column(pa.field(GOLDEN_SCORES, scores.type), scores))
