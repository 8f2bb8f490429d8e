"""ms/query of the CPU engines with live items, beside the same engine without, in one run.

    python -m benchmarks.live_speed --json F [--engines compiled-cpu,onnx-cpu,sparse-cpu] [--live 10000,65536] [--beam 200] [--m 50]

The same queries, one a call on one thread: `open_engine` as it was before items could be live; `open_live_engine` without an overlay, with
an empty one, and with so many live items under random parents that have room. All take turns query by query, in random order; figures are
medians over all queries of all rounds. The models are synthetic: 8^6 items and 32,768 parents for `compiled-cpu` (inner product) and
`sparse-cpu`, 2^16 items under as many parents for `onnx-cpu` (the papers' scorer).
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

from benchmarks.synthetic import synthetic_bundle
from espalier.bundle import Bundle
from espalier.checks.random_bundles import make_bundle, make_linear_bundle, random_queries
from espalier.checks.random_live import random_row
from espalier.engines import open_engine, open_live_engine
from espalier.hardware import hardware
from espalier.live.rows import Placement
from espalier.live.state import Change, LiveState
from espalier.manifest import Ranking
from espalier.search import Engine, SearchParams
from espalier.tree import complete_tree

QUERIES = 100
BRANCHING = 8
ENGINES = ("compiled-cpu", "onnx-cpu", "sparse-cpu")


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
    """A version with so many new items under random parents that have room."""
    rng, state, tree = np.random.default_rng(1), LiveState(bundle), bundle.tree
    parents = tree.level(tree.height - 1)
    for number in range(count):
        parent = int(rng.integers(parents.start, parents.stop))
        while not state.has_room(0, parent):
            parent = int(rng.integers(parents.start, parents.stop))
        placement = Placement(0, parent, state.next_slot(0, parent), random_row(rng, bundle, integer=False))
        state.apply([Change(number + 1, f"new-{number}", "put", placements=(placement,))])
    return state


def searchers(engine: str, bundle: Bundle, live: list[int]) -> dict[str, Engine]:
    """The engines that are compared, by what is live."""
    opened: dict[str, Engine] = {"before": open_engine(bundle, "cpu", engine), "no overlay": open_live_engine(bundle, "cpu", engine)}
    for count in (0, *live):
        searched = open_live_engine(bundle, "cpu", engine)
        searched.set_overlay(with_live_items(bundle, count).overlay())
        opened[f"{count} live"] = searched
    return opened


def measured(engines: dict[str, Engine], bundle: Bundle, beam: int, m: int, rounds: int) -> dict[str, float]:
    """Milliseconds of the median query, by engine."""
    queries, params = random_queries(np.random.default_rng(2), bundle, QUERIES, integer=False), SearchParams.uniform(1, beam, m)
    one = [queries.take(np.array([b])) for b in range(QUERIES)]
    times_s: dict[str, list[float]] = {name: [] for name in engines}
    searches: list[tuple[str, Callable[..., object]]] = [(name, engine.search) for name, engine in engines.items()]
    for _, search in searches:
        search(one[0], params)
    rng = np.random.default_rng(3)
    for _ in range(rounds):
        for b in range(QUERIES):
            for place in rng.permutation(len(searches)).tolist():  # what ran before leaves caches as it needs them
                name, search = searches[place]
                begin_s = time.perf_counter()
                search(one[b], params)
                times_s[name].append(time.perf_counter() - begin_s)
    return {name: 1e3 * float(np.median(own)) for name, own in times_s.items()}


def run(folder: Path, names: list[str], live: list[int], height: int, beam: int, m: int, rounds: int) -> list[dict[str, Any]]:
    """Rows {"engine", "items", "parents", "beam_size", "m", "what", "ms_per_query", "added_ms", "ratio"}, beside `before`."""
    rows = []
    for engine in names:
        bundle = bundle_for(engine, folder, height)
        tree = bundle.tree
        ms = measured(searchers(engine, bundle, live), bundle, beam, m, rounds)
        for what, own in ms.items():
            shape = {"engine": engine, "items": tree.item_count, "parents": tree.level_size(tree.height - 1), "beam_size": beam, "m": m}
            added, ratio = own - ms["before"], own / ms["before"]
            rows.append(shape | {"what": what, "ms_per_query": round(own, 4), "added_ms": round(added, 4), "ratio": round(ratio, 4)})
            print(f"{engine:12s} {what:12s} {own:7.4f} ms/query, {added:+.4f} ms, {ratio:.3f} ×", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--live", default="10000,65536", help="live items")
    parser.add_argument("--height", type=int, default=6, help="the trees have 8^height items, that of onnx-cpu 2^(3 · height − 2)")
    parser.add_argument("--beam", type=int, default=200)
    parser.add_argument("--m", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--models", type=Path, default=Path(tempfile.gettempdir()) / "espalier-benchmarks", help="where the synthetic models are kept"
    )
    args = parser.parse_args()
    live = [int(count) for count in args.live.split(",")]
    rows = run(args.models, args.engines.split(","), live, args.height, args.beam, args.m, args.rounds)
    report = {"date": datetime.now(UTC).date().isoformat(), "hardware": f"{hardware()}, one thread used", "rows": rows}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
