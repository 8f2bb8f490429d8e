"""ms/query of the CPU engines with live items, compared to the same engine without, in one run.

    python -m benchmarks.live_speed --json F [--engines compiled-cpu,onnx-cpu,sparse-cpu] [--live 10000,65536] [--beam 200] [--m 50]

The same queries, one a call on one thread: an engine without an overlay, with an empty overlay, and with live items under random parents
that have room. These take turns query by query, in random order; figures are medians over all queries of all rounds. The models are
synthetic: 8^6 items and 32,768 parents for `compiled-cpu` (inner product) and `sparse-cpu`, 2^16 items under as many parents for `onnx-cpu`
(the papers' scorer).

Then the sample, a trained model with a memory, by its held-out queries, one and eight a call: with live items that such queries placed, and
once all of them are deleted again.

A row is {"engine", "model", "items", "parents", "beam_size", "m", "batch", "what", "ms_per_query", "added_ms", "ratio"}.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.random_bundles import make_bundle, make_linear_bundle, random_queries
from benchmarks.random_live import random_row
from benchmarks.report_file import SYNTHETIC, command_line, print_row, write_report
from benchmarks.service.live_prober import items_of
from benchmarks.synthetic import synthetic_bundle
from espalier.bundle import Bundle
from espalier.checks.heldout import read_heldout
from espalier.engines import open_engine
from espalier.engines.pipeline import Pipeline
from espalier.errors import EspalierError
from espalier.live.operations import ItemBody
from espalier.live.overlay import Overlay
from espalier.live.rows import Placement
from espalier.live.state import Change, LiveState
from espalier.manifest import Ranking
from espalier.placement.placer import Placer
from espalier.queries import QueryBatch
from espalier.search import SearchParams
from espalier.tree import complete_tree
from loadtest.queries import held_out

QUERIES = 100
BRANCHING = 8
ENGINES = ("compiled-cpu", "onnx-cpu", "sparse-cpu")
SAMPLED, BATCHES = 400, (1, 8)
PLACED_AT_ONCE = 256
StateOf = Callable[[Bundle, int], LiveState]


def bundle_for(engine: str, folder: Path, height: int) -> Bundle:
    """A synthetic model of 8^height items, or 2^(3 · height − 2) for `onnx-cpu`, that the engine searches; made once."""
    if engine == "onnx-cpu":
        return synthetic_bundle(folder, 3 * height - 2, gamma=0.5)
    name = f"{'linear' if engine == 'sparse-cpu' else 'product'}-{BRANCHING}-{height}"
    path = folder / name / "1"
    if path.exists():
        return Bundle.open(path, verify=False)
    rng = np.random.default_rng(0)
    tree = complete_tree(rng.permutation(BRANCHING**height), BRANCHING)
    if engine == "sparse-cpu":
        ranking = Ranking(own="log_activation", gamma=1.0, activation="l3-hinge")
        return make_linear_bundle(folder, rng, tree, ranking, integer=False, name=name, width=64, max_beam_size=512, max_m=512)
    return make_bundle(folder, rng, tree, "product", 0.5, integer=False, name=name, width=64, length=20, max_beam_size=512, max_m=512)


def with_live_items(bundle: Bundle, count: int) -> LiveState:
    """A state with `count` new items under random parents that have room."""
    rng, state, tree = np.random.default_rng(1), LiveState(bundle), bundle.tree
    parents = tree.level(tree.height - 1)
    for number in range(count):
        parent = int(rng.integers(parents.start, parents.stop))
        while not state.has_room(0, parent):
            parent = int(rng.integers(parents.start, parents.stop))
        placement = Placement(0, parent, state.next_slot(0, parent), random_row(rng, bundle, integer=False))
        state.apply([Change(number + 1, f"new-{number}", "put", placements=(placement,))])
    return state


def with_placed_items(bundle: Bundle, count: int) -> LiveState:
    """A state with `count` new items, placed by parts of held-out queries."""
    state, search = LiveState(bundle), open_engine(bundle, "cpu").parents
    bodies = [ItemBody(events=(tuple(item.event),)) for item in items_of(held_out(bundle), "new-", count, 0)]
    placer = Placer(bundle)
    for begin in range(0, count, PLACED_AT_ONCE):
        for number, placement_or_error in enumerate(
            placer.place(bodies[begin : begin + PLACED_AT_ONCE], state.table, state.overlay(), search), begin + 1
        ):
            if isinstance(placement_or_error, EspalierError):
                raise placement_or_error
            first, row = next(iter(placement_or_error[0]))
            parent = next(parent for parent in state.near(0, first) if state.has_room(0, parent))
            placement = Placement(0, parent, state.next_slot(0, parent), row)
            state.apply([Change(number, f"new-{number}", "put", placements=(placement,))])
    return state


def overlays(bundle: Bundle, live: list[int], live_state: StateOf = with_live_items) -> dict[str, Overlay | None]:
    """The compared overlays, by name."""
    return {"no overlay": None} | {f"{count} live": live_state(bundle, count).overlay() for count in (0, *live)}


def overlay_after_deletes(bundle: Bundle, count: int) -> Overlay:
    state = with_placed_items(bundle, count)
    state.apply([Change(count + number, f"new-{number}", "delete") for number in range(1, count + 1)])
    return state.overlay()


def measured(
    engine: Pipeline, live: dict[str, Overlay | None], queries: QueryBatch, beam: int, m: int, rounds: int, batch: int = 1
) -> dict[str, float]:
    """Milliseconds of the median query, by overlay, in calls of `batch` queries.

    One engine gets all overlays in turn, since two engines of the same bundle may differ by a tenth.
    """
    params = SearchParams.uniform(batch, beam, m)
    batches = [queries.take(np.arange(begin, begin + batch)) for begin in range(0, len(queries) - batch + 1, batch)]
    times_s: dict[str, list[float]] = {name: [] for name in live}
    rng, names = np.random.default_rng(3), list(live)
    for round_number in range(-1, rounds):  # the first one warms up
        for b in range(len(batches)):
            for name in rng.permutation(names).tolist():  # the search before leaves the caches to its advantage
                engine.set_overlay(live[name])
                begin_s = time.perf_counter()
                engine.search(batches[b], params)
                times_s[name] += [time.perf_counter() - begin_s] * (round_number >= 0)
    return {name: 1e3 * float(np.median(query_times_s)) / batch for name, query_times_s in times_s.items()}


def rows_of(engine: str, bundle: Bundle, ms: dict[str, float], beam: int, m: int, batch: int) -> list[dict[str, Any]]:
    """A row for each overlay, compared to the engine without one."""
    rows, tree = [], bundle.tree
    for name, cost in ms.items():
        shape = {"engine": engine, "model": bundle.manifest.name, "items": tree.item_count}
        shape |= {"parents": tree.level_size(tree.height - 1), "beam_size": beam, "m": m, "batch": batch}
        added, ratio = cost - ms["no overlay"], cost / ms["no overlay"]
        rows.append(shape | {"what": name, "ms_per_query": round(cost, 4), "added_ms": round(added, 4), "ratio": round(ratio, 4)})
        print_row(rows[-1])
    return rows


def run(folder: Path, names: list[str], live: list[int], height: int, beam: int, m: int, rounds: int) -> list[dict[str, Any]]:
    """The rows of synthetic models."""
    rows = []
    for engine in names:
        bundle = bundle_for(engine, folder, height)
        queries = random_queries(np.random.default_rng(2), bundle, QUERIES, integer=False)
        ms = measured(open_engine(bundle, "cpu", engine), overlays(bundle, live), queries, beam, m, rounds)
        rows += rows_of(engine, bundle, ms, beam, m, 1)
    return rows


def run_sample(model: Path, live: list[int], rounds: int) -> list[dict[str, Any]]:
    """The rows of a trained model of one tree."""
    bundle = Bundle.open(model, verify=False)
    search, queries = bundle.manifest.search, read_heldout(bundle, SAMPLED).queries
    overlay_by_name, engine = (
        overlays(bundle, live, with_placed_items) | {f"{live[0]} gone": overlay_after_deletes(bundle, live[0])},
        open_engine(bundle, "cpu"),
    )
    rows = []
    for batch in BATCHES:
        ms = measured(engine, overlay_by_name, queries, search.beam_size, search.m, rounds, batch)
        rows += rows_of(engine.name, bundle, ms, search.beam_size, search.m, batch)
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--live", default="10000,65536", help="live items")
    parser.add_argument("--model", type=Path, default=Path("models/debian-depends/1"), help="the sample (default %(default)s)")
    parser.add_argument("--placed", default="600,10000", help="live items of the sample; empty: leave it out")
    parser.add_argument("--height", type=int, default=6, help="the trees have 8^height items, that of onnx-cpu 2^(3 · height − 2)")
    parser.add_argument("--beam", type=int, default=200)
    parser.add_argument("--m", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--models", type=Path, default=SYNTHETIC, help="where the synthetic models are kept")
    args = parser.parse_args()
    live = [int(count) for count in args.live.split(",")]
    rows = run(args.models, args.engines.split(",") if args.engines else [], live, args.height, args.beam, args.m, args.rounds)
    if args.placed:
        rows += run_sample(args.model, [int(count) for count in args.placed.split(",")], args.rounds)
    write_report(args.json, {"rows": rows}, "one thread used")


if __name__ == "__main__":
    main()
