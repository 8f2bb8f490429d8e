"""Queries with their candidates: features and grades of relevance, to train and measure rankers.

Knows arrays and their invariants. Does not know files (`letor.py`) nor rankers.

Legend: R rows (a query with one of its items), F features, Q queries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from espalier.arrays import Float32, Int64
from espalier.errors import InvalidData

MAX_GRADE = 32
"""The largest grade. NDCG's gain is 2^grade − 1, so a larger one would make all others irrelevant, and 2^1024 overflows."""


@dataclass(frozen=True, eq=False)
class RankingSet:
    """Q queries over R rows; the rows of a query are contiguous.

    features_RF    float32[R, F], NaN where a value is missing
    grades_R       float32[R], from 0 to MAX_GRADE; 0 is irrelevant
    query_offset   int64[Q + 1]: where the rows of each query begin, from 0 to R; every query has a row
    feature_names  F names, each once
    query_ids      Q ids, each once, or None

    Raises InvalidData if the arrays are not so.
    """

    features_RF: Float32
    grades_R: Float32
    query_offset: Int64
    feature_names: tuple[str, ...]
    query_ids: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        features, grades, offset = self.features_RF, self.grades_R, self.query_offset
        if features.dtype != np.float32 or features.ndim != 2:
            raise InvalidData("features_RF", f"{features.dtype}{list(features.shape)}", "float32[R, F]")
        rows, width = features.shape
        if grades.dtype != np.float32 or grades.shape != (rows,):
            raise InvalidData("grades_R", f"{grades.dtype}{list(grades.shape)}", f"float32[{rows}], one per row of features_RF")
        if offset.dtype != np.int64 or offset.ndim != 1 or len(offset) < 2:
            raise InvalidData("query_offset", f"{offset.dtype}{list(offset.shape)}", "int64[Q + 1] of at least one query")
        if offset[0] != 0 or offset[-1] != rows or np.any(offset[1:] <= offset[:-1]):  # differences could wrap
            raise InvalidData("query_offset", offset[:8].tolist(), f"ascending from 0 to {rows}, at least one row a query")
        if width == 0 or len(self.feature_names) != width or len(set(self.feature_names)) != width:
            raise InvalidData("feature_names", list(self.feature_names[:8]), f"{width} different names, at least one")
        is_wrong = ~((grades >= 0) & (grades <= MAX_GRADE))
        if is_wrong.any():
            raise InvalidData(f"grades_R[{int(is_wrong.argmax())}]", float(grades[is_wrong.argmax()]), f"a grade from 0 to {MAX_GRADE}")
        infinite = np.isinf(features).any(axis=1)
        if infinite.any():
            raise InvalidData(f"features_RF[{int(infinite.argmax())}]", "infinity", "finite numbers, or NaN where one is missing")
        if self.query_ids is not None and (len(self.query_ids) != len(self) or len(set(self.query_ids)) != len(self)):
            raise InvalidData("query_ids", list(self.query_ids[:8]), f"{len(self)} different ids")

    def __len__(self) -> int:
        return len(self.query_offset) - 1

    def rows_of(self, query: int) -> slice:
        return slice(int(self.query_offset[query]), int(self.query_offset[query + 1]))

    def _subset(self, queries: Int64) -> RankingSet:
        """The queries at some positions, in that order."""
        size_Q = np.diff(self.query_offset)[queries]
        offset = np.concatenate([[0], np.cumsum(size_Q)])
        rows = np.arange(offset[-1]) + np.repeat(self.query_offset[queries] - offset[:-1], size_Q)
        return replace(
            self,
            features_RF=self.features_RF[rows],
            grades_R=self.grades_R[rows],
            query_offset=offset,
            query_ids=None if self.query_ids is None else tuple(self.query_ids[query] for query in queries),
        )

    def split(self, share: float, seed: int) -> tuple[RankingSet, RankingSet]:
        """The set without a seeded random share of its queries, and that share. Both have at least one query."""
        held_out = round(share * len(self))
        if not 0 < held_out < len(self):
            raise InvalidData("share", share, f"a share of {len(self)} queries that leaves some on both sides")
        order = np.random.default_rng(seed).permutation(len(self))
        return self._subset(np.sort(order[held_out:])), self._subset(np.sort(order[:held_out]))
