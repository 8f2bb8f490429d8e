"""`sparse-cuda`: bundles of linear node scorers, the whole beam search in Triton kernels.

On each level, one kernel looks up the query's features in the tables of the beam's nodes (`chunk_tiles.py`) and scores their children;
another selects the best of them. `gpu_engine.py` and `cells.py` have the calls, masks and cells. The features of a call are in one buffer
whose addresses the kernels read, so cells do not depend on the number of features.

GPU memory: the tables, usually smaller than the bundle's file and at most three times its size (weights in 16 bits take half), 4 bytes per
node for the bias and 4 to 12 for the tree.

Legend: B queries, K beam, N nodes, F features of a call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
import triton
from torch import Tensor

from espalier.bundle import Bundle
from espalier.engines.linear.chunk_search import power_of
from espalier.engines.stages import Leaves, TreeQuery
from espalier.engines.triton.cells import Beam, Cell, CellVariant, Entries, is_ragged
from espalier.engines.triton.chunk_tiles import TILE, TileSizes, laid_out
from espalier.engines.triton.gpu_engine import DTYPES, DeviceLists, GpuSearch
from espalier.engines.triton.kernels.score_chunks import score_chunks_kernel, score_level_kernel
from espalier.search import Precision

FEATURES = 64
"""Features of a query that are looked up at once. The order of a score's sum depends on this number, so it must not be tuned."""


class SparseCudaSearch(GpuSearch["FeatureCell"]):
    """See the module."""

    name = "sparse-cuda"
    roundings: ClassVar[Mapping[Precision, float]] = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.15}
    on_device = "tiles", "features"
    encodes = False

    def load(self, dtype: torch.dtype) -> None:
        trees = self.bundle.alone
        self.power = power_of(self.bundle.manifest.ranking)
        sizes_T = [TileSizes.of(tree_bundle.tree, tree_bundle.chunks) for tree_bundle in trees]
        needed = sum(device_bytes(tree_bundle, sizes, self.precision) for tree_bundle, sizes in zip(trees, sizes_T, strict=True))
        weights = sum(len(tree_bundle.chunks.entry_weight) for tree_bundle in trees)
        self.refuse_without_memory(needed, f"{weights:,} {self.precision} weights")
        self.tiles = [_Tiles(tree_bundle, sizes, dtype, self.device) for tree_bundle, sizes in zip(trees, sizes_T, strict=True)]
        self.features = DeviceLists(self.device)

    def new_cell(self, batch: int, bucket: int, m: int, variant: CellVariant, t: int) -> FeatureCell:
        return FeatureCell(self, batch, bucket, m, variant, t)

    def search(self, query: TreeQuery) -> Leaves:
        """See `TreeSearch`. Raises InvalidQuery where a feature number is out of range or a value is not finite."""
        query.queries.features.check_numbers()
        return super().search(query)


def device_bytes(bundle: Bundle, sizes: TileSizes, precision: Precision) -> int:
    """Bytes of a tree, its tables and biases on a GPU."""
    tree = bundle.tree
    ragged = tree.node_count if is_ragged(tree) else 0
    return sizes.nbytes(DTYPES[precision].itemsize) + 4 * (tree.node_count + tree.leaf_count + ragged)


