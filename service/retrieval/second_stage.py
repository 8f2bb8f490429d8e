"""The second stage: min_score, re-ranking and m turn the candidates of a search into the items of the answer.

Knows requests and candidates. Does not know JSON or queues.

Legend: B queries, M candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from espalier.arrays import Bool, Float32, Int64
from espalier.queries import QueryBatch
from espalier.rerank.features import CallerFeatures
from espalier.rerank.live_candidates import LiveCandidates
from espalier.rerank.ranker import Reranked
from espalier.search import SearchResult

from ..retrieval.request import CheckedRequest


@dataclass(frozen=True)
class Candidates:
    """The items of an answer, best first.

    rows_BM, scores_BM  item rows and their retrieval scores; the answer has the first `count_B` of each query
    eligible_B          int64[B]: number of candidates that passed `min_score`; the answer has the best of these
    reranked            the new order; None if the request did not ask for re-ranking
    """

    rows_BM: Int64
    scores_BM: Float32
    count_B: Int64
    eligible_B: Int64
    complete_B: Bool
    reranked: Reranked | None = None


def second_stage(
    checked: CheckedRequest,
    queries: QueryBatch,
    caller_features: Sequence[CallerFeatures],
    result: SearchResult,
    live: LiveCandidates | None,
) -> Candidates:
    """Apply min_score, then the ranker, then m, to the result of a search for max(m, depth) items.

    `min_score` does not change whether a query is complete. live: the live items that the request sees.
    """
    min_score, reranker, count_B = checked.request.min_score, checked.model.reranker, result.count_B
    if min_score is not None:  # best first, so the items to keep come first
        count_B = np.minimum(count_B, np.count_nonzero(result.scores_BM >= min_score, axis=1))
    if reranker is None or not checked.depth:
        return Candidates(result.item_rows_BM, result.scores_BM, count_B, count_B, result.complete_B)
    reranked = reranker.rerank(queries, replace(result, count_B=count_B), checked.depth, caller_features, live)
    return Candidates(
        reranked.of(result.item_rows_BM),
        reranked.of(result.scores_BM),
        np.minimum(count_B, checked.m),
        count_B,
        result.complete_B | (result.count_B >= checked.m),
        reranked,
    )
