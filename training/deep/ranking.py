"""Chooses how a trained tree ranks (γ, the memory and its weight, the repeat term, the calibration), by searches of validation queries.

First γ is chosen without a memory. Then coordinate passes choose γ, λ, the recency of the history's weights, the number of neighbours an
item and their damping; a trial reorders leaves that searches have found (`reweighing.py`). A search with the best options adds leaves, and
the passes are repeated. Then the memory gets the fewest neighbours an item that lose at most half a percent. It is used only if it finds
more than the tree alone by over a standard error. Differences are paired by query.

The repeat term is chosen last: what each occurrence in the history adds to an item, or whether seen items are left out. There is a value
for each bucket of positions, in multiples of D, the mean over queries of the largest key less the 200th. A trial reorders the best leaves
of one search and the leaves of the history. With seen items excluded the term has no effect, so it is chosen without that exclusion.

Knows searches and their figures. Does not know how neighbours are counted or a bundle is written.

Legend: B queries, C candidate leaves, T history, D its distinct items, M results, K buckets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from espalier.arrays import Float32, Int64
from espalier.errors import InvalidData
from espalier.manifest import Calibration, Ranking
from espalier.memory import BUCKETS, Memory, bucket_of
from espalier.metrics import ndcg_at_m
from espalier.search import padded

from ..deep.calibration import calibrate
from ..deep.memory import FIT_S, NEIGHBOUR_COUNTS, memory_source, with_sorted_rows
from ..deep.prepare import Prepared
from ..deep.reweighing import CandidateLeaves, most_remembered
from ..deep.scorers.model import NodeScorer
from ..deep.searches import Searches
from ..deep.topology import Topology
from ..deep.validation import trained_ranking, validation_pairs
from ..neighbours.fit import GRID, SLIM, WEIGHED
from ..retrieval.repeats import Measured, Order, chosen_by_bucket
from ..retrieval.task import Deadline
from ..retrieval.tuning import Figures, Option, Options, search
from ..specification.deep import DeepConfig, NeighboursConfig

log = logging.getLogger(__name__)

GAMMAS = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
WEIGHTS = Option("weight", (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0), times=1.5, least=0.1, most=1000.0)
FIRST_WEIGHT = 4.0
ROUNDS = 3
"""Most searches with a memory whose leaves are reordered."""
RECENCY = next(option for option in GRID if option.name == "recency")
VALIDATION_QUERIES = 2000
MIN_QUERIES = 30
"""With fewer validation users a gain could be noise. So a memory has the first λ and all neighbours, and there is no repeat term."""
TRIAL_VISITS = 1 << 17
"""Most entries that a query adds up on average, some milliseconds; larger numbers of neighbours are not tried."""
FIRST_KEPT = 256
"""Neighbours an item to try first. More may find more, but a trial takes time in proportion to them."""
PASSES_SHARE = 0.75
"""Share of the time for coordinate passes. The rest is for trying fewer neighbours, on which the time of every search depends."""
MOST_LOST = 0.005
"""Fewer neighbours are used if the figure falls by no more than this share: every search adds up all of them."""
LEFT_OUT = -np.inf
SHARES = (0.0, LEFT_OUT, 0.2, 0.4, 0.6, 0.8, 1.0, 1.4, 2.0)
"""Bonuses of the repeat term, in multiples of D. Among equally good ones the first is chosen."""
NO_REPEAT = (SHARES[0],) * BUCKETS


@dataclass(frozen=True)
class ChosenRanking:
    """The ranking and the memory (or None) of a bundle, and the trials, for the manifest.

    neighbours  the options of the memory's entries, with the neighbours an item as `kept`; None: no memory
    """

    ranking: Ranking
    memory: Memory | None
    trials: list[dict[str, Any]]
    neighbours: Options | None = None


class ReweighedSearches:
    """Figures of rankings with a memory, without a search for each: over leaves that searches found, and leaves with the most memory.

    without_memory  options for the first search
    first_memory    adds the leaves with the most memory
    """

    def __init__(self, searches: Searches, without_memory: Options, first_memory: Memory) -> None:
        self._searches, self._candidates = searches, CandidateLeaves(searches)
        self._mem: dict[tuple[Any, ...], Float32] = {}
        self.add(searches.answers(without_memory))
        self.add(most_remembered(searches.lists(first_memory), searches.topology, searches.ms[-1]))

    def add(self, rows_BM: Int64) -> None:
        """Add the answers of a search."""
        self._candidates.add(rows_BM)
        self._mem = {}

    def measured(self, options: Options) -> Figures:
        """The figures of some options."""
        key = tuple(value for name, value in sorted(options.items()) if name not in ("gamma", "weight"))
        if key not in self._mem:
            memory = self._searches.memory(options)
            self._mem[key] = self._candidates.memory([] if memory is None else self._searches.lists(memory))
        memory_BC = np.float32(options["weight"]) * self._mem[key]
        key_BC = self._candidates.keys(options["gamma"], memory_BC)
        return self._searches.figures_of(self._candidates.best(key_BC, self._searches.ms[-1]))

    def figure(self, options: Options) -> float:
        """The figure to choose by."""
        return self.measured(options).figure


def choose_ranking(config: DeepConfig, prepared: Prepared, topology: Topology, model: NodeScorer, memory_s: float = FIT_S) -> ChosenRanking:
    """The ranking and the memory with the best figure of validation users, and a calibration of the keys.

    memory_s  most seconds for the neighbours of a memory, and again for the choice of how it is added
    """
    own_score, trained_gamma = trained_ranking(config)
    fixed_gamma = trained_gamma if own_score == "log_activation" else config.search.gamma
    gammas = sorted({*GAMMAS, trained_gamma}) if fixed_gamma == "auto" else [fixed_gamma]
    pairs = validation_pairs(config, prepared, VALIDATION_QUERIES)
    if not pairs and isinstance(config, NeighboursConfig):
        raise InvalidData("log", "no validation user with anything left to find", "some, by whom neighbours are chosen")
    if not pairs:
        log.warning("no validation user has anything left to find: γ is the trained one, scores are not calibrated")
        gamma = trained_gamma if fixed_gamma == "auto" else fixed_gamma
        calibration = None if own_score != "logit" or gamma == 0 else Calibration(slope=1, intercept=0)
        return ChosenRanking(Ranking(own=own_score, gamma=gamma, calibration=calibration), None, [])
    searches = Searches(config, topology, model, pairs, own_score)
    cuts = ", ".join(f"@{m}" for m in searches.ms)
    log.info("ranking: the geometric mean of recall %s of %d validation users", cuts, len(pairs))
    start = {"gamma": trained_gamma if fixed_gamma == "auto" else fixed_gamma}
    without_memory = search(searches.figure, [start], [Option("gamma", tuple(gammas), ordered=False)], Deadline(None)).best.options
    best = _with_memory(config, prepared, searches, without_memory, gammas, memory_s)
    if isinstance(config, NeighboursConfig) and "weight" not in best:
        raise InvalidData("log", "lists of which no item leads to one of a validation user", "users who have items in common")
    memory = _with_repeat(config, prepared, searches, best["gamma"], searches.memory(best))
    if memory is not None:
        size = sum(array.nbytes for array in memory.arrays().values()) / 1e6
        chosen = ", ".join(f"{name} {value:g}" for name, value in best.items())
        log.info("memory: %s, %d positions, %s entries, %.1f MB", chosen, len(memory.weight), f"{len(memory.item):,}", size)
    rows_BM, keys_BM = searches.ranked(best["gamma"], memory, config.search.m)
    # A softmax's logits are the log of a probability only up to a constant. A key with a memory is no log-probability.
    probability = memory is None and (own_score != "logit" or (best["gamma"] == 0 and not config.is_softmax))
    calibration = None if probability else calibrate(rows_BM, keys_BM, searches.relevant, heavy_tailed=memory is not None)
    ranking = Ranking(own=own_score, gamma=best["gamma"], calibration=calibration)
    source, neighbours = searches.source, None
    if source is not None and "weight" in best:
        neighbours = source.options | source.weighed_options(best) | {"kept": best["kept"]}
    return ChosenRanking(ranking, None if memory is None else with_sorted_rows(memory), searches.trials(), neighbours)


def _with_memory(
    config: DeepConfig, prepared: Prepared, searches: Searches, without_memory: Options, gammas: Sequence[float], memory_s: float
) -> Options:
    """The best options with a memory, or `without_memory` if none is configured or it gains nothing."""
    weight = config.memory.weight
    if weight == 0 or prepared.interactions.vectors_UF is not None:
        return without_memory
    too_few_queries = len(searches.pairs) < MIN_QUERIES
    if too_few_queries:
        log.warning("memory: validation users are too few to choose λ by: %d", len(searches.pairs))
    source = searches.source = memory_source(config, prepared, memory_s)
    begin = time.monotonic()
    passes_deadline, deadline = Deadline(begin + PASSES_SHARE * memory_s), Deadline(begin + memory_s)
    sizes = [count for count in NEIGHBOUR_COUNTS if count < source.longest] + [source.longest]
    sizes = [count for count in sizes if searches.visits(source, count) <= TRIAL_VISITS] or sizes[:1]
    if config.memory.neighbours != "auto":
        sizes = [source.longest]
    grid = [Option("gamma", tuple(gammas))] if len(gammas) > 1 else []
    grid = [WEIGHTS, *grid] if weight == "auto" else grid
    grid = [*grid, RECENCY] if prepared.interactions.order != "none" else grid
    grid += [Option("kept", tuple(sizes)), *(option for option in WEIGHED if option is not SLIM or source.options["slim"])]
    if too_few_queries or isinstance(config, NeighboursConfig):
        grid = []  # the first options stay
    best = {
        "gamma": without_memory["gamma"],
        "weight": FIRST_WEIGHT if weight == "auto" else weight,
        "kept": max((size for size in sizes if size <= FIRST_KEPT), default=sizes[0]) if grid else sizes[-1],
        "recency": source.recency,
        **source.weighed_options({}),
    }
    weighing_begin = time.monotonic()
    memory = searches.memory(best)
    weighing_s = time.monotonic() - weighing_begin
    if memory is None:
        log.info("no memory: no validation user's history has a neighbour")
        return without_memory
    reweighed = ReweighedSearches(searches, without_memory, memory)
    searched: list[Options] = []
    while best not in searched and len(searched) < ROUNDS:
        best = search(
            reweighed.figure, [best], grid, passes_deadline, cost_s=lambda options: weighing_s * (not searches.has_entries(options))
        ).best.options
        if best not in searched:
            reweighed.add(searches.answers(best))
            searched.append(best)
    best = max(searched, key=searches.figure)
    if not too_few_queries:
        best = _with_fewest_neighbours(reweighed, best, sizes, deadline)
    gain, error = searches.measured(best).gain_over(searches.measured(without_memory))
    is_used = weight != "auto" or too_few_queries or gain > error
    log.info("%s: %+.1f ± %.1f %% over the tree alone", "memory" if is_used else "no memory", 100 * gain, 100 * error)
    return best if is_used else without_memory


def _with_repeat(config: DeepConfig, prepared: Prepared, searches: Searches, gamma: float, memory: Memory | None) -> Memory | None:
    """The memory with the best repeat term, if one is configured and pays. Without a memory, the term gets one without entries."""
    if config.memory.repeat == "none" or prepared.interactions.vectors_UF is not None:
        return memory
    with_seen = config.model_copy(update={"search": config.search.model_copy(update={"exclude_seen": False})})
    pairs = validation_pairs(with_seen, prepared, VALIDATION_QUERIES)
    if len(pairs) < MIN_QUERIES:
        log.info("no repeat term: %d validation users are too few to choose one by", len(pairs))
        return memory
    leaves = _RepeatedLeaves(replace(searches, config=with_seen, pairs=pairs), gamma, memory)
    _, best = chosen_by_bucket(SHARES, leaves.measured, has_order=prepared.interactions.order != "none")
    if best == NO_REPEAT:
        log.info("no repeat term")
        return memory
    gain, error = leaves.measured("own", best).at_cuts.gain_over(leaves.measured("own", NO_REPEAT).at_cuts)
    shares = ", ".join("left out" if share == LEFT_OUT else f"{share:g} D" for share in best)
    log.info("repeat term: %+.1f ± %.1f %% with seen items, at 0, 1, 2, 4, 8 and 16 positions: %s", 100 * gain, 100 * error, shares)
    left_out = np.array(best) == LEFT_OUT
    bonus = np.where(left_out, 0, np.maximum(best, 0) * leaves.spread).astype(np.float32)
    if memory is None:
        offset = np.zeros(searches.topology.tree.item_count + 1, np.int64)
        memory = Memory(offset, np.empty(0, np.int32), np.empty(0, np.float16), np.ones(1, np.float32), key_weight=1.0)  # without entries
    return replace(memory, repeat=(bonus / np.float32(memory.key_weight)).astype(np.float32), left_out=left_out)


class _RepeatedLeaves:
    """The best leaves of a search without the term, and the leaves of the history, with their keys.

    spread  D
    """

    def __init__(self, searches: Searches, gamma: float, memory: Memory | None) -> None:
        self._searches, self._m = searches, searches.ms[-1]
        tree = searches.topology.tree
        self._candidates = CandidateLeaves(searches)
        longest = max(block.rows.shape[1] for block in searches.blocks)
        rows_BM, _ = searches.ranked(gamma, memory, min(self._m + longest, tree.item_count))
        self._candidates.add(rows_BM)
        histories = [row_T[row_T >= 0] for block in searches.blocks for row_T in block.rows]
        self._candidates.add(padded([np.unique(history_T) for history_T in histories]))
        memory_BC = np.zeros(self._candidates.leaf_BC.shape, np.float32)
        if memory is not None:
            memory_BC = np.float32(memory.key_weight) * self._candidates.memory(searches.lists(memory))
        self._key_BC = self._candidates.keys(gamma, memory_BC)
        self._last_BC = np.full(self._key_BC.shape, BUCKETS)  # the bucket of the last occurrence; BUCKETS: not in the history
        self._count_BCK = np.zeros((*self._key_BC.shape, BUCKETS), np.float32)  # occurrences
        bucket_T = np.array([bucket_of(age) for age in range(longest)])
        for last_C, count_CK, leaf_C, history_T in zip(self._last_BC, self._count_BCK, self._candidates.leaf_BC, histories, strict=True):
            order_C = np.argsort(leaf_C)
            column_T = order_C[np.searchsorted(leaf_C, tree.leaf_of_item[history_T][::-1], sorter=order_C)]  # each leaf is a candidate once
            np.minimum.at(last_C, column_T, bucket_T[: len(column_T)])
            np.add.at(count_CK, (column_T, bucket_T[: len(column_T)]), 1)
        best_BM = -np.sort(-self._key_BC, axis=1)[:, : self._m]
        self.spread = float(np.mean([best_M[0] - best_M[np.isfinite(best_M)][-1] for best_M in best_BM]))

    def measured(self, order: Order, shares: tuple[float, ...]) -> Measured:
        """The figures with one value for each bucket, in multiples of D. order: "own", that of the keys."""
        is_left_out_K = np.array([*(share == LEFT_OUT for share in shares), False])
        bonus_K = np.array([0.0 if share == LEFT_OUT else share * self.spread for share in shares], np.float32)
        key_BC = np.where(is_left_out_K[self._last_BC], np.float32(LEFT_OUT), self._key_BC + self._count_BCK @ bonus_K)
        rows_BM = self._candidates.best(key_BC, self._m)
        ndcg_B = ndcg_at_m(rows_BM, self._searches.relevant, self._searches.ms[0])
        return Measured(self._searches.figures_of(rows_BM), Figures(ndcg_B[None]))


def _with_fewest_neighbours(reweighed: ReweighedSearches, best: Options, sizes: Sequence[int], deadline: Deadline) -> Options:
    """The options with the fewest neighbours an item that lose next to nothing. Small numbers are tried first, until the deadline."""
    for count in sizes:
        if count == best["kept"] or deadline.is_over():
            break
        fewer = best | {"kept": count}
        log.info("  %.5f  %d neighbours an item", reweighed.figure(fewer), count)
        gain, _ = reweighed.measured(fewer).gain_over(reweighed.measured(best))
        if gain >= -MOST_LOST:
            return fewer
    return best
