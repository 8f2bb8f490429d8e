"""From a trained model to a bundle: ONNX graphs with a parity check, golden and held-out queries. `ranking.py` chooses how it searches.

Node rows are stored in as few bytes as the recall of validation users allows. float16 has no measurable cost, so it is the default. int8
halves the size again, which matters only for large tables: then validation queries are searched with rows of both types, and int8 is used
unless it finds less.

Legend: B queries, M results, T history, C candidates.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from espalier.arrays import Float32
from espalier.bundle import Bundle
from espalier.bundle_writer import ContentParts, GraphContent, Graphs, write_bundle
from espalier.engines.runtime import ort
from espalier.errors import BundleCorrupt
from espalier.items import ItemTable
from espalier.label_counts import LabelCounts
from espalier.manifest import ManifestDraft, Ranking, SearchDefaults
from espalier.memory import Memory
from espalier.node_rows import rounded, stored_as
from espalier.queries import HistoryKind, Kind, QueryBatch, VectorKind
from espalier.search import Engine, SearchParams
from espalier.tree import Tree

from ..data.item_content import ItemContent
from ..data.splits import LEARNED_VALIDATION, EvaluationPair, Split
from ..deep.content_rows import content_graph
from ..deep.memory import FIT_S, recounted
from ..deep.prepare import Prepared
from ..deep.queries import model_input, query_kind, rows_of_pairs
from ..deep.ranking import ChosenRanking, choose_ranking
from ..deep.scorers.model import NodeScorer, export_graphs
from ..deep.scorers.sequence import SequenceQuery
from ..deep.searches import Searches
from ..deep.topology import Topology
from ..deep.validation import validation_pairs
from ..evaluate import labelled, measure
from ..golden import golden_answers
from ..neighbours.cooccurrence import lists_of
from ..publish import GOLDEN_QUERIES, HELD_OUT_QUERIES, golden_beams, publish, reported_ms, unanswered
from ..retrieval.tuning import CUTS, Figures
from ..specification.deep import DeepConfig

log = logging.getLogger(__name__)

PARITY_TOLERANCE = 1e-3
MOST_NUMBERS = 1 << 22
"""Most numbers in the vectors of the golden or the held-out queries."""
Dtype = Literal["float32", "float16", "int8"]
LARGE_BYTES = 32 << 20
"""Larger tables of float16 rows are tried in int8, too: smaller ones fit into the caches of a server."""
MOST_LOST = 0.002
"""int8 is used if recall, the geometric mean over cuts, falls by no more than this share."""
QUERIES = 1000


@dataclass(frozen=True)
class FinalModel:
    """The published model: trained like the one that the ranking was chosen with, but on more lists."""

    split: Split
    tree: Tree
    model: NodeScorer


def export(
    config: DeepConfig,
    prepared: Prepared,
    tree: Tree,
    model: NodeScorer,
    path: Path,
    memory_s: float = FIT_S,
    final: FinalModel | None = None,
) -> Bundle:
    """Write the bundle of a trained model to models/<name>/<version>/ and return it, verified and measured on test users.

    memory_s  most seconds for the neighbours of a memory
    final     the model to publish, with the ranking chosen for `model`; None: publish `model`
    """
    model, topology = model.eval(), Topology(tree, model.node_rows.device)
    chosen = choose_ranking(config, prepared, topology, model, memory_s)
    dtype = store_rows(config, prepared, topology, model, chosen)
    memory = chosen.memory
    if final is not None:
        tree, model = final.tree, final.model.eval()
        try:
            round_rows(model, dtype)
        except FloatingPointError:
            if config.scorer.dtype != "auto":
                raise
            dtype = "float32"
        if memory is not None and memory.formula is not None and chosen.neighbours is not None:
            memory = recounted(memory, memory.formula.unit, chosen.neighbours, config, final.split)
    kind = query_kind(config, prepared.interactions)
    most_queries = most_stored_queries(kind)
    validation = list(prepared.split.validation[: min(GOLDEN_QUERIES, most_queries) - 1])
    empty_query = replace(validation[0], history=np.empty(0, np.int64)) if isinstance(kind, HistoryKind) else validation[0]
    golden_pairs = [empty_query, *validation]
    test = list(prepared.split.test)
    heldout = _query_table(kind, prepared.items, test[: min(HELD_OUT_QUERIES, most_queries)])
    queries = QueryBatch(kind, rows_of_pairs(config, golden_pairs))
    training_split = prepared.split if final is None else final.split
    events_I = lists_of(training_split.lists, training_split.train).events_I
    counts = LabelCounts(events_I, int(events_I.sum()))
    content = _content(dtype, tree, model.cpu(), prepared, queries, heldout, memory, counts)
    draft = _draft(config, prepared, chosen.ranking, path, learned_all=final is not None)
    ms = reported_ms(CUTS, config.search.max_m)
    params = SearchParams(golden_beams(config.search.beam_size, len(golden_pairs)), np.full(len(golden_pairs), config.search.m, np.int64))
    golden_queries = _query_table(kind, prepared.items, golden_pairs).column(kind.kind)

    def answer_golden(written_bundle: Bundle) -> pa.Table:
        return golden_answers(written_bundle, queries, golden_queries, params)

    def measure_bundle(written_bundle: Bundle, engine: Engine) -> dict[str, Any]:
        return {"validation": chosen.trials, "test": _test_metrics(written_bundle, engine, test, ms)}

    return publish(path, lambda folder: write_bundle(folder, draft, content), answer_golden, measure_bundle, ms)


def most_stored_queries(kind: HistoryKind | VectorKind) -> int:
    """The most queries that a file of the bundle holds; fewer for wide vectors."""
    return HELD_OUT_QUERIES if isinstance(kind, HistoryKind) else max(2, min(HELD_OUT_QUERIES, MOST_NUMBERS // kind.width))


def _query_table(kind: HistoryKind | VectorKind, items: ItemTable, pairs: Sequence[EvaluationPair]) -> pa.Table:
    """A table of queries as clients write them, and their relevant ids."""
    strings = pa.list_(pa.string())
    if isinstance(kind, HistoryKind):
        queries = pa.array([items.ids_of(pair.history) for pair in pairs], strings)
    else:
        queries = pa.array([pair.vector for pair in pairs], pa.list_(pa.float32()))
    return pa.table({kind.kind: queries, "relevant": pa.array([items.ids_of(pair.relevant) for pair in pairs], strings)})


def _test_metrics(bundle: Bundle, engine: Engine, test: list[EvaluationPair], ms: Sequence[int]) -> dict[str, Any]:
    """Rows of `measure` for test users, raw and with seen items excluded; a set without a query with a relevant item is left out."""
    kind, beams = bundle.manifest.query, [bundle.manifest.search.beam_size]
    query_sets = {"raw": labelled(kind, test)}
    if isinstance(kind, HistoryKind):
        query_sets["seen_excluded"] = labelled(kind, test, exclude_seen=True)
    return {key: measure(bundle, engine, queries, beams, ms, batch=64) for key, queries in query_sets.items() if len(queries)}


def _content(
    dtype: Dtype,
    tree: Tree,
    model: NodeScorer,
    prepared: Prepared,
    queries: QueryBatch,
    heldout: pa.Table,
    memory: Memory | None,
    counts: LabelCounts,
) -> GraphContent:
    """The parts of the bare bundle; `queries` are examples for the export of the graphs."""
    example = model_input(model, Topology(tree, torch.device("cpu")), queries.take(np.arange(min(8, len(queries)))).array)
    name = query_input(model, queries.kind)
    graphs = export_graphs(model, name, example)
    check_parity(model, graphs, example, name)
    return GraphContent(
        tree=tree,
        stored_rows=stored_as(model.node_rows.detach().numpy(), dtype),
        state_levels=tree.height + 1 if isinstance(queries.kind, HistoryKind) else 1,
        graphs=graphs,
        items=prepared.items,
        golden=unanswered(heldout, queries.kind.kind),
        heldout=heldout,
        weights={name: tensor.numpy() for name, tensor in model.state_dict().items() if name not in ("node_rows", "content_table")},
        encoder="sequence" if isinstance(model.encoder, SequenceQuery) else "levels",
        content=_content_parts(model, prepared.content),
        memory=memory,
        counts=counts,
    )


def _content_parts(model: NodeScorer, content: ItemContent | None) -> ContentParts | None:
    if content is None or model.content_table is None:
        return None
    if not bool(torch.isfinite(model.content_table).all()):
        raise FloatingPointError("the content table is not finite; lower the learning rate")
    return ContentParts(content.info, content.arrays, content_graph(model.content_table, content.info.entries))


def query_input(model: NodeScorer, kind: Kind) -> str:
    """The name of query.onnx's first input."""
    if isinstance(kind, HistoryKind):
        return "history_leaves" if isinstance(model.encoder, SequenceQuery) else "history_nodes"
    return kind.kind