class _Tiles:
    """The tables of a tree on the device (`ChunkTiles`), built and copied block by block."""

    def __init__(self, bundle: Bundle, sizes: TileSizes, dtype: torch.dtype, device: torch.device) -> None:
        def room(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(tuple(max(1, n) for n in shape), dtype=dtype, device=device)

        self.first_tile, self.per_node = sizes.first_tile, sizes.per_node
        units, rows, weights = (int(array[-1]) for array in (sizes.unit_from, sizes.row_from, sizes.weight_from))
        self.tiles, self.first_key = room(len(sizes.row_from) - 1, 4, dtype=torch.int64), room(units)
        self.keys, self.places, self.weights = room(rows), room(rows, 2), room(weights, dtype=dtype)
        self.bias = torch.from_numpy(np.array(bundle.chunks.bias)).to(device)
        for tiles, block in laid_out(bundle.tree, bundle.chunks, sizes):
            self.tiles[tiles.start : tiles.stop] = torch.from_numpy(block.tiles_T4).to(device)
            for buffer, array, begin in (
                (self.first_key, block.first_key_U, sizes.unit_from),
                (self.keys, block.keys_R, sizes.row_from),
                (self.places, block.places_R2, sizes.row_from),
                (self.weights, block.weights_W, sizes.weight_from),
            ):
                buffer[int(begin[tiles.start]) : int(begin[tiles.stop])] = torch.from_numpy(array).to(device).to(buffer.dtype)

    def of_level(self, level: int) -> tuple[Tensor | int, ...]:
        """The kernels' arguments for scoring the children of a level's nodes."""
        return self.tiles, self.first_tile[level], self.first_key, self.keys, self.places, self.weights, self.bias


class FeatureCell(Cell[None]):
    """A cell of queries with features. The host has encoded them, so there is no query state."""

    def __init__(self, engine: SparseCudaSearch, batch: int, bucket: int, m: int, variant: CellVariant, t: int) -> None:
        entries: Entries = {"features": ((batch,), torch.int64), "values": ((batch,), torch.int64), "count": ((batch,), torch.int32)}
        super().__init__(engine.contexts[t], batch, bucket, m, variant, entries)
        self._warps = self.context.tuning.warps if batch <= self.context.tuning.level_kernel_queries else 1
        self._features, self._tiles, self._power = engine.features, engine.tiles[t], engine.power

    def fill_queries(self, query: TreeQuery) -> None:
        count, rows = len(query), query.queries.features
        features_B, values_B = self._features.put(rows.indptr, rows.indices, rows.values)
        self.host["features"].numpy()[:count], self.host["values"].numpy()[:count] = features_B, values_B
        self.host["count"].numpy()[:count] = np.diff(rows.indptr)
        self.host["count"].numpy()[count:] = 0

    def launch_encoder(self) -> None:
        """Features need no encoding."""

    def leaf_states(self, state: None) -> Tensor:
        """Queries of features have no states: the width is 0."""
        return torch.empty((self.batch, 0), device=self.context.device)

    def begin(self, state: None, beam: Beam) -> None:
        tree, gamma = self.context.tree, self.context.gamma
        if gamma == 0 or self.start == 1:
            return
        above_BK = torch.zeros((self.batch, 1), dtype=torch.float32, device=self.context.device)
        for level in range(1, self.start):
            ranks = beam.ranks
            if level < self.start - 1:
                ranks = torch.empty((self.batch, tree.level_size(level)), dtype=torch.float32, device=self.context.device)
            score_level_kernel[(tree.level_size(level - 1) * self._tiles.per_node[level - 1], self.batch)](
                above_BK, above_BK.shape[1], *self._numbering(level), self.inputs["features"], self.inputs["values"], self.inputs["count"],
                *self._tiles.of_level(level - 1), gamma, ranks, ranks.shape[1], *self._constants(level),
                num_warps=self._warps, **self.launch_options,
            )  # fmt: skip
            above_BK = ranks

    def score(self, level: int, slots: int, beam: Beam, candidates: Beam, state: None, before: int) -> None:
        inputs = self.inputs
        score_chunks_kernel[(slots * self._tiles.per_node[level - 1], self.batch)](
            beam.nodes, beam.ranks, self.stride, *self._numbering(level),
            inputs["masks"], self.excluded, inputs["excluded_from"], inputs["excluded_count"], self.context.shapes.excluded.bit_length(),
            inputs["features"], inputs["values"], inputs["count"], *self._tiles.of_level(level - 1), self.context.gamma,
            candidates.nodes, candidates.ranks, self.max_candidates, *self._constants(level),
            num_warps=self._warps, **self.launch_options,
        )  # fmt: skip

    def _numbering(self, level: int) -> tuple[Tensor, int, int, int, int]:
        """The kernels' arguments from first_child_N to tiles, for the children on a level."""
        tree, tiles = self.context.tree, self._tiles.per_node[level - 1]
        starts = tree.level(level - 1).start, tree.level(level).start
        return self.context.tables.first_child, *starts, tree.max_children[level - 1], tiles

    def _constants(self, level: int) -> tuple[bool, int, int, int]:
        """The kernels' compile-time arguments for a level."""
        tile = min(TILE, triton.next_power_of_2(self.context.tree.max_children[level - 1]))
        return self.context.tree.is_uniform(level - 1), tile, FEATURES, self._power
