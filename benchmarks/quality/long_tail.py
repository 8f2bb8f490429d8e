"""A large catalogue that few users know: what `compare` says in a few minutes, and what counting neighbours of all users takes.

    python -m benchmarks.long_tail --items 340000 --json F                  the log, the counting, and `compare --minutes 5`
    python -m benchmarks.long_tail --items 340000 --counting --json F       without `compare`

The log is made from a seed: --items items, --events for each, lists without an order. Items lie in clusters, popularity in a cluster is
Zipf's, some clusters are more popular than others, and a user takes most items from a few. One user has 14,000 events, of all clusters; the
others' lengths are log-normal, 100 on average. Items that a user drew twice count once.

The report: `log` (users, items, events, the longest list), `counting` (of item-cf and of neighbours with their first options, each in a
process of its own: users, pairs, CPU seconds, MiB at most), and `compare` (seconds, rows, methods that are not judged, the verdict).
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report_file import command_line, write_report
from espalier.arrays import Int64
from training.baselines.item_cf import GRID, fit_item_cf
from training.data.interactions import Interactions, read_interactions
from training.neighbours.cooccurrence import lists_of
from training.neighbours.fit import REGRESSED, WITHOUT_ORDER, count, neighbours_of
from training.neighbours.near_items import near_items
from training.neighbours.slim import slim
from training.specification.models import read_deep_config

EVENTS_A_USER, LONGEST = 100, 14_000
ITEMS_A_CLUSTER = 500
INTERESTS, FAITHFUL = 3, 0.8
"""Clusters that a user likes, and the share of events in them."""
COUNTED = ("item-cf", "neighbours")
CONFIG = """kind = "otm-sequence"
name = "long-tail"
[data]
log = "{log}"
format = {{ format = "lists", separator = " ", order = "none", min_user_events = 2 }}
"""


def long_tail(items: int, seed: int = 1, events_an_item: int = 3) -> list[Int64]:
    """A user's items, ascending and each once, for each user; the first has the longest list. Every item is in some list."""
    rng = np.random.default_rng(seed)
    clusters = max(2, items // ITEMS_A_CLUSTER)
    cluster_I = np.sort(rng.integers(0, clusters, items))
    first_C1 = np.searchsorted(cluster_I, np.arange(clusters + 1))
    user_E = _users(rng, items, events_an_item * items)
    interest_UK = _clusters(rng, clusters, (user_E[-1] + 1, INTERESTS))
    liked_E = interest_UK[user_E, rng.integers(0, INTERESTS, len(user_E))]
    wanted_E = np.where(rng.random(len(user_E)) < FAITHFUL, liked_E, _clusters(rng, clusters, user_E.shape))
    size_E = np.maximum(np.diff(first_C1)[wanted_E], 1)
    rank_E = ((size_E + 1.0) ** rng.random(len(user_E))).astype(np.int64)  # Zipf's law with exponent 1, from 1
    item_E = np.minimum(first_C1[wanted_E] + np.minimum(rank_E, size_E) - 1, items - 1)
    longest = int(np.count_nonzero(user_E == 0))
    item_E[:longest] = rng.permutation(items)[:longest]
    unseen = np.setdiff1d(np.arange(items), item_E)
    at = longest + rng.permutation(len(item_E) - longest)[: len(unseen)]
    pairs = np.unique(np.concatenate([user_E * items + item_E, user_E[at] * items + unseen]))
    return np.split(pairs % items, np.flatnonzero(np.diff(pairs // items)) + 1)


def _clusters(rng: np.random.Generator, clusters: int, shape: tuple[int, ...]) -> Int64:
    """Some clusters, the first ones more often: the popularity of cluster c falls with the root of c."""
    return (clusters * rng.random(shape) ** 2).astype(np.int64)


def _users(rng: np.random.Generator, items: int, events: int) -> Int64:
    """int64[E]: the user of each event, ascending."""
    longest = min(LONGEST, items // 10)
    share_U = rng.lognormal(0, 1, max(20, events // EVENTS_A_USER))
    length_U = np.maximum(2, (events - longest) * share_U / share_U.sum()).astype(np.int64)
    return np.repeat(np.arange(1 + len(length_U)), [longest, *length_U])


def write_log(lists: list[Int64], folder: Path) -> Path:
    """The log and its configuration under `folder`; returns the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (f"u{user} {' '.join(map(str, rows.tolist()))}\n" for user, rows in enumerate(lists))
    (folder / "lists.txt").write_text("".join(lines))
    (folder / "config.toml").write_text(CONFIG.format(log=folder / "lists.txt"))
    return folder / "config.toml"


def counting(config_file: Path, method: str) -> dict[str, Any]:
    """Time and memory to count all users of a log. Run it in a fresh process: the memory is that of the process."""
    config = read_deep_config(config_file)
    with tempfile.TemporaryDirectory() as work:
        interactions = read_interactions(config.data.log, config.data.format, Path(work))
        _count(interactions, np.arange(0), method)  # loads what is compiled
        users, begin = np.arange(interactions.user_count), time.process_time()
        pairs = _count(interactions, users, method)
        seconds = time.process_time() - begin
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"method": method, "users": len(users), "pairs": pairs, "cpu_seconds": round(seconds, 2), "most_mib": round(peak_mib)}


def _count(interactions: Interactions, users: Int64, method: str) -> int:
    """Count, and return the number of kept pairs."""
    if method == "item-cf":
        return len(fit_item_cf(interactions, users, GRID[-1]).item_N)
    lists = lists_of(interactions, users)
    counts, near = count(lists, WITHOUT_ORDER), partial(near_items, interactions, users, seed=1)
    return len(neighbours_of(counts, near, partial(slim, counts, REGRESSED["l2"]), lists.events_I, REGRESSED).lists.item_N)


def compared(config: Path, minutes: float, report: Path) -> dict[str, Any]:
    """Result and duration of `compare` with this time limit."""
    command = [sys.executable, "-m", "training", "compare", "--config", str(config), "--minutes", f"{minutes:g}", "--json", str(report)]
    begin = time.perf_counter()
    subprocess.run(command, check=True)
    seconds = time.perf_counter() - begin
    result = json.loads(report.read_text())
    rows = [{name: row[name] for name in ("method", "figures")} for row in result["rows"]]
    row = {"minutes": minutes, "seconds": round(seconds, 1), "rows": rows}
    return row | {name: result[name] for name in ("not_judged", "verdict")}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--items", type=int, default=340_000)
    parser.add_argument("--events", type=int, default=3, metavar="N", help="events an item, on average")
    parser.add_argument("--minutes", type=float, default=5.0, help="of `compare`")
    parser.add_argument("--counting", action="store_true", help="only count, without `compare`")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, metavar="DIR", help="folder for the log (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.work or Path(temporary)
        lists = long_tail(options.items, options.seed, options.events)
        config = write_log(lists, folder)
        log = {"users": len(lists), "items": options.items, "events": sum(map(len, lists)), "longest": max(map(len, lists))}
        report: dict[str, Any] = {"log": log, "counting": []}
        print(json.dumps(log), flush=True)
        for method in COUNTED:
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                report["counting"].append(process.submit(counting, config, method).result())
            print(json.dumps(report["counting"][-1]), flush=True)
        if not options.counting:
            report["compare"] = compared(config, options.minutes, folder / "compare.json")
            print("\n".join(report["compare"]["verdict"]))
    write_report(options.json, report)


if __name__ == "__main__":
    main()
