"""Recall of a bundle's held-out queries by the bundle, and by all its shards with the same beam.

    python -m benchmarks.shard_recall --model models/debian-depends/1 [--shards 1,2,4] [--beam 50,200] [--m 10,50] --json F

Cuts the bundle into shards in a temporary folder, encodes each query once with the whole bundle, searches every shard with the whole beam
in this process, and merges as a router does; stacking comes after that. No HTTP. The exit code is 1 if shards find more than .1 points
less than the bundle, or if a single shard finds other items.

Legend: B queries, M results.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report_file import command_line, print_row, write_report
from espalier.bundle import Bundle
from espalier.checks.heldout import read_heldout
from espalier.engines import open_engine
from espalier.engines.pipeline import Pipeline
from espalier.engines.stages import GivenQueries, Leaves, TreeQuery
from espalier.metrics import precision_recall_f
from espalier.search import Engine, SearchParams
from espalier.shards.local import LocalShard
from loadtest.sweep import numbers
from service.router.merge import merge_results
from training.evaluate import LabelledQueries, held_out_queries, measure
from training.shard.command import shard

MAX_RECALL_LOSS = 0.001
"""Tolerated loss of recall by sharding."""
BATCH = 16


class MergedShards:
    """A `TreeSearch` that searches a bundle's shards one after the other, and merges their results as a router does."""

    name = "shards"
    rounding = 1e-3
    encodes, merges = False, True

    def __init__(self, bundle: Bundle, shards: Sequence[Bundle]) -> None:
        self._trees = [tree_bundle.tree for tree_bundle in bundle.alone]
        self._shards = [
            (open_engine(cut, "cpu"), LocalShard(cut.shard, [tree.tree for tree in cut.alone])) for cut in shards if cut.shard is not None
        ]

    def search(self, query: TreeQuery) -> Leaves:
        queries = GivenQueries(query.queries.kind, query.queries.rows, query.states_BLS)
        params = SearchParams(query.beam_size_B, query.m_B)
        return merge_results([local.whole(engine.search(queries, params)) for engine, local in self._shards], query, self._trees)

    def warm_up(self) -> None:
        for engine, _ in self._shards:
            engine.warm_up()

    def close(self) -> None:
        for engine, _ in self._shards:
            engine.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="models/NAME/VERSION, a whole bundle with held-out queries")
    parser.add_argument("--shards", default="1,2,4", help="numbers of shards (default %(default)s)")
    parser.add_argument("--beam", default="50,200", help="beam sizes (default %(default)s)")
    parser.add_argument("--m", default="10,50", help="numbers of results (default %(default)s)")
    options = parser.parse_args(arguments)
    bundle = Bundle.open(options.model)
    rows = [row for count in numbers(options.shards) for row in compared(bundle, count, numbers(options.beam), numbers(options.m))]
    for row in rows:
        print_row(row)
    failed = [row for row in rows if row["difference"] < -MAX_RECALL_LOSS or (row["shards"] == 1 and row["same"] < 1)]
    sizes = {"items": bundle.tree.item_count, "queries": len(read_heldout(bundle).table_row_B), "trees": len(bundle.alone)}
    write_report(options.json, {"model": bundle.manifest.name} | sizes | {"passed": not failed, "rows": rows})
    return int(bool(failed))


def compared(bundle: Bundle, count: int, beams: Sequence[int], ms: Sequence[int]) -> list[dict[str, Any]]:
    """Rows {"shards", "beam_size", "m", "recall_one", "recall_sharded", "difference", "ms_one", "ms_sharded", "same", "standard_error"}.

    ms_sharded  of a query, all shards together, one after the other
    same        share of the queries with the same items in the same order
    standard_error  of the difference, over queries
    """
    labelled = held_out_queries(bundle)
    with tempfile.TemporaryDirectory() as folder:
        shards = shard(bundle.path, count, Path(folder) / "shards")
        whole_engine, merged_engine = open_engine(bundle, "cpu"), Pipeline(bundle, MergedShards(bundle, shards))
        rows_by_engine = [measure(bundle, engine, labelled, beams, ms, BATCH) for engine in (whole_engine, merged_engine)]
        rows = []
        for whole, merged in zip(*rows_by_engine, strict=True):
            row = {"shards": count} | {name: whole[name] for name in ("beam_size", "m")}
            row |= {"recall_one": whole["recall"], "recall_sharded": merged["recall"], "difference": merged["recall"] - whole["recall"]}
            row |= {"ms_one": whole["ms_per_query"], "ms_sharded": merged["ms_per_query"]}
            rows.append(row | in_pairs(whole_engine, merged_engine, labelled, whole["beam_size"], whole["m"]))
        whole_engine.close()
        merged_engine.close()
    return rows


def in_pairs(whole_engine: Engine, merged_engine: Engine, labelled: LabelledQueries, beam_size: int, m: int) -> dict[str, float]:
    """The two engines query by query: "same", and "standard_error" of the mean difference in recall."""
    equal, differences = [], []
    for begin in range(0, len(labelled), BATCH):
        members = np.arange(begin, min(begin + BATCH, len(labelled)))
        params = SearchParams.uniform(len(members), beam_size, m)
        first, second = (engine.search(labelled.queries.take(members), params).item_rows_BM for engine in (whole_engine, merged_engine))
        equal += (first == second).all(axis=1).tolist()
        relevant = [labelled.relevant[b] for b in members.tolist()]
        recalls = [precision_recall_f(found_BM, relevant, m)[1] for found_BM in (first, second)]
        differences += (recalls[1] - recalls[0]).tolist()
    return {"same": float(np.mean(equal)), "standard_error": float(np.std(differences, ddof=1) / np.sqrt(len(differences)))}


if __name__ == "__main__":
    raise SystemExit(main())