def check_parity(model: NodeScorer, graphs: Graphs, example: Tensor, input_name: str = "history_nodes") -> float:
    """The largest difference between torch and ONNX Runtime on a sample; BundleCorrupt when it exceeds PARITY_TOLERANCE."""
    rows_ND = model.node_rows.detach()
    nodes_BC = torch.arange(len(example) * 16).view(len(example), 16) % len(rows_ND)
    with torch.no_grad():
        state_BLS = model.state(example)
        logits_BC = model.logits(state_BLS, nodes_BC, state_BLS.shape[1] - 1)
    query, scorer = (ort.InferenceSession(graph, providers=["CPUExecutionProvider"]) for graph in (graphs.query_onnx, graphs.scorer_onnx))
    onnx_state = query.run(None, {input_name: example.numpy(), "node_rows": rows_ND.numpy()})[0]
    onnx_logits = scorer.run(None, {"query_state": onnx_state[:, -1], "node_rows": rows_ND[nodes_BC].numpy()})[0]
    scale = max(1.0, float(logits_BC.abs().max()))
    differences = [np.abs(onnx_state - state_BLS.numpy()).max(), np.abs(onnx_logits - logits_BC.numpy()).max()]
    difference = float(np.max(differences)) / scale  # not Python's max, which loses NaN
    if not difference <= PARITY_TOLERANCE:  # also true for NaN
        raise BundleCorrupt(f"the exported graphs differ from the model by {difference:.2g}, at most {PARITY_TOLERANCE} expected")
    return difference


