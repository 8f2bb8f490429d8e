"""The node row of a new leaf, where a score is an inner product of query state and row: by the states of queries that led to its item.

    e = r̄ + ρ · (s̄ − µ) / |s̄ − µ|

s̄ is the mean state of the item's events, µ that of the bundle's held-out queries, r̄ the mean row of trained leaves, and ρ the median of
their distances from it. Only the direction of s̄ − µ is used: a trained row lies in that of its queries, but how long states are says
nothing of rows. Longer rows are found more often by their own queries, but encoders misread the histories that hold them: they were trained
with no such rows. Columns in which all states are equal hold biases, in which r̄ is the trained leaves' median.

The shift goes into the last bias, and is the same for all items that are taken to have had n events (`popularity.py`), of which as many are
at hand. Some trained items are placed as if they were new, by so many of the held-out queries that they are relevant for, with the memory
of an item that has had n events, and asked for by the others. With the shift they come back EXPLORED · share(n) times as often as the
catalogue's mean item. Items by their fields alone have shifts of their own, found in the same way: trained items are placed by their
fields, next to others than themselves. The constants were chosen on the embedded sample and MovieLens.

Legend: B queries, S state = row, K beam, I items, J trained items that are placed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from espalier.engines.stages import Frontier
from espalier.manifest import Ranking
from espalier.memory import Memory
from espalier.node_rows import NodeRows
from espalier.placement.parents import best_first, votes_of_search
from espalier.tree import EMPTY_LEAF, Tree

Floats = NDArray[np.float64]
Int64 = NDArray[np.int64]
EQUAL = 1e-6
"""Columns of states that differ by less have a standard deviation of 0."""
BLOCK = 1 << 16
"""Leaves whose rows are read at a time."""
LONGEST = 0.99
"""No new row is farther from the mean row than this quantile of the trained ones."""
EXPLORED = 1.3
"""How often live items come back, in multiples of what their counts say."""
NEAREST = 10
"""Items that are named."""
FEWEST = 32
"""Trial items, if held-out queries look for so many."""


@dataclass(frozen=True, eq=False)
class Shifts:
    """The shift of the module.

    gap_G  ascending: what trial items lacked to come back for a query, each for each
    mean   how many of the gaps are closed if each trial item comes back as often as the catalogue's mean item
    """

    gap_G: NDArray[np.float32]
    mean: float

    def of(self, share: float) -> float:
        """That of items that are wanted `share` times as often as a mean one; 0 where trial items never come back."""
        if not len(self.gap_G):
            return 0.0
        closed = round(EXPLORED * share * self.mean)
        return float(self.gap_G[min(max(closed, 1), len(self.gap_G)) - 1])


NO_SHIFTS = Shifts(np.empty(0, np.float32), 0.0)


@dataclass(frozen=True, eq=False)
class RowScale:
    """What rows of new leaves are made with.

    state_S   µ · row_S: r̄ · is_free_S bool[S]: columns in which states differ
    length    ρ · longest: see LONGEST
    """

    state_S: Floats
    row_S: Floats
    is_free_S: NDArray[np.bool_]
    length: float
    longest: float

    def row_of_events(self, state_S: Floats) -> Floats:
        """float64[S]: e, by the mean state of an item's events."""
        return self._row_towards(state_S - self.state_S)

    def row_of_content(self, row_S: Floats) -> Floats:
        """float64[S]: the row in the direction of one by content, as far from the mean row as trained ones and with their biases.

        Rows by content are shorter: training added what it learned for each item. Their biases are those of items that nobody touched.
        """
        return self._row_towards(row_S - self.row_S)

    def _row_towards(self, away_S: Floats) -> Floats:
        away_S = np.where(self.is_free_S, away_S, 0)
        distance = _length(away_S)
        return self.row_S + (self.length / distance if distance > 0 else 0.0) * away_S

    def shifted(self, row_S: Floats, shift: float) -> Floats:
        """A row with a shift; without a column of biases there is none."""
        if shift:
            row_S = row_S.copy()
            row_S[self._bias] += shift
        return row_S

    @cached_property
    def _bias(self) -> int:
        """The last column of biases."""
        return int(np.flatnonzero(~self.is_free_S)[-1])

    def capped(self, row_S: Floats) -> Floats:
        """A row that is not farther from the mean row than trained ones are."""
        away_S = np.where(self.is_free_S, row_S - self.row_S, 0)
        distance = _length(away_S)
        return row_S if distance <= self.longest else row_S - away_S * (1 - self.longest / distance)


