"""How fast `sparse-cuda` searches a synthetic model of linear scorers, compared to `sparse-cpu` on one thread in the same run.

The model has branching^levels labels, 32^4 = 2^20 in earnest, and queries of 40 features (`model_of`), m = 10:

    sparse-cuda        the search on the device, from features there; the same queries again and again
    sparse-cuda-call   whole calls, from rows of features to item rows in NumPy; of single queries median and 99th percentile
    sparse-cpu         the same calls on one CPU thread

`as_sparse_cpu` is the share of sparse-cpu's items that were found. Takes some gigabytes of memory and a minute, mostly to make the model.

Legend: B queries, N nodes, P inner nodes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Literal

import numpy as np

from benchmarks.gpu.graph_models import manifest_of, one_tree
from benchmarks.gpu.lines import Row
from benchmarks.gpu.search_speed import agreement
from benchmarks.gpu.timing import milliseconds
from espalier.arrays import Array, Int32, Int64
from espalier.bundle import Bundle
from espalier.chunks import Chunks, TreeChunks
from espalier.engines.linear.chunk_search import L3_HINGE
from espalier.engines.linear.engine import SparseSearch
from espalier.engines.pipeline import Pipeline
from espalier.engines.triton.cells import FixedShapes
from espalier.engines.triton.linear_engine import SparseCudaSearch
from espalier.manifest import LinearScorer, SearchDefaults
from espalier.queries import FeaturesKind, QueryBatch
from espalier.search import Engine, Precision, SearchParams
from espalier.text.sparse_rows import SparseRows
from espalier.tree import complete_tree

BRANCHING, LEVELS = 32, 4
OWN, COMMON, COMMON_CHILDREN = 16, 64, 12
"""Features of each node, common features, and the children of a chunk that have a weight for each common feature."""
NON_ZEROS = 40
M = 10
SINGLES = 500
AGREED: dict[Precision, float] = {"float32": 0.999, "float16": 0.98, "bfloat16": 0.9}
"""Least share of sparse-cpu's items that each precision has to find."""
Device = Literal["cuda", "cpu"]


# -- the model ------------------------------------------------------------------------------------------------------------


def model_of(levels: int = LEVELS, branching: int = BRANCHING) -> tuple[Bundle, Int32]:
    """A bundle of branching^levels labels in memory, and int32[N, OWN], the features of each node.

    As many features as labels, and at least 1,024. A node has a weight for each of its own features, and some sibling one below 0.
    The first COMMON features have weights in every chunk.
    """
    rng = np.random.default_rng(0)
    tree = complete_tree(rng.permutation(branching**levels), branching)
    features, inner = max(tree.leaf_count, 1024), tree.leaf_offset
    own_NF = rng.integers(COMMON, features, (tree.node_count, OWN), np.int32)
    child = np.arange(1, tree.node_count)
    parent_E = np.repeat(tree.parent[1:], OWN)
    own_child_E = np.repeat(child - tree.first_child[tree.parent[1:]], OWN)
    other_child_E = (own_child_E + rng.integers(1, branching, len(parent_E))) % branching
    children = min(branching, COMMON_CHILDREN)
    key = np.concatenate(
        [
            _key(parent_E, own_NF[1:].ravel(), own_child_E, features, branching) * 2,
            _key(parent_E, own_NF[1:].ravel(), other_child_E, features, branching) * 2 + 1,
            _key(
                np.repeat(np.arange(inner), COMMON * children),
                np.tile(np.repeat(np.arange(COMMON), children), inner),
                rng.integers(0, branching, inner * COMMON * children),
                features,
                branching,
            )
            * 2
            + 1,
        ]
    )
    key.sort()  # several times as fast as np.unique
    key = key[np.append(True, key[1:] != key[:-1])]
    is_negative, key = key % 2 == 1, key // 2
    first = np.append(True, key[1:] != key[:-1])  # if a feature is a child's own and also a sibling's, its own weight counts
    key, is_negative = key[first], is_negative[first]
    weight = rng.uniform(0.2, 0.6, len(key)).astype(np.float32)
    row = key // branching
    begin = np.flatnonzero(np.append(True, row[1:] != row[:-1]))
    row = row[begin]
    chunks = Chunks(
        chunk_row=np.searchsorted(row, np.arange(inner + 1) * features),
        row_feature=(row % features).astype(np.int32),
        row_entry=np.append(begin, len(key)),
        entry_child=(key % branching).astype(np.uint16),
        entry_weight=np.where(is_negative, -weight / 2, weight),
        bias=rng.uniform(-0.4, 0, tree.node_count).astype(np.float32),
        width=features,
    )
    manifest = manifest_of(
        L3_HINGE,
        name=f"synthetic-{tree.leaf_count}",
        query=FeaturesKind(width=features),
        scorer=LinearScorer(features=features, rows=len(row), weights=len(key)),
        search=SearchDefaults(beam_size=10, m=M, max_beam_size=1000, max_m=1000),
    )
    trees = (TreeChunks(tree, chunks),)
    return one_tree(tree=tree, manifest=manifest, chunks=chunks, trees=trees), own_NF


