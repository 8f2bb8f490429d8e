"""`reference`: the beam search in NumPy, one query and one level at a time. The oracle of every other engine; for tests.

It runs the bundle's two ONNX graphs in ONNX's own NumPy evaluator, so it shares no code with ONNX Runtime. It computes linear scorers in
float64. Follows OTM Eq. 3–4 with the ranking formula rank(n) = own(n) + γ · rank(parent(n)), rank(root) = 0, and where the bundle has a
memory, key(n) = rank(n) + λ · mem(n). Of a forest it searches one tree after the other.

Legend: B queries, T history, L levels, K beam, C candidates, M results, N nodes, D node row, S state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from espalier.arrays import Array, Bool, Float32, Float64, Int64
from espalier.bundle import Bundle
from espalier.engines.encode import check_queries
from espalier.engines.graphs import read_graph
from espalier.engines.reference_stacking import stacked
from espalier.engines.stages import GivenQueries
from espalier.errors import BundleCorrupt
from espalier.manifest import Activation, LinearScorer, Ranking
from espalier.masks.eligibility import every_item
from espalier.memory_lists import MemoryLists
from espalier.queries import HistoryKind, QueryBatch, VectorKind
from espalier.scores import finish, log_scores
from espalier.search import NO_CONTEXT, NO_ITEM, Engine, LevelTrace, NodeMask, SearchContext, SearchParams, SearchResult
from espalier.tail import FARTHEST, FLOOR, Tail
from espalier.text.sparse_rows import SparseRows
from espalier.tree import Tree


@dataclass(frozen=True)
class Step:
    """One level of one query's search: all candidates with ranks and keys, and the nodes that were kept; both in ascending node order.

    keys_C  the largest are kept: the ranks, plus λ · mem where there is a memory
    finite  whether the logits of all candidates are finite; always True on a level that other engines need not score
    """

    level: int
    candidates_C: Int64
    ranks_C: Float32
    keys_C: Float32
    kept_K: Int64
    finite: bool


@dataclass(frozen=True)
class ScoredItems:
    """Items that one query's search scored, best first; of equal keys the lower leaf, in a forest the lower item row.

    steps            of each tree
    gap              between the ranks of the last item that stacking reorders and of the next one; inf where there is no next one
    before_stacking  the items as the trees ranked them, if stacking has reordered them
    """

    item_rows: Int64
    ranks: Float32
    keys: Float32
    steps: list[list[Step]]
    gap: float = np.inf
    before_stacking: ScoredItems | None = None


class ReferenceEngine(Engine):
    """See the module. `rounding` is how much other engines may differ from this one, which itself rounds as float32 does."""

    name = "reference"
    rounding = 1e-4

    def __init__(self, bundle: Bundle) -> None:
        self.bundle, self._memory = bundle, bundle.memory
        self._tree_bundles = bundle.alone
        scorer = bundle.manifest.scorer
        if isinstance(scorer, LinearScorer):
            return
        self._reads_sequences = scorer.encoder == "sequence"
        self._rows_ND = np.asarray(bundle.node_rows_ND, np.float32)
        self._query = ReferenceEvaluator(read_graph("query.onnx", bundle.graph("query.onnx")))
        self._scorer = ReferenceEvaluator(read_graph("scorer.onnx", bundle.graph("scorer.onnx")))

    def search(self, queries: QueryBatch, params: SearchParams, context: SearchContext = NO_CONTEXT) -> SearchResult:
        """See `Engine`. Live items are ignored, and no trace is kept."""
        tree = self.bundle.tree
        check_queries(self.bundle, queries)
        if not isinstance(queries, GivenQueries):
            queries.check(tree.item_count)
        params.check(len(queries), tree.item_count, tree.node_count)
        width = int(params.m_B.max(initial=0))
        rows_BM = np.full((len(queries), width), NO_ITEM, np.int64)
        ranks_BM, keys_BM = (np.full((len(queries), width), -np.inf, np.float32) for _ in range(2))
        eligible_B, finite_B = np.zeros(len(queries), np.int64), np.ones(len(queries), np.bool_)
        for b in range(len(queries)):
            results = self.scored_items(queries, params, b)
            rows, ranks, keys = (array[: params.m_B[b]] for array in (results.item_rows, results.ranks, results.keys))
            rows_BM[b, : len(rows)], ranks_BM[b, : len(rows)], keys_BM[b, : len(rows)] = rows, ranks, keys
            eligible_B[b] = self.eligible_nodes(queries, params, b).items
            finite_B[b] = all(step.finite for steps in results.steps for step in steps)
        vectors_finite_B = finite_B if isinstance(queries.kind, VectorKind) else None
        ranking = self.bundle.manifest.result_ranking
        return finish(ranking, params.m_B, eligible_B, rows_BM, ranks_BM, (), vectors_finite_B, keys_BM)

    def scored_items(self, queries: QueryBatch, params: SearchParams, b: int) -> ScoredItems:
        """All items that the search of query b scored, not only the best m."""
        of_trees = self._tree_items(queries, params, b)
        if self.bundle.stacking is None:
            return of_trees
        items, keys = stacked(self.bundle.stacking, *queries.features.row(b), of_trees.item_rows, of_trees.ranks)
        depth, ranks = self.bundle.stacking.info.candidates, of_trees.ranks
        gap = float(ranks[depth - 1] - ranks[depth]) if depth < len(ranks) else np.inf
        return ScoredItems(items, keys, keys, of_trees.steps, gap, of_trees)

    def _tree_items(self, queries: QueryBatch, params: SearchParams, b: int) -> ScoredItems:
        """The scored items of query b before stacking."""
        steps = [self.steps(queries, params, b, t=t) for t in range(len(self._tree_bundles))]
        if len(steps) > 1:
            return self._mean(steps, queries, b)
        return ScoredItems(*best_leaves(self.bundle.tree, steps[0][-1]), steps)

    def _mean(self, steps: list[list[Step]], queries: QueryBatch, b: int) -> ScoredItems:
        """The items of a forest, ranked by the log of their mean score over the trees (0 where a tree did not score them) and the tail."""
        logs: dict[int, list[float]] = {}
        for tree_bundle, (*_, last) in zip(self._tree_bundles, steps, strict=True):
            tree, of_leaves = tree_bundle.tree, log_scores(self.bundle.manifest.ranking, last.ranks_C)
            for leaf, log in zip(last.candidates_C.tolist(), of_leaves.tolist(), strict=True):
                logs.setdefault(int(tree.leaf_item[leaf - tree.leaf_offset]), []).append(log)
        items = np.array(sorted(logs), np.int64)
        wide = np.array([log_mean(logs[item], len(steps)) for item in items.tolist()], np.float64)
        tail = self.bundle.tail
        if tail is not None:
            (features, values), query_F = queries.features.row(b), np.zeros(tail.width)
            query_F[features] = values
            near = np.array([log_near(tail, query_F, item) for item in items.tolist()], np.float64)
            wide = tail.info.alpha * wide + (1 - tail.info.alpha) * near
        ranks = wide.astype(np.float32)
        order = np.argsort(-ranks, kind="stable")
        return ScoredItems(items[order], ranks[order], ranks[order], steps)

    def steps(self, queries: QueryBatch, params: SearchParams, b: int, follow: Mapping[int, Int64] | None = None, t: int = 0) -> list[Step]:
        """The search of query b, level by level from 1 to H; every level is scored, also those that need no pruning.

        follow  beams of another engine (ascending node numbers by level): the search continues from these, to replay that engine's search
        t       which tree of a forest, from 0. A tree of a forest keeps all leaves that it scored
        """
        eligible_N = self.eligible_nodes(queries, params, b, t).eligible_N
        lift_N = None
        if isinstance(queries, GivenQueries) and queries.memory is not None:
            lift_N = self.lift_of_lists(queries.memory, b)
        elif self._memory is not None:
            lift_N = self.memory_lift(queries.array[b], eligible_N)
        beam_size, leaf_count = int(params.beam_size_B[b]), self._leaf_count(params, b)
        return self.walk(self._query_states(queries, b), eligible_N, lift_N, beam_size, leaf_count, follow, t)

    def walk(
        self,
        state_LS: Float32,
        eligible_N: Bool,
        lift_N: Float32 | None,
        beam_size: int,
        leaf_count: int,
        follow: Mapping[int, Int64] | None = None,
        t: int = 0,
    ) -> list[Step]:
        """The search of one query in a tree.

        lift_N      λ · mem of every node, None where there is no memory
        leaf_count  how many leaves of a single tree are kept
        """
        tree, ranking = self._tree_bundles[t].tree, self.bundle.manifest.ranking
        kept_K, rank_K = np.zeros(1, np.int64), np.zeros(1, np.float32)
        start = tree.start_level(beam_size)
        steps = []
        for level in range(1, tree.height + 1):
            candidates_C, parent_C = tree.children(kept_K)
            eligible_C = eligible_N[candidates_C]
            candidates_C, parent_C = candidates_C[eligible_C], parent_C[eligible_C]
            logits_C = self.logits(state_LS, level, candidates_C, t)
            ranks_C = ranks_of(ranking, logits_C, rank_K[parent_C])
            keys_C = ranks_C if lift_N is None else _sum(ranks_C, lift_N[candidates_C])
            finite_C = np.isfinite(logits_C)
            scored = ranking.gamma > 0 or level >= start  # otherwise the beam holds the whole level, and its ranks are never read
            if scored:
                present_C = finite_C & np.isfinite(ranks_C) & np.isfinite(keys_C)
                candidates_C, ranks_C, keys_C = candidates_C[present_C], ranks_C[present_C], keys_C[present_C]
            size = beam_size
            if level == tree.height:
                size = leaf_count if len(self._tree_bundles) == 1 else len(candidates_C)
            best = np.sort(np.argsort(-keys_C, kind="stable")[:size])
            kept_K = candidates_C[best]
            steps.append(Step(level, candidates_C, ranks_C, keys_C, kept_K, bool(finite_C.all()) or not scored))
            if follow is not None and level in follow:
                best = np.flatnonzero(np.isin(candidates_C, follow[level]))
                kept_K = candidates_C[best]
            rank_K = ranks_C[best]
        return steps

    def _leaf_count(self, params: SearchParams, b: int) -> int:
        """How many leaves of the only tree query b needs: m, or as many as stacking reorders."""
        info = self.bundle.manifest.stacking
        return max(int(params.m_B[b]), 0 if info is None else min(info.candidates, self.bundle.tree.item_count))

    def eligible_nodes(self, queries: QueryBatch, params: SearchParams, b: int, t: int = 0) -> NodeMask:
        """The eligible nodes of tree t: those of query b's mask, without nodes below which the query or the memory excludes every item.

        A mask may hold nodes with no eligible item of the bundle below them: the parents of live items (espalier.live).
        """
        tree, mask = self._tree_bundles[t].tree, None if params.mask_B is None else params.mask_B[b]
        mask = every_item(tree) if mask is None else mask.of_tree(t)
        excluded = set() if params.exclude_BE is None else set(params.exclude_BE[b][params.exclude_BE[b] != NO_ITEM].tolist())
        if self._memory is not None:
            last_age = {row: ages[0] for row, ages in self._ages(queries.array[b]).items()}
            excluded |= {row for row, age in last_age.items() if self._memory.left_out[min(age.bit_length(), 5)]}
        if not excluded:
            return mask
        eligible_N, gone = mask.eligible_N.copy(), 0
        for row in sorted(excluded):
            node = int(tree.leaf_of_item[row])
            gone += int(eligible_N[node])
            while node > 0 and eligible_N[node]:
                eligible_N[node] = node < tree.leaf_offset and eligible_N[tree.first_child[node] : tree.first_child[node + 1]].any()
                node = -1 if eligible_N[node] else int(tree.parent[node])
        return replace(mask, eligible_N=eligible_N, items=mask.items - gone)

    def _query_states(self, queries: QueryBatch, b: int) -> Float32:
        """float32[L, S]: the states of query b, encoded here unless the query brings them."""
        if isinstance(queries, GivenQueries) and queries.states_BLS is not None:
            return np.asarray(queries.states_BLS[b])
        return np.asarray(self.states(queries.take(np.array([b])))[0])

    def states(self, queries: QueryBatch) -> Float32:
        """float32[B, L, S] or float32[B, 1, S]: the query states of a batch; features become one dense vector."""
        if isinstance(queries.rows, SparseRows):
            dense_BLS = np.zeros((len(queries), 1, queries.rows.width), np.float32)
            dense_BLS[np.repeat(np.arange(len(queries)), np.diff(queries.rows.indptr)), 0, queries.rows.indices] = queries.rows.values
            return dense_BLS
        inputs: dict[str, NDArray[np.generic]] = {"node_rows": self._rows_ND}
        if isinstance(queries.kind, HistoryKind):
            leaves_BT = np.where(queries.array >= 0, self.bundle.tree.leaf_of_item[queries.array], -1)
            if self._reads_sequences:
                inputs["history_leaves"] = leaves_BT
            else:
                inputs["history_nodes"] = np.moveaxis(self.bundle.tree.ancestors(leaves_BT), 2, 1)
        else:
            inputs["vector"] = queries.array
        feeds = {name: inputs[name] for name in self._query.input_names}
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            return np.asarray(next(iter(self._query.run(None, feeds))), np.float32)

    def memory_lift(self, history_T: Array, eligible_N: Bool) -> Float32:
        """float32[N]: λ · mem of every node for one history (espalier.memory)."""
        memory, tree = self._memory, self.bundle.tree
        mem_N = np.zeros(tree.node_count)
        if memory is None:
            raise BundleCorrupt(f"{self.bundle.path}: it has no memory")
        known_T = history_T[history_T >= 0][::-1]
        for item, weight in zip(known_T.tolist(), memory.weight.astype(np.float64), strict=False):
            entries = slice(memory.offset[item], memory.offset[item + 1])
            mem_N[tree.leaf_of_item[memory.item[entries]]] += weight * memory.value[entries].astype(np.float64)
        for item, ages in self._ages(history_T).items():
            mem_N[tree.leaf_of_item[item]] += sum(float(memory.repeat[min(age.bit_length(), 5)]) for age in ages)
        mem_N[~eligible_N] = 0
        for level in range(tree.height, 1, -1):
            nodes = np.asarray(tree.level(level))
            np.maximum.at(mem_N, tree.parent[nodes], mem_N[nodes])
        return np.float32(memory.key_weight) * mem_N.astype(np.float32)

    def _ages(self, history_T: Array) -> dict[int, list[int]]:
        """The items of a history that this tree holds, each with how many items follow each of its occurrences, ascending."""
        row_of = None if self.bundle.shard is None else {item: row for row, item in enumerate(self.bundle.shard.items.tolist())}
        ages: dict[int, list[int]] = {}
        for age, item in enumerate(history_T[history_T >= 0][::-1].tolist()):
            row = item if row_of is None else row_of.get(item)
            if row is not None:
                ages.setdefault(row, []).append(age)
        return ages

    def lift_of_lists(self, lists: MemoryLists, b: int) -> Float32:
        """float32[N]: λ · mem of every node for query b, from lists of mem that the query brings."""
        lift_N, (nodes, values) = np.zeros(self.bundle.tree.node_count, np.float32), lists.of(b)
        lift_N[nodes] = np.float32(0 if self._memory is None else self._memory.key_weight) * values
        return lift_N

    def logits(self, state_LS: Float32, level: int, nodes_C: Int64, t: int = 0) -> Float32:
        """float32[C]: the logits of nodes on one level; infinite or NaN where float32 overflows."""
        state_S = state_LS[level if len(state_LS) > 1 else 0]
        if len(nodes_C) == 0:
            return np.empty(0, np.float32)
        if isinstance(self.bundle.manifest.scorer, LinearScorer):
            return self._products(state_S, nodes_C, t)
        inputs = {"query_state": state_S[None], "node_rows": self._rows_ND[nodes_C][None]}
        with np.errstate(over="ignore", invalid="ignore"):
            logits_BC = np.asarray(next(iter(self._scorer.run(None, inputs))), np.float32)
        return np.asarray(logits_BC[0])

    def _products(self, features_F: Float32, nodes_C: Int64, t: int) -> Float32:
        """float32[C]: bias + Σ weight · feature of nodes with linear scorers."""
        tree, chunks = self.bundle.trees[t]
        logits_C = chunks.bias[nodes_C].astype(np.float64)
        parent_C = tree.parent[nodes_C]
        for parent in np.unique(parent_C):
            rows = slice(chunks.chunk_row[parent], chunks.chunk_row[parent + 1])
            begin, end = chunks.row_entry[rows.start], chunks.row_entry[rows.stop]
            x = np.repeat(features_F[chunks.row_feature[rows]], np.diff(chunks.row_entry[rows.start : rows.stop + 1]))
            first, after = tree.first_child[parent : parent + 2]
            products = np.bincount(chunks.entry_child[begin:end], x.astype(np.float64) * chunks.entry_weight[begin:end], after - first)
            mine = parent_C == parent
            logits_C[mine] += products[nodes_C[mine] - first]
        with np.errstate(over="ignore"):
            return logits_C.astype(np.float32)


def _sum(ranks_C: Float32, lift_C: Float32) -> Float32:
    with np.errstate(over="ignore"):
        return ranks_C + lift_C


class RankedLeaves(NamedTuple):
    """The leaves that a search of a tree scored, best first."""

    item_rows: Int64
    ranks: Float32
    keys: Float32


def best_leaves(tree: Tree, last: Step) -> RankedLeaves:
    """The candidates of the leaf level, best first."""
    order = np.argsort(-last.keys_C, kind="stable")
    return RankedLeaves(tree.leaf_item[last.candidates_C[order] - tree.leaf_offset], last.ranks_C[order], last.keys_C[order])


def traced(steps: list[Step]) -> tuple[LevelTrace, ...]:
    """The levels of one query's search of a tree."""
    levels = []
    for step in steps:
        is_kept = np.isin(step.candidates_C, step.kept_K)
        kept_1K, scored_1C, ranks_1C, keys_1C = step.kept_K[None], step.candidates_C[None], step.ranks_C[None], step.keys_C[None]
        levels.append(LevelTrace(step.level, kept_1K, ranks_1C[:, is_kept], scored_1C, ranks_1C, keys_1C[:, is_kept], keys_1C))
    return tuple(levels)


