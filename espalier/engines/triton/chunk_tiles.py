"""Linear node scorers as a GPU searches them: for each inner node and each 32 of its children, a table from feature to weights.

The rows of such a tile lie bucket by bucket of a hash of their features, two to a bucket in the mean, one after the other: a look-up reads
where a bucket begins, then its few keys, and no place is empty. A row is the bits of the children that have a weight, and where their
weights begin. A tile takes 40 bytes, a row 14 and a weight 4 (in 16 bits 2), where a bundle's file takes 12 for a row and 6 for a weight:
together less than the file but for tiles of few rows, and for nodes of more than 32 children at most three times its size, as each tile
has a row of its own.

Legend: P inner nodes, N nodes, T tiles, U buckets and ends, R rows of tiles, W weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from espalier.chunks import Chunks
from espalier.tree import Tree

TILE = 32
"""Children that the bits of a row can tell of."""
PER_BUCKET = 2
BLOCK = 1 << 24
"""Weights that are laid out at a time."""
Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class TileSizes:
    """Where each tile's parts begin; counted before anything is laid out, so that memory can be asked for.

    first_tile   of each level 0 … H − 1; its nodes have per_node[h] tiles each
    unit_from    int64[T + 1]: among first_key_U · row_from int64[T + 1] · weight_from int64[T + 1]
    """

    first_tile: tuple[int, ...]
    per_node: tuple[int, ...]
    unit_from: NDArray[np.int64]
    row_from: NDArray[np.int64]
    weight_from: NDArray[np.int64]

    @staticmethod
    def of(tree: Tree, chunks: Chunks) -> TileSizes:
        per_node = tuple(-(-children // TILE) for children in tree.max_children)
        first_tile = np.concatenate([[0], np.cumsum([tree.level_size(h) * per_node[h] for h in range(tree.height)])])
        rows, weights = np.zeros((2, first_tile[-1]), np.int64)
        _count(_tile_of_node(tree, per_node, first_tile), *_arrays(chunks), rows, weights)
        parts = [np.concatenate([[0], np.cumsum(part)]) for part in (np.maximum(1, -(-rows // PER_BUCKET)) + 1, rows, weights)]
        return TileSizes(tuple(first_tile[:-1].tolist()), per_node, *parts)

    def nbytes(self, weight_bytes: int) -> int:
        """Of all arrays of ChunkTiles but the bias."""
        return 32 * (len(self.row_from) - 1) + int(4 * self.unit_from[-1] + 12 * self.row_from[-1] + weight_bytes * self.weight_from[-1])


@dataclass(frozen=True, eq=False)
class ChunkTiles:
    """Some tiles in a row, as they lie on a device.

    tiles_T4     int64[T, 4]: where a tile's parts begin in all of first_key_U, rows and weights; its buckets + 2^32 · keys of the longest
    first_key_U  int32[U]: for each bucket of a tile, and after them, where its keys begin among the tile's rows
    keys_R       int32[R]: the rows' features
    places_R2    int32[R, 2]: the bits of the children that have a weight, and where the weights begin among the tile's
    weights_W    float32[W]
    """

    tiles_T4: NDArray[np.int64]
    first_key_U: NDArray[np.int32]
    keys_R: NDArray[np.int32]
    places_R2: NDArray[np.int32]
    weights_W: NDArray[np.float32]


def laid_out(tree: Tree, chunks: Chunks, sizes: TileSizes) -> Iterator[tuple[range, ChunkTiles]]:
    """The tiles in blocks of about BLOCK weights, each with the tiles that it is."""
    tile_of_node = _tile_of_node(tree, sizes.per_node, np.array([*sizes.first_tile, len(sizes.row_from) - 1]))
    begin = 0
    while begin < len(tile_of_node) - 1:
        most = sizes.weight_from[tile_of_node[begin]] + BLOCK
        end = max(begin + 1, int(np.searchsorted(sizes.weight_from[tile_of_node], most, "right")) - 1)
        tiles = range(int(tile_of_node[begin]), int(tile_of_node[end]))
        ends = tuple(part[tiles.start : tiles.stop + 1] for part in (sizes.unit_from, sizes.row_from, sizes.weight_from))
        units, rows, weights = (int(part[-1] - part[0]) for part in ends)
        block = ChunkTiles(
            np.empty((len(tiles), 4), np.int64), np.zeros(units, np.int32), np.empty(rows, np.int32), np.zeros((rows, 2), np.int32),
            np.empty(weights, np.float32),
        )  # fmt: skip
        _lay_out(
            begin, end, tile_of_node, *_arrays(chunks), chunks.row_feature.view(np.ndarray), chunks.entry_weight.view(np.ndarray), ends,
            block.tiles_T4, block.first_key_U, block.keys_R, block.places_R2, block.weights_W,
        )  # fmt: skip
        yield tiles, block
        begin = end


def _tile_of_node(tree: Tree, per_node: tuple[int, ...], first_tile: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64[P + 1]: each inner node's first tile."""
    parts = [first_tile[h] + np.arange(tree.level_size(h)) * per_node[h] for h in range(tree.height)]
    return np.concatenate([*parts, first_tile[-1:]])


