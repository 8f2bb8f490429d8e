"""Models of any number of items for measurements on a GPU, and the beam search that a careful user would write in torch.

`mlp` is the papers' scorer, 24 numbers a row and 128–64–24, with γ = 0; `product` is the default recipe's, with γ = 0.5. Weights and rows
are random: the models answer at random, but cost as much as trained ones.

Legend: B queries, C candidates, L levels, S state, N nodes, D node row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from espalier.arrays import Int64
from espalier.bundle import Bundle
from espalier.engines.triton.graph_engine import TritonSearch
from espalier.manifest import GraphScorer, Ranking, SearchDefaults, TreeInfo
from espalier.queries import HistoryKind
from espalier.tree import Tree, complete_tree
from training.deep.scorers.model import NodeScorer, export_graphs, new_scorer
from training.specification.deep import PAPER_WINDOWS
from training.specification.networks import MlpScorer, ProductScorer, Scorer

BLOCK = 1 << 16
"""Node rows that are drawn from one seed."""
SIGN_AND_FRACTION, EXPONENT = np.uint16(0x83FF), np.uint16(0x3400)
"""Of a float16's bits: with these, random ones make numbers between 0.25 and 0.5 of either sign, faster than any other way."""


@dataclass(frozen=True)
class Form:
    scorer: Scorer
    gamma: float


FORMS = {"mlp": Form(MlpScorer(), 0.0), "product": Form(ProductScorer(), 0.5)}


