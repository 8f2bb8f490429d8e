"""ms/query of the CPU engine, compared to a NumPy loop with one ONNX Runtime call per level, in one run.

    python -m benchmarks.engine_cpu --json F [--height 20] [--beam 50,200,400] [--batch 1] [--rounds 7]

Whole searches: histories of 69 items in, 200 item rows out, encoder included, with the history and 20 more items excluded. One thread.
Both sides take turns in every round; the figures are medians over rounds. The script checks that both give the same items.

    python -m benchmarks.engine_cpu --scorer product --json F [--height 20] [--dim 63] [--m 10] [--beam 50,200,400] [--index FILE]

With an inner product as scorer, and noisy item vectors as queries: `compiled-cpu` at each beam, an exact search of its leaf rows, and HNSW
over them at the least efSearch that finds .95 of the exact answers (needs the extra `ann`). One query at a time, one thread; all take turns
in every round. Recall is the share of the m best leaves, by the scorer alone, that came back.

Legend: B queries, D row, I items, M results; in timing X systems, P parts, R rounds, Q queries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from benchmarks.papers.product_search.ann import HnswIndex, faiss_is_installed
from benchmarks.quality.filtered_recall import overlap
from benchmarks.report_file import SYNTHETIC, command_line, print_row, write_report
from benchmarks.synthetic import diffusion_bundle, diffusion_queries, synthetic_bundle
from espalier.arrays import Array, Float32, Float64, Int64
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.engines.encode import Encoder
from espalier.engines.encoder import QueryEncoder
from espalier.engines.graphs import load_graph
from espalier.engines.pipeline import Pipeline
from espalier.engines.runtime import ort
from espalier.engines.stages import GivenQueries
from espalier.masks.eligibility import excluded_nodes
from espalier.queries import QueryBatch
from espalier.search import NO_ITEM, SearchParams
from training.retrieval.scores import best_of_all

M = 200
QUERIES = 64
VECTORS = 256
"""Queries of the inner product."""
RECALL = 0.95
EF_SEARCH = (10, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
MOST = 4096
"""efSearch if none of those is enough."""
Row = dict[str, Any]


class LevelLoop:
    """The search a careful user would write: NumPy for the tree, ONNX Runtime for the two graphs, one call per level.

    For complete binary trees ranked by the logit (γ = 0). One query at a time.
    """

    name = "numpy-loop"

    def __init__(self, bundle: Bundle) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self.tree = bundle.tree
        self.rows_ND = np.ascontiguousarray(bundle.node_rows_ND, np.float32)
        self.query, self.scorer = (  # with PRelu rewritten as in the engine
            ort.InferenceSession(load_graph(name, bundle.graph(name)).SerializeToString(), options)
            for name in ("query.onnx", "scorer.onnx")
        )

    def search(self, queries: QueryBatch, params: SearchParams) -> Int64:
        return np.stack([self.search_one(queries.array[b : b + 1], params, b) for b in range(len(queries))])

    def search_one(self, history: Array, params: SearchParams, b: int) -> Int64:
        tree, k = self.tree, int(params.beam_size_B[b])
        start = tree.start_level(k)
        leaf = np.where(history >= 0, tree.leaf_of_item[history], -1)
        shift = np.arange(tree.height - start, -1, -1)[None, :, None]
        nodes = np.where(leaf[:, None] >= 0, ((leaf[:, None] + 1) >> shift) - 1, -1)
        states = self.query.run(None, {"history_nodes": nodes, "node_rows": self.rows_ND})[0][0]
        assert params.exclude_BE is not None
        excluded = excluded_nodes(tree, params.exclude_BE[b : b + 1])
        candidates = np.arange(tree.level(start).start, tree.level(start).stop)
        for level in range(start, tree.height + 1):
            logits = self.scorer.run(None, {"query_state": states[level - start][None], "node_rows": self.rows_ND[candidates][None]})[0][0]
            logits[np.isin(candidates, excluded.leaves_BX[0] if level == tree.height else excluded.inner_BX[0])] = -np.inf
            if level < tree.height:
                beam_positions = np.sort(np.argpartition(-logits, k)[:k]) if len(logits) > k else np.arange(len(logits))
                beam = candidates[beam_positions]
                candidates = (2 * beam[:, None] + np.array([1, 2])).ravel()
        best = np.argsort(-logits, kind="stable")[: int(params.m_B[b])]
        return np.where(np.isfinite(logits[best]), tree.leaf_item[candidates[best] - tree.leaf_offset], NO_ITEM)


def run(bundle: Bundle, beams: list[int], batches: list[int], rounds: int) -> list[Row]:
    """Rows {"engine", "items", "beam_size", "batch", "ms_per_query"}."""
    rng = np.random.default_rng(1)
    items = bundle.tree.item_count
    queries = QueryBatch(bundle.manifest.query, rng.integers(0, items, (QUERIES, 69)))
    exclude = np.concatenate([queries.array, rng.integers(0, items, (QUERIES, 20))], axis=1)
    engine, loop = open_engine(bundle, "cpu"), LevelLoop(bundle)
    rows = []
    for beam in beams:
        params = SearchParams.uniform(QUERIES, beam, min(M, 2 * beam), exclude)
        shared_share = overlap(loop.search(queries, params), engine.search(queries, params).item_rows_BM)
        if shared_share < 0.999:
            raise SystemExit(f"the two sides agree on {shared_share:.4f} of the items at beam {beam}; expected at least .999")
        for batch in batches:
            calls: dict[str, Callable[[QueryBatch, SearchParams], object]] = {engine.name: engine.search, loop.name: loop.search}
            times: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(rounds):
                for name, call in calls.items():
                    begin = time.perf_counter()
                    for begin_row in range(0, QUERIES, batch):
                        span = np.arange(begin_row, min(begin_row + batch, QUERIES))
                        call(queries.take(span), SearchParams(params.beam_size_B[span], params.m_B[span], exclude[span]))
                    times[name].append((time.perf_counter() - begin) * 1e3 / QUERIES)
            for name, values in times.items():
                row_columns = {"engine": name, "items": items, "beam_size": beam, "batch": batch}
                rows.append(row_columns | {"ms_per_query": round(float(np.median(values)), 4)})
                print_row(rows[-1])
    return rows


# -- an inner product -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class System:
    """One of the compared systems.

    knob    the beam or efSearch; None: there is none
    encode  query → the argument of `search`
    search  the encoded query → int64[1, ≤ M] item rows, best first, NO_ITEM at the end
    """

    name: str
    knob: int | None
    encode: Callable[[Array], Any]
    search: Callable[[Any], Int64]

    def find(self, query: Array) -> Int64:
        return self.search(self.encode(query))


def timed(systems: Sequence[System], queries: Sequence[Array], rounds: int) -> list[dict[str, float]]:
    """{"ms_per_query", "encode_ms", "search_ms"} of each system: the mean over queries of each one's median over rounds.

    One query at a time; all systems take turns in every round.
    """
    ms_XPRQ = np.zeros((len(systems), 2, rounds, len(queries)))
    for round_number in tqdm(range(rounds), desc="time", unit="round", disable=None):
        for system, ms_PRQ in zip(systems, ms_XPRQ, strict=True):
            system.find(queries[0])  # warms up the new knob and the processor's cache
            for query_number, query in enumerate(queries):
                begin = time.perf_counter()
                encoded = system.encode(query)
                between = time.perf_counter()
                system.search(encoded)
                ms_PRQ[:, round_number, query_number] = (between - begin) * 1e3, (time.perf_counter() - between) * 1e3
    return [_milliseconds(ms_PRQ) for ms_PRQ in ms_XPRQ]


def _milliseconds(ms_PRQ: Float64) -> dict[str, float]:
    whole, encode, search = (round(float(np.median(part_RQ, axis=0).mean()), 4) for part_RQ in (ms_PRQ.sum(0), *ms_PRQ))
    return {"ms_per_query": whole, "encode_ms": encode, "search_ms": search}


def tree_system(engine: Pipeline, beam: int, m: int) -> System:
    encoder = Encoder(engine.bundle, engine_encodes=False)

    def encode(query: Array) -> tuple[QueryBatch, SearchParams]:
        queries, params = QueryBatch(engine.bundle.manifest.query, query[None]), SearchParams.uniform(1, beam, m)
        states_BLS = encoder.of(queries, params.beam_size_B, False, None, None).states_BLS
        return GivenQueries(queries.kind, queries.rows, states_BLS), params

    return System(engine.name, beam, encode, lambda made: engine.search(*made).item_rows_BM)


def leaf_encoder(bundle: Bundle) -> Callable[[Array], Float32]:
    """Makes the states of a query on the leaf level, float32[1, S]."""
    encoder = QueryEncoder.open(bundle)
    return lambda query: encoder.states(query[None], [bundle.tree.height])[:, -1]


def leaf_rows(bundle: Bundle) -> Float32:
    """float32[I, D]: the row of each item's leaf."""
    return np.ascontiguousarray(bundle.node_rows_ND[bundle.tree.leaf_of_item], np.float32)


