"""The trained scorers of one inner node, of a level (in memory or as maps of a file), and of all levels as the chunks of a model.

Legend: P inner nodes of a level, R rows of them, N nodes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from espalier.arrays import Array, Float32, Int32, Int64
from espalier.bundle_files import map_safetensors, write_safetensors
from espalier.chunks import Chunks
from espalier.durable import atomic_write
from espalier.errors import BundleCorrupt, InvalidConfig
from espalier.tree import Tree

from ..linear.node_centroids import Centroids
from ..specification.linear import LinearOptions


@dataclass(frozen=True, eq=False)
class NodeScorers:
    """The scorers of one inner node's children: rows of features with how many entries each has; the other fields are as in Chunks."""

    row_feature: Int32
    row_count: Int32
    entry_child: NDArray[np.uint16]
    entry_weight: Float32
    bias: Float32


DTYPES: Mapping[str, type[np.generic]] = {
    "row_feature": np.int32,
    "row_count": np.int32,
    "entry_child": np.uint16,
    "entry_weight": np.float32,
    "bias": np.float32,
}
"""Of the arrays of NodeScorers."""


@dataclass(frozen=True, eq=False)
class LevelScorers(NodeScorers):
    """The scorers of all nodes of a level, one after another; maybe maps of a file. node_rows: int64[P], the number of rows of each."""

    node_rows: Int64

    @staticmethod
    def of(nodes: Iterable[NodeScorers]) -> LevelScorers:
        """The scorers of a level's nodes, in their order."""
        arrays_of: dict[str, list[Array]] = {field.name: [] for field in fields(NodeScorers)}
        for node in nodes:
            for name, values in arrays_of.items():
                values.append(getattr(node, name))
        node_rows = np.array([len(rows) for rows in arrays_of["row_feature"]], np.int64)
        level = {name: np.concatenate(arrays_of.pop(name)) for name in list(arrays_of)}  # popped: only one array at a time is held twice
        return LevelScorers(**level, node_rows=node_rows)


def centroid_scorers(centroids: Centroids, children: slice, options: LinearOptions) -> NodeScorers:
    """Scorers that are not trained: β times the children's centroids.

    centroids  of the children's level
    children   their positions on that level
    The threshold applies before rows are normalised: a large node's row has many features, each of a small value after normalising.
    """
    rows = centroids.of(children)
    child = np.repeat(np.arange(rows.shape[0]), np.diff(rows.indptr))
    features, weights = rows.indices.astype(np.int32, copy=False), np.float32(options.prior) * rows.data
    large = np.abs(weights) * centroids.divisor_N[children][child] >= options.threshold
    order = np.lexsort((child[large], features[large]))
    features = features[large][order]
    first = np.flatnonzero(np.diff(features, prepend=-1))
    return NodeScorers(
        row_feature=features[first],
        row_count=np.diff(first, append=len(features)).astype(np.int32),
        entry_child=child[large][order].astype(np.uint16),
        entry_weight=weights[large][order],
        bias=np.full(rows.shape[0], -options.prior / 2 * (options.bias > 0), np.float32),
    )


def as_chunks(levels: Sequence[LevelScorers], tree: Tree, width: int, work: Path | None = None) -> Chunks:
    """The scorers of the first levels as chunks of the whole tree; the other nodes' chunks are empty.

    work  a folder for nameless files of which the largest arrays are maps; None: they are in memory
    """

    def room(name: str, size: int, dtype: type[np.generic]) -> Array:
        if work is None or not size:
            return np.empty(size, dtype)
        with tempfile.TemporaryFile(dir=work) as file:  # it lasts as long as its map
            os.posix_fallocate(file.fileno(), 0, size * np.dtype(dtype).itemsize)  # else a full disk would kill the process
            return np.asarray(np.memmap(file, dtype, "r+", shape=size))

    def concatenated(name: str, dtype: type[np.generic]) -> Array:
        arrays = [getattr(level, name) for level in levels]
        return np.concatenate([*arrays, np.empty(0, dtype)], out=room(name, sum(map(len, arrays)), dtype))

    node_rows, bias = concatenated("node_rows", np.int64), concatenated("bias", np.float32)
    chunk_row, row_entry = np.zeros(tree.leaf_offset + 1, np.int64), room("row_entry", int(node_rows.sum()) + 1, np.int64)
    row_entry[0] = 0
    chunk_row[1 : len(node_rows) + 1] = np.cumsum(node_rows)
    chunk_row[len(node_rows) + 1 :] = node_rows.sum()
    np.cumsum(concatenated("row_count", np.int32), dtype=np.int64, out=row_entry[1:])
    return Chunks(
        chunk_row=chunk_row,
        row_feature=concatenated("row_feature", np.int32),
        row_entry=row_entry,
        entry_child=concatenated("entry_child", np.uint16),
        entry_weight=concatenated("entry_weight", np.float32),
        bias=np.concatenate([[np.float32(0)], bias, np.zeros(tree.node_count - 1 - len(bias), np.float32)]),
        width=width,
    )


def write_level(file: Path, nodes: Iterable[NodeScorers]) -> None:
    """Write the scorers of a level's nodes, in their order, all or nothing. Memory holds one node at a time."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.stem}-")))
        streams = {field.name: stack.enter_context((folder / field.name).open("wb")) for field in fields(NodeScorers)}
        rows_of_node = []
        for node in nodes:
            for name, stream in streams.items():
                stream.write(np.ascontiguousarray(getattr(node, name), DTYPES[name]).data)
            rows_of_node.append(len(node.row_feature))
        for stream in streams.values():
            stream.flush()
        level = {name: _mapped(folder / name, dtype) for name, dtype in DTYPES.items()}
        with atomic_write(file) as part:
            write_safetensors(part, level | {"node_rows": np.array(rows_of_node, np.int64)})


def _mapped(file: Path, dtype: type[np.generic]) -> Array:
    """The numbers in a file, as a map of it."""
    return np.asarray(np.memmap(file, dtype, "r")) if file.stat().st_size else np.empty(0, dtype)


def read_level(file: Path) -> LevelScorers:
    """The scorers in a file of `write_level`, as maps of it. Raises InvalidConfig."""
    try:
        return LevelScorers(**map_safetensors(file))
    except (BundleCorrupt, TypeError) as error:
        raise InvalidConfig("--resume", str(file), f"a readable level ({error}); delete its folder to start anew") from error
