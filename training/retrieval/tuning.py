"""A search over options by a figure of validation queries: one option after another, until no step of any is better.

Knows options, figures and a deadline. Does not know methods.

It begins at the best of some starts. An ordered option climbs: its next value up, and on while that is better, else the next one down.
Where the best value is the last of the grid, it goes on beyond it by the option's step, within its limits. Of an unordered option every
value is tried. Equal figures keep what was there, so the start and the grid's order say what is simpler. No combination is measured twice.

Legend: B queries, C cuts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..retrieval.task import Deadline, Trial

log = logging.getLogger(__name__)

Options = dict[str, Any]
T = TypeVar("T")

CUTS = (10, 50, 200)
"""The m of the figures by which rankings are chosen: by one alone, they may be anywhere above it."""
LEAST_MEAN = 1e-4
"""A mean below this counts as this, so that the mean of logarithms has a value."""


@dataclass(frozen=True)
class Figures:
    """figure_CB float64[C, B]: recall, or another metric, of each query at each of CUTS."""

    figure_CB: NDArray[np.float64]

    @property
    def mean_C(self) -> NDArray[np.float64]:
        """The mean at each cut."""
        mean_C: NDArray[np.float64] = np.maximum(self.figure_CB.mean(1), LEAST_MEAN)
        return mean_C

    @property
    def figure(self) -> float:
        """The geometric mean over the cuts: the top of a list counts as much as its length."""
        return float(np.exp(np.log(self.mean_C).mean()))

    def gain_over(self, other: Figures) -> tuple[float, float]:
        """The relative gain in `figure`, to first order, and its standard error, paired by query."""
        gain_B = ((self.figure_CB - other.figure_CB) / other.mean_C[:, None]).mean(0)
        error = float(gain_B.std(ddof=1)) / math.sqrt(len(gain_B)) if len(gain_B) > 1 else math.inf
        return float(gain_B.mean()), error


@dataclass(frozen=True)
class Option:
    """One option and its grid.

    values        at least one, ascending where it is ordered
    add, times    how an ordered one goes on beyond its grid, at most one of them; with neither it does not
    least, most   limits beyond the grid
    ordered       whether values next to each other give similar figures
    """

    name: str
    values: tuple[Any, ...]
    add: float = 0.0
    times: float = 0.0
    least: float = float("-inf")
    most: float = float("inf")
    ordered: bool = True

    def beside(self, value: Any, direction: int) -> Any | None:
        """The next value up (direction 1) or down (−1), None where there is none."""
        further = [other for other in self.values if (other - value) * direction > 0]
        if further:
            return min(further) if direction > 0 else max(further)
        if self.add:
            new = round(value + direction * self.add, 9)
        elif self.times:
            new = round(value * self.times**direction, 9)
        else:
            return None
        new = int(new) if isinstance(value, int) else new
        return new if self.least <= new <= self.most and new != value else None

    def __str__(self) -> str:
        beyond = f" then {'±' if self.add else '×÷'}{self.add or self.times:g}" if self.add or self.times else ""
        return f"{self.name}: {', '.join(map(str, self.values))}{beyond}"


@dataclass
class Search:
    """What was tried, in order, and the best of it."""

    figure: Callable[[Options], float]
    deadline: Deadline
    most_trials: int
    cost_s: Callable[[Options], float]
    trials: list[Trial] = field(default_factory=list)
    ended: str | None = None

    @property
    def best(self) -> Trial:
        """The trial with the highest figure, the earlier of equals."""
        return max(self.trials, key=lambda trial: trial.figure)

    def is_better(self, options: Options) -> bool:
        """Measure them, unless that was done or time is over; whether they are the best now, and nothing earlier is as good."""
        if any(trial.options == options for trial in self.trials):
            return False
        is_full = len(self.trials) >= self.most_trials
        if self.trials and (is_full or self.cost_s(options) >= self.deadline.left_s()):
            limit = "limit" if is_full else "deadline"
            self.ended = self.ended or f"the search's {limit} left out trials, the first after {len(self.trials)}"
            return False
        before = self.best.figure if self.trials else float("-inf")
        self.trials.append(Trial(dict(options), self.figure(options)))
        log.info("  %.5f  %s", self.trials[-1].figure, ", ".join(f"{name} {value}" for name, value in options.items()))
        return self.trials[-1].figure > before


@dataclass
class Remembered(Generic[T]):
    """What some of the options give at a high price, kept for the best trial so far and for the latest: two at most."""

    make: Callable[[Options], T]
    names: tuple[str, ...]
    best: tuple[Any, ...] = ()
    figure: float = float("-inf")
    held: dict[tuple[Any, ...], T] = field(default_factory=dict)

    def has(self, options: Options) -> bool:
        return self._key(options) in self.held

    def of(self, options: Options) -> T:
        key = self._key(options)
        if key not in self.held:
            for other in [other for other in self.held if other != self.best]:
                del self.held[other]  # first: there is room for two alone
            self.held[key] = self.make(options)
        return self.held[key]

    def _key(self, options: Options) -> tuple[Any, ...]:
        return tuple(options[name] for name in self.names)

    def watched(self, figure: Callable[[Options], float]) -> Callable[[Options], float]:
        """The same figure; this learns by it which trial is the best."""

        def measured(options: Options) -> float:
            found = figure(options)
            if found > self.figure:
                self.figure, self.best = found, self._key(options)
            return found

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
    """Measure each start and climb from the best. The first is measured in any case; every trial counts, whatever ends the search.

    starts  each with a value of every option
    cost_s  about how many seconds a trial takes; one that would take more than is left is left out, and cheaper ones go on
    """
    found = Search(figure, deadline, most_trials, cost_s)
    for start in starts:
        found.is_better(start)
    better = True
    while better:  # with nothing left to try in time, no step is better
        better = False
        for option in grid:
            better |= _climb(found, option) if option.ordered else _try_all(found, option)
    return found


def _climb(found: Search, option: Option) -> bool:
    better = False
    for direction in (1, -1):
        while (value := option.beside(found.best.options[option.name], direction)) is not None:
            if not found.is_better({**found.best.options, option.name: value}):
                break
            better = True
        if better:
            break
    return better


def _try_all(found: Search, option: Option) -> bool:
    before = found.best.options
    better = [found.is_better({**before, option.name: value}) for value in option.values]
    return any(better)
