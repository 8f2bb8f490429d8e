"""The trained scorers of inner nodes: one node's, a level's on disk, all of them as the chunks of a model."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.chunks import Chunks
from espalier.errors import InvalidConfig
from espalier.tree import Tree
from training.linear.node_centroids import Centroids
from training.specification.linear import LinearOptions


@dataclass(frozen=True, eq=False)
class NodeScorers:
    """The scorers of one inner node's children. `row_entry` counts from 0; the other arrays are as in Chunks."""

    row_feature: NDArray[np.int32]
    row_entry: NDArray[np.int64]
    entry_child: NDArray[np.uint16]
    entry_weight: NDArray[np.float32]
    bias: NDArray[np.float32]


ARRAYS = tuple(field.name for field in fields(NodeScorers))


def centroid_scorers(centroids: Centroids, children: slice, options: LinearOptions) -> NodeScorers:
    """Scorers that are not trained: β times the children's centroids.

    centroids  of the children's level
    children   which of its nodes they are

    The threshold applies before rows are normalised: a large node's row has many features, each of a small value after normalising.
    """
    rows = centroids.rows[children]
    child = np.repeat(np.arange(rows.shape[0]), np.diff(rows.indptr))
    features, weights = rows.indices.astype(np.int32, copy=False), np.float32(options.prior) * rows.data
    large = np.abs(weights) * centroids.length_N[children][child] >= options.threshold
    order = np.lexsort((child[large], features[large]))
    features = features[large][order]
    first = np.flatnonzero(np.diff(features, prepend=-1))
    return NodeScorers(
        row_feature=features[first],
        row_entry=np.append(first, len(features)),
        entry_child=child[large][order].astype(np.uint16),
        entry_weight=weights[large][order],
        bias=np.full(rows.shape[0], -options.prior / 2 * (options.bias > 0), np.float32),
    )


def joined(scorers: Sequence[NodeScorers], tree: Tree, width: int) -> Chunks:
    """The scorers of the first inner nodes, in their order, as chunks of the whole tree; the other nodes' chunks are empty."""
    rows = np.zeros(tree.leaf_offset, np.int64)
    rows[: len(scorers)] = [len(node.row_feature) for node in scorers]
    entries = np.cumsum([0, *(len(node.entry_child) for node in scorers)])
    bias = np.zeros(tree.node_count, np.float32)
    for p, node in enumerate(scorers):
        bias[tree.first_child[p] : tree.first_child[p + 1]] = node.bias

    def concatenated(arrays: list[NDArray[Any]], dtype: type) -> NDArray[Any]:
        return np.concatenate([*arrays, np.empty(0, dtype)])

    row_entry = concatenated([node.row_entry[:-1] + begin for node, begin in zip(scorers, entries, strict=False)], np.int64)
    return Chunks(
        chunk_row=np.concatenate([[0], np.cumsum(rows)]),
        row_feature=concatenated([node.row_feature for node in scorers], np.int32),
        row_entry=np.append(row_entry, entries[-1]),
        entry_child=concatenated([node.entry_child for node in scorers], np.uint16),
        entry_weight=concatenated([node.entry_weight for node in scorers], np.float32),
        bias=bias,
        width=width,
    )


def write_level(file: Path, scorers: Sequence[NodeScorers]) -> None:
    """Write a level's scorers, all or nothing."""
    arrays = {f"{p}.{name}": getattr(node, name) for p, node in enumerate(scorers) for name in ARRAYS}
    unfinished = file.with_suffix(".part")
    with unfinished.open("wb") as stream:
        np.savez(stream, **arrays)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.replace(file)


def read_level(file: Path) -> list[NodeScorers]:
    """What `write_level` wrote. Raises InvalidConfig."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            count = len(arrays.files) // len(ARRAYS)
            return [NodeScorers(*(arrays[f"{p}.{name}"] for name in ARRAYS)) for p in range(count)]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise InvalidConfig("--resume", str(file), f"a readable level ({error}); delete its folder to start anew") from error