def _arrays(chunks: Chunks) -> tuple[Array, Array, Array]:
    """As numba wants them: what is mapped is of a class of its own."""
    return chunks.chunk_row.view(np.ndarray), chunks.row_entry.view(np.ndarray), chunks.entry_child.view(np.ndarray)


@njit(cache=True, nogil=True)
def bucket_of(feature: int, buckets: int) -> Any:
    """Fibonacci hashing to 32 bits, and these in proportion to the number of buckets."""
    hashed = (np.uint64(feature) * np.uint64(2654435769)) & np.uint64(0xFFFFFFFF)
    return np.int64((hashed * np.uint64(buckets)) >> np.uint64(32))


@njit(cache=True, nogil=True)
def _count(tile_of_node: Array, chunk_row: Array, row_entry: Array, entry_child: Array, rows: Array, weights: Array) -> None:
    """How many rows and weights each tile has."""
    for p in range(len(tile_of_node) - 1):
        for row in range(chunk_row[p], chunk_row[p + 1]):
            former = -1
            for e in range(row_entry[row], row_entry[row + 1]):
                tile = tile_of_node[p] + entry_child[e] // TILE
                weights[tile] += 1
                if tile != former:
                    rows[tile] += 1
                    former = tile


@njit(cache=True, nogil=True)
def _lay_out(
    begin: int, end: int, tile_of_node: Array, chunk_row: Array, row_entry: Array, entry_child: Array, row_feature: Array,
    entry_weight: Array, ends: tuple[Array, ...], tiles_T4: Array, first_key_U: Array, keys_R: Array, places_R2: Array, weights_W: Array,
) -> None:  # fmt: skip
    """The tiles of the nodes begin … end − 1: rows counted by bucket, then put there, then their weights in that order."""
    unit_from, row_from, weight_from = ends
    first_tile = tile_of_node[begin]
    source = np.empty(len(keys_R), np.int64)  # where a row's weights are in the bundle
    next_key = np.empty(len(first_key_U), np.int32)
    for p in range(begin, end):
        for step in range(2):
            for row in range(chunk_row[p], chunk_row[p + 1]):
                e = row_entry[row]
                while e < row_entry[row + 1]:
                    tile = tile_of_node[p] - first_tile + entry_child[e] // TILE
                    units = unit_from[tile] - unit_from[0]
                    unit = units + bucket_of(row_feature[row], unit_from[tile + 1] - unit_from[tile] - 1)
                    start, bits = e, np.uint32(0)
                    while e < row_entry[row + 1] and tile_of_node[p] - first_tile + entry_child[e] // TILE == tile:
                        bits |= np.uint32(1) << np.uint32(entry_child[e] % TILE)
                        e += 1
                    if step == 0:
                        first_key_U[unit + 1] += 1
                    else:
                        at = row_from[tile] - row_from[0] + next_key[unit]
                        next_key[unit] += 1
                        keys_R[at] = row_feature[row]
                        places_R2[at, 0] = np.int32(bits)
                        source[at] = start
            for tile in range(tile_of_node[p] - first_tile, tile_of_node[p + 1] - first_tile):
                if step == 0:
                    longest = 0
                    for unit in range(unit_from[tile] - unit_from[0], unit_from[tile + 1] - unit_from[0] - 1):
                        longest = max(longest, first_key_U[unit + 1])
                        first_key_U[unit + 1] += first_key_U[unit]
                        next_key[unit] = first_key_U[unit]
                    tiles_T4[tile, 0], tiles_T4[tile, 1], tiles_T4[tile, 2] = unit_from[tile], row_from[tile], weight_from[tile]
                    tiles_T4[tile, 3] = (unit_from[tile + 1] - unit_from[tile] - 1) + (np.int64(longest) << np.int64(32))
                else:
                    used = 0
                    weights = weight_from[tile] - weight_from[0]
                    for at in range(row_from[tile] - row_from[0], row_from[tile + 1] - row_from[0]):
                        places_R2[at, 1] = used
                        bits = np.uint32(places_R2[at, 0])
                        e = source[at]
                        while bits != 0:
                            bits &= bits - np.uint32(1)
                            weights_W[weights + used] = entry_weight[e]
                            used += 1
                            e += 1
