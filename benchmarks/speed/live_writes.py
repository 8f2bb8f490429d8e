"""Processor time of one put applied to a version with many live items, and of a filter that it has not seen before.

    python -m benchmarks.live_writes --json F [--live 20000] [--height 5] [--repeats 200]

The model is synthetic: 8^height items with a field, an inner product, a memory. Live items hang under random parents that have room, and
each has memory entries from eight trained items. A put is applied, its snapshot taken and given to an engine; then the same beside a
trained item that was deleted, so that queries need a mask. Filters are price ranges, each asked for once. Figures are minima over the
repeats, of this thread's processor time, which other load on the machine disturbs least.

A row is {"what", "live", "min_us", "median_us"}.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.random_bundles import make_bundle
from benchmarks.report_file import write_report
from espalier.engines import open_engine
from espalier.live.filtered import LiveFilters
from espalier.live.rows import LiveRow, Placement
from espalier.live.state import Change, LiveState
from espalier.masks.filters import ItemFilters
from espalier.memory import Memory
from espalier.tree import complete_tree

BRANCHING, WIDTH = 8, 64
MEMORY = 8
"""Trained items that lead to a live item."""
MASK_BYTES = 1 << 26
Row = dict[str, str | int | float]


class Version:
    """A synthetic model with live items.

    folder  where its bundle is written
    """

    def __init__(self, folder: Path, height: int, live: int) -> None:
        rng = np.random.default_rng(0)
        tree = complete_tree(rng.permutation(BRANCHING**height), BRANCHING)
        items = tree.item_count
        entries = rng.integers(0, items, (items, 1)) + np.arange(MEMORY) * (items // MEMORY)
        item = np.sort(entries % items, axis=1).astype(np.int32).ravel()
        offset, value = np.arange(items + 1) * MEMORY, rng.random(len(item), np.float32)
        memory = Memory(offset, item, value, np.ones(20, np.float32), 0.5)
        columns = {"price": rng.integers(0, 1000, items)}
        self.bundle = make_bundle(folder, rng, tree, "product", 0.5, integer=False, width=WIDTH, length=20, memory=memory, columns=columns)
        self._rng, self._live, self._parents = rng, live, np.array(tree.level(tree.height - 1))
        self.state, self._engine = LiveState(self.bundle), open_engine(self.bundle, "cpu")
        self._trained = ItemFilters([tree], self.bundle.items, MASK_BYTES)
        self.filters = LiveFilters([tree], self._trained, self.state.table, self.state.touched)
        for number in range(live):
            self.put(f"new-{number}")
        self.show()

    def put(self, item_id: str) -> None:
        """Put an item anew, or an id for the first time, under a parent that has room."""
        self.apply(self.change(item_id))

    def change(self, item_id: str) -> Change:
        found = self.state.live_leaf_of(item_id)
        parent, slot = found or (int(self._rng.choice(self._parents)), -1)
        while slot < 0:
            if self.state.has_room(0, parent):
                slot = self.state.next_slot(0, parent)
            else:
                parent = int(self._rng.choice(self._parents))
        sources = self._rng.choice(len(self.bundle.items), MEMORY, replace=False)
        of = tuple((f"item-{row}", float(self._rng.random())) for row in sources)
        row = LiveRow(self._rng.standard_normal(WIDTH, np.float32), memory_from=of)
        fields = {"price": int(self._rng.integers(0, 1000))}
        return Change(self.state.sequence + 1, item_id, "put", fields, (Placement(0, parent, slot, row),))

    def apply(self, change: Change) -> None:
        self.state.apply([change])
        self.filters.touch(change.id)

    def show(self) -> None:
        """Give the engine a snapshot."""
        self._engine.set_overlay(self.state.overlay())

    def new_put(self) -> Callable[[], object]:
        change = self.change(f"new-{int(self._rng.integers(2 * self._live))}")

        def put() -> None:
            self.apply(change)
            self.show()

        return put

    def new_filter(self) -> Callable[[], object]:
        low, high = sorted(self._rng.random(2) * 1000)
        parsed = self._trained.parse({"price": {"min": low, "max": high}}, {})
        self._trained.mask(parsed)
        overlay = self.state.overlay()
        return lambda: self.filters.mask(parsed, overlay)


def measured(what: str, live: int, new: Callable[[], Callable[[], object]], repeats: int) -> Row:
    """new: prepares one call, which is then timed."""
    new()()
    times_us = []
    for _ in range(repeats):
        call = new()
        begin_s = time.thread_time()
        call()
        times_us.append(1e6 * (time.thread_time() - begin_s))
    row: Row = {"what": what, "live": live, "min_us": round(min(times_us), 1), "median_us": round(float(np.median(times_us)), 1)}
    print(f"{what:36s} {row['min_us']:9.1f} µs, median {row['median_us']:9.1f} µs", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--live", type=int, default=20000, help="live items")
    parser.add_argument("--height", type=int, default=5, help="the tree has 8^height items")
    parser.add_argument("--repeats", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        version = Version(Path(folder), args.height, args.live)
        rows = [measured("put", args.live, version.new_put, args.repeats)]
        rows.append(measured("filter", args.live, version.new_filter, args.repeats))
        version.apply(Change(version.state.sequence + 1, "item-0", "delete"))
        rows.append(measured("put, a trained item deleted", args.live, version.new_put, args.repeats))
    write_report(args.json, {"rows": rows}, "one thread used")


if __name__ == "__main__":
    main()
