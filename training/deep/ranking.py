"""How a trained tree ranks: γ, the memory and its weight, and the calibration, chosen by searches of validation users.

γ is chosen without a memory first. Then γ, λ, the recency of the history's weights and the damping of the neighbours, which was best for
them alone, climb together, one after another, over the leaves that searches have found, ordered anew (`reweighing.py`); a search with the
best of them adds leaves, and they climb again. Then as few neighbours an item are kept as find as much but for half a percent; and then the
memory stays only if it finds more than the tree alone by over a standard error. Differences are paired by query. The repeat term comes last
(`repeats.py`).

Knows searches and their figures. Does not know how neighbours are counted or a bundle is written.

Legend: B queries, C candidate leaves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.errors import InvalidData
from espalier.manifest import Calibration, Ranking
from espalier.memory import Memory

from ..deep.calibration import calibrate
from ..deep.memory import FIT_S, KEPT, in_order, remembered
from ..deep.prepare import Prepared
from ..deep.repeats import with_repeat
from ..deep.reweighing import Candidates, most_remembered
from ..deep.scorers.model import NodeScorer
from ..deep.searches import Searches
from ..deep.topology import Topology
from ..deep.validation import ranked_by, validation_pairs
from ..neighbours.fit import GRID, WEIGHED
from ..retrieval.task import Deadline
from ..retrieval.tuning import Figures, Option, Options, search
from ..specification.deep import DeepConfig, NeighboursConfig

log = logging.getLogger(__name__)

GAMMAS = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
WEIGHTS = Option("weight", (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0), times=1.5, least=0.1, most=1000.0)
FIRST_WEIGHT = 4.0
ROUNDS = 3
"""Searches with a memory whose leaves are ordered anew, at most."""
RECENCY = next(option for option in GRID if option.name == "recency")
VALIDATION_QUERIES = 2000
MIN_QUERIES = 30
"""With fewer validation users nothing about a memory is chosen, whether there is one included: a gain could not be told from noise."""
TRIAL_VISITS = 1 << 17
"""Entries that a validation query of a search with a memory may have to add up, on average: some milliseconds. Else fewer are kept."""
MOST_LOST = 0.005
"""Fewer neighbours are kept where the figure falls by no more than this share, and by no more than its standard error."""


@dataclass(frozen=True)
class Chosen:
    """What the search of a bundle is: its ranking and its memory, None for none; and what was tried, for the manifest.

    neighbours  the options of the memory's entries, with how many an item are `kept`; None: it has none
    """

    ranking: Ranking
    memory: Memory | None
    trials: list[dict[str, Any]]
    neighbours: Options | None = None


class Reweighed:
    """Figures of rankings with a memory, without a search for each: of the leaves that searches have found, and those remembered most.

    alone  the options without a memory, whose search comes first
    first  options with one
    """

    def __init__(self, searches: Searches, alone: Options, first: Memory) -> None:
        self._searches, self._candidates = searches, Candidates(searches)
        self._mem: dict[tuple[Any, ...], NDArray[np.float32]] = {}
        self.add(searches.answers(alone))
        self.add(most_remembered(searches.lists(first), searches.topology, searches.ms[-1]))

    def add(self, rows_BM: NDArray[np.int64]) -> None:
        """Answers of a search."""
        self._candidates.add(rows_BM)
        self._mem = {}

    def measured(self, options: Options) -> Figures:
        """The figures of some options."""
        key = tuple(value for name, value in sorted(options.items()) if name not in ("gamma", "weight"))
        if key not in self._mem:
            memory = self._searches.memory(options)
            self._mem[key] = self._candidates.memory([] if memory is None else self._searches.lists(memory))
        added_BC = np.float32(options["weight"]) * self._mem[key]
        key_BC = self._candidates.keys(options["gamma"], added_BC)
        return self._searches.figures_of(self._candidates.best(key_BC, self._searches.ms[-1]))

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
    if not pairs and isinstance(config, NeighboursConfig):
        raise InvalidData("log", "no validation user with anything left to find", "some, by whom neighbours are chosen")
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
    if isinstance(config, NeighboursConfig) and "weight" not in best:
        raise InvalidData("log", "lists of which no item leads to one of a validation user", "users who have items in common")
    memory = _with_repeat(config, prepared, searches, best["gamma"], searches.memory(best))
    if memory is not None:
        size = sum(array.nbytes for array in memory.arrays().values()) / 1e6
        log.info("memory: %s, %d places, %s entries, %.1f MB", _named(best), len(memory.weight), f"{len(memory.item):,}", size)
    rows_BM, keys_BM = searches.ranked(best["gamma"], memory, config.search.m)
    # A softmax's logits are the log of a probability up to a constant only, and a key with a memory is none at all.
    probability = memory is None and (own != "logit" or (best["gamma"] == 0 and not config.is_softmax))
    calibration = None if probability else calibrate(rows_BM, keys_BM, searches.relevant, heavy_tailed=memory is not None)
    ranking = Ranking(own=own, gamma=best["gamma"], calibration=calibration)
    source, neighbours = searches.source, None
    if source is not None and "weight" in best:
        neighbours = source.options | source.values(best) | {"kept": best["kept"]}
    return Chosen(ranking, None if memory is None else in_order(memory), searches.trials(), neighbours)


def _with_memory(
    config: DeepConfig, prepared: Prepared, searches: Searches, alone: Options, gammas: Sequence[float], memory_s: float
) -> Options:
    """The best options with a memory, or `alone` where none is wanted or it does not pay."""
    weight = config.memory.weight
    if weight == 0 or prepared.interactions.vectors_UF is not None:
        return alone
    few = len(searches.pairs) < MIN_QUERIES
    if few and weight == "auto":
        log.warning("no memory: %d validation users are too few to choose one by", len(searches.pairs))
        return alone
    source = searches.source = remembered(config, prepared, memory_s)
    deadline = Deadline(time.monotonic() + memory_s)
    sizes = [kept for kept in KEPT if kept < source.most] + [source.most]
    sizes = [kept for kept in sizes if searches.visits(source, kept, source.recency) <= TRIAL_VISITS] or sizes[:1]
    if config.memory.neighbours != "auto":
        sizes = [source.most]
    first = FIRST_WEIGHT if weight == "auto" else weight
    best = {"gamma": alone["gamma"], "weight": first, "kept": sizes[-1], "recency": source.recency, **source.values({})}
    begin = time.monotonic()
    memory = searches.memory(best)
    weighing_s = time.monotonic() - begin
    if memory is None:
        log.info("no memory: no validation user has a neighbour to be told of")
        return alone
    grid = [Option("gamma", tuple(gammas))] if len(gammas) > 1 else []
    grid = [WEIGHTS, *grid] if weight == "auto" else grid
    grid = [*grid, RECENCY] if prepared.interactions.order != "none" else grid
    grid += WEIGHED
    if few or isinstance(config, NeighboursConfig):
        grid = []  # what was best alone stays, or cannot be told
    anew = Reweighed(searches, alone, memory)
    tried: list[Options] = []
    while best not in tried and len(tried) < ROUNDS:
        best = search(
            anew.figure, [best], grid, deadline, cost_s=lambda options: weighing_s * (not searches.has_entries(options))
        ).best.options
        if best not in tried:
            anew.add(searches.answers(best))
            tried.append(best)
    best = _fewest(anew, max(tried, key=searches.figure), sizes, deadline)
    gain, error = searches.measured(best).gain_over(searches.measured(alone))
    kept = weight != "auto" or gain > error
    log.info("%s: %+.1f ± %.1f %% over the tree alone", "memory" if kept else "no memory", 100 * gain, 100 * error)
    return best if kept else alone


def _with_repeat(config: DeepConfig, prepared: Prepared, searches: Searches, gamma: float, memory: Memory | None) -> Memory | None:
    """The memory with a repeat term, where one is wanted and pays."""
    if config.memory.repeat == "none" or prepared.interactions.vectors_UF is not None:
        return memory
    whole = config.model_copy(update={"search": config.search.model_copy(update={"exclude_seen": False})})
    pairs = validation_pairs(whole, prepared, VALIDATION_QUERIES)
    if len(pairs) < MIN_QUERIES:
        log.info("no repeat term: %d validation users are too few to choose one by", len(pairs))
        return memory
    raw = replace(searches, config=whole, pairs=pairs)
    return with_repeat(raw, gamma, memory, has_order=prepared.interactions.order != "none")


def _fewest(anew: Reweighed, best: Options, sizes: Sequence[int], deadline: Deadline) -> Options:
    """The options with the fewest neighbours an item that lose next to nothing, as far as there is time to try: few are tried first."""
    for kept in sizes:
        if kept == best["kept"] or deadline.is_over():
            break
        fewer = best | {"kept": kept}
        log.info("  %.5f  %d neighbours an item", anew.figure(fewer), kept)
        gain, error = anew.measured(fewer).gain_over(anew.measured(best))
        if gain >= -min(error, MOST_LOST):
            return fewer
    return best


def _named(options: Options) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in options.items())
