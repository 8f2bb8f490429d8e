"""Cold, short, empty and repeated histories: what a tree finds for the same test users when it is told less, or told twice.

    python -m benchmarks.short_histories --model models/NAME/1 --data DIR --set NAME | --log FILE [--queries N] [--exclude-seen] --json F

The log is the one that the model was trained on; the model says how it is read and which users were held out. Every test query is asked
with each of these histories, and what is relevant for it stays the same:

whole            all items that the model takes (the last `length` of its query kind)
last 10, 5, 2    the last so many of them, or all where there are fewer
last 1           a history of one: "more like this"
none             an empty history: a new user
each item twice  the whole history with every item two times in a row; the model takes the last `length` places of it too

Beside the tree: `popularity`, the items of most training users, for the empty history; and where the bundle has a memory, `neighbours` for
a history of one: the best entries of the last item's row. `neighbours, then popular` fills up what the row leaves empty.

Rows: {"system", "history", "items", "beam_size", "recall@M", "recall@M_se", "complete", "ms_per_query"} for M = 10, 50, 200. `items` is the
mean length of the histories; `complete` the share of answers with 200 items, or with all where fewer may come back: a beam below 200 may
give fewer; milliseconds are the mean over queries, one at a time on one thread of a CPU. With --exclude-seen an answer leaves out the items
of the history that it was asked with, and nothing of the user's own history is relevant.

Legend: B queries, M results.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from benchmarks import real_logs
from benchmarks.quality.ann_systems import M, System, history_kind, tree_system
from benchmarks.quality.leaderboard import beams_of, main_of
from benchmarks.quality.why_not_ann import MS, read_split, write_report
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.errors import InvalidConfig
from espalier.memory import Memory
from espalier.search import NO_ITEM
from training.baselines.popularity import Popularity, fit_popularity
from training.compare.figures import figures_of
from training.compare.outcome import queries_of
from training.data.splits import EvaluationPair
from training.neighbours.neighbour_lists import NeighbourLists
from training.retrieval.task import Metric, Rank
from training.specification.models import deep_config

Int64 = NDArray[np.int64]
Row = dict[str, Any]
Histories = dict[str, Callable[[Int64], Int64]]
METRICS = [Metric("recall", m) for m in MS]
ONE, NONE = "last 1", "none"


def histories_of(length: int) -> Histories:
    """Name → what is left of a history (item rows, oldest first) that a query is asked with. length: of the model's query kind."""

    def last(count: int) -> Callable[[Int64], Int64]:
        return lambda history: history[-min(count, length) :]

    return {
        "whole": last(length),
        **{f"last {count}": last(count) for count in (10, 5, 2, 1)},
        NONE: lambda history: history[:0],
        "each item twice": lambda history: np.repeat(history, 2)[-length:],
    }


def baseline(name: str, rank: Rank, exclude_seen: bool) -> System:
    """A method without a beam and without an encoder."""
    return System(name, None, lambda history: history, lambda history, _: rank([history], M, exclude_seen), apart=False)


def baselines(popularity: Popularity, memory: Memory | None, exclude_seen: bool) -> list[tuple[str, System]]:
    """(history that it is asked with, method)."""
    found = [(NONE, baseline("popularity", popularity.rank, exclude_seen))]
    if memory is not None:
        for name, popular_I in (("neighbours", popularity.best_I[:0]), ("neighbours, then popular", popularity.best_I)):
            lists = NeighbourLists(memory.offset, memory.item, memory.value, popular_I)
            found.append((ONE, baseline(name, lists.rank, exclude_seen)))
    return found


def row_of(system: System, name: str, histories: Sequence[Int64], pairs: Sequence[EvaluationPair], items: int, exclude_seen: bool) -> Row:
    """What a system finds for the queries, asked with these histories in place of their own. items: of the catalogue."""
    found_BM, eligible_B, seconds = np.full((len(pairs), M), NO_ITEM, np.int64), np.full(len(pairs), items), 0.0
    system.find(histories[0])  # allocates and compiles
    for b, history in enumerate(tqdm(histories, desc=f"{system.name}, {name}", unit="query", leave=False, disable=None)):
        begin = time.perf_counter()
        found_1M = system.find(history)
        seconds += time.perf_counter() - begin
        found_BM[b, : found_1M.shape[1]] = found_1M[0]
        eligible_B[b] -= len(np.unique(history)) if exclude_seen else 0
    figures = figures_of(found_BM, pairs, METRICS)
    row: Row = {"system": system.name, "history": name, "items": float(np.mean([len(history) for history in histories]))}
    row["beam_size"] = system.knob
    for metric in METRICS:
        row |= {str(metric): figures.mean(metric), f"{metric}_se": figures.standard_error(metric)}
    complete_B = np.count_nonzero(found_BM != NO_ITEM, axis=1) >= np.minimum(M, eligible_B)
    return row | {"complete": float(complete_B.mean()), "ms_per_query": round(1e3 * seconds / len(pairs), 4)}


def print_row(row: Row) -> None:
    found = "  ".join(f"{metric} {100 * row[str(metric)]:6.2f} ± {100 * row[f'{metric}_se']:.2f}" for metric in METRICS)
    cost = f"complete {row['complete']:.3f}  {row['ms_per_query']:7.3f} ms"
    print(f"{row['system']:24s} {row['beam_size'] or '':>5} {row['history']:15s} {row['items']:6.1f} items  {found}  {cost}", flush=True)


def benchmark(options: argparse.Namespace) -> None:
    if options.queries is not None and options.queries < 1:
        raise InvalidConfig("--queries", options.queries, "at least 1")
    real = real_logs.load(options)
    bundle, exclude_seen = Bundle.open(options.model), bool(options.exclude_seen)
    length = history_kind(bundle).length
    items, leaves = bundle.tree.item_count, bundle.tree.leaf_count
    beams = beams_of(options.beams) if options.beams else sorted({bundle.manifest.search.beam_size, M})
    with tempfile.TemporaryDirectory() as folder:
        split = read_split(bundle, deep_config(bundle.manifest.training), real.log, Path(folder))
        pairs = queries_of(split.test, exclude_seen, options.queries)
        popularity = fit_popularity(split.lists, split.train)
    print(f"{bundle.manifest.name} version {bundle.manifest.version}, {items} items, {len(pairs)} test queries")
    engine, made = open_engine(bundle, "cpu"), histories_of(length)
    asked = [(name, tree_system(engine, bundle, "tree", min(beam, leaves), exclude_seen)) for beam in beams for name in made]
    rows = []
    with threadpool_limits(1):
        for name, system in asked + baselines(popularity, bundle.memory, exclude_seen):
            rows.append(row_of(system, name, [made[name](pair.history) for pair in pairs], pairs, items, exclude_seen))
            print_row(rows[-1])
    engine.close()
    if options.json is not None:
        sizes = {"items": items, "length": length, "queries": len(pairs), "exclude_seen": exclude_seen}
        write_report(options.json, bundle, {"log": real.name if options.set else real.log.name} | sizes | {"rows": rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="models/NAME/VERSION")
    real_logs.add_arguments(parser)
    parser.add_argument("--queries", type=int, help="at most so many test queries, evenly spread")
    parser.add_argument("--beams", help=f"beams of the tree, comma-separated (default: the model's own, and {M})")
    parser.add_argument("--exclude-seen", action="store_true", help="leave out the items of the history")
    parser.add_argument("--json", type=Path)
    main_of(benchmark, parser)


if __name__ == "__main__":
    main()
