"""What comes between the engine's answer and the JSON: min_score, the re-ranking that a request asks for, and m.

Knows requests and candidates. Does not know JSON or queues.

Legend: B queries, M candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from espalier.errors import InvalidQuery
from espalier.queries import QueryBatch
from espalier.rerank.features import Sent
from espalier.rerank.ranker import Reranked
from espalier.search import SearchResult
from service.models.registry import LoadedModel
from service.retrieval.schemas import Query, RetrieveRequest

LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Ordered:
    """What goes out, best first.

    rows_BM, scores_BM  item rows and their scores of retrieval; the first `count_B` of each query go out
    eligible_B          int64[B]: candidates that `min_score` left, of which those are the best
    reranked            how they were re-ordered, where the request asked for it
    """

    rows_BM: NDArray[np.int64]
    scores_BM: NDArray[np.float32]
    count_B: NDArray[np.int64]
    eligible_B: NDArray[np.int64]
    complete_B: NDArray[np.bool_]
    reranked: Reranked | None = None


def check_rerank(request: RetrieveRequest, model: LoadedModel) -> None:
    """Raise InvalidQuery unless the model can do what a request asks of its ranker, and knows the features that come with it."""
    reranker, most = model.reranker, model.bundle.manifest.search.max_m
    if reranker is None:
        if request.rerank is not None:
            raise InvalidQuery("rerank", True, "false, because this model has no ranker")
    elif request.rerank is not None and (request.rerank.depth or 0) > reranker.info.max_depth:
        raise InvalidQuery("rerank.depth", request.rerank.depth, f"at most {reranker.info.max_depth}")
    for i, query in enumerate(request.queries):
        if not query.rank_features and not query.item_features:
            continue
        if reranker is None:
            raise InvalidQuery(f"queries[{i}]", "features for a ranker", "none, because this model has no ranker")
        _check_sent(f"queries[{i}].rank_features", query.rank_features, reranker.features.sent_with_query)
        if len(query.item_features) > most:
            raise InvalidQuery(f"queries[{i}].item_features", len(query.item_features), f"at most {most} items")
        for item_id, numbers in query.item_features.items():
            _check_sent(f"queries[{i}].item_features.{item_id}", numbers, reranker.features.sent_with_items)


def _check_sent(field: str, numbers: Mapping[str, float], known: Sequence[str]) -> None:
    for name, value in numbers.items():
        if name not in known:
            raise InvalidQuery(
                f"{field}.{name}", value, f"one of {', '.join(known)}" if known else "no feature: the ranker takes none here"
            )
        if abs(value) > LARGEST:
            raise InvalidQuery(f"{field}.{name}", value, "a 32-bit number")


def depth_of(request: RetrieveRequest, model: LoadedModel) -> int:
    """Candidates that are to be re-ranked; 0: none are. The request has been checked."""
    if model.reranker is None or request.rerank is None:
        return 0
    return request.rerank.depth or model.reranker.info.depth


def sent_with(query: Query, rows: NDArray[np.int64]) -> Sent:
    """The features that come with a query; `rows` are the item rows of its `item_features`, −1 where the catalogue lacks an id."""
    numbers = zip(rows.tolist(), query.item_features.values(), strict=True)
    return Sent(query.rank_features, {row: own for row, own in numbers if row >= 0})


def ordered(
    request: RetrieveRequest, model: LoadedModel, queries: QueryBatch, sent: Sequence[Sent], result: SearchResult, m: int, depth: int
) -> Ordered:
    """The result of a search for max(m, depth) items as it goes out.

    `min_score` trims before the ranker, and after the engine decided what is complete.
    """
    count_B = result.count_B
    if request.min_score is not None:  # best first, so that the items to keep come first
        count_B = np.minimum(count_B, np.count_nonzero(result.scores_BM >= request.min_score, axis=1))
    if model.reranker is None or not depth:
        return Ordered(result.item_rows_BM, result.scores_BM, count_B, count_B, result.complete_B)
    reranked = model.reranker.rerank(queries, replace(result, count_B=count_B), depth, sent)
    return Ordered(
        reranked.of(result.item_rows_BM),
        reranked.of(result.scores_BM),
        np.minimum(count_B, m),
        count_B,
        result.complete_B | (result.count_B >= m),
        reranked,
    )
