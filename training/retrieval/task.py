"""The interface of retrieval methods: task and fitted method, the same for our models and for everything that they are compared with.

Knows lists, queries and figures. Does not know methods.

Legend: B queries, M results.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from espalier.arrays import Float64, Int64
from espalier.errors import InvalidConfig, InvalidData
from espalier.items import ItemTable
from espalier.metrics import ndcg_at_m, precision_recall_f, reciprocal_rank_at_m

from ..data.splits import EvaluationPair, Split, without_seen
from ..specification.deep import InstanceConfig

log = logging.getLogger(__name__)

METRICS: tuple[Literal["recall", "ndcg", "hr", "mrr"], ...] = ("recall", "ndcg", "hr", "mrr")
MOST_M = 10_000
"""Largest m of a metric."""
Clock = Callable[[], float]
"""Seconds since some moment, never fewer than before."""


class Question(Protocol):
    """A query with relevant items: a history, a vector or a text.

    user      the user who asked
    relevant  int64 item rows, at least one
    """

    @property
    def user(self) -> int: ...

    @property
    def query(self) -> Any: ...

    @property
    def relevant(self) -> Int64: ...


@dataclass(frozen=True)
class Metric:
    """A figure of retrieved lists, the mean over queries.

    recall, ndcg  see `espalier.metrics`
    hr, mrr       1 if any relevant item is in the list, else 0; 1 / rank of the first relevant item, or 0
    """

    name: Literal["recall", "ndcg", "hr", "mrr"]
    m: int

    @staticmethod
    def named(option: str, text: str) -> Metric:
        """`recall@50` and the like. Raises InvalidConfig."""
        name, _, m = text.partition("@")
        for metric in METRICS:
            if name == metric and m.isdecimal() and 1 <= int(m) <= MOST_M:
                return Metric(metric, int(m))
        raise InvalidConfig(option, text, f"{', '.join(f'{metric}@M' for metric in METRICS)}, M from 1 to {MOST_M}, such as recall@50")

    def __str__(self) -> str:
        return f"{self.name}@{self.m}"

    def of(self, item_rows_BM: Int64, pairs: Sequence[Question]) -> Float64:
        """float64[B]: the figure of each query."""
        relevant = [pair.relevant for pair in pairs]
        if self.name == "ndcg":
            return ndcg_at_m(item_rows_BM, relevant, self.m)
        if self.name == "mrr":
            return reciprocal_rank_at_m(item_rows_BM, relevant, self.m)
        recall_B = precision_recall_f(item_rows_BM, relevant, self.m)[1]
        return recall_B if self.name == "recall" else (recall_B > 0).astype(np.float64)


class Rank(Protocol):
    """How a fitted method answers."""

    def __call__(self, queries: Sequence[Any], /, m: int, exclude_seen: bool) -> Int64:
        """int64[B, M = m]: item rows, best first, ties by the lower row; NO_ITEM fills short rows.

        queries       texts, vectors, or histories: int64 item rows, oldest first, perhaps none; entries below 0 (unknown items) are skipped
        exclude_seen  whether the history's items are left out
        """
        ...


@dataclass(frozen=True)
class Task:
    """A method's data, metric and limits.

    split         a method learns from the lists of `split.train`, chooses by `split.validation` and never looks at `split.test`
    items         the item table, rows as in the lists
    metric        the figure of validation queries that chooses options and weights
    exclude_seen  whether seen items are left out in these choices
    instances     how methods that learn from (history, targets) cut the lists
    seed          of all random draws
    seconds       for choosing and training together; a method that would need more ends early with its best so far
    clock         measures the seconds
    """

    split: Split
    items: ItemTable
    metric: Metric
    exclude_seen: bool
    instances: InstanceConfig
    seed: int = 1
    seconds: float | None = None
    clock: Clock = time.monotonic

    def validation_pairs(self, most: int | None = None) -> list[EvaluationPair]:
        """At most `most` validation queries, evenly spread. Raises InvalidData if there is none."""
        pairs = list(self.split.validation)
        pairs = without_seen(pairs) if self.exclude_seen else pairs
        if not pairs:
            raise InvalidData("split.validation", f"{len(self.split.validation)} queries", "at least one with something relevant")
        return pairs if most is None else pairs[:: max(1, -(-len(pairs) // most))]

    def measured(self, rank: Rank, pairs: Sequence[EvaluationPair]) -> float:
        """The mean of `metric` over these queries."""
        found_BM = rank([pair.query for pair in pairs], self.metric.m, self.exclude_seen)
        return float(self.metric.of(found_BM, pairs).mean())

    def deadline(self) -> Deadline:
        """The end of `seconds` from now."""
        return Deadline(None if self.seconds is None else self.clock() + self.seconds, self.clock)


@dataclass(frozen=True)
class Deadline:
    """A point in time of a clock, or none."""

    at_s: float | None
    clock: Clock = time.monotonic

    def is_over(self) -> bool:
        return self.at_s is not None and self.clock() >= self.at_s

    def part(self, count: int) -> Deadline:
        """The end of the first of `count` equal parts of the remaining time."""
        return self if self.at_s is None else Deadline(self.clock() + self.left_s() / count, self.clock)

    def left_s(self) -> float:
        """Seconds until then, at least 0; infinite without a deadline."""
        return float("inf") if self.at_s is None else max(0.0, self.at_s - self.clock())


NO_DEADLINE = Deadline(None)


@dataclass(frozen=True)
class Trial:
    """Options and their figure on validation queries."""

    options: dict[str, Any]
    figure: float


@dataclass(frozen=True)
class Fitted:
    """A method after choosing and training.

    rank      answers queries
    options   the chosen options
    trials    all trials, in order
    bytes     of the arrays that answers need
    seconds   wall-clock time of choosing and training together
    ended     why it ended early, for the report; None if it did not
    share     of its steps, or of its data, that it saw (see `needs.py`): the smaller
    source    the data behind its answers, if another method can be made of them
    """

    rank: Rank
    options: dict[str, Any]
    bytes: int
    seconds: float
    trials: list[Trial] = field(default_factory=list)
    ended: str | None = None
    share: float = 1.0
    source: object = None


Method = Callable[[Task], Fitted]
