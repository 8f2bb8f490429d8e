"""Random puts and deletions of a bundle's items, to test live states.

Knows live states. Does not know searches.
"""

from __future__ import annotations

import numpy as np

from benchmarks.random_bundles import Rng, drawn
from espalier.bundle import Bundle
from espalier.live.rows import NO_FEATURES, LiveRow, Placement
from espalier.live.state import Change, LiveState
from espalier.manifest import LinearScorer


def random_row(rng: Rng, bundle: Bundle, integer: bool = True, memory_ids: tuple[str, ...] = (), in_tail: bool = False) -> LiveRow:
    """A row that fits a bundle. With a memory: entries from and to some of `memory_ids`; `in_tail`: also a row of the bundle's tail."""
    scorer = bundle.manifest.scorer
    if isinstance(scorer, LinearScorer):
        feature = np.flatnonzero(rng.random(scorer.features) < 0.4).astype(np.int32)
        tail = np.unique(rng.integers(0, scorer.features, 1 if integer else 4)).astype(np.int32) if in_tail else NO_FEATURES
        length = np.full(len(tail), max(1, len(tail)) ** -0.5, np.float32)
        bias = float(rng.integers(-1, 2))
        return LiveRow(drawn(rng, (len(feature),), integer), feature, bias, dense=False, tail_feature=tail, tail_value=length)
    values = drawn(rng, (scorer.node_dim,), integer)
    if bundle.manifest.memory is None or not memory_ids:
        return LiveRow(values)
    to, of = (tuple((str(name), float(rng.integers(1, 4))) for name in rng.choice(memory_ids, 3)) for _ in range(2))
    return LiveRow(values, memory_to=to, memory_from=of)


def random_put(rng: Rng, state: LiveState, item_id: str, sequence: int, integer: bool = True, parents: np.ndarray | None = None) -> Change:
    """A put under random parents with room; of a trained item also at its own leaves, in models of graphs always.

    parents  of the first tree, to choose from while they have room
    """
    memory_ids = tuple(state.bundle.items.ids_of(np.arange(min(8, len(state.bundle.items)))))
    memory_ids += tuple(entry.id for handle in range(state.table.handles) if (entry := state.table.entry_at(handle)) is not None)
    placements = []
    for number, tree_bundle in enumerate(state.bundle.alone):
        tree = tree_bundle.tree
        level = list(tree.level(tree.height - 1))
        candidate_parents = level if parents is None or number else parents.tolist()
        open_parents = [parent for parent in candidate_parents if state.has_room(number, parent)]
        open_parents = open_parents or [parent for parent in level if state.has_room(number, parent)]
        parent = int(rng.choice(open_parents))
        row = random_row(rng, state.bundle, integer, memory_ids, in_tail=number == 0 and state.bundle.manifest.tail is not None)
        own_leaf = state.trained_leaf_of(item_id, number)
        where = own_leaf if own_leaf and rng.random() < 0.5 else (parent, state.next_slot(number, parent))
        placements.append(Placement(number, *where, row))
    return Change(sequence, item_id, "put", None, tuple(placements), at=float(sequence))


def random_state(
    rng: Rng, bundle: Bundle, new: int = 12, deleted: int = 4, changed: int = 3, integer: bool = True, parents: np.ndarray | None = None
) -> LiveState:
    """A state with new items (a quarter deleted again), deleted trained items, and trained items with new rows."""
    state = LiveState(bundle)
    ids = [f"new-{i}" for i in range(new)]
    trained = bundle.items.ids_of(rng.permutation(bundle.manifest.tree.items)[: deleted + changed])
    jobs = [("put", item_id) for item_id in ids] + [("delete", item_id) for item_id in trained[:deleted]]
    jobs += [("put", item_id) for item_id in trained[deleted:]]
    order = rng.permutation(len(jobs)).tolist()
    repeated_jobs = [("delete", item_id) for item_id in ids[: new // 4]] + [("put", item_id) for item_id in ids[: new // 8]]
    for sequence, (kind, item_id) in enumerate([*(jobs[i] for i in order), *repeated_jobs], start=1):
        if kind == "put":
            state.apply([random_put(rng, state, item_id, sequence, integer, parents)])
        else:
            state.apply([Change(sequence, item_id, "delete")])
    return state