def _draft(config: DeepConfig, prepared: Prepared, ranking: Ranking, path: Path, learned_all: bool) -> ManifestDraft:
    interactions = prepared.interactions
    limits = config.search
    return ManifestDraft(
        name=config.name,
        version=int(path.name),
        algorithm=config.kind,
        created=datetime.now(UTC),
        query=query_kind(config, interactions),
        ranking=ranking,
        search=SearchDefaults(**limits.model_dump(include=set(SearchDefaults.model_fields))),
        training=config.model_dump(mode="json"),
        data={
            "sha256": interactions.fingerprint,
            "users": interactions.user_count,
            "items": interactions.item_count,
            "events": interactions.event_count,
            "bad_rows": dict(interactions.bad_rows),
            LEARNED_VALIDATION: learned_all,
        },
        live=None if prepared.run_journal is None else prepared.run_journal.info(path),
    )


def round_rows(model: NodeScorer, dtype: Dtype, rows_ND: Float32 | None = None) -> None:
    """Round a model's node rows, or set others rounded, to a stored type. Raises FloatingPointError if the type cannot hold them."""
    rows_ND = model.node_rows.detach().cpu().numpy() if rows_ND is None else rows_ND
    model.node_rows.data = torch.from_numpy(rounded(rows_ND, dtype)).to(model.node_rows.device)


def store_rows(config: DeepConfig, prepared: Prepared, topology: Topology, model: NodeScorer, chosen: ChosenRanking) -> Dtype:
    """Round the model's node rows to the type that the bundle stores, and return it.
    Raises FloatingPointError if the configured type cannot hold them.
    """
    rows_ND = model.node_rows.detach().cpu().numpy()

    def rounded_to(dtype: Dtype) -> Dtype:
        round_rows(model, dtype, rows_ND)
        return dtype

    configured = config.scorer.dtype
    if configured != "auto":
        return rounded_to(configured)
    try:
        rounded_to("float16")
    except FloatingPointError:
        return rounded_to("float32")
    pairs = validation_pairs(config, prepared, QUERIES)
    if 2 * rows_ND.size <= LARGE_BYTES or not pairs:
        return "float16"

    def measured() -> Figures:
        searches = Searches(config, topology, model, pairs, chosen.ranking.own)
        return searches.figures_of(searches.ranked(chosen.ranking.gamma, chosen.memory, searches.ms[-1])[0])

    float16_figures = measured()
    rounded_to("int8")
    gain, error = measured().gain_over(float16_figures)
    log.info("node rows in int8: recall %+.2f %% (± %.2f) of float16's, %d validation users", 100 * gain, 100 * error, len(pairs))
    return "int8" if gain >= -MOST_LOST else rounded_to("float16")
