"""The GPU engine for linear scorers: correct on this card, and how fast beside the one for CPUs.

    python -m benchmarks.sparse_gpu --check --json F [--cases 60] [--sanitize]
    python -m benchmarks.sparse_gpu --json F [--beams 10,50,200] [--batches 1,512] [--precisions float32,float16]

--check    random trees of many shapes, rankings, beams, masks and exclusions: equal to the reference with integer weights, replayed with
           real ones, the same answer in any batch; and 32,768 labels searched as sparse-cpu does. Exit status 1 where something differs.
           --sanitize runs it once more, on few cases, under compute-sanitizer
--json     a table over a synthetic model of 32^4 = 2^20 labels, 4 levels of branching 32, and queries of 40 features (`model_of`), m = 10:
             sparse-cuda        the search on the device, from features there; the same queries again and again
             sparse-cuda-call   whole calls, from rows of features to item rows in NumPy; of single queries median and 99th percentile
             sparse-cpu         the same calls on one CPU thread, in the same run
           with the share of sparse-cpu's items that were found. Some gigabytes of memory and a few minutes, most of them for the model
With both, one command checks and measures. Without a GPU it ends with status 2, but for `--check --device cpu`, in Triton's interpreter
(TRITON_INTERPRET=1).

Legend: B queries, N nodes, P inner nodes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.engine_gpu import milliseconds, replayed, sanitized
from espalier.bundle import Bundle
from espalier.chunks import Chunks
from espalier.engines.chunk_search import L3_HINGE
from espalier.engines.gpu_cells import Grid
from espalier.engines.sparse_cpu import SparseCpuEngine
from espalier.engines.sparse_gpu import SparseCudaEngine
from espalier.manifest import LinearScorer, Ranking, SearchDefaults
from espalier.queries import FeaturesKind, QueryBatch
from espalier.search import Engine, Precision, SearchParams
from espalier.sparse import SparseRows
from espalier.tree import complete_tree
from loadtest.hardware import hardware

BRANCHING, LEVELS = 32, 4
OWN, COMMON, COMMON_CHILDREN = 16, 64, 12
"""Features that speak for a node, features that all nodes know, and in a chunk the children with a weight for each of those."""
NON_ZEROS = 40
M = 10
SINGLES = 500
Row = dict[str, Any]
Device = Literal["cuda", "cpu"]


# -- the model ------------------------------------------------------------------------------------------------------------


def model_of(levels: int = LEVELS, branching: int = BRANCHING) -> tuple[Bundle, NDArray[np.int32]]:
    """A bundle of branching^levels labels that is nowhere on disk, and int32[N, OWN], the features that speak for each node.

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
    key.sort()  # several times as fast as np.unique, which would be most of the benchmark
    key = key[np.append(True, key[1:] != key[:-1])]
    against, key = key % 2 == 1, key // 2
    first = np.append(True, key[1:] != key[:-1])  # a child's weight for a feature that is its own and a sibling's too is the own one
    key, against = key[first], against[first]
    weight = rng.uniform(0.2, 0.6, len(key)).astype(np.float32)
    row = key // branching
    begin = np.flatnonzero(np.append(True, row[1:] != row[:-1]))
    row = row[begin]
    chunks = Chunks(
        chunk_row=np.searchsorted(row, np.arange(inner + 1) * features),
        row_feature=(row % features).astype(np.int32),
        row_entry=np.append(begin, len(key)),
        entry_child=(key % branching).astype(np.uint16),
        entry_weight=np.where(against, -weight / 2, weight),
        bias=rng.uniform(-0.4, 0, tree.node_count).astype(np.float32),
        width=features,
    )
    manifest = SimpleNamespace(
        name=f"synthetic-{tree.leaf_count}",
        version=1,
        query=FeaturesKind(width=features),
        ranking=L3_HINGE,
        scorer=LinearScorer(features=features, rows=len(row), weights=len(key)),
        search=SearchDefaults(beam_size=10, m=M, max_beam_size=1000, max_m=1000),
    )
    return cast(Bundle, SimpleNamespace(tree=tree, manifest=manifest, chunks=chunks)), own_NF


