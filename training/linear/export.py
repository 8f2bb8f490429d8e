"""From trained linear scorers to a bundle: golden and held-out queries, and how well it finds them.

Legend: B queries, M results.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from espalier.bundle import Bundle, LinearContent, make_folder, write_bundle
from espalier.checks.golden import GOLDEN_COLUMNS, verify_golden
from espalier.chunks import Chunks
from espalier.engines import open_engine
from espalier.manifest import ManifestDraft, SearchDefaults
from espalier.queries import QueryBatch
from espalier.search import SearchParams
from espalier.tree import Tree
from training.evaluate import measure, recall_columns
from training.golden import golden_answers
from training.linear.config import LinearConfig
from training.linear.prepare import Prepared

HELD_OUT_QUERIES, GOLDEN_QUERIES = 1000, 32
REPORTED_M = (10, 50, 100)


@dataclass(frozen=True, eq=False)
class Golden:
    """Queries that every engine must answer as the reference does, as features and as they are asked, with how they are searched."""

    queries: QueryBatch
    asked: pa.Array
    params: SearchParams


def export(config: LinearConfig, prepared: Prepared, tree: Tree, chunks: Chunks, path: Path) -> Bundle:
    """Write the bundle of trained scorers to models/<name>/<version>/ and return it, verified and measured on the test queries."""
    test = prepared.test
    known = np.flatnonzero(np.diff(test.labels_from))
    relevant = [test.labels_of(b) for b in known.tolist()]
    draft = _draft(config, prepared, path)
    strings = pa.list_(pa.string())
    held = [prepared.items.ids_of(rows) for rows in relevant[:HELD_OUT_QUERIES]]
    asked = prepared.asked.take(pa.array(known))
    heldout = pa.table({draft.query.kind: asked.slice(0, len(held)), "relevant": pa.array(held, strings)})
    queries = QueryBatch(prepared.kind, test.points.take(known))
    golden = _golden(config, queries, asked)
    content = LinearContent(tree, chunks, prepared.items, _no_answers(golden), heldout, prepared.vectoriser)
    return write_measured(path, draft, content, golden, queries, relevant)


def write_measured(
    path: Path,
    draft: ManifestDraft,
    content: LinearContent,
    golden: Golden,
    queries: QueryBatch,
    relevant: Sequence[NDArray[np.int64]],
) -> Bundle:
    """Write a bundle whose golden queries are answered, whose manifest says what it finds and whose held-out queries what each finds.

    content            its golden table is not looked at; its held-out one has no columns of recall
    queries, relevant  the test queries with their item rows
    """
    ms = sorted({min(m, draft.search.max_m) for m in REPORTED_M})
    make_folder(path.parent)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=path.parent) as folder:
        bare = write_bundle(Path(folder) / draft.name / str(draft.version), draft, replace(content, golden=_no_answers(golden)))
        engine = open_engine(bare, "cpu")
        answers = golden_answers(bare, golden.queries, golden.asked, golden.params)
        metrics: dict[str, Any] = {"golden_overlap": verify_golden(bare, engine, answers)}
        if len(queries):
            metrics |= {"test": {"raw": measure(bare, engine, queries, relevant, [draft.search.beam_size], ms, batch=64)}}
        heldout = content.heldout
        for name, recall_B in recall_columns(bare, engine, ms).items():
            heldout = heldout.append_column(name, pa.array(recall_B))
        engine.close()
    return write_bundle(path, draft.model_copy(update={"metrics": metrics}), replace(content, golden=answers, heldout=heldout))


def _no_answers(golden: Golden) -> pa.Table:
    kind = golden.queries.kind.kind
    return pa.table({kind: golden.asked.slice(0, 0)} | {name: pa.array([], column) for name, column in GOLDEN_COLUMNS.items()})


def _golden(config: LinearConfig, queries: QueryBatch, asked: pa.Array) -> Golden:
    """Test queries with the default beam and smaller ones."""
    chosen: NDArray[np.int64] = np.arange(min(GOLDEN_QUERIES, len(queries)))
    beam_B = np.maximum(1, config.search.beam_size // (1 + chosen % 4))
    params = SearchParams(beam_B, np.full(len(chosen), config.search.m))
    return Golden(queries.take(chosen), asked.take(pa.array(chosen)), params)


def _draft(config: LinearConfig, prepared: Prepared, path: Path) -> ManifestDraft:
    items = len(prepared.items)
    limits = config.search.model_dump(include=set(SearchDefaults.model_fields))
    return ManifestDraft(
        name=config.name,
        version=int(path.name),
        algorithm=config.algorithm,
        created=datetime.now(UTC),
        query=prepared.kind,
        ranking=config.linear.ranking,
        search=SearchDefaults(**limits),
        training=config.model_dump(mode="json"),
        data={"sha256": prepared.fingerprint, "queries": len(prepared.train), "test_queries": len(prepared.test), "items": items},
    )
