"""Measures a bundle on held-out queries with a serving engine: recall, precision, F and ms/query over beam sizes and m.

Legend: B queries, M results.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from espalier.arrays import Float32, Float64, Int64
from espalier.bundle import Bundle
from espalier.checks.heldout import RECALL_COLUMN, Unknown, read_heldout, whole_histories
from espalier.errors import InvalidConfig, InvalidData
from espalier.metrics import ndcg_at_m, precision_recall_f
from espalier.queries import HistoryKind, Kind, QueryBatch, VectorKind, pad_histories
from espalier.rerank.ranker import Reranker
from espalier.search import Engine, NodeMask, SearchParams, padded

from .data.splits import EvaluationPair, without_seen
from .graded import Grades, graded_figures, grades_of, print_graded

MIN_STANDARD_ERRORS = 3.0
"""A smaller fall of recall counts as noise. About one in a thousand comparisons without a difference exceeds it."""
MIN_QUERIES = 30
"""With fewer, the standard error itself is unreliable."""


@dataclass(frozen=True, eq=False)
class LabelledQueries:
    """B queries of any kind with their relevant item rows.

    exclude_BE  int64[B, E], −1 = none: the item rows that each search excludes
    mask        restricts all searches to these items; None: all
    grades      degrees of relevance; None: items are only relevant or not
    unknown     what was left out of a log's queries
    """

    queries: QueryBatch
    relevant: Sequence[Int64]
    exclude_BE: Int64 | None = None
    mask: NodeMask | None = None
    grades: Grades | None = None
    unknown: Unknown | None = None

    def __len__(self) -> int:
        return len(self.queries)


@dataclass(frozen=True)
class Rerank:
    """The second stage and the number of candidates that it re-ranks. It gets no caller features."""

    reranker: Reranker
    depth: int

    @property
    def caller_features(self) -> list[str]:
        """The names of the ranker's features that are missing here."""
        return [name for name in self.reranker.features.names if name.startswith(("query.", "item."))]


def second_stage(bundle: Bundle, rerank: bool, depth: int | None) -> Rerank | None:
    """The second stage of `--rerank` and `--depth`, or None. Raises InvalidConfig if the model does not have it."""
    if not rerank:
        if depth is not None:
            raise InvalidConfig("--depth", depth, "--rerank with it")
        return None
    info = bundle.manifest.ranker
    if info is None:
        raise InvalidConfig(
            "--rerank", True, f"a model with a ranker, which {bundle.manifest.name} version {bundle.manifest.version} lacks"
        )
    if depth is not None and depth > info.max_depth:
        raise InvalidConfig("--depth", depth, f"at most {info.max_depth}")
    return Rerank(Reranker(bundle), depth or info.depth)


def held_out_pairs(bundle: Bundle) -> list[EvaluationPair]:
    """The bundle's own held-out queries (at most 1,000) with their relevant items."""
    held_out = read_heldout(bundle)
    histories = [bundle.items.rows_of(ids) for ids in whole_histories(bundle, held_out)]
    return [EvaluationPair(i, row[row >= 0], rows) for i, (row, rows) in enumerate(zip(histories, held_out.relevant, strict=True))]


def in_rows(pairs: Iterable[EvaluationPair], row_of: Int64) -> list[EvaluationPair]:
    """Queries of a log in a bundle's item rows, without items that it lacks (−1). Those left without history or relevant items drop out."""
    rows = ((pair, row_of[pair.history], row_of[pair.relevant]) for pair in pairs)
    known_pairs = [replace(pair, history=history[history >= 0], relevant=relevant[relevant >= 0]) for pair, history, relevant in rows]
    return [pair for pair in known_pairs if len(pair.relevant) and (len(pair.history) or pair.vector is not None)]


def held_out_queries(bundle: Bundle) -> LabelledQueries:
    """The bundle's own held-out queries of any kind, with their grades."""
    held_out = read_heldout(bundle)
    return LabelledQueries(held_out.queries, held_out.relevant, grades=grades_of(bundle, held_out.relevance))


