"""The node row of a new leaf from the states of the queries that led to its item, for scores that are inner products of state and row.

    e = r̄ + ρ · (s̄ − µ) / |s̄ − µ|

s̄ is the mean state of the item's events, µ the mean state of the bundle's held-out queries, r̄ the mean row of trained leaves, and ρ the
median of their distances from r̄. Only the direction of s̄ − µ is used: a trained row lies in the direction of its queries, but the length of
states says nothing of rows. Their queries would find longer rows more often, but encoders misread histories that hold such rows, because
they were trained without any. Columns in which all states are equal hold biases; there r̄ is the median of the trained leaves.

A shift is added to the last bias. It is the same for all items with the same assumed number of events n (`popularity.py`) and as many
events at hand. To compute it, some trained items are placed as if they were new: by as many of the held-out queries that they are relevant
for, and with the memory of an item of n events. The other held-out queries test them. With the shift, searches find these items EXPLORED ·
share(n) times as often as the catalogue's mean item. Items with fields alone have separate shifts: trained items are placed by their
fields, without being their own neighbours. The constants were chosen on the embedded sample and MovieLens.

Legend: B queries, S state = row, K beam, I items, T trials, G gaps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from espalier.arrays import Bool, Float32, Float64, Int64
from espalier.manifest import Ranking
from espalier.memory import Memory
from espalier.node_rows import NodeRows
from espalier.placement.parents import best_first, votes_of_search
from espalier.search import Frontier
from espalier.tree import EMPTY_LEAF, Tree

EQUAL = 1e-6
"""A column of states with a smaller standard deviation is constant."""
BLOCK = 1 << 16
"""Leaves whose rows are read at a time."""
LONGEST = 0.99
"""Quantile of the trained rows' distances from the mean row that no new row exceeds."""
EXPLORED = 1.3
"""How often searches find live items, in multiples of the share that their counts imply."""
MOST_CLOSED = 0.5
"""The largest share of the gaps that a shift closes. To close the last ones, an item would come first wherever it can be found."""
NEAREST = 10
"""Most neighbours of an item."""
FEWEST = 32
"""Fewest trial items, if held-out queries have so many relevant items."""


@dataclass(frozen=True, eq=False)
class Shifts:
    """The shift of the module.

    gap_G  ascending: for each trial item and query, the logit that the item lacked to be in the answer
    mean   number of gaps that are closed if queries find each trial item as often as the catalogue's mean item
    """

    gap_G: Float32
    mean: float

    def of(self, share: float) -> float:
        """The shift of items that are relevant `share` times as often as a mean item; 0 without gaps."""
        if not len(self.gap_G):
            return 0.0
        closed = round(min(EXPLORED * share * self.mean, MOST_CLOSED * len(self.gap_G)))
        return float(self.gap_G[max(closed, 1) - 1])


NO_SHIFTS = Shifts(np.empty(0, np.float32), 0.0)


@dataclass(frozen=True, eq=False)
class RowScale:
    """Mean and scale of a bundle's rows.

    state_S   µ · row_S: r̄ · is_free_S bool[S]: columns in which states differ
    length    ρ · longest: largest distance from r̄, see LONGEST
    """

    state_S: Float64
    row_S: Float64
    is_free_S: Bool
    length: float
    longest: float

    def row_of_events(self, state_S: Float64) -> Float64:
        """float64[S]: e, from the mean state of an item's events."""
        return self._row_towards(state_S - self.state_S)

    def row_of_content(self, row_S: Float64) -> Float64:
        """float64[S]: the row in the direction of a row by content, at the distance of trained rows from the mean row, with its biases.

        Rows by content are shorter, because training added what it learned of each item. Their biases are those of untouched items.
        """
        return self._row_towards(row_S - self.row_S)

    def _row_towards(self, away_S: Float64) -> Float64:
        away_S = np.where(self.is_free_S, away_S, 0)
        distance = _length(away_S)
        return self.row_S + (self.length / distance if distance > 0 else 0.0) * away_S

    def shifted(self, row_S: Float64, shift: float) -> Float64:
        """A row with a shift, which is 0 for bundles without a column of biases."""
        if shift:
            row_S = row_S.copy()
            row_S[self._bias] += shift
        return row_S

    @cached_property
    def _bias(self) -> int:
        """The last column of biases."""
        return int(np.flatnonzero(~self.is_free_S)[-1])

    def capped(self, row_S: Float64) -> Float64:
        """A row moved towards the mean row, if it is farther from it than `longest`."""
        away_S = np.where(self.is_free_S, row_S - self.row_S, 0)
        distance = _length(away_S)
        return row_S if distance <= self.longest else row_S - away_S * (1 - self.longest / distance)


