"""Queries that a ranker learns from, with their relevant items and grades.

Knows queries and grades. Does not know where they came from (`log_queries.py`, `judgements.py`) nor what a model retrieves for them.

Legend: B queries.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from espalier.arrays import Float32, Int64
from espalier.queries import QueryBatch
from espalier.rerank.features import NO_CALLER_FEATURES, CallerFeatures


@dataclass(frozen=True, eq=False)
class GradedQueries:
    """B queries with their relevant items.

    items, grades    of each query: int64 item rows that are relevant, each once, and float32 grades above 0
    seen             of each query: int64 item rows of its history that the search excludes; None: nothing is excluded
    caller_features  of each query: the features that callers send with it; empty: no query has any
    """

    queries: QueryBatch
    items: list[Int64]
    grades: list[Float32]
    seen: list[Int64] | None = None
    caller_features: list[CallerFeatures] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.queries)

    def caller_features_of(self, b: int) -> CallerFeatures:
        return self.caller_features[b] if self.caller_features else NO_CALLER_FEATURES

    def take(self, rows: Int64) -> GradedQueries:
        """The queries at some positions (int64)."""
        chosen = rows.tolist()
        return GradedQueries(
            self.queries.take(rows),
            [self.items[b] for b in chosen],
            [self.grades[b] for b in chosen],
            None if self.seen is None else [self.seen[b] for b in chosen],
            [self.caller_features[b] for b in chosen] if self.caller_features else [],
        )

    def sample(self, count: int, seed: int) -> GradedQueries:
        """At most `count` of them, drawn at random."""
        if len(self) <= count:
            return self
        return self.take(np.sort(np.random.default_rng(seed).permutation(len(self))[:count]))


@dataclass(frozen=True)
class QuerySplit:
    """Queries to learn from, to choose weights by and to measure on. No user is in two of them.

    file  of judgements that they are from; "": they are from a log
    """

    train: GradedQueries
    valid: GradedQueries
    test: GradedQueries
    file: str = field(default="", kw_only=True)


def equally_relevant(queries: QueryBatch, items: list[Int64], seen: list[Int64] | None = None) -> GradedQueries:
    """Queries whose relevant items all have the grade 1."""
    return GradedQueries(queries, items, [np.ones(len(rows), np.float32) for rows in items], seen)
