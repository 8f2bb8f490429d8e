"""How a trained tree ranks: γ, the memory and its weight, and the calibration, chosen by searches of validation users.

γ is chosen without a memory first. Then γ, λ and the recency of the history's weights climb together, one after another, over the leaves
that searches have found, ordered anew (`reweighing.py`); a search with the best of them adds leaves, and they climb again. Then as few
neighbours an item are kept as find as much but for half a percent; and then the memory stays only if it finds more than the tree alone by
over a standard error. Differences are paired by query.

Knows searches and their figures. Does not know how neighbours are counted or a bundle is written.

Legend: B queries, M results, C cuts.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.manifest import Calibration, Ranking
from espalier.memory import Memory
from espalier.memory_lists import MemoryLists, MemoryTree
from espalier.metrics import precision_recall_f
from training.data.splits import EvaluationPair
from training.deep.beam import Own
from training.deep.calibration import calibrate
from training.deep.memory import FIT_S, KEPT, Remembered, in_order, in_units, remembered, unit_of
from training.deep.prepare import Prepared
from training.deep.reweighing import Candidates, most_remembered
from training.deep.scorers.model import NodeScorer
from training.deep.topology import Topology
from training.deep.validation import encoded, ranked_by, search_encoded, validation_pairs
from training.neighbours.fit import GRID
from training.publish import reported_ms
from training.retrieval.task import Deadline
from training.retrieval.tuning import Option, Options, search
from training.specification.deep import DeepConfig

log = logging.getLogger(__name__)

GAMMAS = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
WEIGHTS = Option("weight", (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0), times=1.5, least=0.1, most=1000.0)
FIRST_WEIGHT = 4.0
ROUNDS = 3
"""Searches with a memory whose leaves are ordered anew, at most."""
RECENCY = next(option for option in GRID if option.name == "recency")
CUTS = (10, 50, 200)
"""The m whose recall is what a ranking is chosen by."""
VALIDATION_QUERIES = 2000
MIN_QUERIES = 30
"""With fewer validation users there is no memory: its gain could not be told from noise."""
TRIAL_VISITS = 1 << 17
"""Entries that a validation query of a search with a memory may have to add up, on average: some milliseconds. Else fewer are kept."""
MOST_LOST = 0.005
"""Fewer neighbours are kept where the figure falls by no more than this share, and by no more than its standard error."""
LEAST_RECALL = 1e-4
"""Recall below this counts as this, so that the mean of logarithms has a value."""


@dataclass(frozen=True)
class Chosen:
    """What the search of a bundle is: its ranking and its memory, None for none; and what was tried, for the manifest."""

    ranking: Ranking
    memory: Memory | None
    trials: list[dict[str, Any]]


@dataclass(frozen=True)
class Figures:
    """recall_CB float64[C, B]: recall@m of each query, for each m of the cuts."""

    recall_CB: NDArray[np.float64]

    @property
    def mean_C(self) -> NDArray[np.float64]:
        """Recall at each cut."""
        mean_C: NDArray[np.float64] = np.maximum(self.recall_CB.mean(1), LEAST_RECALL)
        return mean_C

    @property
    def figure(self) -> float:
        """The geometric mean of the recalls: the top of a list counts as much as its length."""
        return float(np.exp(np.log(self.mean_C).mean()))

    def gain_over(self, other: Figures) -> tuple[float, float]:
        """The relative gain in `figure`, to first order, and its standard error, paired by query."""
        gain_B = ((self.recall_CB - other.recall_CB) / other.mean_C[:, None]).mean(0)
        error = float(gain_B.std(ddof=1)) / math.sqrt(len(gain_B)) if len(gain_B) > 1 else math.inf
        return float(gain_B.mean()), error


@dataclass
class Searches:
    """Searches of the same validation queries, encoded once; figures by options."""

    config: DeepConfig
    topology: Topology
    model: NodeScorer
    pairs: Sequence[EvaluationPair]
    own: Own
    source: Remembered | None = None
    figures: dict[tuple[tuple[str, Any], ...], Figures] = field(default_factory=dict)
    units: dict[tuple[int, float], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ms = reported_ms(CUTS, self.config.search.max_m)
        self.relevant = [pair.relevant for pair in self.pairs]
        self.length = self.config.history_length
        self.blocks = list(encoded(self.config, self.topology, self.model, self.pairs))

    def memory(self, options: Options) -> Memory | None:
        """The memory of these options, None where they name none or no validation query has any."""
        if self.source is None or "weight" not in options:
            return None
        key = options["kept"], options["recency"]
        raw = self.source.memory(*key, self.length)
        if key not in self.units:
            self.units[key] = unit_of(self.lists(raw), self.topology.tree.leaf_offset, CUTS[-1])
        return in_units(raw, self.units[key], options["weight"]) if self.units[key] > 0 else None

    def lists(self, memory: Memory) -> Iterator[MemoryLists]:
        """The nodes with memory, of one block of queries after another."""
        of = MemoryTree(memory, self.topology.tree)
        return (of.lists(block.rows, block.eligible) for block in self.blocks)

    def visits(self, source: Remembered, kept: int, recency: float) -> float:
        """Entries of a memory that a query has to add up, on average."""
        length_I, places = source.lengths(kept), len(source.weights(kept, recency, self.length))
        rows = np.concatenate([block.rows for block in self.blocks])
        place_BT = np.cumsum((rows >= 0)[:, ::-1], 1)[:, ::-1]  # 1 for the newest item
        counts_BT = (rows >= 0) & (place_BT <= places)
        return float(length_I[rows[counts_BT]].sum()) / len(rows)

    def found(self, options: Options, m: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """int64[B, M] item rows and float32[B, M] keys of all queries."""
        return self.ranked(options["gamma"], self.memory(options), m)

    def ranked(self, gamma: float, memory: Memory | None, m: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The same with a memory that is there already."""
        lists = [None] * len(self.blocks) if memory is None else self.lists(memory)
        weight, blocks = 0.0 if memory is None else memory.key_weight, zip(self.blocks, lists, strict=True)
        return search_encoded(self.model, self.topology, blocks, gamma, self.own, self.config.search.beam_size, m, weight)

    def measured(self, options: Options) -> Figures:
        """The figures of some options, searched for once."""
        key = tuple(sorted(options.items()))
        if key not in self.figures:
            self.answers(options)
        return self.figures[key]

    def answers(self, options: Options) -> NDArray[np.int64]:
        """int64[B, M]: what a search with these options finds, whose figures are measured."""
        rows_BM, _ = self.found(options, self.ms[-1])
        self.figures[tuple(sorted(options.items()))] = self.figures_of(rows_BM)
        return rows_BM

    def figures_of(self, rows_BM: NDArray[np.int64]) -> Figures:
        """The figures of answers."""
        return Figures(np.stack([precision_recall_f(rows_BM, self.relevant, m)[1] for m in self.ms]))

    def figure(self, options: Options) -> float:
        """What options are chosen by."""
        return self.measured(options).figure

    def trials(self) -> list[dict[str, Any]]:
        """All that were tried, in order: options, what they were compared by, and the recall at each cut."""
        return [
            {
                "options": dict(key),
                "figure": figures.figure,
                "recall": dict(zip(map(str, self.ms), figures.recall_CB.mean(1).tolist(), strict=True)),
            }
            for key, figures in self.figures.items()
        ]