def _length(row_S: Float64) -> float:
    return math.sqrt(float(row_S @ row_S))


def scale_of(tree: Tree, node_rows_ND: NodeRows, states_BS: Float32 | None) -> RowScale:
    """The scale of a bundle's rows. states_BS: of its held-out queries; None: not inner products, or no queries."""
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
    """Held-out queries of a bundle and their answers.

    history_BT    item rows, −1: no item; None for vectors
    states_BS     float32[B, S]: on the leaf level
    item_rows_BM  the answers · key_B: the key of the last item of each; −inf for an answer of fewer than M items
    relevant      for each query the rows of its relevant items
    memory        of the bundle
    """

    history_BT: Int64 | None
    frontier: Frontier
    states_BS: Float32
    item_rows_BM: Int64
    key_B: Float32
    relevant: Sequence[Int64]
    memory: Memory | None = None

    @cached_property
    def history_weights(self) -> dict[int, tuple[Int64, Float64]]:
        """Item row → the queries whose histories hold it, and for each the summed weights of its positions."""
        if self.history_BT is None or self.memory is None:
            return {}
        weights_of: dict[int, dict[int, float]] = {}
        for b, history in enumerate(self.history_BT):
            newest_first = history[history >= 0][::-1].tolist()
            for a, weight in zip(newest_first, self.memory.weight.tolist(), strict=False):
                weight_of = weights_of.setdefault(a, {})
                weight_of[b] = weight_of.get(b, 0.0) + weight
        return {a: (np.array(list(weight_of)), np.array(list(weight_of.values()))) for a, weight_of in weights_of.items()}


@dataclass(frozen=True, eq=False)
class Trial:
    """A trained item placed as if it were new. queries: its evidence, positions of queries; row_S: without a shift; memory: returns, for a
    number of events that the item has had, the item rows that lift it, with S.
    """

    item: int
    queries: list[int]
    row_S: Float64
    parent: int
    memory: Callable[[float], tuple[Int64, Float64]]


def trial_items(relevant: Sequence[Int64], most: int, events: int) -> list[tuple[int, list[int]]]:
    """Items that are relevant for at least `events` queries, or the FEWEST of the most queries; and the first `events` of these queries.

    Of more than `most` items, evenly spaced ones.
    """
    queries_of: dict[int, list[int]] = {}
    for b, rows in enumerate(relevant):
        for item in np.unique(rows).tolist():
            queries_of.setdefault(item, []).append(b)
    enough = min(events, sorted(map(len, queries_of.values()), reverse=True)[:FEWEST][-1] if queries_of else 0)
    items = sorted(item for item, queries in queries_of.items() if len(queries) >= enough)
    chosen = items if len(items) <= most else [items[i] for i in np.linspace(0, len(items) - 1, most).astype(int).tolist()]
    return [(item, queries_of[item][:events]) for item in chosen]


def best_parent(frontier: Frontier, queries: Sequence[int]) -> int:
    """The best parent of a search with some queries, −1 for none."""
    nodes = best_first([(1.0, votes_of_search(frontier, queries))])
    return int(nodes[0]) if len(nodes) else -1


