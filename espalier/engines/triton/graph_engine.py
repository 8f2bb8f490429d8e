"""`triton`: bundles with graphs, the whole beam search in Triton kernels.

torch runs the query encoder. Then on each level one kernel scores the children of the beam and another selects the best of them; a last
kernel orders the leaves. `gpu_engine.py` and `cells.py` have the calls, masks and cells.

Legend: B queries, T history, L levels, K beam, C candidates, N nodes, D node row, S state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from espalier.bundle import Bundle
from espalier.engines.graphs import read_graph
from espalier.engines.scorer_weights import ScorerWeights, scorer_weights
from espalier.engines.stages import TreeQuery
from espalier.engines.triton.cells import FEW, Beam, Cell, CellVariant, Entries, inner_slots, is_ragged
from espalier.engines.triton.gpu_engine import DTYPES, GpuSearch
from espalier.engines.triton.kernels.history_nodes import history_nodes_kernel
from espalier.engines.triton.kernels.score import rank_level_kernel, score_children_kernel, score_levels_kernel
from espalier.engines.triton.kernels.search import search_kernel
from espalier.engines.triton.torch_graph import encoder_of
from espalier.queries import HistoryKind
from espalier.search import Precision
from espalier.tree import Tree

FEW_QUERIES = 8
"""Up to so many queries in a call, small tiles of inner products are faster: more programs read rows at a time."""
MOST_PROGRAM_CANDIDATES = 2048
"""Most candidates of a level that fit the registers of one program, which selects from them."""
COPY_BYTES = 256 << 20
"""Bytes of node rows that are copied to the device at a time."""


class Tile(NamedTuple):
    """nodes      that one program scores at a time; the matrix units of a Hopper GPU take 64 for each group of 4 warps
    registers  most registers of a thread, so that several programs fit a multiprocessor; None: the compiler chooses
    """

    nodes: int
    warps: int
    registers: int | None


class TritonSearch(GpuSearch["GraphCell"]):
    """See the module."""

    name = "triton"
    roundings: ClassVar[Mapping[Precision, float]] = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.15}
    on_device = "node_rows_ND", "scorer", "encoder"
    encodes = True

    def load(self, dtype: torch.dtype) -> None:
        bundle, kind, scorer = self.bundle, self.bundle.graph_kind, self.bundle.graph_scorer
        weights = scorer_weights(bundle)
        query = read_graph("query.onnx", bundle.graph("query.onnx"))
        rows = f"{bundle.tree.node_count:,} node rows of {scorer.node_dim} {self.precision} numbers"
        self.refuse_without_memory(device_bytes(bundle, self.precision), rows)
        levels, width = bundle.tree.height + 1, kind.length if isinstance(kind, HistoryKind) else kind.width
        states = levels if scorer.state_levels > 1 else 1, scorer.state_dim
        self.encoder = encoder_of(query, self.device, scorer.node_dim, levels, width, states)
        self.scorer = _Scorer(weights, scorer.node_dim, dtype, self.device)
        self.node_rows_ND = self._node_rows(dtype)

    def tile(self, batch: int, candidates: int) -> Tile:
        """The tile for calls of `batch` queries whose levels have at most `candidates` candidates.

        Activations take registers. If one program searches each query, four programs fit a multiprocessor only for scorers up to 128–64–24.
        """
        tuning, by_program = self.tuning, batch > self.tuning.level_kernel_queries
        if tuning.tile is not None:
            return Tile(tuning.tile, tuning.warps, tuning.registers)
        if not self.scorer.state_width:
            # In both tiles a thread sums eight numbers of a row. Of shorter rows it would sum four in the smaller tile: another order.
            return Tile(32, 4, None) if batch <= FEW_QUERIES and self.scorer.row_width >= 32 else Tile(64, 2, None)
        if self.precision == "float32":
            return Tile(16, tuning.warps, tuning.registers)
        small = self.scorer.row_width <= 32 and max(self.scorer.widths) <= 128 and sum(self.scorer.widths) <= 224
        if by_program and small:
            return Tile(64, 4, 128) if candidates <= 1024 else Tile(128, 4, None)
        return Tile(64, tuning.warps, tuning.registers)

    def new_cell(self, batch: int, bucket: int, m: int, variant: CellVariant, t: int) -> GraphCell:
        return GraphCell(self, batch, bucket, m, variant)

    def _node_rows(self, dtype: torch.dtype) -> Tensor:
        """The node rows, copied from the bundle's mapped file piece by piece."""
        source = self.bundle.node_rows_ND
        rows_ND = torch.empty(source.shape, dtype=dtype, device=self.device)
        step = max(1, COPY_BYTES // max(1, source.shape[1] * source.dtype.itemsize))
        for start in range(0, len(source), step):
            rows_ND[start : start + step] = torch.from_numpy(np.array(source[start : start + step])).to(self.device).to(dtype)
        return rows_ND


def device_bytes(bundle: Bundle, precision: Precision) -> int:
    """Bytes of a bundle's rows and tree on a GPU."""
    tree = bundle.tree
    needed = tree.node_count * bundle.graph_scorer.node_dim * DTYPES[precision].itemsize
    return needed + 4 * (tree.leaf_count + tree.item_count + (2 * tree.node_count if is_ragged(tree) else 0))


class _Scorer:
    """A scorer's weights as the kernels read them: layers padded to powers of two of at least 16, end to end.

    convex, shared  whether no slope is above 1, and whether each layer has one slope
    """

    def __init__(self, weights: ScorerWeights, node_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.widths = [_padded(len(layer.bias)) for layer in weights.layers] + [0] * (4 - len(weights.layers))
        self.row_width = triton.next_power_of_2(node_dim) if not weights.layers else _padded(node_dim + 2)  # see `with_state`
        self.state_width = self.widths[0]
        self.convex = all(bool((layer.slope <= 1).all()) for layer in weights.layers)
        self.shared = all(bool((layer.slope == layer.slope[0]).all()) for layer in weights.layers)
        matrices, vectors, before = [], [], self.row_width
        for layer, width in zip(weights.layers, self.widths, strict=False):
            matrix = np.zeros((before, width), np.float32)
            matrix[: layer.weight.shape[0], : layer.weight.shape[1]] = layer.weight
            matrices.append(matrix.ravel())
            vectors += [_fill(layer.bias, width), _fill(layer.slope, width)]
            before = width
        if weights.layers:
            vectors += [_fill(weights.out, before), np.array([weights.offset], np.float32)]
        flat = np.concatenate(matrices) if matrices else np.zeros(1, np.float32)
        self.weights = torch.from_numpy(flat).to(device).to(dtype)
        self.vectors = torch.from_numpy(np.concatenate(vectors) if vectors else np.zeros(1, np.float32)).to(device)


class GraphCell(Cell[Tensor]):
    """A cell whose queries have states, encoded here or brought along: float32[B, levels from `first` on or 1, S]."""

    chooses = True

    def __init__(self, engine: TritonSearch, batch: int, bucket: int, m: int, variant: CellVariant) -> None:
        bundle, kind, scorer, tree = engine.bundle, engine.bundle.graph_kind, engine.bundle.graph_scorer, engine.bundle.tree
        gamma = bundle.manifest.ranking.gamma
        self._history = isinstance(kind, HistoryKind)
        self._first = 1 if gamma > 0 else inner_slots(tree, bucket)[0]
        width, dtype = (kind.length, torch.int32) if isinstance(kind, HistoryKind) else (kind.width, torch.float32)
        entries: Entries = {"query": ((batch, width), dtype)}
        if variant.states:
            entries = {
                "states": ((batch, tree.height + 1 - self._first if scorer.state_levels > 1 else 1, scorer.state_dim), torch.float32)
            }
        super().__init__(engine.contexts[0], batch, bucket, m, variant, entries, scorer.state_dim)
        self._engine, self._tile, self._top_tile = engine, engine.tile(batch, self.max_candidates), engine.tile(1, 1)
        self._sequence = scorer.encoder == "sequence"
        self._log_activation = bundle.manifest.ranking.own == "log_activation"
        state_width = max(scorer.state_dim, engine.scorer.state_width)
        self._levels, self._children = self._program_levels(engine, scorer.state_levels > 1, state_width)
        has_top = gamma > 0 and self.start > 1
        self._top = _WholeLevels(tree, self.start - 1, self._top_tile.nodes, engine.device) if has_top else None

    def _program_levels(self, engine: TritonSearch, of_levels: bool, width: int) -> tuple[Tensor, int]:
        """`search_kernel`'s levels_L5, and the most children of a node; 0 children: each level is a kernel.

        of_levels  whether each level has its own state of `width` padded numbers, or all levels share one
        """
        tree, children = self.context.tree, self.context.tree.max_children[self.start - 1]
        same = all(other == children for other in tree.max_children[self.start - 1 : tree.height])
        by_level = self.batch <= engine.tuning.level_kernel_queries or self._variant.frontier or self._every_leaf
        if by_level or not same or self.max_candidates > MOST_PROGRAM_CANDIDATES:
            return torch.empty(0, device=engine.device), 0
        levels_L5 = [
            (*self.slots[i : i + 2], tree.level(level - 1).start, tree.level(level).start, of_levels * (level - self._first) * width)
            for i, level in enumerate(range(self.start, tree.height + 1))
        ]
        return torch.tensor(levels_L5, dtype=torch.int32, device=engine.device), children

    def fill_queries(self, query: TreeQuery) -> None:
        if "states" not in self.host:
            self.host["query"].numpy()[: len(query)] = query.queries.array
            return
        if query.states_BLS is None:
            raise ValueError("queries without states")
        self.host["states"].numpy()[: len(query)] = query.states_BLS[:, -self.host["states"].shape[1] :]

    def launch_encoder(self) -> Tensor:
        """float32[B, levels from `first` on or 1, S]: the query states."""
        engine = self._engine
        state_BLS = self.inputs["states"] if "states" in self.inputs else self._encoded()
        padding = engine.scorer.state_width - state_BLS.shape[2]
        return (torch.nn.functional.pad(state_BLS, (0, padding)) if padding > 0 else state_BLS).contiguous()

    def _encoded(self) -> Tensor:
        """float32[B, levels from `first` on or 1, S]: the states of the cell's queries, encoded here."""
        engine, batch, tree, tables = self._engine, self.batch, self.context.tree, self.context.tables
        feeds = {"node_rows": engine.node_rows_ND, "vector": self.inputs["query"]}
        if self._history:
            length = self.inputs["query"].shape[1]
            first = tree.height if self._sequence else self._first  # a sequence encoder reads leaves only
            shape = (batch, tree.height + 1 - first, length)
            nodes = torch.empty(shape, dtype=torch.int64, device=engine.device)
            history_nodes_kernel[(batch,)](
                self.inputs["query"], tables.leaf_of_item, tables.parent, tables.levels, nodes, length, first, tree.height,
                triton.next_power_of_2(length),
            )  # fmt: skip
            feeds |= {"history_nodes": nodes, "history_leaves": nodes[:, -1]}
        state_BLS: Tensor = engine.encoder(**{name: feeds[name] for name in engine.encoder.inputs})
        return state_BLS[:, self._first :] if self._sequence else state_BLS

    def leaf_states(self, state: Tensor) -> Tensor:
        return state[:, -1, : self._engine.bundle.graph_scorer.state_dim]

    def begin(self, state: Tensor, beam: Beam) -> None:
        """See `Cell.begin`."""
        engine = self._engine
        if self._top is None:
            return
        top, scorer, tile = self._top, engine.scorer, self._top_tile
        own_BN = torch.empty((self.batch, top.nodes), dtype=torch.float32, device=engine.device)
        score_levels_kernel[(len(top.tiles), self.batch)](
            top.tiles, engine.node_rows_ND, state, state.stride(0), state.shape[2], state.shape[1],
            scorer.weights, scorer.vectors, engine.node_rows_ND.shape[1], self.finite, own_BN, top.nodes,
            tile.nodes, scorer.row_width, *scorer.widths, scorer.convex, scorer.shared, self._log_activation,
            num_warps=tile.warps, maxnreg=tile.registers, **self.launch_options,
        )  # fmt: skip
        levels, width = top.ancestors.shape
        rank_level_kernel[(triton.cdiv(width, 128), self.batch)](
            own_BN, top.nodes, top.ancestors, levels, width, beam.ranks, self.stride, self.context.gamma, 128, **self.launch_options
        )

    def score(self, level: int, slots: int, beam: Beam, candidates: Beam, state: Tensor, before: int) -> None:
        engine, tree = self._engine, self.context.tree
        scorer, tuning, tile = engine.scorer, engine.tuning, self._tile
        children = tree.max_children[level - 1]
        tiles = triton.cdiv(slots * children, tile.nodes)
        several = tuning.tiles_per_program if tiles * self.batch >= tuning.busy_tiles and not before else 1
        state_level = 0 if state.shape[1] == 1 else level - self._first
        score_children_kernel[(triton.cdiv(tiles, several), self.batch)](
            beam.nodes, beam.ranks, beam.keys, slots, beam.nodes.shape[1], before, self.inputs["beam_size"],
            self.context.tables.first_child, tree.level(level - 1).start, tree.level(level).start,
            self.inputs["masks"], self.excluded, self.inputs["excluded_from"], self.inputs["excluded_count"],
            engine.shapes.excluded.bit_length(),
            engine.node_rows_ND, state, state.stride(0), state_level * state.shape[2],
            scorer.weights, scorer.vectors, engine.node_rows_ND.shape[1], self.context.gamma, self.finite,
            self.inputs["memory" if self.memory else "masks"], self.context.memory_weight or 0.0,
            candidates.nodes, candidates.ranks, candidates.keys, self.max_candidates, slots * children, several,
            children, tree.is_uniform(level - 1), tile.nodes,
            scorer.row_width, *scorer.widths, scorer.convex, scorer.shared, self._log_activation, self.memory,
            BEFORE=triton.next_power_of_2(before) if before else 0, num_warps=tile.warps, maxnreg=tile.registers, **self.launch_options,
        )  # fmt: skip

    def search_by_program(self, beam: Beam, candidates: Beam, leaves: Beam, state: Tensor) -> bool:
        """See `Cell.search_by_program`."""
        if not self._children:
            return False
        engine, tree, tile = self._engine, self.context.tree, self._tile
        scorer = engine.scorer
        search_kernel[(self.batch,)](
            self._levels, len(self._levels), beam.nodes, beam.ranks, leaves.nodes, leaves.ranks, leaves.keys, self.stride,
            self.inputs["beam_size"], self.inputs["m"], self.context.tables.first_child,
            self.inputs["masks"], self.excluded, self.inputs["excluded_from"], self.inputs["excluded_count"],
            engine.shapes.excluded.bit_length(),
            engine.node_rows_ND, state, state.stride(0), scorer.weights, scorer.vectors, engine.node_rows_ND.shape[1], self.context.gamma,
            self.finite, self.inputs["memory" if self.memory else "masks"], self.context.memory_weight or 0.0,
            candidates.nodes, candidates.ranks, candidates.keys, self.max_candidates,
            self._children, not is_ragged(tree), tile.nodes,
            triton.next_power_of_2(self.max_candidates), self.max_candidates <= FEW, min(triton.next_power_of_2(max(self.slots[1:])), 1024),
            scorer.row_width, *scorer.widths, scorer.convex, scorer.shared, self._log_activation, self.memory,
            num_warps=tile.warps, maxnreg=tile.registers, num_stages=1,
        )  # fmt: skip
        return True


class _WholeLevels:
    """The levels 1 … `last`, all of whose nodes are scored because later levels inherit their ranks.

    nodes      the number of nodes of these levels and the root
    tiles      int32[tiles, 3]: level − 1, first node and number of nodes of a tile of one level
    ancestors  int32[last, nodes of the last]: each node's ancestors from level 1 down to itself
    """

    def __init__(self, tree: Tree, last: int, tile: int, device: torch.device) -> None:
        self.nodes = tree.level(last).stop
        tiles = [
            (level - 1, first, min(tile, tree.level(level).stop - first))
            for level in range(1, last + 1)
            for first in range(tree.level(level).start, tree.level(level).stop, tile)
        ]
        path = [np.arange(tree.level(last).start, tree.level(last).stop)]
        for _ in range(1, last):
            path.insert(0, tree.parent[path[0]])
        self.tiles = torch.tensor(tiles, dtype=torch.int32, device=device)
        self.ancestors = torch.from_numpy(np.stack(path).astype(np.int32)).to(device)


def _padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _fill(values: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    return np.pad(values, (0, width - len(values)))
