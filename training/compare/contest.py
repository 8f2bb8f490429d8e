"""Methods by name on one log and one seed. Each is fitted at its first use and kept, since fusions use it again.

    contest = Contest(config, prepared, folder, device, baselines)
    contest.entry("recipe", exclude_seen, seconds)      what `fit` trains
    contest.entry("neighbours", exclude_seen, seconds)  a baseline of training.baselines.methods
    contest.entry("fusion:recipe:neighbours", …)        any two, fused; `fusion` is these two

Knows names, tasks and fitted methods. Does not know test queries.
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
"""Baselines without training by gradient steps: they take seconds on most logs."""
TUNED_FOR_EACH = ("popularity", "item-cf", "neighbours", "content")
"""Baselines whose options are chosen separately for answers with and without seen items, since that takes only seconds."""
ENOUGH = 0.995
"""The smallest serving beam with this share of the best beam's figure is chosen: wider beams cost time for almost no gain."""
CHOOSING_QUERIES = 2000
"""Most validation queries that choose a serving beam and the best method."""
MOST_QUERIES = 5000
"""Most test queries that are measured, evenly spread. Answers take time, and with so many the standard errors are small."""
ANSWER_S, TIMING_S = 0.001, 1.5
"""About the seconds of an answer in a batch, and of timing answers one by one."""
FUSED_QUERY_S = 0.003
"""About the seconds that a fusion takes for each query that chooses its weights: two answers and some forty trials."""
REFUSALS = (EspalierError, ImportError, MemoryError, FloatingPointError)
"""Errors that say that a method cannot be fitted to a log. The comparison goes on without it."""


