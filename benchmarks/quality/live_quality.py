"""Items put into a running model by a few events each: how well are they found, and how much do the others lose?

    python -m benchmarks.live_quality --log FILE --config FILE --events 5 --json F

A tenth of the items with enough training users is hidden: training has neither the items nor their events. Then they are put in, all at
once or a fifth at a time, each with the histories of some training users before they came to it. A fold, as `python -m training fold` makes
it, answers as the service does with these items live. Test queries are the test users for whom a hidden item is relevant; only hidden items
count as relevant. recall_old is over all test users, by their old items.

It is compared to the model trained on everything, to the same trained on only these events of hidden items, and to item neighbours of these
events, tuned on validation users. With `events+count`, an item also comes with its number of events of training users. If the configuration
has content, or with --content, items are also put in by their fields alone, compared to neighbours by content, and by both.

Rows: {"how", "at_once", "m", "recall_new", "recall_old", "recall_old_before", "recall_new_retrained", "recall_old_retrained",
"recall_new_retrained_same", "recall_new_neighbours", "shown", "share", "queries"}. `how` is events, events+count, content or
events+content. `shown` is the share of new items among all results, `share` among all relevant items. All models are searched with the
configured beam. --users validation is for choosing how items are placed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import real_logs
from benchmarks.quality.leaderboard import main_of, without_folders
from benchmarks.quality.live_sets import HiddenItems, hide
from benchmarks.report_file import command_line, write_report
from espalier.arrays import Bool, Int64
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.errors import EspalierError
from espalier.live.fold import write_fold
from espalier.live.operations import ItemBody
from espalier.live.rows import Placement
from espalier.live.state import Change, LiveState
from espalier.metrics import precision_recall_f
from espalier.placement.placer import Candidates, Placer
from espalier.search import NO_ITEM
from training.baselines.content import content
from training.compare.recipe import Recipe
from training.data.item_content import item_content
from training.data.splits import EvaluationPair, without_seen
from training.deep.prepare import Prepared, prepare
from training.deep.run import train_and_export
from training.neighbours.fit import neighbours
from training.retrieval.task import Metric, Task
from training.specification.deep import DeepConfig

Row = dict[str, Any]
Find = Callable[[Sequence[Int64], int], Int64]
"""Histories and a number of results → rows of the whole catalogue, old items first."""
MS = (10, 50, 200)
SHOWN_AT = 50
HOW = ("events", "events+count")
MORE = 800
"""Results of a search of which some do not count."""


def trained(config: DeepConfig, prepared: Prepared, folder: Path) -> Bundle:
    """The bundle of a folder; trained if it is missing."""
    out = folder / config.name / "1"
    if not out.exists():
        work = folder / "work"
        work.mkdir(parents=True, exist_ok=True)
        train_and_export(config, prepared, out, torch.device("cpu"), work, False)
    return Bundle.open(out)


def finder(bundle: Bundle, ids: Sequence[str], beam: int, exclude_seen: bool) -> Find:
    """A search of the bundle whose results are rows of `ids`."""
    rank = Recipe(bundle, open_engine(bundle, "cpu"), {}, [], 0.0, None, 1.0).at(beam).rank
    to_bundle = bundle.items.rows_of(list(ids))
    from_bundle = np.full(len(bundle.items), NO_ITEM, np.int64)
    from_bundle[to_bundle[to_bundle >= 0]] = np.flatnonzero(to_bundle >= 0)

    def find(histories: Sequence[Int64], m: int) -> Int64:
        rows_BM = rank([to_bundle[history] for history in histories], min(m, bundle.manifest.search.max_m), exclude_seen)
        found_BM = np.full((len(histories), m), NO_ITEM, np.int64)
        found_BM[:, : rows_BM.shape[1]] = np.where(rows_BM >= 0, from_bundle[np.maximum(rows_BM, 0)], NO_ITEM)
        return found_BM

    return find


def among(found_BM: Int64, gone_I: Bool, m: int) -> Int64:
    """The first m of each row without the items `gone_I`."""
    allowed_BM = np.full((len(found_BM), m), NO_ITEM, np.int64)
    for allowed_M, row in zip(allowed_BM, found_BM, strict=True):
        rows = row[row >= 0]
        rows = rows[~gone_I[rows]][:m]
        allowed_M[: len(rows)] = rows
    return allowed_BM


def put_in(bundle: Bundle, hidden: HiddenItems, hidden_numbers: Int64, how: str, out: Path) -> tuple[Bundle, float]:
    """The bundle with some hidden items (numbers 0 … n − 1) in it, and how many were placed per second of processor time."""
    engine, state, placer = open_engine(bundle, "cpu"), LiveState(bundle), Placer(bundle)
    bodies = []
    for k in hidden_numbers.tolist():
        events = tuple(tuple(bundle.items.ids_of(event)) for event in hidden.events[k]) if "events" in how else ()
        count = hidden.counts[k] if "count" in how else None
        bodies.append(ItemBody(fields=hidden.fields[k] if "content" in how else None, events=events, count=count))
    placer.place(bodies[:1], state.table, state.overlay(), engine.parents)  # finds the scale of rows
    begin = time.process_time()
    placements = placer.place(bodies, state.table, state.overlay(), engine.parents)
    for placement in placements:
        if isinstance(placement, EspalierError):
            raise placement
    put_placed(state, [hidden.ids[len(hidden.old.items) + k] for k in hidden_numbers.tolist()], placements)
    per_s = len(hidden_numbers) / (time.process_time() - begin)
    return write_fold(out, bundle, state.overlay(), state.table), per_s


def put_placed(state: LiveState, ids: Sequence[str], placements: Sequence[Candidates | EspalierError], first: int = 1) -> None:
    """Put the items that could be placed, with sequences from `first` on."""
    for number, (item_id, placement) in enumerate(zip(ids, placements, strict=True), first):
        if not isinstance(placement, EspalierError):
            parent, row = next((parent, row) for parent, row in placement[0] if state.has_room(0, parent))
            state.apply([Change(number, item_id, "put", None, (Placement(0, parent, state.next_slot(0, parent), row),))])


class Measure:
    """The queries of some users, and the recall of results for them."""

    def __init__(self, pairs: Sequence[EvaluationPair], old: int, exclude_seen: bool) -> None:
        self.old = old
        query_pairs = without_seen(pairs) if exclude_seen else pairs
        self.histories = [pair.history for pair in query_pairs]
        self.relevant = [np.unique(pair.relevant) for pair in query_pairs]

    def recall(self, found_BM: Int64, counted_I: Bool, m: int) -> tuple[float, int]:
        """Mean recall of the items `counted_I`, over the queries with such a relevant item, and the number of these queries."""
        relevant = [rows[counted_I[rows]] for rows in self.relevant]
        queries_with_relevant = np.flatnonzero([len(rows) > 0 for rows in relevant])
        recall_B = precision_recall_f(found_BM[queries_with_relevant], [relevant[b] for b in queries_with_relevant.tolist()], m)[1]
        return float(recall_B.mean()), len(queries_with_relevant)


def neighbours_of(config: DeepConfig, hidden: HiddenItems, how: str) -> Find:
    metric, exclude_seen = Metric("recall", config.search.m), config.search.exclude_seen
    task = Task(hidden.with_events(), hidden.items, metric, exclude_seen, config.windowed_instances, config.seed, 300.0)
    rank = content(task).rank if how == "content" else neighbours(task).rank
    return lambda histories, m: rank(histories, m, exclude_seen)


def run(config: DeepConfig, log: Path, options: argparse.Namespace, folder: Path) -> list[Row]:
    (folder / "log").mkdir(parents=True, exist_ok=True)
    whole = prepare(config, log, folder / "log")
    hidden = hide(config, whole, options.share, options.events, config.seed)
    old, count = len(hidden.old.items), len(hidden.hidden_n)
    print(f"{count} of {len(whole.items)} items are hidden", flush=True)
    with_events = Prepared(hidden.with_events(), hidden.items, None, item_content(hidden.items, config.content))
    before, retrained, retrained_same = (
        trained(config, prepared, folder / name)
        for prepared, name in ((hidden.old, "old"), (whole, "whole"), (with_events, f"told-{options.events}"))
    )
    beam, exclude_seen = config.search.beam_size, config.search.exclude_seen
    pairs = whole.split.validation if options.users == "validation" else whole.split.test
    measure = Measure(hidden.moved(pairs), old, exclude_seen)
    answers = {
        "before": finder(before, hidden.ids, beam, exclude_seen)(measure.histories, MORE),
        "retrained": finder(retrained, hidden.ids, beam, exclude_seen)(measure.histories, MORE),
        "retrained_same": finder(retrained_same, hidden.ids, beam, exclude_seen)(measure.histories, MORE),
    }
    by_events = neighbours_of(config, hidden, "events")(measure.histories, MORE)
    rows: list[Row] = []
    for how in HOW if before.manifest.content is None else (*HOW, "content", "events+content"):
        answers["neighbours"] = neighbours_of(config, hidden, how)(measure.histories, MORE) if how == "content" else by_events
        for name, groups in groups_of(count, config.seed):
            figures: list[list[Row]] = []
            for number, group in enumerate(groups):
                with tempfile.TemporaryDirectory(dir=folder) as live_folder:
                    folded, per_s = put_in(before, hidden, group, how, Path(live_folder) / "live" / "2")
                    live_BM = finder(folded, hidden.ids, beam, exclude_seen)(measure.histories, MORE)
                is_new_I = np.zeros(len(whole.items), np.bool_)
                is_new_I[old + group] = True
                is_old_I = np.arange(len(whole.items)) < old
                allowed = {key: among(rows_BM, ~is_old_I & ~is_new_I, max(MS)) for key, rows_BM in (answers | {"live": live_BM}).items()}
                figures.append(figures_of(measure, allowed, is_new_I, is_old_I))
                print(f"{how}, {name} {number}: {per_s:.0f} items/s placed; {figures[-1][MS.index(SHOWN_AT)]}", flush=True)
            rows += [{"how": how, "at_once": name} | row for row in mean_of(figures)]
    return rows


def groups_of(count: int, seed: int) -> tuple[tuple[str, list[Int64]], ...]:
    """Groups of hidden items that are put in together, by name."""
    order = np.random.default_rng([seed, 8]).permutation(count)
    return ("all", [np.arange(count)]), ("a fifth", [np.sort(group) for group in np.array_split(order, 5)])


def mean_of(figures: Sequence[Sequence[Row]]) -> list[Row]:
    """For each m, the mean over the groups of items."""
    rows = []
    for m_index, m in enumerate(MS):
        mean = {key: float(np.mean([figure[m_index][key] for figure in figures])) for key in figures[0][m_index]}
        total = {"queries": sum(figure[m_index]["queries"] for figure in figures), "shown_over_share": mean["shown"] / mean["share"]}
        rows.append({"m": m} | mean | total)
        print(rows[-1], flush=True)
    return rows


def figures_of(measure: Measure, tops: dict[str, Int64], is_new_I: Bool, is_old_I: Bool) -> list[Row]:
    """A figure for each m."""
    rows = []
    relevant = np.concatenate(measure.relevant)
    counted_items = relevant[is_new_I[relevant] | is_old_I[relevant]]
    for m in MS:
        shown = tops["live"][:, :m]
        row = {f"recall_new_{name}": measure.recall(tops[name], is_new_I, m)[0] for name in ("retrained", "retrained_same", "neighbours")}
        row |= {f"recall_old_{name}": measure.recall(tops[name], is_old_I, m)[0] for name in ("before", "retrained")}
        row["recall_new"], row["queries"] = measure.recall(tops["live"], is_new_I, m)
        row["recall_old"] = measure.recall(tops["live"], is_old_I, m)[0]
        row["shown"], row["share"] = float(is_new_I[shown[shown >= 0]].mean()), float(is_new_I[counted_items].mean())
        rows.append(row)
    return rows


def benchmark(options: argparse.Namespace) -> None:
    real = real_logs.load(options)
    raw = real.config.model_dump(mode="json")
    steps = raw["optimiser"]["steps"]
    raw["optimiser"]["steps"] = min(steps, options.steps or steps)
    raw["content"]["columns"] = "auto" if options.content else raw["content"]["columns"]
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        if options.content and real.config.data.items is None:
            raw["data"]["items"] = str(real_logs.movies(real.log.parent, Path(folder) / "movies.parquet"))
        config = type(real.config).model_validate(raw)
        rows = run(config, real.log, options, options.models or Path(folder))
    header = {"set": real.name, "threads": options.threads, "events": options.events, "hidden_share": options.share, "users": options.users}
    seconds = round(time.perf_counter() - begin)
    write_report(options.json, header | {"seconds": seconds, "config": without_folders(config), "rows": rows})


def main() -> None:
    parser = command_line(__doc__)
    real_logs.add_arguments(parser)
    parser.add_argument("--events", type=int, default=5, help="of each hidden item")
    parser.add_argument("--share", type=float, default=0.1, help="of the items that may be hidden")
    parser.add_argument("--users", choices=("test", "validation"), default="test", help="whose queries are measured")
    parser.add_argument("--content", action="store_true", help="items' fields enter their rows (MovieLens: movies.dat.gz)")
    parser.add_argument("--steps", type=int, help="at most so many training steps")
    parser.add_argument("--models", type=Path, help="a folder that keeps the trained models; those that are there are not trained again")
    main_of(benchmark, parser)


if __name__ == "__main__":
    main()