class Reweighed:
    """Figures of rankings with a memory, without a search for each: of the leaves that searches have found, and those remembered most.

    alone  the options without a memory, whose search comes first
    first  options with one
    """

    def __init__(self, searches: Searches, alone: Options, first: Memory) -> None:
        self._searches, topology = searches, searches.topology
        self._candidates = Candidates(searches.model, topology, searches.blocks, searches.own)
        self._mem: dict[tuple[int, float], NDArray[np.float32]] = {}
        self.add(searches.answers(alone))
        self.add(most_remembered(searches.lists(first), topology, searches.ms[-1]))

    def add(self, rows_BM: NDArray[np.int64]) -> None:
        """Answers of a search."""
        self._candidates.add(rows_BM)
        self._mem = {}

    def measured(self, options: Options) -> Figures:
        """The figures of some options."""
        key = options["kept"], options["recency"]
        if key not in self._mem:
            memory = self._searches.memory(options)
            self._mem[key] = self._candidates.memory([] if memory is None else self._searches.lists(memory))
        added_BC = np.float32(options["weight"]) * self._mem[key]
        return self._searches.figures_of(self._candidates.best(options["gamma"], added_BC, self._searches.ms[-1]))

    def figure(self, options: Options) -> float:
        """What options are chosen by."""
        return self.measured(options).figure