def _key(parent: NDArray[Any], feature: NDArray[Any], child: NDArray[Any], features: int, branching: int) -> NDArray[np.int64]:
    key: NDArray[np.int64] = (parent.astype(np.int64) * features + feature) * branching + child
    return key


def queries_of(bundle: Bundle, own_NF: NDArray[np.int32], count: int, seed: int = 1) -> QueryBatch:
    """Queries of NON_ZEROS features, of length 1: for a random label as many of each node on its path, the rest common ones."""
    rng, tree = np.random.default_rng(seed), bundle.tree
    path_BL = tree.ancestors(rng.integers(tree.leaf_offset, tree.node_count, count))[:, 1:]
    each = min(OWN, NON_ZEROS // (tree.height + 1))
    rows = [
        np.unique(np.append(own_NF[path][:, rng.permutation(OWN)[:each]], rng.permutation(COMMON)[: NON_ZEROS - each * tree.height]))
        for path in path_BL
    ]
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    indices = np.concatenate(rows).astype(np.int32)
    values = rng.uniform(0.5, 1.5, len(indices)).astype(np.float32) * np.where(indices < COMMON, np.float32(0.3), np.float32(1))
    return QueryBatch(bundle.manifest.query, SparseRows(indptr, indices, values, bundle.chunks.width).normalised())


# -- the table ------------------------------------------------------------------------------------------------------------


def table(
    beams: Sequence[int],
    batches: Sequence[int],
    precisions: Sequence[Precision],
    device: Device = "cuda",
    levels: int = LEVELS,
    branching: int = BRANCHING,
    singles: int = SINGLES,
) -> Iterator[Row]:
    """Rows of one run, as each is measured; first that of the model's size."""
    begin = time.perf_counter()
    bundle, own_NF = model_of(levels, branching)
    rows = [queries_of(bundle, own_NF, batch, seed=batch) for batch in batches]
    apart = queries_of(bundle, own_NF, singles, seed=0)
    on_cpu = SparseCpuEngine(bundle)
    on_cpu.warm_up()
    sizes = {"labels": bundle.tree.leaf_count, "weights": len(bundle.chunks.entry_weight), "bundle_mb": round(bundle.chunks.nbytes / 1e6)}
    yield sizes | {"seconds_until_here": round(time.perf_counter() - begin, 1)}
    known: dict[tuple[int, int], NDArray[np.int64]] = {}
    for beam in beams:
        for queries in rows:
            params = SearchParams.uniform(len(queries), beam, M)
            known[beam, len(queries)] = on_cpu.search(queries, params).item_rows_BM
            yield _row("sparse-cpu", None, beam, queries, _call(on_cpu, queries, params, apart))
    for precision in precisions:
        begin = time.perf_counter()
        with closing(SparseCudaEngine(bundle, device, precision, Grid(batches=tuple(sorted(batches)), wanted=(64,)))) as engine:
            tables = {name: getattr(engine.tiles, name).nbytes for name in ("tiles", "first_key", "keys", "places", "weights", "bias")}
            yield {
                "precision": precision,
                "device_mb": round(sum(tables.values()) / 1e6),
                "seconds_to_open": round(time.perf_counter() - begin, 1),
            }
            for beam in beams:
                for queries in rows:
                    params = SearchParams.uniform(len(queries), beam, M)
                    found = engine.search(queries, params).item_rows_BM
                    agreed = agreement(found, known[beam, len(queries)])
                    with engine.running():
                        cell = engine.cell(len(queries), beam.bit_length() - 1, M)
                        run = cell.graph.replay if cell.graph is not None else partial(cell.launch_search, None)
                        times = {"ms": milliseconds(run)}
                    yield _row("sparse-cuda", precision, beam, queries, times) | {"as_sparse_cpu": round(agreed, 5)}
                    yield _row("sparse-cuda-call", precision, beam, queries, _call(engine, queries, params, apart))


def _call(engine: Engine, queries: QueryBatch, params: SearchParams, apart: QueryBatch) -> dict[str, float]:
    """Milliseconds of a call of many queries, or of calls of single ones, each another."""
    if len(queries) > 1:
        return {"ms": milliseconds(partial(engine.search, queries, params), 3)}
    times = []
    for b in range(len(apart)):
        query = apart.take(np.array([b]))
        begin = time.perf_counter()
        engine.search(query, params)
        times.append((time.perf_counter() - begin) * 1e3)
    return {"ms": float(np.median(times)), "ms_p99": float(np.quantile(times, 0.99))}


def agreement(found_BM: NDArray[np.int64], expected_BM: NDArray[np.int64]) -> float:
    """The share of the expected items that were found, −1 being none."""
    same = [np.isin(expected[expected >= 0], found).sum() for found, expected in zip(found_BM, expected_BM, strict=True)]
    return float(np.sum(same) / np.sum(expected_BM >= 0))


def _row(name: str, precision: str | None, beam: int, queries: QueryBatch, times: dict[str, float]) -> Row:
    rounded = {key: round(value, 4) for key, value in times.items()}
    return {"engine": name, "precision": precision, "beam_size": beam, "batch": len(queries)} | rounded | {
        "queries_per_s": round(len(queries) / times["ms"] * 1e3)
    }  # fmt: skip


# -- correct on this card -------------------------------------------------------------------------------------------------


def check(device: Device, cases: int, large: bool, cuda_graphs: bool = True, seed: int | None = None) -> list[str]:
    """What is wrong, a line each. large: also a model of 32^3 labels; seed: of the cases, None for new ones."""
    from espalier.engines.reference import ReferenceEngine
    from tests.builders import make_linear_bundle, random_masks, random_queries, random_tree

    wrong: list[str] = []
    seed = int(time.time()) if seed is None else seed
    shapes = [(2, 3), (2, 7), (3, 4), (8, 3), (32, 2), (40, 2), (100, 1), (2, 1)] if device == "cuda" else [(2, 3), (8, 2), (40, 1)]
    grid = Grid(batches=(1, 4, 64), wanted=(64, 256), closed=16) if device == "cuda" else Grid(batches=(1, 2), wanted=(64,), closed=16)
    for case in range(cases):
        rng = np.random.default_rng((seed, case))
        branching, height = shapes[rng.integers(len(shapes))]
        tree = random_tree(rng, height, branching, bool(rng.integers(2)), float(rng.choice([0.0, 0.2, 0.9])))
        gamma, own = float(rng.choice([0.0, 0.5, 1.0])), cast(Any, rng.choice(["logit", "log_activation"]))
        # with whole numbers the fourth power and the sigmoid would not stay exact
        activation = cast(Any, rng.choice(["l1-hinge", "l2-hinge", "l3-hinge"]))
        real_activation = cast(Any, rng.choice([activation, "sigmoid", "l4-hinge"]))
        width, batch = int(rng.choice([1, 20, 300])), int(rng.choice([1, 3, 40] if device == "cuda" else [1, 2]))
        exclude_BE = rng.integers(-1, tree.item_count, (batch, 40)) if rng.integers(2) else None
        mask_B = random_masks(rng, tree, batch, float(rng.choice([0.05, 0.5]))) if rng.integers(2) else None
        most = 65 if device == "cuda" else 9
        params = SearchParams(rng.integers(1, most, batch), rng.integers(1, 2 * most, batch), exclude_BE, mask_B=mask_B)
        name = (
            f"case {seed}/{case}: {branching}^{height}, {own}, {activation}, {real_activation}, γ {gamma}, {width} features, batch {batch}"
        )
        with tempfile.TemporaryDirectory() as folder:
            for integer in (True, False):
                ranking = Ranking(activation=activation if integer else real_activation, own=own, gamma=gamma)
                used = 20 if integer and own == "log_activation" else width  # so that cubes stay whole numbers of 24 bits
                bundle = make_linear_bundle(Path(folder), rng, tree, ranking, integer, f"m{int(integer)}", used)
                queries = random_queries(rng, bundle, batch, integer)
                engine, reference = SparseCudaEngine(bundle, device, grid=grid, cuda_graphs=cuda_graphs), ReferenceEngine(bundle)
                got = engine.search(queries, replace(params, trace=not integer))
                if integer:
                    expected = reference.search(queries, params)
                    for field in ("item_rows_BM", "ranks_BM", "scores_BM", "count_B", "complete_B"):
                        if not np.array_equal(getattr(got, field), getattr(expected, field)):
                            wrong.append(f"{name}: {field} differs from the reference")
                else:
                    wrong += [f"{name}: {line}" for line in replayed(reference, queries, params, got, engine.rounding)]
                for b in range(min(batch, 3)):
                    alone = engine.search(queries.take(np.array([b])), params.take(np.array([b])))
                    if not np.array_equal(alone.ranks_BM[0], got.ranks_BM[b, : params.m_B[b]]):
                        wrong.append(f"{name}: query {b} gets another answer alone than in a batch")
                engine.close()
        print(f"{name}: {'ok' if not any(line.startswith(name) for line in wrong) else 'WRONG'}", flush=True)
    if large:
        wrong += compared(device, 3, BRANCHING, 300)
    return wrong


def compared(device: Device, levels: int, branching: int, count: int) -> Iterator[str]:
    """The synthetic model's answers beside those of sparse-cpu, in each precision."""
    bundle, own_NF = model_of(levels, branching)
    queries = queries_of(bundle, own_NF, count)
    precisions: tuple[Precision, ...] = ("float32", "float16", "bfloat16")
    on_cpu = SparseCpuEngine(bundle)
    grid = Grid(batches=(1, 8, 64, 512), wanted=(64,)) if device == "cuda" else Grid(batches=(count,), wanted=(64,))
    for beam in (10, 200) if device == "cuda" else (3,):
        params = SearchParams.uniform(count, beam, M)
        expected = on_cpu.search(queries, params)
        for precision in precisions:
            with closing(SparseCudaEngine(bundle, device, precision, grid)) as engine:
                got = engine.search(queries, params)
            same = agreement(got.item_rows_BM, expected.item_rows_BM)
            away = np.nanmax(np.abs(np.where(np.isfinite(expected.ranks_BM), got.ranks_BM, np.nan) - expected.ranks_BM))
            print(
                f"{bundle.tree.leaf_count} labels, {precision}, beam {beam}: {same:.4f} of sparse-cpu's items, ranks within {away:.2g}",
                flush=True,
            )
            if same < {"float32": 0.999, "float16": 0.98, "bfloat16": 0.9}[precision]:
                yield f"{precision} at beam {beam} finds {same:.4f} of the items of sparse-cpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--sanitize", action="store_true", help="with --check: once more under compute-sanitizer")
    parser.add_argument("--eager", action="store_true", help="with --check: without CUDA graphs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--beams", default="10,50,200")
    parser.add_argument("--batches", default="1,512")
    parser.add_argument("--precisions", default="float32,float16")
    args = parser.parse_args()
    if not args.check and not args.json:
        parser.error("expected --check, --json F or both")
    if not torch.cuda.is_available() and not (args.check and not args.json and args.device == "cpu"):
        print("this benchmark needs an NVIDIA GPU, and torch finds none", file=sys.stderr)
        raise SystemExit(2)
    if args.check:
        wrong = check(args.device, args.cases, large=args.device == "cuda" and not args.eager, cuda_graphs=not args.eager)
        print("\n".join(wrong) or "all is well", flush=True)
        status = 1 if wrong else sanitized("benchmarks.sparse_gpu") if args.sanitize else 0
        if status or not args.json:
            raise SystemExit(status)
    report: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": f"{torch.cuda.get_device_name()}, {hardware()}",
        "torch": torch.__version__,
        "rows": [],
    }
    print(report["hardware"], flush=True)
    beams, batches = ([int(entry) for entry in text.split(",")] for text in (args.beams, args.batches))
    for row in table(beams, batches, args.precisions.split(",")):
        report["rows"].append(row)
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