def scan_system(name: str, encode: Callable[[Array], Float32], item_rows_ID: Float32, m: int) -> System:
    """All inner products by one product of a matrix and a vector, then the best by compiled code."""

    def search(state_1D: Array) -> Int64:
        return best_of_all(lambda part: state_1D @ item_rows_ID.T, len(item_rows_ID), list(state_1D), m, exclude_seen=False)

    return System(name, None, encode, search)


def index_system(name: str, encode: Callable[[Array], Float32], index: HnswIndex, effort: int, m: int) -> System:
    return System(name, effort, encode, lambda state_1D: index.search(state_1D, m, effort))


def run_product(bundle: Bundle, beams: Sequence[int], m: int, rounds: int, index_file: Path | None = None) -> list[Row]:
    """Rows {"engine", "items", "knob", "m", "recall", "ms_per_query", "encode_ms", "search_ms"}; the knob is the beam or efSearch."""
    with threadpool_limits(1):
        engine, queries = open_engine(bundle, "cpu"), list(diffusion_queries(bundle, VECTORS).array)
        encode, item_rows_ID = leaf_encoder(bundle), leaf_rows(bundle)
        exact = scan_system("exact scan", encode, item_rows_ID, m)
        exact_BM = np.concatenate([exact.find(query) for query in queries])
        systems = [tree_system(engine, beam, m) for beam in beams]
        if faiss_is_installed():
            index = HnswIndex(item_rows_ID, index_file)
            index_systems = (index_system("hnsw", encode, index, effort, m) for effort in EF_SEARCH if effort < index.items)
            accurate_systems = (system for system in index_systems if recall(system, queries, exact_BM) >= RECALL)
            systems.append(next(accurate_systems, index_system("hnsw", encode, index, MOST, m)))
        systems.append(exact)
        rows: list[Row] = [
            {"engine": system.name, "knob": system.knob, "recall": round(recall(system, queries, exact_BM), 4), **cost}
            for system, cost in zip(systems, timed(systems, queries, rounds), strict=True)
        ]
    for row in rows:
        print_row(row)
    return [row | {"items": bundle.tree.item_count, "m": m} for row in rows]