def choose_ranking(config: DeepConfig, prepared: Prepared, topology: Topology, model: NodeScorer, memory_s: float = FIT_S) -> Chosen:
    """The ranking and the memory with the best figure of validation users, and a calibration of the keys.

    memory_s  most seconds for the neighbours of a memory, and again for the choice of how it is added
    """
    own, trained = ranked_by(config)
    fixed = trained if own == "log_activation" else config.search.gamma
    gammas = sorted({*GAMMAS, trained}) if fixed == "auto" else [fixed]
    pairs = validation_pairs(config, prepared, VALIDATION_QUERIES)
    if not pairs:
        log.warning("no validation user has anything left to find: γ is the trained one, scores are not calibrated")
        gamma = trained if fixed == "auto" else fixed
        calibration = None if own != "logit" or gamma == 0 else Calibration(slope=1, intercept=0)
        return Chosen(Ranking(own=own, gamma=gamma, calibration=calibration), None, [])
    searches = Searches(config, topology, model, pairs, own)
    cuts = ", ".join(f"@{m}" for m in searches.ms)
    log.info("ranking: the geometric mean of recall %s of %d validation users", cuts, len(pairs))
    start = {"gamma": trained if fixed == "auto" else fixed}
    alone = search(searches.figure, [start], [Option("gamma", tuple(gammas), ordered=False)], Deadline(None)).best.options
    best = _with_memory(config, prepared, searches, alone, gammas, memory_s)
    memory = searches.memory(best)
    if memory is not None:
        size = sum(array.nbytes for array in memory.arrays().values()) / 1e6
        log.info("memory: %s, %d places, %s entries, %.1f MB", _named(best), len(memory.weight), f"{len(memory.item):,}", size)
    rows_BM, keys_BM = searches.ranked(best["gamma"], memory, config.search.m)
    # A softmax's logits are the log of a probability up to a constant only, and a key with a memory is none at all.
    probability = memory is None and (own != "logit" or (best["gamma"] == 0 and not config.is_softmax))
    calibration = None if probability else calibrate(rows_BM, keys_BM, searches.relevant, heavy_tailed=memory is not None)
    ranking = Ranking(own=own, gamma=best["gamma"], calibration=calibration)
    return Chosen(ranking, None if memory is None else in_order(memory), searches.trials())


def _with_memory(
    config: DeepConfig, prepared: Prepared, searches: Searches, alone: Options, gammas: Sequence[float], memory_s: float
) -> Options:
    """The best options with a memory, or `alone` where none is wanted or it does not pay."""
    weight = config.memory.weight
    if weight == 0 or prepared.interactions.vectors_UF is not None:
        return alone
    if len(searches.pairs) < MIN_QUERIES:
        log.warning("no memory: %d validation users are too few to choose one by", len(searches.pairs))
        return alone
    source = searches.source = remembered(config, prepared, memory_s)
    deadline = Deadline(time.monotonic() + memory_s)
    sizes = [kept for kept in KEPT if kept < source.most] + [source.most]
    sizes = [kept for kept in sizes if searches.visits(source, kept, source.recency) <= TRIAL_VISITS] or sizes[:1]
    if config.memory.neighbours != "auto":
        sizes = [source.most]
    first = FIRST_WEIGHT if weight == "auto" else weight
    best = {"gamma": alone["gamma"], "weight": first, "kept": sizes[-1], "recency": source.recency}
    memory = searches.memory(best)
    if memory is None:
        log.info("no memory: no validation user has a neighbour to be told of")
        return alone
    grid = [Option("gamma", tuple(gammas))] if len(gammas) > 1 else []
    grid = [WEIGHTS, *grid] if weight == "auto" else grid
    grid = [*grid, RECENCY] if prepared.interactions.order != "none" else grid
    anew = Reweighed(searches, alone, memory)
    tried: list[Options] = []
    while best not in tried and len(tried) < ROUNDS:
        best = search(anew.figure, [best], grid, deadline).best.options
        if best not in tried:
            anew.add(searches.answers(best))
            tried.append(best)
    best = _fewest(anew, max(tried, key=searches.figure), sizes, deadline)
    gain, error = searches.measured(best).gain_over(searches.measured(alone))
    kept = weight != "auto" or gain > error
    log.info("%s: %+.1f ± %.1f %% over the tree alone", "memory" if kept else "no memory", 100 * gain, 100 * error)
    return best if kept else alone


def _fewest(anew: Reweighed, best: Options, sizes: Sequence[int], deadline: Deadline) -> Options:
    """The options with the fewest neighbours an item, of what there is time to try, that lose next to nothing against the best."""
    tried = [best]
    for kept in reversed(sizes):
        if deadline.is_over():
            break
        tried.append(best | {"kept": kept})
        log.info("  %.5f  %d neighbours an item", anew.figure(tried[-1]), kept)
    most = max(tried, key=anew.figure)
    for options in reversed(tried):
        gain, error = anew.measured(options).gain_over(anew.measured(most))
        if options == most or gain >= -min(error, MOST_LOST):
            return options
    return most


def _named(options: Options) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in options.items())
