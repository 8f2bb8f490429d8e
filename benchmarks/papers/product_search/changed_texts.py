"""Trained products whose texts change while a service runs: are they found by the new ones, and does the rest stay?

    python -m benchmarks.changed_texts --data DIR --set psearch --json F        # and the sets of `product_sets.py`
    python -m benchmarks.changed_texts --data DIR --set psearch --share 1       # of all products instead of a tenth

A model with the defaults learns a set's table and every other query. Then some products are put with other fields, as a service does:

trained  nothing is put
edited   the first column gets one word more, `new`
swapped  each product gets the texts of another one, and that product's judgements: a model that was trained with these texts would answer
         as `trained` does, apart from what it learned of the queries

Rows: {"system", "placed", "moved", "unseen", "learned", "by_title", "ms"}: products that were placed, and those of them that moved; nDCG@10
of the other queries and of the learned ones; the share of SEARCHED put products that are among the ten answers to their first column; ms a
placement.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers.product_search.own_words import figures, fitted
from benchmarks.papers.product_search.product_sets import SETS, Products, products_of
from benchmarks.papers.product_search.text_linear import engine_find
from benchmarks.report_file import command_line, print_row, write_report
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.errors import EspalierError
from espalier.live.operations import ItemBody, Operation
from espalier.live.state import Change, LiveState
from espalier.placement.placer import Placer, needs_placement
from espalier.placement.slots import Slots

GROUP, SEARCHED = 64, 300


def put(bundle: Bundle, texts: Mapping[int, Mapping[str, Any]]) -> tuple[LiveState, int, int, float]:
    """The state of a version in which trained items got other fields; how many were placed and moved, and the ms of a placement."""
    engine, state, placer = open_engine(bundle, "cpu"), LiveState(bundle), Placer(bundle)
    ids = bundle.items.ids_of(np.array([*texts], np.int64))
    puts = [Operation(n, item, "put", ItemBody(fields=fields)) for n, (item, fields) in enumerate(zip(ids, texts.values(), strict=True), 1)]
    placed = moved = 0
    seconds = 0.0
    for begin in range(0, len(puts), GROUP):
        group = puts[begin : begin + GROUP]
        changed = [operation for operation in group if needs_placement(bundle, operation)]
        start = time.perf_counter()
        candidates = placer.place(
            [operation.body for operation in changed], state.table, state.overlay(), engine.parents, [operation.id for operation in changed]
        )
        seconds += time.perf_counter() - start
        slots, placements = Slots(state), {}
        for operation, found in zip(changed, candidates, strict=True):
            if isinstance(found, EspalierError):
                raise found
            placements[operation.id] = slots.place(operation.id, found)
            (first, *_) = placements[operation.id]
            placed, moved = placed + 1, moved + ((first.parent, first.slot) != state.trained_leaf_of(operation.id))
        state.apply([Change(put.sequence, put.id, "put", put.body.fields, placements.get(put.id, ())) for put in group])
    engine.close()
    return state, placed, moved, 1e3 * seconds / max(placed, 1)


def rows_of(products: Products, share: float, folder: Path) -> list[dict[str, Any]]:
    """The rows, printed as they come. share: of the products that are put."""
    queries = list(products.right)
    bundle = fitted(products, folder, asked=queries[::2])
    (first, *_), count = products.fields, len(bundle.items)
    chosen = np.random.default_rng(1).permutation(count)[: max(2, round(share * count))].tolist()
    own = {row: {name: texts[row] for name, texts in products.fields.items()} for row in chosen}
    edited = {row: fields | {first: f"{fields[first] or ''} new"} for row, fields in own.items()}
    swapped = {row: own[other] for row, other in zip(chosen, np.roll(chosen, 1).tolist(), strict=True)}
    heirs = dict(zip(np.roll(chosen, 1).tolist(), chosen, strict=True))
    inherited = {query: {heirs.get(row, row): grade for row, grade in right.items()} for query, right in products.right.items()}
    rows = []
    for system, texts, right in (("trained", own, products.right), ("edited", edited, products.right), ("swapped", swapped, inherited)):
        state, placed, moved, ms = put(bundle, texts)
        engine = open_engine(bundle, "cpu")
        engine.set_overlay(state.overlay())
        find, asked = engine_find(engine, bundle, bundle.manifest.search.beam_size), replace(products, right=right)
        titles = [(row, str(fields[first])) for row, fields in texts.items() if fields[first]][:SEARCHED]
        by_title = np.mean([row in find(title)[:10] for row, title in titles])
        unseen, learned = (figures(find, asked, part)["ndcg10"] for part in (queries[1::2], queries[::2]))
        figures_of = {"unseen": unseen, "learned": learned, "by_title": round(100 * float(by_title), 1), "ms": round(ms, 2)}
        rows.append({"system": system, "placed": placed, "moved": moved} | figures_of)
        print_row(rows[-1])
        engine.close()
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds the sets")
    parser.add_argument("--set", choices=[name for name in SETS if name != "mixed"], required=True)
    parser.add_argument("--share", type=float, default=0.1, help="of the products that are put")
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as name:
            rows = rows_of(products_of(options.data, options.set, 0), options.share, Path(name))
    except EspalierError as error:
        raise SystemExit(f"error: {error}") from None
    write_report(options.json, {"set": options.set, "share": options.share, "rows": rows})


if __name__ == "__main__":
    main()