class _Rows:
    """Node rows that are drawn when they are read: a stand-in for rows mapped from a file."""

    def __init__(self, nodes: int, width: int) -> None:
        self.shape, self.dtype = (nodes, width), np.dtype(np.float16)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> NDArray[np.float16]:
        start, stop, _ = rows.indices(len(self))
        first, after = start // BLOCK, -(-stop // BLOCK)
        drawn = np.empty(((after - first) * BLOCK, self.shape[1]), np.uint16)
        for block, block_rows in zip(range(first, after), drawn.reshape(-1, BLOCK, self.shape[1]), strict=True):
            raw = np.random.default_rng(block).integers(0, 1 << 64, block_rows.size // 4, np.uint64, endpoint=False)
            np.bitwise_and(raw.view(np.uint16).reshape(block_rows.shape), SIGN_AND_FRACTION, out=block_rows)
        drawn |= EXPONENT
        return drawn.view(np.float16)[start % BLOCK : start % BLOCK + stop - start]


def scorer_of(form: str) -> NodeScorer:
    """A form's scorer with random weights, always the same."""
    torch.manual_seed(0)
    return new_scorer(FORMS[form].scorer, PAPER_WINDOWS, 64)


@lru_cache(2)
def model_of(height: int, form: str = "mlp") -> Bundle:
    """A bundle of 2^height items in memory."""
    length, model = sum(PAPER_WINDOWS), scorer_of(form)
    graphs = export_graphs(model, "history_nodes", torch.zeros((2, height + 1, length), dtype=torch.int64))
    tree = complete_tree(np.random.default_rng(0).permutation(1 << height), 2)
    kind, width = HistoryKind(length=length), FORMS[form].scorer.node_dim
    scorer = GraphScorer(
        dtype="float16",
        node_dim=width,
        state_levels=height + 1,
        state_dim=graphs.state_dim,
        form=graphs.form,
    )
    ranking = Ranking(own="logit", gamma=FORMS[form].gamma)
    search = SearchDefaults(beam_size=200, m=200, max_beam_size=1000, max_m=1000)
    info, name = TreeInfo.of(tree), f"{form}-{height}"
    manifest = manifest_of(tree=info, history_items=tree.item_count, name=name, query=kind, ranking=ranking, scorer=scorer, search=search)
    by_name = {"query.onnx": graphs.query_onnx, "scorer.onnx": graphs.scorer_onnx}
    rows = _Rows(tree.node_count, width)
    attributes: dict[str, Any] = {"node_rows_ND": rows, "graph": by_name.__getitem__, "graph_kind": kind, "graph_scorer": scorer}
    return one_tree(tree=tree, manifest=manifest, **attributes)


def with_rows_in_memory(bundle: Bundle) -> Bundle:
    """The same bundle for engines that read node rows as an array."""
    rows_ND = bundle.node_rows_ND[0 : bundle.tree.node_count]
    return one_tree(**{**vars(bundle), "node_rows_ND": rows_ND, "stored_rows": rows_ND})


def manifest_of(ranking: Ranking, **fields: Any) -> SimpleNamespace:
    """The fields of a manifest that engines read, for a bundle without a second stage."""
    absent_fields: dict[str, Any] = {"trees": (), "memory": None, "stacking": None, "shard": None}
    return SimpleNamespace(**absent_fields, version=1, ranking=ranking, result_ranking=ranking, **fields)


def one_tree(**attributes: Any) -> Bundle:
    """A bundle of one tree with these attributes; optional parts are None."""
    bundle = SimpleNamespace(**({"memory": None, "stacking": None, "shard": None} | attributes))
    bundle.alone = (bundle,)
    return cast(Bundle, bundle)


class TorchSearch:
    """Beam search in torch, scored in float16, over a complete binary tree. No masks; topk breaks ties.

    state_BLS  query states, the first of them for level `first`
    """

    def __init__(self, engine: TritonSearch, form: str, state_BLS: Tensor, first: int) -> None:
        self._head = scorer_of(form).head.half().to(engine.device).eval()
        self._rows_ND, self._tree, self._gamma = engine.node_rows_ND.half(), engine.bundle.tree, FORMS[form].gamma
        self._state_BLS, self._first = state_BLS.half(), first

    @torch.no_grad()
    def search(self, beam: int, m: int) -> Tensor:
        """int64[B, m] leaves."""
        start, height = self._tree.start_level(beam), self._tree.height
        above_BC = torch.zeros((len(self._state_BLS), 1), device=self._rows_ND.device)  # ranks of the level above
        for level in range(1, start) if self._gamma else ():
            above_BC = self._logits(self._level(level), level) + self._gamma * _twice(above_BC)
        nodes_BC = self._level(start)
        above_BC = _twice(above_BC) if self._gamma else above_BC.expand(-1, nodes_BC.shape[1])
        for level in range(start, height):
            rank_BC = self._logits(nodes_BC, level) + self._gamma * above_BC
            best = rank_BC.topk(beam, sorted=False)
            kept_nodes = nodes_BC.gather(1, best.indices)
            nodes_BC, above_BC = torch.cat([2 * kept_nodes + 1, 2 * kept_nodes + 2], 1), torch.cat([best.values, best.values], 1)
        rank_BC = self._logits(nodes_BC, height) + self._gamma * above_BC
        return nodes_BC.gather(1, rank_BC.topk(m).indices)

    def _level(self, level: int) -> Tensor:
        """int64[B, nodes of the level]."""
        span = self._tree.level(level)
        return torch.arange(span.start, span.stop, device=self._rows_ND.device).expand(len(self._state_BLS), -1)

    def _logits(self, nodes_BC: Tensor, level: int) -> Tensor:
        logits: Tensor = self._head(self._state_BLS[:, level - self._first], self._rows_ND[nodes_BC])
        return logits.float()

    @torch.no_grad()
    def exhaustive(self, m: int) -> Tensor:
        """int64[B, m]: every leaf scored by its logit."""
        leaves, state = self._tree.level(self._tree.height), self._state_BLS[:, -1]
        logit_blocks = [
            self._head(state, self._rows_ND[start : min(start + (1 << 17), leaves.stop)].expand(len(state), -1, -1))
            for start in range(leaves.start, leaves.stop, 1 << 17)
        ]
        return torch.cat(logit_blocks, 1).topk(m).indices


def _twice(rank_BC: Tensor) -> Tensor:
    """Each parent's rank for both of its children, in the order of the nodes."""
    return rank_BC.unsqueeze(-1).expand(-1, -1, 2).flatten(1)


def items_of(tree: Tree, leaves_BM: Tensor) -> Int64:
    item_rows: Int64 = tree.leaf_item[leaves_BM.cpu().numpy() - tree.leaf_offset]
    return item_rows
