"""Linear node scorers as a GPU searches them: a tile is a hash table from feature to weights for up to 32 children of an inner node.

The rows of a tile are sorted by the hash bucket of their features, on average two to a bucket. A look-up reads the begin of a bucket and
then its few keys; there are no empty slots. A row is a bit mask of the children that have a weight, and the begin of their weights. A tile
takes 40 bytes, a row 14 and a weight 4 (2 in 16 bits); a bundle's file takes 12 for a row and 6 for a weight. So tiles are smaller than the
file, unless they have few rows. For nodes of more than 32 children, whose tiles each have rows, they are at most three times as large.

Legend: P inner nodes, N nodes, T tiles, U units (a tile's buckets and one end), R rows of tiles, W weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from espalier.arrays import Array, Int64
from espalier.chunks import Chunks
from espalier.compiled_code import compiled
from espalier.stored_arrays import row_blocks
from espalier.stored_numbers import number, stored
from espalier.tree import Tree

TILE = 32
"""Children of a tile, which are the bits of a row's mask."""
PER_BUCKET = 2
"""Rows of a bucket, on average."""
BLOCK = 1 << 24
"""Weights of one block, about: so many are laid out at a time."""


@dataclass(frozen=True, eq=False)
class TileSizes:
    """The offsets of each tile's units, rows and weights. They are counted first, to allocate memory before anything is laid out.

    first_tile   of each level 0 … H − 1; its nodes have per_node[h] tiles each
    unit_from    int64[T + 1]: among first_key_U · row_from int64[T + 1] · weight_from int64[T + 1]
    """

    first_tile: tuple[int, ...]
    per_node: tuple[int, ...]
    unit_from: Int64
    row_from: Int64
    weight_from: Int64

    @staticmethod
    def of(tree: Tree, chunks: Chunks) -> TileSizes:
        per_node = tuple(-(-children // TILE) for children in tree.max_children)
        first_tile = np.concatenate([[0], np.cumsum([tree.level_size(h) * per_node[h] for h in range(tree.height)])])
        rows, weights = np.zeros((2, first_tile[-1]), np.int64)
        _count(_scorers(chunks, _tile_of_node(tree, per_node, first_tile)), rows, weights)
        offsets = [np.concatenate([[0], np.cumsum(sizes)]) for sizes in (np.maximum(1, -(-rows // PER_BUCKET)) + 1, rows, weights)]
        return TileSizes(tuple(first_tile[:-1].tolist()), per_node, *offsets)

    def nbytes(self, weight_bytes: int) -> int:
        """Bytes of all arrays of ChunkTiles."""
        return 32 * (len(self.row_from) - 1) + int(4 * self.unit_from[-1] + 12 * self.row_from[-1] + weight_bytes * self.weight_from[-1])


class ChunkTiles(NamedTuple):
    """Some consecutive tiles, as they are stored on a device.

    tiles_T4     int64[T, 4]: a tile's offsets in first_key_U, in the rows and in the weights; buckets + 2^32 · keys of the longest bucket
    first_key_U  int32[U]: for each bucket of a tile, and for the tile's end, the position of its first key among the tile's rows
    keys_R       int32[R]: the rows' features
    places_R2    int32[R, 2]: the mask of the children that have a weight, and the position of the first weight among the tile's weights
    weights_W    float32[W]
    """

    tiles_T4: Array
    first_key_U: Array
    keys_R: Array
    places_R2: Array
    weights_W: Array


class Scorers(NamedTuple):
    """The chunks of a tree, and int64[P + 1]: each inner node's first tile."""

    tile_of_node: Array
    chunk_row: Array
    row_entry: Array
    entry_child: Array
    row_feature: Array
    entry_weight: Array


class Begins(NamedTuple):
    """The offsets of some consecutive tiles, with the end of the last one; see TileSizes."""

    unit: Array
    row: Array
    weight: Array


def laid_out(tree: Tree, chunks: Chunks, sizes: TileSizes) -> Iterator[tuple[range, ChunkTiles]]:
    """The tiles in blocks of about BLOCK weights, each with the numbers of its tiles."""
    tile_of_node = _tile_of_node(tree, sizes.per_node, np.array([*sizes.first_tile, len(sizes.row_from) - 1]))
    for begin, end in row_blocks(sizes.weight_from[tile_of_node], BLOCK):
        tiles = range(int(tile_of_node[begin]), int(tile_of_node[end]))
        begins = Begins(*(offsets[tiles.start : tiles.stop + 1] for offsets in (sizes.unit_from, sizes.row_from, sizes.weight_from)))
        units, rows, weights = (int(offsets[-1] - offsets[0]) for offsets in begins)
        block = ChunkTiles(
            np.empty((len(tiles), 4), np.int64), np.zeros(units, np.int32), np.empty(rows, np.int32), np.zeros((rows, 2), np.int32),
            np.empty(weights, np.float32),
        )  # fmt: skip
        _lay_out(begin, end, _scorers(chunks, tile_of_node), begins, block)
        yield tiles, block


def _tile_of_node(tree: Tree, per_node: tuple[int, ...], first_tile: Int64) -> Int64:
    """int64[P + 1]: each inner node's first tile."""
    tiles = [first_tile[h] + np.arange(tree.level_size(h)) * per_node[h] for h in range(tree.height)]
    return np.concatenate([*tiles, first_tile[-1:]])


def _scorers(chunks: Chunks, tile_of_node: Int64) -> Scorers:
    """Plain arrays for numba: mapped ones are of another class."""
    arrays = (chunks.chunk_row, chunks.row_entry, chunks.entry_child, chunks.row_feature, stored(chunks.entry_weight))
    return Scorers(tile_of_node, *(array.view(np.ndarray) for array in arrays))


@compiled()
def bucket_of(feature: int, buckets: int) -> Any:
    """Fibonacci hashing to 32 bits, scaled to the number of buckets."""
    hashed = (np.uint64(feature) * np.uint64(2654435769)) & np.uint64(0xFFFFFFFF)
    return np.int64((hashed * np.uint64(buckets)) >> np.uint64(32))


@compiled()
def _count(scorers: Scorers, rows: Array, weights: Array) -> None:
    """Count the rows and weights of each tile."""
    for p in range(len(scorers.tile_of_node) - 1):
        for row in range(scorers.chunk_row[p], scorers.chunk_row[p + 1]):
            former = -1
            for e in range(scorers.row_entry[row], scorers.row_entry[row + 1]):
                tile = scorers.tile_of_node[p] + scorers.entry_child[e] // TILE
                weights[tile] += 1
                if tile != former:
                    rows[tile] += 1
                    former = tile


@compiled()
def _lay_out(begin: int, end: int, scorers: Scorers, begins: Begins, out: ChunkTiles) -> None:
    """Write the tiles of the nodes begin … end − 1. Rows are sorted by bucket with a counting sort; weights are in the order of rows."""
    first_tile = scorers.tile_of_node[begin]
    source = np.empty(len(out.keys_R), np.int64)  # each row's first entry in the chunks
    next_key = np.empty(len(out.first_key_U), np.int32)
    for p in range(begin, end):
        for row in range(scorers.chunk_row[p], scorers.chunk_row[p + 1]):
            e = scorers.row_entry[row]
            while e < scorers.row_entry[row + 1]:
                tile, _, e = _tile_row(scorers, p, row, e)
                out.first_key_U[_unit_of(tile - first_tile, scorers.row_feature[row], begins) + 1] += 1
        for tile in range(scorers.tile_of_node[p] - first_tile, scorers.tile_of_node[p + 1] - first_tile):
            _end_counts(tile, begins, out, next_key)
        for row in range(scorers.chunk_row[p], scorers.chunk_row[p + 1]):
            e = scorers.row_entry[row]
            while e < scorers.row_entry[row + 1]:
                start = e
                tile, bits, e = _tile_row(scorers, p, row, e)
                unit = _unit_of(tile - first_tile, scorers.row_feature[row], begins)
                at = begins.row[tile - first_tile] - begins.row[0] + next_key[unit]
                next_key[unit] += 1
                out.keys_R[at], out.places_R2[at, 0], source[at] = scorers.row_feature[row], np.int32(bits), start
        for tile in range(scorers.tile_of_node[p] - first_tile, scorers.tile_of_node[p + 1] - first_tile):
            _copy_weights(tile, scorers, begins, out, source)


@compiled(forceinline=True)
def _tile_row(scorers: Scorers, p: int, row: int, e: Any) -> Any:
    """The tile of entry e of a row of node p, the mask of the row's children in that tile, and the first entry after them."""
    tile, bits = scorers.tile_of_node[p] + scorers.entry_child[e] // TILE, np.uint32(0)
    while e < scorers.row_entry[row + 1] and scorers.tile_of_node[p] + scorers.entry_child[e] // TILE == tile:
        bits |= np.uint32(1) << np.uint32(scorers.entry_child[e] % TILE)
        e += 1
    return tile, bits, e


@compiled(forceinline=True)
def _unit_of(tile: int, feature: int, begins: Begins) -> Any:
    return begins.unit[tile] - begins.unit[0] + bucket_of(feature, begins.unit[tile + 1] - begins.unit[tile] - 1)


@compiled(forceinline=True)
def _end_counts(tile: int, begins: Begins, out: ChunkTiles, next_key: Array) -> None:
    """Turn a tile's counts of keys into the begin of each bucket, and write its entry of tiles_T4."""
    longest = 0
    for unit in range(begins.unit[tile] - begins.unit[0], begins.unit[tile + 1] - begins.unit[0] - 1):
        longest = max(longest, out.first_key_U[unit + 1])
        out.first_key_U[unit + 1] += out.first_key_U[unit]
        next_key[unit] = out.first_key_U[unit]
    buckets = begins.unit[tile + 1] - begins.unit[tile] - 1
    out.tiles_T4[tile, 0], out.tiles_T4[tile, 1], out.tiles_T4[tile, 2] = begins.unit[tile], begins.row[tile], begins.weight[tile]
    out.tiles_T4[tile, 3] = buckets + (np.int64(longest) << np.int64(32))


@compiled(forceinline=True)
def _copy_weights(tile: int, scorers: Scorers, begins: Begins, out: ChunkTiles, source: Array) -> None:
    """Write a tile's weights in the order of its rows."""
    weights_before, begin = 0, begins.weight[tile] - begins.weight[0]
    for at in range(begins.row[tile] - begins.row[0], begins.row[tile + 1] - begins.row[0]):
        out.places_R2[at, 1] = weights_before
        bits, e = np.uint32(out.places_R2[at, 0]), source[at]
        while bits != 0:
            bits &= bits - np.uint32(1)
            out.weights_W[begin + weights_before] = number(scorers.entry_weight[e])
            weights_before += 1
            e += 1
