"""Methods by name on one log and one seed: each is fitted when it is first asked for, and kept for what is made of it later.

    contest = Contest(config, prepared, folder, device, baselines)
    contest.entry("recipe", exclude_seen, seconds)      what `fit` trains
    contest.entry("neighbours", exclude_seen, seconds)  a baseline of training.baselines.methods
    contest.entry("fusion:recipe:neighbours", …)        any two, fused; `fusion` is these two

Knows names, tasks and what a method gives back. Does not know test queries.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from espalier.errors import EspalierError, InvalidConfig

from ..baselines.fusion import VALIDATION_QUERIES, fuse
from ..baselines.methods import FOR_VECTORS
from ..compare.recipe import Costs, Recipe, costs_of, fit_recipe, needs_of
from ..deep.prepare import Prepared
from ..retrieval.needs import Estimate, Needs
from ..retrieval.task import Clock, Fitted, Method, Metric, Task
from ..specification.deep import DeepConfig

log = logging.getLogger(__name__)

RECIPE, FUSION, NEIGHBOURS = "recipe", "fusion", "neighbours"
FUSED_BY_DEFAULT = "fusion:recipe:neighbours"
QUICK = ("popularity", "item-means", "item-cf", "neighbours", "content", "ease", "graph-filter", "ials")
"""Baselines without training by gradient steps: seconds on most logs."""
TUNED_FOR_EACH = ("popularity", "item-cf", "neighbours", "content")
"""Baselines that are chosen anew for answers with and without seen items: it takes seconds."""
ENOUGH = 0.995
"""The smallest serving beam is chosen that finds so much of what the best one finds: wider beams cost time for next to nothing."""
CHOOSING_QUERIES = 2000
"""Validation queries by which a serving beam, and the best method, are chosen, at most."""
MOST_QUERIES = 5000
"""Test queries that are measured, evenly spread: answering takes time, too, and standard errors are small by then."""
ANSWER_S, TIMING_S = 0.001, 1.5
"""About what an answer takes in a batch, and timing answers one by one."""
FUSED_QUERY_S = 0.003
"""About what a fusion takes for each query by which its weights are chosen: two answers, and some forty trials."""
REFUSALS = (EspalierError, ImportError, MemoryError, FloatingPointError)
"""What a method may raise where it cannot be fitted to a log: it is left out, and others go on."""


@dataclass(frozen=True)
class Entry:
    """A fitted method.

    by_beam     serving beam, ascending → how it answers with it; one entry, None, where a method has no beam
    beam_size   the smallest beam that finds at least ENOUGH of what the best one finds, on validation queries
    validation  beam → its figure on validation queries, seen items left out or not as the method was chosen
    """

    name: str
    by_beam: Mapping[int | None, Fitted]
    beam_size: int | None
    validation: Mapping[int | None, float]

    @property
    def fitted(self) -> Fitted:
        return self.by_beam[self.beam_size]


@dataclass
class Contest:
    """One log and one seed, for all methods.

    metric     by which everything is chosen: recall at the configured `search.m`
    beams      serving beams of the recipe
    estimates  what baselines need of a log
    clock      by which times are counted
    """

    config: DeepConfig
    prepared: Prepared
    folder: Path
    beams: Sequence[int]
    baselines: Mapping[str, Method]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    estimates: Mapping[str, Estimate] = field(default_factory=dict)
    clock: Clock = time.monotonic
    _entries: dict[tuple[str, bool], Entry] = field(default_factory=dict)
    _recipe: Recipe | None = None
    _costs: Costs | None = None

    @property
    def metric(self) -> Metric:
        return Metric("recall", self.config.search.m)

    def task(self, exclude_seen: bool, seconds: float | None) -> Task:
        split, items = self.prepared.split, self.prepared.items
        return Task(split, items, self.metric, exclude_seen, self.config.windowed_instances, self.config.seed, seconds, self.clock)

    def needs(self, name: str, exclude_seen: bool, has_neighbours: bool = False) -> Needs:
        """What the method needs, its parts aside. Raises one of REFUSALS where it cannot be fitted to this log.

        has_neighbours  neighbours are fitted before: the tree's memory is made of these
        """
        if name == RECIPE:
            self._costs = costs_of(self.config, self.prepared, self.folder, self.device, self.clock)
            return needs_of(self.config, self.prepared, replace(self._costs, memory_s=0.0) if has_neighbours else self._costs)
        if name in self.baselines:
            self._refuse_histories(name)
            return self.estimates[name](self.task(exclude_seen, None))
        queries = min(VALIDATION_QUERIES, len(self.prepared.split.validation))
        return Needs(FUSED_QUERY_S * queries, FUSED_QUERY_S * queries)

    def answering_seconds(self, name: str) -> float:
        """About what a method takes, once fitted, to be measured and timed: those with the tree at each of its beams."""
        split = self.prepared.split
        queries = min(CHOOSING_QUERIES, len(split.validation)) + min(MOST_QUERIES, len(split.test))
        search_s = ANSWER_S if self._costs is None else max(ANSWER_S, self._costs.search_s)
        return len(self.beams) * (TIMING_S + search_s * queries) if name == RECIPE else TIMING_S + ANSWER_S * queries

    def _refuse_histories(self, name: str) -> None:
        if self.prepared.interactions.vectors_UF is not None and name not in FOR_VECTORS:
            raise InvalidConfig("--methods", name, f"{', '.join(FOR_VECTORS)} or {RECIPE}: queries are vectors, it learns from histories")

    def entry(self, name: str, exclude_seen: bool, seconds: float | None = None) -> Entry:
        """The method, fitted within so many seconds, which include those of methods that it is made of and that are not fitted yet.

        exclude_seen  whether it is chosen with seen items left out; baselines that take long are chosen once, as `search.exclude_seen` says

        Raises one of REFUSALS where it cannot be fitted to this log.
        """
        if name in self.baselines and name not in TUNED_FOR_EACH:
            exclude_seen = self.config.search.exclude_seen
        key = name, exclude_seen
        if key not in self._entries:
            self._entries[key] = self._fit(name, exclude_seen, seconds)
        return self._entries[key]

    def _fit(self, name: str, exclude_seen: bool, seconds: float | None) -> Entry:
        task = self.task(exclude_seen, seconds)
        if name == RECIPE:
            recipe = self._trained(seconds)
            leaves = recipe.bundle.tree.leaf_count
            return self._entry(RECIPE, {beam: recipe.at(beam) for beam in sorted({min(beam, leaves) for beam in self.beams})}, task)
        if name in self.baselines:
            self._refuse_histories(name)
            return self._entry(name, {None: self.baselines[name](task)}, task)
        first, second = parts_of(name)
        deadline = task.deadline()
        entries: dict[str, Entry] = {}
        for part in sorted((first, second), key=lambda part: part == RECIPE):  # the tree takes what the other one leaves
            own_s = 0.9 * deadline.left_s() / (1 if entries else 2)  # what is left in the end is for choosing the fusion
            entries[part] = self.entry(part, exclude_seen, None if seconds is None else own_s)
        left_s = None if seconds is None else deadline.left_s()
        fused = fuse(entries[first].fitted, entries[second].fitted, self.task(exclude_seen, left_s))
        beams = [entries[part].beam_size for part in (first, second) if entries[part].beam_size is not None]
        return self._entry(name, {beams[0] if beams else None: fused}, task)

    def _trained(self, seconds: float | None) -> Recipe:
        if self._recipe is None:
            known = self._entries.get((NEIGHBOURS, self.config.search.exclude_seen))  # chosen as the export would choose a memory's
            told = None if known is None else known.fitted
            self._recipe = fit_recipe(self.config, self.prepared, self.folder, self.device, seconds, self._costs, self.clock, told)
        return self._recipe

    def _entry(self, name: str, by_beam: Mapping[int | None, Fitted], task: Task) -> Entry:
        pairs = task.validation_pairs(CHOOSING_QUERIES)
        validation = {beam: task.measured(fitted.rank, pairs) for beam, fitted in by_beam.items()}
        enough = ENOUGH * max(validation.values())
        return Entry(name, by_beam, next(beam for beam, figure in validation.items() if figure >= enough), validation)


def parts_of(name: str) -> tuple[str, str]:
    """The two methods of a fusion. Raises InvalidConfig for a name that is none."""
    fusion, *parts = (FUSED_BY_DEFAULT if name == FUSION else name).split(":")
    if fusion != FUSION or len(parts) != 2 or parts[0] == parts[1]:
        raise InvalidConfig("--methods", name, "fusion, or fusion:A:B with two methods")
    return parts[0], parts[1]


def checked_names(text: str, known: Sequence[str], *, fusions: bool = True) -> list[str]:
    """The methods of a comma-separated list, each once. Raises InvalidConfig on one that is neither known nor a fusion of known ones.

    fusions  whether there are any
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        parts = parts_of(name) if fusions and name.split(":")[0] == FUSION else (name,)
        for part in parts:
            if part not in known:
                raise InvalidConfig("--methods", part, f"some of {', '.join([*known, *([FUSION, 'fusion:A:B'] if fusions else [])])}")
    return names


def in_order(names: Sequence[str]) -> list[str]:
    """Quick methods first, then trained ones, the tree, fusions: the tree gets what others leave, and a fusion finds its parts fitted."""
    return sorted(names, key=lambda name: (name.split(":")[0] == FUSION, name == RECIPE, name not in QUICK))


def attempted(contest: Contest, name: str, exclude_seen: bool, seconds: float | None) -> Entry | str:
    """The method, fitted, or why it cannot be."""
    try:
        return contest.entry(name, exclude_seen, seconds)
    except REFUSALS as refusal:
        log.warning("%s is not judged: %s", name, refusal)
        return named(refusal)


def named(refusal: BaseException) -> str:
    """What a refusal says, or its type where it says nothing."""
    return str(refusal) or type(refusal).__name__