def with_recall(bundle: Bundle, engine: Engine, ms: Sequence[int]) -> pa.Table:
    """heldout.parquet with a column recall@m of each query at the default beam, without exclusions; NaN if nothing is relevant.

    The columns replace earlier ones. The service's recall probe compares live recall with them.
    """
    table, held_out = bundle.heldout(), read_heldout(bundle)
    table = table.select([name for name in table.column_names if not name.startswith(RECALL_COLUMN.format(""))])
    columns = {m: np.full(len(table), np.nan) for m in ms}
    if len(held_out.table_row_B):
        labelled = LabelledQueries(held_out.queries, held_out.relevant)
        found_BM, _, _, _ = _search_all(engine, labelled, bundle.manifest.search.beam_size, max(ms), batch=64)
        for m, column in columns.items():
            column[held_out.table_row_B] = precision_recall_f(found_BM, held_out.relevant, m)[1]
    for m, column in columns.items():
        table = table.append_column(RECALL_COLUMN.format(m), pa.array(column))
    return table


def labelled(kind: Kind, pairs: Sequence[EvaluationPair], exclude_seen: bool = False, mask: NodeMask | None = None) -> LabelledQueries:
    """Queries of histories or vectors. Raises InvalidData for other kinds, and for vectors with `exclude_seen`.

    exclude_seen  exclude the history's items from the search and from the relevant items; queries without relevant items drop out
    """
    if isinstance(kind, VectorKind) and not exclude_seen:
        vectors = [pair.vector for pair in pairs if pair.vector is not None]
        queries = QueryBatch(kind, np.stack(vectors) if vectors else np.zeros((0, kind.width), np.float32))
        return LabelledQueries(queries, [pair.relevant for pair in pairs], None, mask)
    if not isinstance(kind, HistoryKind):
        raise InvalidData("queries", kind.kind, "a model of history queries")
    pairs = without_seen(pairs) if exclude_seen else list(pairs)
    exclude_BE = padded([pair.history for pair in pairs]) if exclude_seen and pairs else None
    return LabelledQueries(pad_histories(kind, [pair.history for pair in pairs]), [pair.relevant for pair in pairs], exclude_BE, mask)


def measure(
    bundle: Bundle,
    engine: Engine,
    labelled: LabelledQueries,
    beams: Sequence[int],
    ms: Sequence[int],
    batch: int = 1,
    rerank: Rerank | None = None,
) -> list[dict[str, Any]]:
    """Rows {"beam_size", "m", "batch", "precision", "recall", "f", "ndcg", "ms_per_query"}, means over queries.

    With grades also "graded", see `graded_figures`.

    If a smaller beam was measured, also "recall_against": {"beam_size", "difference", "standard_error"} of the recall minus that of the
    smaller beam with the highest recall, paired by query.

    batch   queries in one engine call; ms_per_query is the engine's wall time over all calls ÷ queries
    rerank  the second stage; rows have its "rerank_ms_per_query" too
    """
    limits = bundle.manifest.search
    for name, values, limit in (("--beam", beams, limits.max_beam_size), ("--m", ms, limits.max_m)):
        for value in values:
            if not 1 <= value <= limit:
                raise InvalidConfig(name, value, f"1 to {limit}, the model's limit")
    if not len(labelled):
        raise InvalidData("held-out queries", 0, "at least one with a relevant item")
    rows: list[dict[str, Any]] = []
    recalls: dict[int, dict[int, Float64]] = {m: {} for m in ms}
    for beam in beams:
        found_BM, scores_BM, seconds, rerank_s = _search_all(engine, labelled, beam, max(ms), batch, rerank)
        times = {"ms_per_query": seconds * 1e3 / len(labelled)}
        if rerank is not None:
            times |= {"rerank_depth": rerank.depth, "rerank_ms_per_query": rerank_s * 1e3 / len(labelled)}
        for m in ms:
            quality, recalls[m][beam] = _quality(found_BM, labelled.relevant, m)
            row: dict[str, Any] = {"beam_size": beam, "m": m, "batch": batch} | quality | times
            rows.append(row)
        if labelled.grades is not None and rerank is None:  # scores of a ranker do not estimate relevance
            items = bundle.manifest.tree.items
            graded = graded_figures(labelled.relevant, labelled.grades, found_BM, scores_BM, ms, items)
            for row in rows[-len(ms) :]:
                row["graded"] = graded[row["m"]]
    for row in rows:
        against = _against_smaller(recalls[row["m"]], row["beam_size"])
        row |= {} if against is None else {"recall_against": against}
    return rows


def _quality(found_BM: Int64, relevant: Sequence[Int64], m: int) -> tuple[dict[str, float], Float64]:
    """Means over queries, and float64[B]: the recall of each query."""
    precision_B, recall_B, f_B = precision_recall_f(found_BM, relevant, m)
    columns = {"precision": precision_B, "recall": recall_B, "f": f_B, "ndcg": ndcg_at_m(found_BM, relevant, m)}
    return {name: float(column_B.mean()) for name, column_B in columns.items()}, recall_B


