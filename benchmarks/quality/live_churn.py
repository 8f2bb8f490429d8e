"""Items that are deleted and added in many rounds, with a fold after each: how much of a trained model's quality remains?

    python -m benchmarks.live_churn --log FILE --config FILE --events 5 64 --json F

Each round deletes 2 % of the catalogue, trained items that were not deleted before, and adds the same items under new ids. Histories of
training users before they came to an item place it. The round ends with a fold, as `python -m training fold` makes it, from which the next
round goes on. So the first version is a model trained on the same items, to compare the last version with. Its network was trained with the
items that are deleted later, which flatters the rounds. An item that nobody came to after another item stays.

Rows: {"events", "round", "recall", "recall_old", "recall_came", "recall_trained", "shown", "share"}: recall@m of test users by all items,
by trained items and by live items; that of the first version; the share of live items among all results, and among all relevant items.
`events`: most histories of an item; a service takes 64. With --count, an item also comes with its number of events of training users.

--learn selects the log that each fold learns from, as `--log` of `python -m training fold`. `none`: no log. `training`: the first version's
log, without events of the new ids; live items have the events that they came with. `today`: the same events under the present ids, as if
the items had come long ago. --users validation is for choosing how folds are made.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks import real_logs
from benchmarks.quality.leaderboard import main_of, without_folders
from benchmarks.quality.live_quality import Measure, finder, put_placed, trained
from benchmarks.quality.live_sets import histories_of
from benchmarks.report_file import command_line, write_report
from espalier.arrays import Int64
from espalier.bundle import Bundle
from espalier.bundle_writer import GraphContent, write_bundle
from espalier.engines import open_engine
from espalier.errors import EspalierError
from espalier.live.fold import fold_draft, folded, write_fold
from espalier.live.operations import ItemBody, Operation
from espalier.live.state import Change, LiveState
from espalier.placement.placer import Placer
from training.data.splits import Split
from training.deep.prepare import Prepared, prepare
from training.live.catalogue import JournalItems
from training.live.learned_fold import Lesson, learn_from_log
from training.neighbours.cooccurrence import lists_of
from training.specification.deep import DeepConfig

Row = dict[str, Any]


def churned(
    bundle: Bundle,
    ids: list[str],
    renamed: dict[int, str],
    events: dict[int, list[Int64]],
    count_I: Int64 | None,
    out: Path,
    lessons: Lessons | None = None,
) -> Bundle:
    """The bundle after a round: `renamed` items are deleted and added again by their events.

    ids      of its items, by row of the log
    count_I  number of events of each item; None: not given
    lessons  the data that the fold learns from; None: nothing
    """
    engine, state, placer = open_engine(bundle, "cpu"), LiveState(bundle), Placer(bundle)
    state.apply([Change(number, ids[item], "delete") for number, item in enumerate(renamed, 1)])
    engine.set_overlay(state.overlay())
    deleted_items = set(renamed)
    bodies = []
    for item in renamed:
        histories = [[ids[other] for other in event.tolist() if other not in deleted_items] for event in events[item]]
        count = None if count_I is None else max(len(histories), int(count_I[item]))
        bodies.append(ItemBody(events=tuple(histories), count=count))
    placements = placer.place(bodies, state.table, state.overlay(), engine.parents)
    put_placed(state, list(renamed.values()), placements, len(renamed) + 1)  # an item stays away if all its events were deleted with it
    if lessons is not None:
        lessons.deleted([ids[item] for item in renamed])
    for item, body, placement in zip(renamed, bodies, placements, strict=True):
        if not isinstance(placement, EspalierError):
            ids[item] = renamed[item]
            if lessons is not None:
                lessons.put(ids[item], body)
    if lessons is None:
        return write_fold(out, bundle, state.overlay(), state.table)
    draft = fold_draft(bundle, out, state.overlay())
    content = folded(bundle, state.overlay(), state.table).content
    if not isinstance(content, GraphContent):
        raise TypeError("a fold that learns is of a tree over histories")
    return write_bundle(out, draft, learn_from_log(content, draft, lessons.of(ids)), check_padding=False)


class Lessons:
    """The operations of all rounds, and the log.

    today  whether the log has the events of added items, under their new ids
    """

    def __init__(self, split: Split, today: bool, work: Path) -> None:
        self._split, self._today, self._work = split, today, work
        self._operations: list[Operation] = []

    def deleted(self, ids: Sequence[str]) -> None:
        for item_id in ids:
            self._operations.append(Operation(len(self._operations) + 1, item_id, "delete"))

    def put(self, item_id: str, body: ItemBody) -> None:
        self._operations.append(Operation(len(self._operations) + 1, item_id, "put", body))

    def of(self, ids: Sequence[str]) -> Lesson:
        """The data that a fold learns from. ids: the present ones, by row of the log."""
        lists = replace(self._split.lists, item_ids=pa.array(ids, pa.large_string())) if self._today else self._split.lists
        journal = JournalItems.of(self._operations, 0.0)
        return Lesson(replace(self._split, lists=lists), journal, [*journal.put], self._work)


def run(config: DeepConfig, log: Path, options: argparse.Namespace, folder: Path) -> list[Row]:
    (folder / "log").mkdir(parents=True, exist_ok=True)
    whole = prepare(config, log, folder / "log")
    bundle = trained(config, whole, folder / "whole")
    return [{"events": events} | row for events in options.events for row in rounds(config, whole, bundle, events, options, folder)]


def rounds(config: DeepConfig, whole: Prepared, bundle: Bundle, limit: int, options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """A row after each round. limit: most histories of an added item."""
    beam, m, exclude_seen = config.search.beam_size, config.search.m, config.search.exclude_seen
    ids = whole.items.ids_of(np.arange(len(whole.items)))
    pairs = whole.split.test if options.users == "test" else whole.split.validation
    measure, every_I = Measure(pairs, len(ids), exclude_seen), np.ones(len(ids), np.bool_)
    relevant = np.concatenate(measure.relevant)
    rng = np.random.default_rng([config.seed, 9])
    events = histories_of(whole, limit, rng)
    count_I = lists_of(whole.split.lists, whole.split.train).events_I if options.count else None
    order = rng.permutation(np.array(sorted(events), np.int64))
    items_per_round = round(options.share * len(whole.items))
    came_live_I = np.zeros(len(ids), np.bool_)
    trained: float | None = None
    with tempfile.TemporaryDirectory(dir=folder) as round_folder:
        (Path(round_folder) / "lessons").mkdir()
        lessons = None if options.learn == "none" else Lessons(whole.split, options.learn == "today", Path(round_folder) / "lessons")
        for number in range(options.rounds + 1):
            if number:
                deleted_items = order[(number - 1) * items_per_round : number * items_per_round].tolist()
                if not deleted_items:
                    return
                renamed = {item: f"{ids[item]}~{number}" for item in deleted_items}
                bundle = churned(bundle, ids, renamed, events, count_I, Path(round_folder) / "churn" / str(number), lessons)
                came_live_I[deleted_items] = True
            begin = time.perf_counter()
            found_BM = finder(bundle, ids, beam, exclude_seen)(measure.histories, m)
            recall = measure.recall(found_BM, every_I, m)[0]
            trained = recall if trained is None else trained
            row: Row = {"round": number, "recall": recall, "recall_old": measure.recall(found_BM, ~came_live_I, m)[0]}
            row["recall_came"] = measure.recall(found_BM, came_live_I, m)[0] if came_live_I[relevant].any() else None
            row["recall_trained"] = trained
            row |= {"shown": float(came_live_I[found_BM[found_BM >= 0]].mean()), "share": float(came_live_I[relevant].mean())}
            print(limit, row, f"{time.perf_counter() - begin:.0f} s", flush=True)
            yield row


def benchmark(options: argparse.Namespace) -> None:
    real = real_logs.load(options)
    with tempfile.TemporaryDirectory() as folder:
        rows = run(real.config, real.log, options, options.models or Path(folder))
    header = {"set": real.name, "threads": options.threads, "events": options.events, "count": options.count, "churn": options.share}
    header |= {"users": options.users, "learn": options.learn, "m": real.config.search.m}
    write_report(options.json, header | {"config": without_folders(real.config), "rows": rows})


def main() -> None:
    parser = command_line(__doc__)
    real_logs.add_arguments(parser)
    parser.add_argument("--events", type=int, nargs="+", default=[5, 64], help="of each item, at most; one run for each number")
    parser.add_argument("--count", action="store_true", help="items come with the number of events that they have had")
    parser.add_argument("--learn", choices=("none", "training", "today"), default="none", help="the log that each fold learns from")
    parser.add_argument("--users", choices=("test", "validation"), default="test", help="whose queries are measured")
    parser.add_argument("--share", type=float, default=0.02, help="of the catalogue that goes and comes in a round")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--models", type=Path, help="a folder that keeps the trained model, as for live_quality")
    main_of(benchmark, parser)


if __name__ == "__main__":
    main()
