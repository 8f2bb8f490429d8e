"""The re-ranker: reorders the best candidates of a search by the scores of ranker.onnx.

Knows how candidates become features, scores and a new order, and checks the scores of golden queries. Does not know searches.

Legend: B queries, M candidates, N candidates of all queries, F features.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from onnx.reference import ReferenceEvaluator

from espalier.arrays import Array, Float32, Int64
from espalier.bundle import RANKER, Bundle
from espalier.checks.golden import encode_table, golden_ranks
from espalier.checks.golden_answers import GoldenAnswers
from espalier.engines.graphs import read_graph
from espalier.errors import BundleCorrupt
from espalier.queries import QueryBatch
from espalier.rerank.features import NO_CALLER_FEATURES, CallerFeatures, RankFeatures
from espalier.rerank.live_candidates import LiveCandidates
from espalier.search import SearchResult

log = logging.getLogger(__name__)

GOLDEN_SCORES = "rerank_scores"
"""Column of golden.parquet: the ranker's score of each of the query's items, in the order of the search."""
TOLERANCE = 1e-3
"""Largest difference of a score from the golden one, relative to it if it exceeds 1."""


@dataclass(frozen=True)
class Reranked:
    """A search's candidates in their new order.

    retrieved_BM  int64[B, M]    the position in the search's result, from 0, of each candidate; padding stays last
    score_BM      float32[B, M]  the ranker's scores; NaN past the depth, for padding and for scores that are not finite
    """

    retrieved_BM: Int64
    score_BM: Float32

    def of(self, array_BM: Array) -> Array:
        """An array of the search's result, [B, M], in the new order."""
        return np.take_along_axis(array_BM, self.retrieved_BM, axis=1)


class Reranker:
    """Runs a bundle's ranker. Raises BundleCorrupt if the bundle has none, or it does not fit the manifest.

    device  runs the network; features are computed on the host
    """

    def __init__(self, bundle: Bundle, device: Literal["cpu", "cuda"] = "cpu") -> None:
        from espalier.engines.runtime import opened_session  # here, because it loads slowly and bundles without a ranker need none

        if bundle.manifest.ranker is None:
            raise BundleCorrupt(f"{bundle.path}: it has no ranker")
        self.bundle, self.info, self.device = bundle, bundle.manifest.ranker, device
        self.features = RankFeatures(bundle, self.info.features)
        graph = read_graph(RANKER, bundle.graph(RANKER))
        try:
            self._session = opened_session(graph, device=device)
        except Exception as error:  # ONNX Runtime's own classes have no common base
            raise BundleCorrupt(f"{bundle.path / RANKER}: ONNX Runtime cannot open it ({error})") from error
        _check_graph(bundle, self._session, len(self.info.features))

    def rerank(
        self,
        queries: QueryBatch,
        result: SearchResult,
        depth: int,
        caller_features: Sequence[CallerFeatures] | None = None,
        live: LiveCandidates | None = None,
    ) -> Reranked:
        """Order the best `depth` candidates of each query by the ranker's score. Ties, and candidates past the depth, keep their order.

        Candidates whose score is not finite follow the others.

        result  of a search for these queries; only items, ranks, scores and counts are used
        live    fields and node rows of live items
        """
        batch, width = result.item_rows_BM.shape
        retrieved_BM = np.empty((batch, width), np.int64)
        retrieved_BM[:] = np.arange(width)
        score_BM = np.full((batch, width), np.nan, np.float32)
        count_B = np.minimum(result.count_B, depth)
        features_NF = self.features_of(queries, result, count_B, caller_features, live)
        if len(features_NF):
            score_N = self._session.run(None, {"features": features_NF})[0]
            score_N = np.where(np.isfinite(score_N), score_N, np.float32(np.nan))
            for score_C, retrieved_M, out_M in zip(np.split(score_N, np.cumsum(count_B)[:-1]), retrieved_BM, score_BM, strict=True):
                order = np.argsort(-score_C, kind="stable")
                retrieved_M[: len(order)], out_M[: len(order)] = order, score_C[order]
        return Reranked(retrieved_BM, score_BM)

    def features_of(
        self,
        queries: QueryBatch,
        result: SearchResult,
        count_B: Int64,
        caller_features: Sequence[CallerFeatures] | None = None,
        live: LiveCandidates | None = None,
    ) -> Float32:
        """float32[N, F]: the features of the first `count_B` candidates of each query, one query after the other."""
        blocks = [
            self.features.of(
                queries,
                b,
                result.item_rows_BM[b, :count],
                result.ranks_BM[b, :count],
                result.scores_BM[b, :count],
                NO_CALLER_FEATURES if caller_features is None else caller_features[b],
                live,
            )
            for b, count in enumerate(count_B.tolist())
        ]
        return blocks[0] if len(blocks) == 1 else np.concatenate([np.empty((0, len(self.info.features)), np.float32), *blocks])