@dataclass(frozen=True, eq=False)
class Trials:
    """Trials, and for each query the rank that each of them lacks to be in the answer, without memory.

    needed_TB   the leaf's own part of the rank that is needed · logit_TB: the logit that it has
    in_beam_TB  whether the parent is in the beam · tests_TB: whether the query is no evidence of the trial, and has a beam
    """

    trials: Sequence[Trial]
    needed_TB: Float64
    logit_TB: Float64
    in_beam_TB: Bool
    tests_TB: Bool

    @staticmethod
    def of(background: Background, trials: Sequence[Trial], ranking: Ranking) -> Trials:
        ranks_BK = background.frontier.ranks_BK.astype(np.float64)
        least_B = np.where(np.isfinite(ranks_BK), ranks_BK, np.inf).min(1)
        shape = len(trials), len(background.key_B)
        needed_TB, logit_TB, in_beam_TB, tests_TB = np.empty(shape), np.empty(shape), np.empty(shape, np.bool_), np.ones(shape, np.bool_)
        for t, trial in enumerate(trials):
            is_parent_BK = background.frontier.nodes_BK == trial.parent
            in_beam_TB[t] = is_parent_BK.any(1)
            # memory may lift a parent into the beam: its rank is then about that of the beam's last node
            parent_rank_B = np.where(in_beam_TB[t], np.where(is_parent_BK, ranks_BK, -np.inf).max(1), least_B)
            tests_TB[t] = np.isfinite(parent_rank_B)
            tests_TB[t, trial.queries] = False
            needed_TB[t] = background.key_B - ranking.gamma * np.where(np.isfinite(parent_rank_B), parent_rank_B, 0)
            logit_TB[t] = background.states_BS @ trial.row_S
        return Trials(trials, needed_TB, logit_TB, in_beam_TB, tests_TB)

    def shifts(self, background: Background, items: int, ranking: Ranking, count: float = 0.0) -> Shifts:
        """The shifts of items like those of the trials that have had `count` events. items: number of items of the catalogue."""
        lift_TB = np.zeros(self.needed_TB.shape)
        if background.memory is not None:
            for lift_B, trial in zip(lift_TB, self.trials, strict=True):
                for a, value in zip(*(array.tolist() for array in trial.memory(count)), strict=True):
                    queries, weight = background.history_weights.get(a, _NO_QUERIES)
                    lift_B[queries] += background.memory.key_weight * value * weight
        counts_TB = self.tests_TB & (self.in_beam_TB | (lift_TB > 0))
        gaps = _logit_of((self.needed_TB - lift_TB)[counts_TB], ranking) - self.logit_TB[counts_TB]
        mean = len(self.trials) * len(background.key_B) * background.item_rows_BM.shape[1] / items
        return Shifts(np.sort(gaps[np.isfinite(gaps)].astype(np.float32)), mean)


_NO_QUERIES = (np.empty(0, np.int64), np.empty(0))


def _logit_of(own_B: Float64, ranking: Ranking) -> Float64:
    """The logits of a leaf's own part of the rank; inf for a value that no logit has."""
    if ranking.own == "logit":
        return own_B
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(own_B < 0, own_B - np.log(-np.expm1(np.minimum(own_B, 0))), np.inf)


class NearRows:
    """Finds the trained items whose rows have the direction of a new row. Holds float32[I, D]: the leaves' rows less their mean, without
    biases, of length 1."""

    def __init__(self, node_rows_ND: NodeRows, leaf_of_item: Int64, scale: RowScale) -> None:
        rows_ID = np.asarray(node_rows_ND[leaf_of_item], np.float32)
        rows_ID = np.where(scale.is_free_S, rows_ID - scale.row_S.astype(np.float32), np.float32(0))
        length_I = np.linalg.norm(rows_ID, axis=1, keepdims=True)
        self._unit_ID = (rows_ID / np.where(length_I > 0, length_I, 1)).astype(np.float32)
        self._scale = scale

    def of(self, row_D: Float64, exclude: int = -1) -> tuple[Int64, Float64]:
        """At most NEAREST items, the nearest first, and their cosines, at least 0. exclude: an item row, −1 for none."""
        away_D = np.where(self._scale.is_free_S, row_D - self._scale.row_S, 0)
        cosine_I = self._unit_ID @ (away_D / max(float(np.linalg.norm(away_D)), 1e-12)).astype(np.float32)
        items = np.argsort(-cosine_I, kind="stable")[: NEAREST + 1]
        items = items[items != exclude][:NEAREST]
        return items, np.maximum(cosine_I[items].astype(np.float64), 0)