def _key(parent: Array, feature: Array, child: Array, features: int, branching: int) -> Int64:
    key: Int64 = (parent.astype(np.int64) * features + feature) * branching + child
    return key


def queries_of(bundle: Bundle, own_NF: Int32, count: int, seed: int = 1) -> QueryBatch:
    """Queries of NON_ZEROS features, of length 1: for a random label, equally many of each node on its path; the others are common ones."""
    rng, tree = np.random.default_rng(seed), bundle.tree
    path_BL = tree.ancestors(rng.integers(tree.leaf_offset, tree.node_count, count))[:, 1:]
    quota = min(OWN, NON_ZEROS // (tree.height + 1))
    rows = [
        np.unique(np.append(own_NF[path][:, rng.permutation(OWN)[:quota]], rng.permutation(COMMON)[: NON_ZEROS - quota * tree.height]))
        for path in path_BL
    ]
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    indices = np.concatenate(rows).astype(np.int32)
    values = rng.uniform(0.5, 1.5, len(indices)).astype(np.float32) * np.where(indices < COMMON, np.float32(0.3), np.float32(1))
    return QueryBatch(bundle.manifest.query, SparseRows(indptr, indices, values, bundle.chunks.width).normalised())


# -- the rows -------------------------------------------------------------------------------------------------------------


def search(
    beams: Sequence[int],
    batches: Sequence[int],
    precisions: Sequence[Precision],
    device: Device = "cuda",
    levels: int = LEVELS,
    branching: int = BRANCHING,
    singles: int = SINGLES,
) -> Iterator[Row]:
    """Rows of one run, as they are measured; the first has the model's size."""
    begin = time.perf_counter()
    bundle, own_NF = model_of(levels, branching)
    rows = [queries_of(bundle, own_NF, batch, seed=batch) for batch in batches]
    single_queries = queries_of(bundle, own_NF, singles, seed=0)
    on_cpu = Pipeline(bundle, SparseSearch(bundle))
    on_cpu.warm_up()
    sizes = {"labels": bundle.tree.leaf_count, "weights": len(bundle.chunks.entry_weight), "bundle_mb": round(bundle.chunks.nbytes / 1e6)}
    yield {"case": "the model", "ok": None} | sizes | {"seconds_until_here": round(time.perf_counter() - begin, 1)}
    expected_rows: dict[tuple[int, int], Int64] = {}
    for precision in precisions:
        begin = time.perf_counter()
        with closing(SparseCudaSearch(bundle, device, precision, FixedShapes(batches=tuple(sorted(batches)), m_sizes=(64,)))) as trees:
            engine = Pipeline(bundle, trees)
            tables = {name: getattr(trees.tiles[0], name).nbytes for name in ("tiles", "first_key", "keys", "places", "weights", "bias")}
            sizes = {"device_mb": round(sum(tables.values()) / 1e6)}
            yield {"case": f"the tables, {precision}", "ok": None} | sizes | {"seconds_to_open": round(time.perf_counter() - begin, 1)}
            for queries, beam in itertools.product(rows, beams):
                params = SearchParams.uniform(len(queries), beam, M)
                if (beam, len(queries)) not in expected_rows:
                    expected_rows[beam, len(queries)] = on_cpu.search(queries, params).item_rows_BM
                    yield _row("sparse-cpu", "float32", beam, queries, _call(on_cpu, queries, params, single_queries), bundle)
                found_BM = engine.search(queries, params).item_rows_BM
                share = agreement(found_BM, expected_rows[beam, len(queries)])
                with trees.running():
                    cell = trees.cell(len(queries), beam.bit_length() - 1, M)
                    run = cell.graph.replay if cell.graph is not None else partial(cell.launch_search, None)
                    times = {"ms": milliseconds(run)}
                searched = _row("sparse-cuda", precision, beam, queries, times, bundle)
                yield searched | {"ok": share >= AGREED[precision], "as_sparse_cpu": round(share, 5)}
                yield _row("sparse-cuda-call", precision, beam, queries, _call(engine, queries, params, single_queries), bundle)


def _call(engine: Engine, queries: QueryBatch, params: SearchParams, single_queries: QueryBatch) -> dict[str, float]:
    """Milliseconds of a call of many queries, or of calls of different single queries."""
    if len(queries) > 1:
        return {"ms": milliseconds(partial(engine.search, queries, params), 3)}
    times = []
    for b in range(len(single_queries)):
        query = single_queries.take(np.array([b]))
        begin = time.perf_counter()
        engine.search(query, params)
        times.append((time.perf_counter() - begin) * 1e3)
    return {"ms": float(np.median(times)), "ms_p99": float(np.quantile(times, 0.99))}


def _row(name: str, precision: Precision, beam: int, queries: QueryBatch, times: dict[str, float], bundle: Bundle) -> Row:
    batch, labels = len(queries), bundle.tree.leaf_count
    row: Row = {"case": f"{name}, {labels} labels, beam {beam}, batch {batch}, {precision}", "ok": True}
    row |= {key: round(value, 4) for key, value in times.items()} | {"queries_per_s": round(batch / times["ms"] * 1e3)}
    return row | {"engine": name, "items": labels, "beam_size": beam, "batch": batch, "precision": precision}