@dataclass(frozen=True)
class Entry:
    """A fitted method.

    by_beam     serving beam, ascending → the method with this beam; a method without a beam has one entry, None
    beam_size   the smallest beam with at least ENOUGH of the best beam's figure on validation queries
    validation  beam → figure on validation queries; seen items are left out if they were when the method was chosen
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

    metric     makes all choices: recall at the configured `search.m`
    beams      serving beams of the recipe
    estimates  name of a baseline → estimate of its needs
    clock      measures all times
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
    _refused: dict[tuple[str, bool], str] = field(default_factory=dict)
    _recipe: Recipe | None = None
    _costs: Costs | None = None

    @property
    def metric(self) -> Metric:
        return Metric("recall", self.config.search.m)

    def task(self, exclude_seen: bool, seconds: float | None) -> Task:
        split, items = self.prepared.split, self.prepared.items
        return Task(split, items, self.metric, exclude_seen, self.config.windowed_instances, self.config.seed, seconds, self.clock)

    def needs(self, name: str, exclude_seen: bool, has_neighbours: bool = False) -> Needs:
        """The needs of a method; of a fusion, without those of its methods. Raises one of REFUSALS if it cannot be fitted to this log.

        has_neighbours  neighbours are fitted before the tree, whose memory uses them
        """
        if name == RECIPE:
            self._costs = costs_of(self.config, self.prepared, self.folder, self.device, self.clock)
            return needs_of(self.config, self.prepared, replace(self._costs, memory_s=0.0) if has_neighbours else self._costs)
        if name in self.baselines:
            self._refuse_histories(name)
            return self.estimates[name](self.task(exclude_seen, None))
        queries = min(VALIDATION_QUERIES, len(self.prepared.split.validation))
        return Needs(FUSED_QUERY_S * queries, FUSED_QUERY_S * queries)

    def has_refused(self, name: str) -> bool:
        """Whether the method was tried and failed: more time would not do."""
        return any(name == refused for refused, _ in self._refused)

    def refuse(self, name: str, exclude_seen: bool, refusal: BaseException) -> str:
        """Note that a fitted method fails, and return the reason. Fusions with it are refused, too."""
        log.warning("%s is not judged: %s", name, refusal)
        self._refused[name, exclude_seen] = reason_of(refusal)
        return self._refused[name, exclude_seen]

    def answering_seconds(self, name: str) -> float:
        """About the seconds for measuring and timing a fitted method; the tree is measured at each of its beams."""
        split = self.prepared.split
        queries = min(CHOOSING_QUERIES, len(split.validation)) + min(MOST_QUERIES, len(split.test))
        search_s = ANSWER_S if self._costs is None else max(ANSWER_S, self._costs.search_s)
        return len(self.beams) * (TIMING_S + search_s * queries) if name == RECIPE else TIMING_S + ANSWER_S * queries

    def _refuse_histories(self, name: str) -> None:
        if self.prepared.interactions.vectors_UF is not None and name not in FOR_VECTORS:
            raise InvalidConfig("--methods", name, f"{', '.join(FOR_VECTORS)} or {RECIPE}: queries are vectors, it learns from histories")

    def entry(self, name: str, exclude_seen: bool, seconds: float | None = None) -> Entry:
        """The method, fitted within `seconds`. Of a fusion, that includes its methods that are not fitted yet.

        exclude_seen  whether options are chosen with seen items left out; slow baselines are chosen once, as `search.exclude_seen` says

        Raises one of REFUSALS if it cannot be fitted to this log. It is tried once: a fusion with it is refused, too.
        """
        if name in self.baselines and name not in TUNED_FOR_EACH:
            exclude_seen = self.config.search.exclude_seen
        key = name, exclude_seen
        if key in self._refused:
            raise EspalierError(f"{name} is not judged: {self._refused[key]}")
        if key not in self._entries:
            try:
                self._entries[key] = self._fit(name, exclude_seen, seconds)
            except REFUSALS as refusal:
                self._refused[key] = reason_of(refusal)
                raise
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
        first, second = fused_methods(name)
        deadline = task.deadline()
        entries: dict[str, Entry] = {}
        for method in sorted((first, second), key=lambda method: method == RECIPE):  # the tree gets the time that the other one leaves
            method_s = 0.9 * deadline.left_s() / (1 if entries else 2)  # the last tenth is for choosing the fusion
            entries[method] = self.entry(method, exclude_seen, None if seconds is None else method_s)
        left_s = None if seconds is None else deadline.left_s()
        fused = fuse(entries[first].fitted, entries[second].fitted, self.task(exclude_seen, left_s))
        beams = [entries[method].beam_size for method in (first, second) if entries[method].beam_size is not None]
        return self._entry(name, {beams[0] if beams else None: fused}, task)

    def _trained(self, seconds: float | None) -> Recipe:
        if self._recipe is None:
            entry = self._entries.get((NEIGHBOURS, self.config.search.exclude_seen))  # the export chooses a memory's neighbours so, too
            neighbours = None if entry is None else entry.fitted
            self._recipe = fit_recipe(self.config, self.prepared, self.folder, self.device, seconds, self._costs, self.clock, neighbours)
        return self._recipe

    def _entry(self, name: str, by_beam: Mapping[int | None, Fitted], task: Task) -> Entry:
        pairs = task.validation_pairs(CHOOSING_QUERIES)
        validation = {beam: task.measured(fitted.rank, pairs) for beam, fitted in by_beam.items()}
        enough = ENOUGH * max(validation.values())
        return Entry(name, by_beam, next(beam for beam, figure in validation.items() if figure >= enough), validation)


def fused_methods(name: str) -> tuple[str, str]:
    """The two methods of a fusion. Raises InvalidConfig if the name is not a fusion's."""
    fusion, *methods = (FUSED_BY_DEFAULT if name == FUSION else name).split(":")
    if fusion != FUSION or len(methods) != 2 or methods[0] == methods[1]:
        raise InvalidConfig("--methods", name, "fusion, or fusion:A:B with two methods")
    return methods[0], methods[1]


def checked_names(text: str, known_names: Sequence[str], *, fusions: bool = True) -> list[str]:
    """The methods of a comma-separated list, each once. Raises InvalidConfig for a name that is neither known nor a fusion of known ones.

    fusions  whether fusions are allowed
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        methods = fused_methods(name) if fusions and name.split(":")[0] == FUSION else (name,)
        for method in methods:
            if method not in known_names:
                expected = [*known_names, *([FUSION, "fusion:A:B"] if fusions else [])]
                raise InvalidConfig("--methods", method, f"some of {', '.join(expected)}")
    return names


def in_order(names: Sequence[str]) -> list[str]:
    """Quick methods first, then trained ones, the tree, fusions. So the tree gets the time that others leave, and fusions come last."""
    return sorted(names, key=lambda name: (name.split(":")[0] == FUSION, name == RECIPE, name not in QUICK))


def attempted(contest: Contest, name: str, exclude_seen: bool, seconds: float | None) -> Entry | str:
    """The fitted method, or the reason why it cannot be fitted."""
    try:
        return contest.entry(name, exclude_seen, seconds)
    except REFUSALS as refusal:
        log.warning("%s is not judged: %s", name, refusal)
        return reason_of(refusal)


def reason_of(refusal: BaseException) -> str:
    """The message of an error, or the name of its type if the message is empty."""
    return str(refusal) or type(refusal).__name__
