"""The cost of a filter in time and in overlap with exhaustive scoring, with the beam as it is and as the service widens it, on one thread.

    python -m benchmarks.filtered_recall --json F [--height 20] [--models DIR] [--debian models/debian-depends/1] [--rounds 5]

Two models: a synthetic one of 2^height items, whose inner nodes resemble their leaves (`benchmarks.synthetic.diffusion_bundle`), with
noisy item vectors as queries and filters of 50 %, 10 %, 1 % and 0.1 % of the items, scattered over the tree or whole subtrees of it; and a
trained one over Debian's packages with its held-out queries and filters by section. A missing trained model is left out with a message.

Overlap is with the m best of all eligible items by the same scorer: a search whose beam holds every node. Milliseconds are medians over
rounds. The rules of widening:

    none       the beam as it is
    root       √(items / eligible) times the beam, at most 4 times, bounded by the model's limit and by the number of eligible items, beyond
               which a beam keeps nothing more: the service's rule, `espalier.masks.eligibility.widened_beam`
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.report_file import SYNTHETIC, command_line, print_row, write_report
from benchmarks.synthetic import diffusion_bundle, diffusion_queries
from espalier.arrays import Int64
from espalier.bundle import Bundle
from espalier.checks.golden import encode_table
from espalier.engines import open_engine
from espalier.engines.pipeline import Pipeline
from espalier.masks.eligibility import every_item, widened_beam
from espalier.masks.filters import ItemFilters
from espalier.queries import QueryBatch
from espalier.search import NodeMask, SearchParams

M = 100
QUERIES = 64
BEAMS = (50, 100, 200)
SHARES = (0.5, 0.1, 0.01, 0.001)
WIDEST = 4
"""Times the beam, at most."""

T = TypeVar("T")


def overlap(best_BM: Int64, got_BM: Int64) -> float:
    """Mean share of the best items that were found."""
    shares = [len(np.intersect1d(best[best >= 0], got[got >= 0])) / (best >= 0).sum() for best, got in zip(best_BM, got_BM, strict=True)]
    return float(np.mean(shares))


def measure(bundle: Bundle, queries: QueryBatch, conditions: Mapping[str, Mapping[str, object]], rounds: int) -> list[dict[str, Any]]:
    """Every filter with every beam and rule: rows {"model", "filter", "eligible", "beam_size", "rule", "widened", "overlap", …_ms}."""
    engine = open_engine(bundle, "cpu")
    rows = []
    for name, condition in {"all items": {}, **conditions}.items():
        mask, cost = masked(bundle, condition) if condition else (every_item(bundle.tree), {})
        filter_columns = {"model": bundle.manifest.name, "filter": name, "eligible": mask.items} | cost
        for row in measure_filter(engine, queries, mask, bool(condition), rounds):
            rows.append(filter_columns | row)
            print_row(rows[-1])
    return rows


def masked(bundle: Bundle, condition: Mapping[str, object]) -> tuple[NodeMask, dict[str, float]]:
    """The mask, and its milliseconds: with building the column's index (`cold`), with the index there, and from the cache."""
    filters = ItemFilters([bundle.tree], bundle.items, max_bytes=1 << 30)
    parsed = filters.parse(condition, {})
    cold_ms, _ = timed(lambda: filters.mask(parsed))
    filters.set_removed(np.empty(0, np.int64))  # drops the mask and keeps the index
    mask_ms, mask = timed(lambda: filters.mask(parsed))
    cached_ms, _ = timed(lambda: filters.cached(parsed))
    return mask, {"mask_cold_ms": round(cold_ms, 4), "mask_ms": round(mask_ms, 4), "mask_cached_ms": round(cached_ms, 4)}


def measure_filter(engine: Pipeline, queries: QueryBatch, mask: NodeMask, filtered: bool, rounds: int) -> list[dict[str, Any]]:
    """Rows of one filter with every beam and rule. Equal widened beams are measured once."""
    tree, limit = engine.bundle.tree, engine.bundle.manifest.search.max_beam_size
    condition = mask if filtered else None
    best_BM = engine.search(queries, SearchParams.uniform(len(queries), tree.leaf_count, M, mask=condition)).item_rows_BM
    by_beam: dict[int, tuple[float, float]] = {}
    rows: list[dict[str, Any]] = []
    for beam in BEAMS:
        widened_by_root = max(1, min(widened_beam(beam, mask.items, tree.item_count, WIDEST), limit, mask.items))
        for rule, widened in (("none", beam), ("root", widened_by_root)):
            if widened not in by_beam:
                by_beam[widened] = search(engine, queries, SearchParams.uniform(len(queries), widened, M, mask=condition), best_BM, rounds)
            share, ms = by_beam[widened]
            rows.append({"beam_size": beam, "rule": rule, "widened": widened, "overlap": round(share, 4), "ms_per_query": round(ms, 4)})
    return rows


def search(engine: Pipeline, queries: QueryBatch, params: SearchParams, best_BM: Int64, rounds: int) -> tuple[float, float]:
    """Overlap with the best items, and milliseconds per query."""
    result = engine.search(queries, params)
    times = [timed(lambda: engine.search(queries, params))[0] / len(queries) for _ in range(rounds)]
    return overlap(best_BM, result.item_rows_BM), float(np.median(times))


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Milliseconds that a call takes, and what it returns."""
    begin = time.perf_counter()
    value = call()
    return (time.perf_counter() - begin) * 1e3, value


def sections(bundle: Bundle) -> dict[str, Mapping[str, object]]:
    """Filters by section, of shares from a third to a thousandth of the items."""
    counts = {entry["values"]: entry["counts"] for entry in bundle.items.column("section").value_counts().to_pylist()}
    target_sizes = [share * len(bundle.items) for share in (0.3, 0.1, 0.05, 0.01, 0.005, 0.001)]
    names, sizes = list(counts), np.array(list(counts.values()))
    nearest_names = [names[int(np.abs(np.log(sizes / size)).argmin())] for size in target_sizes]
    return {section: {"section": [section]} for section in dict.fromkeys(nearest_names)}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--height", type=int, default=20, help="the synthetic tree has 2^height items")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--debian", type=Path, default=Path("models/debian-depends/1"), help="the trained bundle")
    parser.add_argument("--models", type=Path, default=SYNTHETIC, help="where the synthetic model is kept")
    args = parser.parse_args()
    synthetic = diffusion_bundle(args.models, args.height)
    shares = {f"{column} {share:.1%}": {column: {"max": share}} for column in ("scattered", "clustered") for share in SHARES}
    rows = measure(synthetic, diffusion_queries(synthetic, QUERIES), shares, args.rounds)
    if (args.debian / "manifest.json").is_file():
        debian = Bundle.open(args.debian, verify=False)
        heldout = encode_table(debian, debian.heldout())
        rows += measure(debian, heldout.take(np.arange(0, len(heldout), max(1, len(heldout) // QUERIES))), sections(debian), args.rounds)
    else:
        print(f"\n{args.debian}: no bundle there, so the trained model is left out")
    write_report(args.json, {"rows": rows}, "one thread used")


if __name__ == "__main__":
    main()