def _length(row_S: Floats) -> float:
    return math.sqrt(float(row_S @ row_S))


def scale_of(tree: Tree, node_rows_ND: NodeRows, states_BS: NDArray[np.float32] | None) -> RowScale:
    """That of a bundle, without a shift. states_BS: of its held-out queries; None: they say nothing of rows."""
    leaves = tree.leaf_offset + np.flatnonzero(tree.leaf_item != EMPTY_LEAF)
    width = node_rows_ND.shape[1]
    blocks = [leaves[begin : begin + BLOCK] for begin in range(0, len(leaves), BLOCK)]
    mean_S = sum((node_rows_ND[block].astype(np.float64).sum(0) for block in blocks), np.zeros(width)) / len(leaves)
    state_S, is_free_S = np.zeros(width), np.ones(width, np.bool_)
    if states_BS is not None:
        wide_BS = states_BS.astype(np.float64)
        state_S, is_free_S = wide_BS.mean(0), wide_BS.std(0) > EQUAL
        biases = np.concatenate([node_rows_ND[block][:, ~is_free_S].astype(np.float64) for block in blocks])
        mean_S[~is_free_S] = np.median(biases, 0)
    distance = np.concatenate([np.linalg.norm((node_rows_ND[block] - mean_S)[:, is_free_S], axis=1) for block in blocks])
    return RowScale(state_S, mean_S, is_free_S, float(np.median(distance)), float(np.quantile(distance, LONGEST)))


@dataclass(frozen=True, eq=False)
class Background:
    """Held-out queries of a bundle, searched.

    history_BT  item rows, −1: no item; None for vectors
    states_BS   float32[B, S]: on the leaf level
    found_BM    item rows that came back · key_B: what the last of them was ordered by; −inf where fewer came
    relevant    for each query the item rows that it should find
    memory      of the bundle
    """

    history_BT: Int64 | None
    frontier: Frontier
    states_BS: NDArray[np.float32]
    found_BM: Int64
    key_B: NDArray[np.float32]
    relevant: Sequence[Int64]
    memory: Memory | None = None

    @cached_property
    def places(self) -> dict[int, tuple[Int64, Floats]]:
        """Item row → the queries whose histories hold it, and the weights of its places."""
        if self.history_BT is None or self.memory is None:
            return {}
        found: dict[int, dict[int, float]] = {}
        for b, history in enumerate(self.history_BT):
            known = history[history >= 0][::-1].tolist()
            for a, weight in zip(known, self.memory.weight.tolist(), strict=False):
                of_item = found.setdefault(a, {})
                of_item[b] = of_item.get(b, 0.0) + weight
        return {a: (np.array(list(at)), np.array(list(at.values()))) for a, at in found.items()}


@dataclass(frozen=True, eq=False)
class Trial:
    """A trained item placed as if it were new: its evidence (positions of queries), its row without a shift, its parent, and the item rows
    that lift it with S, if it has had so many events.
    """

    item: int
    queries: list[int]
    row_S: Floats
    parent: int
    memory: Callable[[float], tuple[Int64, Floats]]


def trial_items(relevant: Sequence[Int64], most: int, events: int) -> list[tuple[int, list[int]]]:
    """Items that at least `events` queries should find, or the FEWEST of the most queries; the first `events` of those queries.

    Of more than `most` items those at even distances.
    """
    queries_of: dict[int, list[int]] = {}
    for b, rows in enumerate(relevant):
        for item in np.unique(rows).tolist():
            queries_of.setdefault(item, []).append(b)
    enough = min(events, sorted(map(len, queries_of.values()), reverse=True)[:FEWEST][-1] if queries_of else 0)
    items = sorted(item for item, queries in queries_of.items() if len(queries) >= enough)
    chosen = items if len(items) <= most else [items[place] for place in np.linspace(0, len(items) - 1, most).astype(int).tolist()]
    return [(item, queries_of[item][:events]) for item in chosen]


def best_parent(frontier: Frontier, queries: Sequence[int]) -> int:
    """The parent that a search of some queries prefers, −1 for none."""
    nodes = best_first([(1.0, votes_of_search(frontier, queries))])
    return int(nodes[0]) if len(nodes) else -1


