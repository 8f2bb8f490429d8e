"""Leaf rows of items by their content alone: fields → features → content.onnx → rows.

Legend: I items, X features of an item, D node row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from espalier.arrays import Float32, Int64
from espalier.bundle import CONTENT, CONTENT_ARRAYS, Bundle
from espalier.content.features import ContentFeatures
from espalier.engines.graphs import read_graph
from espalier.errors import BundleCorrupt
from espalier.text.sparse_rows import SparseRows

BLOCK = 1 << 16
"""Most features of one graph call, padding included; a call has at least one item."""


class ContentRows:
    """Computes leaf rows from items' fields. Raises BundleCorrupt if the bundle has no content graph or it does not fit.

    The constructor runs the graph on every feature once: the graph must know all of them and give finite rows.
    """

    def __init__(self, bundle: Bundle) -> None:
        from espalier.engines.runtime import opened_session  # here, because it loads slowly

        info = bundle.manifest.content
        if info is None:
            raise BundleCorrupt(f"{bundle.path}: it has no {CONTENT}")
        self.features = bundle.load_part(CONTENT_ARRAYS, partial(ContentFeatures, info))
        self.width = bundle.graph_scorer.node_dim
        graph = read_graph(CONTENT, bundle.graph(CONTENT))
        self._graph_file, self._block = bundle.path / CONTENT, max(1, BLOCK // info.entries)
        try:
            self._session = opened_session(graph)
        except Exception as error:  # ONNX Runtime's own classes have no common base
            raise BundleCorrupt(f"{self._graph_file}: ONNX Runtime cannot open it ({error})") from error
        ends = np.minimum(np.arange(0, info.features + info.entries, info.entries), info.features)
        every_feature = SparseRows(ends, np.arange(info.features, dtype=np.int32), np.ones(info.features, np.float32), info.features)
        for start in range(0, len(every_feature), self._block):
            self._run(every_feature.take(np.arange(start, min(start + self._block, len(every_feature)))))

    def of(self, fields: Sequence[Mapping[str, Any]]) -> Float32:
        """float32[I, D]; an item's row does not depend on other items. Raises InvalidQuery for a value of another kind than its column."""
        starts = range(0, len(fields), self._block)
        blocks = [self._run(self.features.of(fields[start : start + self._block])) for start in starts]
        return np.concatenate([np.zeros((0, self.width), np.float32), *blocks])

    def _run(self, features: SparseRows) -> Float32:
        features_IX, values_IX = padded(features, self.features.info.entries)
        try:
            rows: Float32 = self._session.run(None, {"features": features_IX, "values": values_IX})[0]
        except Exception as error:  # ONNX Runtime's own classes have no common base
            raise BundleCorrupt(f"{self._graph_file}: it cannot be run ({error})") from error
        if rows.shape != (len(features_IX), self.width) or rows.dtype != np.float32 or not np.isfinite(rows).all():
            expected = f"finite float32[{len(features_IX)}, {self.width}]"
            raise BundleCorrupt(f"{self._graph_file}: it gives {rows.dtype}{list(rows.shape)}, expected {expected}")
        return rows


def padded(rows: SparseRows, entries: int) -> tuple[Int64, Float32]:
    """The inputs of content.onnx: features int64[I, X] and values float32[I, X] with X = entries, 0 as padding.

    X is always the same: sums over more entries could round differently, and an item's row would then depend on the other items.
    """
    inside = np.arange(entries) < np.diff(rows.indptr)[:, None]
    features_IX, values_IX = np.zeros(inside.shape, np.int64), np.zeros(inside.shape, np.float32)
    features_IX[inside], values_IX[inside] = rows.indices, rows.values
    return features_IX, values_IX
