"""From trained linear scorers to a bundle: golden and held-out queries, and how well it finds them.

Legend: B queries, M results.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from espalier.bundle import Bundle
from espalier.bundle_writer import LinearContent, write_bundle
from espalier.checks.heldout import RELEVANCE
from espalier.chunks import Chunks, TreeChunks
from espalier.manifest import ManifestDraft, Ranking, SearchDefaults, TailInfo
from espalier.packed_chunks import rounded
from espalier.placement.evidence import OWN_LENGTH, OWN_WEIGHTS
from espalier.queries import QueryBatch
from espalier.search import Engine, SearchParams
from espalier.stacking import Stacking
from espalier.tail import Tail

from ..data.csr import as_rows
from ..data.relevance import distribution, is_graded, scale_of
from ..evaluate import LabelledQueries, measure
from ..golden import golden_answers
from ..graded import Grades
from ..linear.choosing import Choice
from ..linear.label_features import mean_points
from ..linear.prepare import Prepared
from ..publish import GOLDEN_QUERIES, HELD_OUT_QUERIES, golden_beams, publish, reported_ms, unanswered
from ..specification.linear import LinearConfig, LinearOptions

log = logging.getLogger(__name__)

REPORTED_M = (10, 50, 100)


def export(
    config: LinearConfig, choice: Choice, prepared: Prepared, trees: Sequence[TreeChunks], path: Path, stacking: Stacking | None = None
) -> Bundle:
    """Write the bundle of trained scorers to models/<name>/<version>/ and return it, verified and measured on the test queries.

    choice  the options that the scorers were trained with, and the trials behind them
    """
    test = prepared.test
    with_labels = np.flatnonzero(np.diff(test.labels.indptr))
    relevant = [test.labels_of(b) for b in with_labels.tolist()]
    draft = _draft(config, choice.options.ranking, prepared, path)
    relevant_ids = [prepared.items.ids_of(rows) for rows in relevant[:HELD_OUT_QUERIES]]
    written = prepared.written_queries.take(pa.array(with_labels))
    relevance = [test.weights_of(b) for b in with_labels.tolist()] if RELEVANCE in draft.data else None
    columns = {draft.query.kind: written.slice(0, len(relevant_ids)), "relevant": pa.array(relevant_ids, pa.list_(pa.string()))}
    if relevance is not None:
        columns[RELEVANCE] = pa.array(relevance[: len(relevant_ids)], pa.list_(pa.float32()))
    heldout = pa.table(columns)
    queries = QueryBatch(prepared.kind, as_rows(test.points[with_labels]))
    golden = unanswered(heldout, draft.query.kind)
    counts = prepared.relevance.counts
    tail_and_stacking = _tail(config, prepared), stacking
    content = LinearContent(*trees[0], prepared.items, golden, heldout, prepared.vectoriser, counts, trees[1:], *tail_and_stacking)
    grades = Grades(relevance, scale_of(prepared.train.labels), prepared.relevance.inverse_propensity_I)
    labelled_queries = LabelledQueries(queries, relevant, grades=grades)
    metrics: dict[str, Any] = {} if choice.report is None else {"validation": choice.report}
    ms, count = reported_ms(REPORTED_M, draft.search.max_m), min(GOLDEN_QUERIES, len(queries))

    def measure_bundle(written_bundle: Bundle, engine: Engine) -> dict[str, Any]:
        if not len(labelled_queries):
            return metrics
        return metrics | {"test": {"raw": measure(written_bundle, engine, labelled_queries, [draft.search.beam_size], ms, batch=64)}}

    def answer_golden(written_bundle: Bundle) -> pa.Table:
        params = SearchParams(golden_beams(config.search.beam_size, count), np.full(count, config.search.m))
        return golden_answers(written_bundle, queries.take(np.arange(count)), written.slice(0, count), params)

    return publish(path, lambda folder: write_bundle(folder, draft, content), answer_golden, measure_bundle, ms)


def _tail(config: LinearConfig, prepared: Prepared) -> Tail | None:
    """The direction of each item's training points, if the configuration adds it to scores."""
    form = config.tail.form
    if form == "none":
        return None
    rows = as_rows(mean_points(prepared.train))
    info = TailInfo(form=form, alpha=config.tail.alpha, gamma=config.tail.gamma, entries=len(rows.indices))
    return Tail(info, rows.indptr, rows.indices, rows.values, rows.width)


def with_stored_weights(chunks: Chunks, options: LinearOptions) -> Chunks:
    """The scorers with weights of the type that the bundle stores."""
    float16_chunks = rounded(chunks) if options.weights == "float16" else chunks
    if float16_chunks is None:
        log.warning("linear.weights: float16 cannot hold weights up to %g without loss, float32 is written", chunks.largest[0])
    return float16_chunks or chunks


def _draft(config: LinearConfig, ranking: Ranking, prepared: Prepared, path: Path) -> ManifestDraft:
    sizes = {"queries": len(prepared.train), "test_queries": len(prepared.test), "items": len(prepared.items)}
    data: dict[str, Any] = {"sha256": prepared.fingerprint} | sizes | {"tested": prepared.test_source}
    data["bad_rows"] = dict(prepared.bad_rows)
    if is_graded(prepared.train.labels):
        scale = {"scale": scale_of(prepared.train.labels)}
        data[RELEVANCE] = scale | distribution(prepared.train.labels)
    if prepared.smoothing is not None:
        data["prior"] = prepared.smoothing.prior
    if prepared.own_texts is not None:
        data[OWN_WEIGHTS] = list(prepared.own_texts.weights)
        data[OWN_LENGTH] = prepared.own_texts.length
        data["own_queries"] = prepared.own_texts.queries if math.isfinite(prepared.own_texts.queries) else None
    limits = config.search.model_dump(include=set(SearchDefaults.model_fields))
    return ManifestDraft(
        name=config.name,
        version=int(path.name),
        algorithm=config.kind,
        created=datetime.now(UTC),
        query=prepared.kind,
        ranking=ranking,
        search=SearchDefaults(**limits),
        training=config.model_dump(mode="json"),
        data=data,
        live=None if prepared.run_journal is None else prepared.run_journal.info(path),
    )
