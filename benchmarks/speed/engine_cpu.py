"""ms/query of the CPU engine, beside a NumPy loop with one ONNX Runtime call per level, in one run.

    python -m benchmarks.engine_cpu --json F [--height 20] [--beam 50,200,400] [--batch 1] [--rounds 7]

Whole searches: histories of 69 items in, 200 item rows out, encoder included, with the history and 20 more items excluded. One thread.
Both sides take turns in every round; the figures are medians over rounds. The script checks that both give the same items.

    python -m benchmarks.engine_cpu --scorer product --json F [--height 20] [--dim 63] [--m 10] [--beam 50,200,400] [--index FILE]

An inner product instead, for noisy item vectors as queries: `compiled-cpu` at each beam, HNSW over its leaf rows at the least efSearch that
finds .95 of what an exact search of them does, and that exact search (`benchmarks.speed.product_search`; HNSW needs the extra `ann`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.speed import product_search
from benchmarks.synthetic import diffusion_bundle, synthetic_bundle
from espalier.bundle import Bundle
from espalier.engines.onnx.engine import OnnxEngine
from espalier.engines.onnx.graphs import load_graph
from espalier.engines.onnx.runtime import ort
from espalier.hardware import hardware
from espalier.masks.eligibility import excluded_nodes
from espalier.queries import QueryBatch
from espalier.search import SearchParams

M = 200
QUERIES = 64


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
        self.rows_ND = np.ascontiguousarray(bundle.node_rows_ND)
        self.query, self.scorer = (  # with the engine's own rewriting of PRelu, which a bare session would lack
            ort.InferenceSession(load_graph(name, bundle.graph(name)).SerializeToString(), options)
            for name in ("query.onnx", "scorer.onnx")
        )

    def search(self, queries: QueryBatch, params: SearchParams) -> NDArray[np.int64]:
        return np.stack([self.one(queries.array[b : b + 1], params, b) for b in range(len(queries))])

    def one(self, history: NDArray[Any], params: SearchParams, b: int) -> NDArray[np.int64]:
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
                kept = np.sort(np.argpartition(-logits, k)[:k]) if len(logits) > k else np.arange(len(logits))
                beam = candidates[kept]
                candidates = (2 * beam[:, None] + np.array([1, 2])).ravel()
        best = np.argsort(-logits, kind="stable")[: int(params.m_B[b])]
        return np.asarray(tree.leaf_item[candidates[best] - tree.leaf_offset])


def run(bundle: Bundle, beams: list[int], batches: list[int], rounds: int) -> list[dict[str, Any]]:
    """Rows {"engine", "items", "beam_size", "batch", "ms_per_query"}."""
    rng = np.random.default_rng(1)
    items = bundle.tree.item_count
    queries = QueryBatch(bundle.manifest.query, rng.integers(0, items, (QUERIES, 69)))
    exclude = np.concatenate([queries.array, rng.integers(0, items, (QUERIES, 20))], axis=1)
    engine, loop = OnnxEngine(bundle, "cpu"), LevelLoop(bundle)
    rows = []
    for beam in beams:
        params = SearchParams.uniform(QUERIES, beam, min(M, 2 * beam), exclude)
        same = np.mean(
            [
                len(np.intersect1d(a, b)) / len(b)
                for a, b in zip(engine.search(queries, params).item_rows_BM, loop.search(queries, params), strict=True)
            ]
        )
        if same < 0.999:
            raise SystemExit(f"the two sides agree on {same:.4f} of the items at beam {beam}; expected at least .999")
        for batch in batches:
            calls: dict[str, Callable[[QueryBatch, SearchParams], object]] = {engine.name: engine.search, loop.name: loop.search}
            times: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(rounds):
                for name, call in calls.items():
                    begin = time.perf_counter()
                    for at in range(0, QUERIES, batch):
                        part = np.arange(at, min(at + batch, QUERIES))
                        call(queries.take(part), SearchParams(params.beam_size_B[part], params.m_B[part], exclude[part]))
                    times[name].append((time.perf_counter() - begin) * 1e3 / QUERIES)
            for name, values in times.items():
                rows.append(
                    {"engine": name, "items": items, "beam_size": beam, "batch": batch, "ms_per_query": round(float(np.median(values)), 4)}
                )
                print(f"{name:12s} beam {beam:4d} batch {batch:3d}  {np.median(values):7.3f} ms/query", flush=True)
            print(f"{'':12s} ratio loop / engine {np.median(times[loop.name]) / np.median(times[engine.name]):.2f}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--height", type=int, default=20, help="the tree has 2^height items")
    parser.add_argument("--beam", default="50,200,400")
    parser.add_argument("--batch", default="1")
    parser.add_argument("--scorer", choices=("mlp", "product"), default="mlp")
    parser.add_argument("--dim", type=int, default=63, help="product: numbers of a query; a node row has one more")
    parser.add_argument("--m", type=int, default=10, help="product: results of a search")
    parser.add_argument("--index", type=Path, help="product: where the HNSW index is kept, which takes long to build")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--models", type=Path, default=Path(tempfile.gettempdir()) / "espalier-benchmarks", help="where the synthetic model is kept"
    )
    args = parser.parse_args()
    beams = [int(x) for x in args.beam.split(",")]
    if args.scorer == "product":
        rows = product_search.run(diffusion_bundle(args.models, args.height, dim=args.dim), beams, args.m, args.rounds, args.index)
    else:
        rows = run(synthetic_bundle(args.models, args.height), beams, [int(x) for x in args.batch.split(",")], args.rounds)
    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": f"{hardware()}, one thread used",
        "rows": rows,
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
