"""The training data of a ranker: the candidates that its model retrieves for queries, with their features and grades.

Legend: B queries, M candidates, R candidates of all queries, F features.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from espalier.arrays import Float32, Float64, Int64
from espalier.errors import InvalidData
from espalier.metrics import ndcg, precision_recall_f
from espalier.rerank.features import RankFeatures
from espalier.search import NO_ITEM, Engine, SearchParams, padded

from ..data.ranking_set import RankingSet
from ..rankers.graded_queries import GradedQueries

BATCH = 64
"""Queries in one engine call."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """The candidates of the queries that have any.

    ranking     their features and grades, in the order of retrieval
    rows_BM     int64[B, M]: item rows in that order, NO_ITEM as padding
    relevant    of each query the item rows that are relevant, retrieved or not
    grades      of each query the float32 grades of these
    unanswered  the number of other queries, which have a relevant item and no candidates
    """

    ranking: RankingSet
    rows_BM: Int64
    relevant: list[Int64]
    grades: list[Float32]
    unanswered: int = 0

    def quality(self, scores_R: Float32 | None, m: int, depth: int | None = None) -> dict[str, float]:
        """`ndcg`, with gains 2^grade − 1, and `recall` at m, means over the queries with a relevant item, 0 for those without candidates.
        Relevant items that were not retrieved count in the divisors. The best `depth` candidates (None: all) are in the order of the
        scores, None: as retrieved.

        Raises InvalidData where no query has a relevant item.
        """
        rows_BM = self.rows_BM if scores_R is None else self.ordered(scores_R, depth)
        with_relevant = np.flatnonzero([len(rows) > 0 for rows in self.relevant])
        if not len(with_relevant):
            raise InvalidData("queries", "no relevant item", "at least one query with a relevant item")
        relevant = [self.relevant[b] for b in with_relevant.tolist()]
        answered_BM = rows_BM[with_relevant]
        lists = [self.graded_list(b, row_M[:m], m) for b, row_M in zip(with_relevant.tolist(), answered_BM, strict=True)]
        offset, grades_R = np.concatenate([[0], np.cumsum([*map(len, lists)])]), np.concatenate(lists)
        answered_share = len(relevant) / (len(relevant) + self.unanswered)
        return {
            "ndcg": answered_share * float(ndcg(-np.arange(len(grades_R), dtype=np.float64), grades_R, offset, m).mean()),
            "recall": answered_share * float(precision_recall_f(answered_BM, relevant, m)[1].mean()),
        }

    def graded_list(self, b: int, rows_M: Int64, m: int) -> Float64:
        """The grades of m answered items of query b, 0 where there is none, and then of its other relevant items."""
        grade_of = dict(zip(self.relevant[b].tolist(), self.grades[b].tolist(), strict=True))
        answered = [grade_of.pop(row, 0.0) for row in rows_M.tolist()]
        return np.array([*answered, *[0.0] * (m - len(answered)), *grade_of.values()])

    def ordered(self, scores_R: Float32, depth: int | None = None) -> Int64:
        """int64[B, M]: the candidates, of which the best `depth` (None: all) are ordered by their scores, best first."""
        rows_BM = self.rows_BM.copy()
        for b, row_M in enumerate(rows_BM):
            query_scores = scores_R[self.ranking.rows_of(b)][:depth]
            row_M[: len(query_scores)] = row_M[np.argsort(-query_scores, kind="stable")]
        return rows_BM


def retrieve(engine: Engine, features: RankFeatures, graded: GradedQueries, depth: int, beam_size: int, name: str = "") -> Candidates:
    """The best `depth` candidates of each query. Raises InvalidData where no query has any.

    With features `item.NAME`, only judged items are candidates: no others have values, which would tell which items were judged.
    """
    features_of_queries, counts, rows, answered_positions, grades = [], [], [], [], []
    unanswered = 0
    with tqdm(total=len(graded), desc=f"candidates {name}".rstrip(), unit="query", disable=None, leave=False) as bar:
        for start in range(0, len(graded), BATCH):
            positions = np.arange(start, min(start + BATCH, len(graded)))
            queries = graded.queries.take(positions)
            seen_BE = None if graded.seen is None else padded([graded.seen[b] for b in positions.tolist()])
            result = engine.search(queries, SearchParams.uniform(len(positions), beam_size, depth, seen_BE))
            for b, position in enumerate(positions.tolist()):
                count, caller_features = int(result.count_B[b]), graded.caller_features_of(position)
                rows_N = result.item_rows_BM[b, :count]
                is_candidate_N = (
                    np.isin(rows_N, [*caller_features.items])
                    if features.caller_item and caller_features.items
                    else np.ones(count, np.bool_)
                )
                if not is_candidate_N.any():
                    unanswered += len(graded.items[position]) > 0
                    continue
                found = rows_N, result.ranks_BM[b, :count], result.scores_BM[b, :count]
                features_of_queries.append(features.of(queries, b, *found, caller_features)[is_candidate_N])
                rows_N, count = rows_N[is_candidate_N], int(is_candidate_N.sum())
                grade_of = dict(zip(graded.items[position].tolist(), graded.grades[position].tolist(), strict=True))
                grades.append(np.array([grade_of.get(row, 0.0) for row in rows_N.tolist()], np.float32))
                counts.append(count)
                rows.append(np.pad(rows_N, (0, depth - count), constant_values=NO_ITEM))
                answered_positions.append(position)
            bar.update(len(positions))
    if not features_of_queries:
        raise InvalidData("queries", f"{len(graded)} queries", "at least one that retrieves something")
    offset = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    ranking = RankingSet(np.concatenate(features_of_queries), np.concatenate(grades), offset, features.names)
    answered = graded.take(np.array(answered_positions))
    return Candidates(ranking, np.stack(rows), answered.items, answered.grades, unanswered)
