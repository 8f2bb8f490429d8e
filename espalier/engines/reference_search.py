"""The tree search of the `reference` engine as a stage of the pipeline, which adds live items, forests and stacking.

Legend: B queries, T trees, C leaves that were scored.
"""

from __future__ import annotations

import numpy as np

from espalier.arrays import Float32
from espalier.bundle import Bundle
from espalier.engines.reference import RankedLeaves, ReferenceEngine, Step, best_leaves, traced
from espalier.engines.stages import NO_RANK, NO_ROW, Leaves, TreeQuery, TreeSearch, stacked
from espalier.manifest import GraphScorer
from espalier.search import Frontier
from espalier.tree import Tree


class ReferenceSearch(TreeSearch):
    """See the module."""

    name = ReferenceEngine.name
    rounding = ReferenceEngine.rounding

    def __init__(self, bundle: Bundle) -> None:
        self._engine = ReferenceEngine(bundle)
        self._trees = [alone.tree for alone in bundle.alone]
        self._has_states = self.encodes = isinstance(bundle.manifest.scorer, GraphScorer)

    def search(self, query: TreeQuery) -> Leaves:
        """See `TreeSearch`."""
        batch = len(query.queries)
        states = [self._states(query, b) for b in range(batch)]
        paths_T = [[self._walk(query, b, states[b], t, tree) for b in range(batch)] for t, tree in enumerate(self._trees)]
        leaves_TB = [[best_leaves(tree, path[-1]) for path in paths] for tree, paths in zip(self._trees, paths_T, strict=True)]
        width = max((len(leaves.item_rows) for leaves_B in leaves_TB for leaves in leaves_B), default=0)
        if len(self._trees) == 1:
            width, m_B = int(query.m_B.max(initial=0)), query.m_B.tolist()
            leaves_TB = [[RankedLeaves(rows[:m], ranks[:m], keys[:m]) for (rows, ranks, keys), m in zip(leaves_TB[0], m_B, strict=True)]]
        flat = [leaves_TB[t][b] for b in range(batch) for t in range(len(self._trees))]
        shape = batch, len(self._trees), width
        rows_BTM, ranks_BTM, keys_BTM = (
            np.full(shape, filler, dtype) for filler, dtype in ((-1, np.int64), (-np.inf, np.float32), (-np.inf, np.float32))
        )
        for i, (rows, ranks, keys) in enumerate(flat):
            at = *divmod(i, len(self._trees)), slice(len(rows))
            rows_BTM[at], ranks_BTM[at], keys_BTM[at] = rows, ranks, keys
        count_BT = np.array([len(leaves.item_rows) for leaves in flat], np.int64).reshape(shape[:2])
        finite_B = np.array([all(step.finite for paths in paths_T for step in paths[b]) for b in range(batch)])
        return Leaves(
            rows_BTM,
            ranks_BTM,
            keys_BTM,
            count_BT,
            finite_B,
            tuple(traced(paths[0]) for paths in paths_T) if query.trace else (),
            tuple(self._frontier(query, *entry) for entry in enumerate(paths_T)) if query.frontier else (),
            np.stack([state[-1] for state in states]) if query.frontier and self._has_states else None,
        )

    def _states(self, query: TreeQuery, b: int) -> Float32:
        """float32[L, S]: the states of query b."""
        if query.states_BLS is not None and (query.encoded_B is None or query.encoded_B[b]):
            return np.asarray(query.states_BLS[b])
        return np.asarray(self._engine.states(query.queries.take(np.array([b])))[0])

    def _walk(self, query: TreeQuery, b: int, state_LS: Float32, t: int, tree: Tree) -> list[Step]:
        lift_N = None if query.memory is None else self._engine.lift_of_lists(query.memory, b)
        beam_size, m = int(query.beam_size_B[b]), int(query.m_B[b])
        return self._engine.walk(state_LS, query.eligible_T[t].nodes_of(tree, b), lift_N, beam_size, m, t=t)

    def _frontier(self, query: TreeQuery, t: int, paths: list[list[Step]]) -> Frontier:
        tree, nodes, ranks = self._trees[t], [], []
        gamma = self._engine.bundle.manifest.ranking.gamma
        for b, path in enumerate(paths):
            is_ranked = tree.height > 1 and (gamma > 0 or tree.start_level(int(query.beam_size_B[b])) < tree.height)
            nodes.append(path[-2].kept_K if tree.height > 1 else np.zeros(1, np.int64))
            ranks.append(np.zeros(len(nodes[-1]), np.float32))
            if is_ranked:
                ranks[-1] = path[-2].ranks_C[np.isin(path[-2].candidates_C, path[-2].kept_K)]
        return Frontier(stacked([row[None] for row in nodes], NO_ROW), stacked([row[None] for row in ranks], NO_RANK))
