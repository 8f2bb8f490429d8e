"""Threads that search while another one writes: each finds what its snapshot shows, and nothing of what comes meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from benchmarks.random_bundles import make_bundle, make_linear_bundle, random_memory, random_queries, random_tree
from benchmarks.random_live import random_put, random_state
from espalier import entry_lists
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.live import live_tree, memory_entries, state
from espalier.live.overlay import Overlay
from espalier.live.state import Change, LiveState
from espalier.manifest import Ranking
from espalier.search import SearchParams, SearchResult

READERS, WRITES = 3, 400


def history_bundle(folder: Path) -> Bundle:
    rng = np.random.default_rng(0)
    tree = random_tree(rng, 3, 3)
    return make_bundle(folder, rng, tree, "product", 0.5, memory=random_memory(rng, tree.item_count, 5))


def linear_bundle(folder: Path) -> Bundle:
    rng = np.random.default_rng(1)
    return make_linear_bundle(folder, rng, random_tree(rng, 3, 3), Ranking(own="log_activation", gamma=1))


def write(rng: np.random.Generator, live: LiveState) -> None:
    """Put or delete a trained item, or one of those that come and go."""
    sequence = live.sequence + 1
    item_id = f"new-{rng.integers(20)}" if rng.random() < 0.8 else f"item-{rng.integers(4)}"
    if rng.random() < 0.3:
        live.apply([Change(sequence, item_id, "delete")])
    else:
        live.apply([random_put(rng, live, item_id, sequence)])


@pytest.fixture
def small_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays are replaced every few writes."""
    monkeypatch.setattr(entry_lists, "FIRST", 4)
    for module in (live_tree, memory_entries, state):
        monkeypatch.setattr(module, "UNUSED", 4)


@pytest.mark.usefixtures("small_arrays")
@pytest.mark.parametrize("make", [history_bundle, linear_bundle])
def test_searches_beside_a_writer_find_what_their_snapshot_shows(tmp_path: Path, make: Callable[[Path], Bundle]) -> None:
    """Every search is repeated when nothing is written any more, in the snapshot that it had."""
    rng, bundle = np.random.default_rng(3), make(tmp_path)
    live = random_state(rng, bundle)
    queries, params = random_queries(rng, bundle, 4), SearchParams.uniform(4, 6, 20)
    newest, ended = [live.overlay()], threading.Event()

    def read() -> list[tuple[Overlay, SearchResult]]:
        searched = open_engine(bundle)
        found: list[tuple[Overlay, SearchResult]] = []
        while not ended.is_set() or not found:
            overlay = newest[0]
            searched.set_overlay(overlay)
            found.append((overlay, searched.search(queries, params)))
        return found

    with ThreadPoolExecutor(READERS) as threads:
        readers = [threads.submit(read) for _ in range(READERS)]
        try:
            for _ in range(WRITES):
                write(rng, live)
                newest[0] = live.overlay()
        finally:
            ended.set()
        searched = open_engine(bundle)
        for overlay, found in (one for reader in readers for one in reader.result()):
            searched.set_overlay(overlay)
            expected = searched.search(queries, params)
            for name in ("item_rows_BM", "ranks_BM", "keys_BM", "count_B", "complete_B"):
                assert_array_equal(getattr(found, name), getattr(expected, name), name)
    assert live.sequence > WRITES
