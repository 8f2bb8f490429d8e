"""Coordinate search over options by a figure of validation queries: one option after another, until no step of any is better.

Knows options, figures and a deadline. Does not know methods.

The search begins at the best of some starts. An ordered option climbs: it tries the next value up, and on while that is better, else the
next one down. After the grid's last value it goes on by the option's step, within its limits. Of an unordered option every value is tried.
At equal figures the earlier options stay, so starts and grids list simpler values first. No combination is measured twice.

Legend: B queries, C cuts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from espalier.arrays import Float64

from ..retrieval.task import Deadline, Trial

log = logging.getLogger(__name__)

Options = dict[str, Any]
T = TypeVar("T")

CUTS = (10, 50, 200)
"""The m of the figures that choose rankings. A single m would ignore the order above it."""
LEAST_MEAN = 1e-4
"""Lower bound of a mean, so that its logarithm is finite."""


def geometric_mean(mean_C: Float64) -> float:
    return float(np.exp(np.log(np.maximum(mean_C, LEAST_MEAN)).mean()))


@dataclass(frozen=True)
class Figures:
    """figure_CB float64[C, B]: recall, or another metric, of each query at each of CUTS."""

    figure_CB: Float64

    @property
    def mean_C(self) -> Float64:
        mean_C: Float64 = np.maximum(self.figure_CB.mean(1), LEAST_MEAN)
        return mean_C

    @property
    def figure(self) -> float:
        """The geometric mean over the cuts, so that the top of a list counts as much as the whole list."""
        return geometric_mean(self.figure_CB.mean(1))

    def gain_over(self, other: Figures) -> tuple[float, float]:
        """The relative gain in `figure`, to first order, and its standard error, paired by query."""
        gain_B = ((self.figure_CB - other.figure_CB) / other.mean_C[:, None]).mean(0)
        error = float(gain_B.std(ddof=1)) / math.sqrt(len(gain_B)) if len(gain_B) > 1 else math.inf
        return float(gain_B.mean()), error

    def is_level_with(self, other: Figures) -> bool:
        """Whether the loss at each cut is at most its standard error, paired by query. A gain at one cut does not make up for another."""
        gain_CB = self.figure_CB - other.figure_CB
        return bool((gain_CB.mean(axis=1) >= -gain_CB.std(axis=1, ddof=1) / math.sqrt(gain_CB.shape[1])).all())


@dataclass(frozen=True)
class Option:
    """One option and its grid.

    values        at least one, ascending if the option is ordered
    add, times    the step of an ordered option beyond its grid: a summand or a factor; with neither the grid is the limit
    least, most   limits beyond the grid
    ordered       whether neighbouring values give similar figures
    only_with     another option: while its value is 0, this one has no effect and is left out
    """

    name: str
    values: tuple[Any, ...]
    add: float = 0.0
    times: float = 0.0
    least: float = float("-inf")
    most: float = float("inf")
    ordered: bool = True
    only_with: str = ""

    def beside(self, value: Any, direction: int) -> Any | None:
        """The next value up (direction 1) or down (−1), or None."""
        candidates = [entry for entry in self.values if (entry - value) * direction > 0]
        if candidates:
            return min(candidates) if direction > 0 else max(candidates)
        if self.add:
            next_value = round(value + direction * self.add, 9)
        elif self.times:
            next_value = round(value * self.times**direction, 9)
        else:
            return None
        next_value = int(next_value) if isinstance(value, int) else next_value
        return next_value if self.least <= next_value <= self.most and next_value != value else None

    def __str__(self) -> str:
        beyond = f" then {'±' if self.add else '×÷'}{self.add or self.times:g}" if self.add or self.times else ""
        return f"{self.name}: {', '.join(map(str, self.values))}{beyond}"


@dataclass
class Search:
    """The trials in order, and the best of them."""

    figure: Callable[[Options], float]
    deadline: Deadline
    most_trials: int
    cost_s: Callable[[Options], float]
    trials: list[Trial] = field(default_factory=list)
    ended: str | None = None

    @property
    def best(self) -> Trial:
        """The trial with the highest figure; of equal ones the earliest."""
        return max(self.trials, key=lambda trial: trial.figure)

    def is_better(self, options: Options) -> bool:
        """Measure options, unless they were measured or time is over. Returns whether they are better than all earlier ones."""
        if any(trial.options == options for trial in self.trials):
            return False
        is_full = len(self.trials) >= self.most_trials
        if self.trials and (is_full or self.cost_s(options) >= self.deadline.left_s()):
            limit = "limit" if is_full else "deadline"
            self.ended = self.ended or f"the search reached its {limit}; trials: {len(self.trials)}"
            return False
        before = self.best.figure if self.trials else float("-inf")
        self.trials.append(Trial(dict(options), self.figure(options)))
        log.info("  %.5f  %s", self.trials[-1].figure, ", ".join(f"{name} {value}" for name, value in options.items()))
        return self.trials[-1].figure > before


@dataclass
class Remembered(Generic[T]):
    """A cache of two expensive results, of the best trial so far and of the latest, by the options `names`, on which they depend."""

    make: Callable[[Options], T]
    names: tuple[str, ...]
    best: tuple[Any, ...] = ()
    figure: float = float("-inf")
    results: dict[tuple[Any, ...], T] = field(default_factory=dict)

    def has(self, options: Options) -> bool:
        return self._key(options) in self.results

    def of(self, options: Options) -> T:
        key = self._key(options)
        if key not in self.results:
            for other_key in [other_key for other_key in self.results if other_key != self.best]:
                del self.results[other_key]  # before the next is made: memory has room for two
            self.results[key] = self.make(options)
        return self.results[key]

    def _key(self, options: Options) -> tuple[Any, ...]:
        return tuple(options[name] for name in self.names)

    def watched(self, figure: Callable[[Options], float]) -> Callable[[Options], float]:
        """The same figure function. Its calls tell the cache which trial is the best."""

        def measured(options: Options) -> float:
            value = figure(options)
            if value > self.figure:
                self.figure, self.best = value, self._key(options)
            return value

        return measured


def search(
    figure: Callable[[Options], float],
    starts: Sequence[Options],
    grid: Sequence[Option],
    deadline: Deadline,
    *,
    most_trials: int = 200,
    cost_s: Callable[[Options], float] = lambda _: 0.0,
) -> Search:
    """Measure each start and climb from the best. The first start is always measured. All trials count, however the search ends.

    starts  each with a value of every option
    cost_s  about the seconds of a trial; a trial that would take more than the remaining time is left out, cheaper ones go on
    """
    tuning = Search(figure, deadline, most_trials, cost_s)
    for start in starts:
        tuning.is_better(start)
    better = True
    while better:  # when time is over, no step is better
        better = False
        for option in grid:
            if option.only_with and not tuning.best.options[option.only_with]:
                continue
            better |= _climb(tuning, option) if option.ordered else _try_all(tuning, option)
    return tuning


def _climb(tuning: Search, option: Option) -> bool:
    better = False
    for direction in (1, -1):
        while (value := option.beside(tuning.best.options[option.name], direction)) is not None:
            if not tuning.is_better({**tuning.best.options, option.name: value}):
                break
            better = True
        if better:
            break
    return better


def _try_all(tuning: Search, option: Option) -> bool:
    before = tuning.best.options
    better = [tuning.is_better({**before, option.name: value}) for value in option.values]
    return any(better)