def _against_smaller(recall_by_beam: Mapping[int, Float64], beam: int) -> dict[str, Any] | None:
    """The difference of a beam's recall (float64[B]) from that of the smaller beam with the highest mean; None if there is none."""
    smaller_beams = [size for size in sorted(recall_by_beam) if size < beam]
    if not smaller_beams or len(recall_by_beam[beam]) < 2:
        return None
    best = max(smaller_beams, key=lambda size: float(recall_by_beam[size].mean()))
    difference_B = recall_by_beam[beam] - recall_by_beam[best]
    error = float(difference_B.std(ddof=1)) / math.sqrt(len(difference_B))
    return {"beam_size": best, "difference": float(difference_B.mean()), "standard_error": error}


def falls(rows: Sequence[dict[str, Any]], queries: int) -> list[str]:
    """A sentence for each m whose recall falls significantly as the beam grows, from the rows of `measure` over `queries` queries.

    A wider beam scores more nodes. It finds less only if the ranks of inner nodes mislead the search.
    """
    if queries < MIN_QUERIES:
        return []
    warnings = []
    for m in sorted({row["m"] for row in rows}):
        falling_rows = [row for row in rows if row["m"] == m and "recall_against" in row and _falls(row["recall_against"])]
        if falling_rows:
            worst = min(falling_rows, key=lambda row: float(row["recall_against"]["difference"]))
            against = worst["recall_against"]
            warnings.append(
                f"recall@{m} falls as the beam grows: {worst['recall']:.4f} at beam {worst['beam_size']}, "
                f"{-against['difference']:.4f} less than at beam {against['beam_size']} (standard error {against['standard_error']:.4f})"
            )
    return warnings


def _falls(against: dict[str, Any]) -> bool:
    return float(against["difference"]) < -MIN_STANDARD_ERRORS * float(against["standard_error"])


def _search_all(
    engine: Engine, labelled: LabelledQueries, beam: int, m: int, batch: int, rerank: Rerank | None = None
) -> tuple[Int64, Float32, float, float]:
    """int64[B, M] item rows, their scores, and the seconds in the engine and in the ranker, after one call to warm them up.

    With a ranker, scores are those of the search, and not in the order of the item rows.
    """
    width = m if rerank is None else max(m, rerank.depth)
    queries, exclude_BE, mask = labelled.queries, labelled.exclude_BE, labelled.mask

    def call(rows: Int64) -> tuple[Int64, Float32, float, float]:
        params = SearchParams.uniform(len(rows), beam, width, None if exclude_BE is None else exclude_BE[rows], mask=mask)
        batch_queries = queries.take(rows)
        begin = time.perf_counter()
        result = engine.search(batch_queries, params)
        searched = time.perf_counter()
        found_BM = result.item_rows_BM
        if rerank is not None:
            found_BM = rerank.reranker.rerank(batch_queries, result, rerank.depth).of(found_BM)
        return found_BM[:, :m], result.scores_BM[:, :m], searched - begin, time.perf_counter() - searched

    rows_of_calls, scores_of_calls, search_s, rerank_s = [], [], 0.0, 0.0
    call(np.arange(min(batch, len(queries))))
    for start in tqdm(range(0, len(queries), batch), desc=f"beam {beam}", unit="call", leave=False, disable=None):
        rows_BM, scores_BM, searching_s, reranking_s = call(np.arange(start, min(start + batch, len(queries))))
        rows_of_calls.append(rows_BM)
        scores_of_calls.append(scores_BM)
        search_s, rerank_s = search_s + searching_s, rerank_s + reranking_s
    return np.concatenate(rows_of_calls), np.concatenate(scores_of_calls), search_s, rerank_s


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    reranked, has_among = "rerank_depth" in rows[0], "among" in rows[0]
    print(
        f"{'among':>7} " * has_among
        + f"{'beam':>6} {'m':>5} {'precision':>10} {'recall':>8} {'F':>8} {'nDCG':>8} {'ms/query':>9}{' + re-ranking' if reranked else ''}"
    )
    for row in rows:
        figures = f"{row['precision']:10.4f} {row['recall']:8.4f} {row['f']:8.4f} {row['ndcg']:8.4f} {row['ms_per_query']:9.3f}"
        reranking = f" {row['rerank_ms_per_query']:12.3f}" if reranked else ""
        among_text = f"{row['among']:>7} " if has_among else ""
        print(f"{among_text}{row['beam_size']:6d} {row['m']:5d} {figures}{reranking}")
    print_graded(rows)