# -- the formulas: from logits to ranks, the mean over a forest's trees, and the tail of its items ----------------------------


def ranks_of(ranking: Ranking, logits_C: Float32, parent_rank_C: Float32) -> Float32:
    """float32[C]: the ranks of nodes, given their logits and their parents' ranks."""
    with np.errstate(over="ignore", invalid="ignore"):
        own_C = log_activation(ranking.activation, logits_C) if ranking.own == "log_activation" else logits_C
        inherited_C = np.float32(ranking.gamma) * parent_rank_C if ranking.gamma > 0 else np.float32(0)  # 0 · ∞ is no number
        return np.asarray(own_C + inherited_C, np.float32)


def log_near(tail: Tail, query_F: Float64, item: int) -> float:
    """The log of a query's closeness to an item's row (espalier.tail)."""
    span = slice(int(tail.row_begin[item]), int(tail.row_begin[item + 1]))
    row_F = np.zeros(tail.width)
    row_F[tail.feature[span]] = tail.value[span]
    if tail.info.form == "product":
        return math.log(max(float(row_F @ query_F), FLOOR))
    distance = float(((query_F - row_F) ** 2).sum())
    return -float(np.logaddexp(0, min(tail.info.gamma / 2 * distance, FARTHEST)))


def log_mean(logs: list[float], trees: int) -> float:
    """log((Σ e^log) / trees), exact also for scores too small for a float."""
    top = max(logs)
    return top + math.log(sum(math.exp(log - top) for log in logs) / trees)


def log_activation(activation: Activation, logits: Float32) -> Float32:
    """The log of the sigmoid, or of a hinge: −max(0, 1 − v)^p."""
    if activation == "sigmoid":
        return np.asarray(-np.logaddexp(np.float32(0), -logits), np.float32)
    return np.asarray(-(np.maximum(np.float32(1) - logits, 0) ** int(activation[1])), np.float32)