def golden_scores(bundle: Bundle, golden: pa.Table, features: RankFeatures, ranker_onnx: bytes) -> pa.Array:
    """The column GOLDEN_SCORES of some golden queries, computed by ONNX's own evaluator."""
    queries, result = encode_table(bundle, golden), golden_result(bundle, golden)
    evaluator = ReferenceEvaluator(read_graph(RANKER, ranker_onnx))
    scores = []
    for b, count in enumerate(result.count_B.tolist()):
        candidates = result.item_rows_BM[b, :count], result.ranks_BM[b, :count], result.scores_BM[b, :count]
        outputs: Any = evaluator.run(None, {"features": features.of(queries, b, *candidates)})
        scores.append(outputs[0])
    return pa.array(scores, pa.list_(pa.float32()))


def verify_ranker(bundle: Bundle, reranker: Reranker, golden: pa.Table | None = None) -> float:
    """Re-rank the expected results of the golden queries (`golden` instead of the bundle's own). Returns the largest difference of a score.

    Raises BundleCorrupt if it exceeds TOLERANCE. The candidates are stored ones, so no engine's rounding matters.
    """
    golden = bundle.golden() if golden is None else golden
    if GOLDEN_SCORES not in golden.column_names:
        raise BundleCorrupt(f"{bundle.path / 'golden.parquet'}: no column {GOLDEN_SCORES!r}, which a bundle with a ranker must have")
    result = golden_result(bundle, golden)
    reranked = reranker.rerank(encode_table(bundle, golden), result, result.item_rows_BM.shape[1])
    worst = 0.0
    for b, row in enumerate(golden.column(GOLDEN_SCORES).to_pylist()):
        expected = np.asarray(row, np.float64)
        got = np.empty(len(expected), np.float32)
        got[reranked.retrieved_BM[b, : len(expected)]] = reranked.score_BM[b, : len(expected)]
        difference = np.abs(got - expected) / np.maximum(1, np.abs(expected))
        worst = max(worst, float(np.max(np.nan_to_num(difference, nan=np.inf), initial=0)))
        if worst > TOLERANCE:
            raise BundleCorrupt(f"{bundle.path}: the ranker scores golden query {b} otherwise than when it was trained, by {worst:.2g}")
    return worst


def golden_result(bundle: Bundle, golden: pa.Table) -> SearchResult:
    """The expected results of the golden queries, as a search would give them."""
    answers = GoldenAnswers.of(golden.column("item_rows").to_pylist(), *golden_ranks(golden))
    return answers.as_result(bundle.manifest.result_ranking, 0)


def _check_graph(bundle: Bundle, session: Any, width: int) -> None:
    """Raise BundleCorrupt unless a graph takes features[N, width] and gives scores[N]."""
    inputs = [(entry.name, entry.type, len(entry.shape), entry.shape[-1]) for entry in session.get_inputs()]
    outputs = [(entry.name, entry.type, len(entry.shape)) for entry in session.get_outputs()]
    if inputs != [("features", "tensor(float)", 2, width)] or outputs != [("scores", "tensor(float)", 1)]:
        expected = f"float features [N, {width}] and scores [N]"
        raise BundleCorrupt(f"{bundle.path / RANKER}: takes {inputs} and gives {outputs}, expected {expected}")