def recall(system: System, queries: Sequence[Array], exact_BM: Int64) -> float:
    """The mean share of the exact answers that come back."""
    return float(np.mean([np.isin(exact_M, system.find(query)).mean() for query, exact_M in zip(queries, exact_BM, strict=True)]))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--height", type=int, default=20, help="the tree has 2^height items")
    parser.add_argument("--beam", default="50,200,400")
    parser.add_argument("--batch", default="1")
    parser.add_argument("--scorer", choices=("mlp", "product"), default="mlp")
    parser.add_argument("--dim", type=int, default=63, help="product: numbers of a query; a node row has one more")
    parser.add_argument("--m", type=int, default=10, help="product: results of a search")
    parser.add_argument("--index", type=Path, help="product: where the HNSW index is kept, which takes long to build")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", type=Path, default=SYNTHETIC, help="where the synthetic model is kept")
    args = parser.parse_args()
    beams = [int(x) for x in args.beam.split(",")]
    if args.scorer == "product":
        rows = run_product(diffusion_bundle(args.models, args.height, dim=args.dim), beams, args.m, args.rounds, args.index)
    else:
        rows = run(synthetic_bundle(args.models, args.height), beams, [int(x) for x in args.batch.split(",")], args.rounds)
    write_report(args.json, {"rows": rows}, "one thread used")


if __name__ == "__main__":
    main()