@dataclass(frozen=True, eq=False)
class Trials:
    """Trials, and what each of them lacks to come back for each query if nothing lifts it.

    lack_TB   own part of the rank · own_TB: what the row makes of it
    kept_TB   whether the parent is in the beam · asked_TB: whether the query is none of the evidence, and has a beam
    """

    trials: Sequence[Trial]
    lack_TB: Floats
    own_TB: Floats
    kept_TB: NDArray[np.bool_]
    asked_TB: NDArray[np.bool_]

    @staticmethod
    def of(background: Background, trials: Sequence[Trial], ranking: Ranking) -> Trials:
        ranks_BK = background.frontier.ranks_BK.astype(np.float64)
        least_B = np.where(np.isfinite(ranks_BK), ranks_BK, np.inf).min(1)
        shape = len(trials), len(background.key_B)
        lack_TB, own_TB, kept_TB, asked_TB = np.empty(shape), np.empty(shape), np.empty(shape, np.bool_), np.ones(shape, np.bool_)
        for t, trial in enumerate(trials):
            is_parent_BK = background.frontier.nodes_BK == trial.parent
            kept_TB[t] = is_parent_BK.any(1)
            # memory may lift a parent that is not in the beam: then it is about as good as the last that is
            above_B = np.where(kept_TB[t], np.where(is_parent_BK, ranks_BK, -np.inf).max(1), least_B)
            asked_TB[t] = np.isfinite(above_B)
            asked_TB[t, trial.queries] = False
            lack_TB[t] = background.key_B - ranking.gamma * np.where(np.isfinite(above_B), above_B, 0)
            own_TB[t] = background.states_BS @ trial.row_S
        return Trials(trials, lack_TB, own_TB, kept_TB, asked_TB)

    def shifts(self, background: Background, items: int, ranking: Ranking, count: float = 0.0) -> Shifts:
        """What items like those of the trials are shifted by that have had so many events. items: of the catalogue."""
        lift_TB = np.zeros(self.lack_TB.shape)
        if background.memory is not None:
            for lift_B, trial in zip(lift_TB, self.trials, strict=True):
                for a, value in zip(*(part.tolist() for part in trial.memory(count)), strict=True):
                    at, weight = background.places.get(a, _NOWHERE)
                    lift_B[at] += background.memory.key_weight * value * weight
        is_asked_TB = self.asked_TB & (self.kept_TB | (lift_TB > 0))
        gaps = _logit_of((self.lack_TB - lift_TB)[is_asked_TB], ranking) - self.own_TB[is_asked_TB]
        mean = len(self.trials) * len(background.key_B) * background.found_BM.shape[1] / items
        return Shifts(np.sort(gaps[np.isfinite(gaps)].astype(np.float32)), mean)


_NOWHERE = (np.empty(0, np.int64), np.empty(0))


def _logit_of(own_B: Floats, ranking: Ranking) -> Floats:
    """The logits that a leaf's own part of the rank is made of; inf where no logit gives it."""
    if ranking.own == "logit":
        return own_B
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(own_B < 0, own_B - np.log(-np.expm1(np.minimum(own_B, 0))), np.inf)


class NearRows:
    """The trained items whose rows have the direction of a new one, by a copy of the leaves' rows, less their mean, of length 1,
    without biases: float32[I, D]."""

    def __init__(self, node_rows_ND: NodeRows, leaf_of_item: Int64, scale: RowScale) -> None:
        rows_ID = np.asarray(node_rows_ND[leaf_of_item], np.float32)
        rows_ID = np.where(scale.is_free_S, rows_ID - scale.row_S.astype(np.float32), np.float32(0))
        length_I = np.linalg.norm(rows_ID, axis=1, keepdims=True)
        self._unit_ID = (rows_ID / np.where(length_I > 0, length_I, 1)).astype(np.float32)
        self._scale = scale

    def of(self, row_D: Floats, but: int = -1) -> tuple[Int64, Floats]:
        """At most NEAREST items, the nearest first, and their cosines, at least 0. but: an item that is left out, −1 for none."""
        away_D = np.where(self._scale.is_free_S, row_D - self._scale.row_S, 0)
        cosine_I = self._unit_ID @ (away_D / max(float(np.linalg.norm(away_D)), 1e-12)).astype(np.float32)
        items = np.argsort(-cosine_I, kind="stable")[: NEAREST + 1]
        items = items[items != but][:NEAREST]
        return items, np.maximum(cosine_I[items].astype(np.float64), 0)
