"""Entries of live items depend on what was applied, not on its order; each counts once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.live import memory_entries
from espalier.live.memory_entries import MemoryEntries
from espalier.live.overlay import LiveMemory

ROWS = {"a": 0, "b": 1, "x": 10, "y": 11}
HANDLES = {"x": 0, "y": 1}


class Catalogue:
    """Trained items a and b; x and y are live once they came."""

    def __init__(self) -> None:
        self.entries, self.there, self.moment = MemoryEntries(4), {"a", "b"}, 0

    def put(self, item: str, to: Any = (), of: Any = ()) -> None:
        self.moment += 1
        if item not in self.there:
            self.there.add(item)
            self.entries.arrived(self.moment, item, ROWS[item])
        self.entries.put(self.moment, HANDLES[item], ROWS[item], to, of, lambda other: ROWS[other] if other in self.there else -1)

    def drop(self, item: str) -> None:
        self.moment += 1
        self.entries.drop(self.moment, HANDLES[item])

    def snapshot(self) -> LiveMemory:
        return self.entries.snapshot(self.moment)

    @property
    def found(self) -> dict[tuple[int, int], float]:
        columns = self.snapshot().all
        return {(int(source), int(target)): float(value) for source, target, value in zip(*columns, strict=True)}


def test_an_entry_of_an_id_that_comes_later_waits_for_it() -> None:
    catalogue = Catalogue()
    catalogue.put("x", to=(("y", 2.0), ("a", 1.0)), of=(("y", 3.0),))
    assert catalogue.found == {(10, 0): 1.0}
    catalogue.put("y")
    assert catalogue.found == {(10, 0): 1.0, (10, 11): 2.0, (11, 10): 3.0}


def test_an_entry_that_waits_goes_with_its_item() -> None:
    catalogue = Catalogue()
    catalogue.put("x", to=(("y", 2.0),))
    catalogue.put("x", to=(("b", 1.0),))
    catalogue.put("y")
    assert catalogue.found == {(10, 1): 1.0}
    catalogue.drop("x")
    assert catalogue.found == {}


def test_of_entries_that_are_given_twice_the_larger_one_counts() -> None:
    catalogue = Catalogue()
    catalogue.put("x", to=(("a", 1.0), ("a", 3.0), ("a", 2.0)))
    catalogue.put("y", to=(("x", 5.0),))
    catalogue.put("x", to=(("a", 1.0), ("a", 3.0)), of=(("y", 4.0),))
    assert catalogue.found == {(10, 0): 3.0, (11, 10): 5.0}
    catalogue.drop("y")
    assert catalogue.found == {(10, 0): 3.0, (11, 10): 4.0}
    catalogue.drop("x")
    assert catalogue.found == {}


entries = st.lists(st.tuples(st.sampled_from(["a", "b", "x", "y"]), st.integers(0, 3).map(float)), max_size=3)
puts = st.tuples(st.sampled_from(["x", "y"]), entries, entries)


@given(st.lists(puts, max_size=6))
def test_the_last_operation_of_each_item_is_enough(operations: list[Any]) -> None:
    whole, last = Catalogue(), Catalogue()
    for operation in operations:
        whole.put(*operation)
        whole.found  # noqa: B018  # snapshots in between change nothing
    current = {operation[0]: operation for operation in operations}
    for operation in [operation for operation in operations if current[operation[0]] is operation]:
        last.put(*operation)
    assert whole.found == last.found


@pytest.mark.parametrize("value", [0.0, -0.0])
def test_nothing_is_no_entry(value: float) -> None:
    catalogue = Catalogue()
    catalogue.put("x", to=(("a", value),))
    assert catalogue.found == {}
    assert catalogue.snapshot().entries.first.max() == 0


def test_entries_that_nothing_refers_to_are_dropped_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_entries, "UNUSED", 8)
    catalogue = Catalogue()
    for value in range(100):
        catalogue.put("x", to=(("a", float(value + 1)), ("b", 1.0)))
        assert len(catalogue.snapshot().entries.rows) <= 256


def test_entries_are_found_by_their_source() -> None:
    catalogue = Catalogue()
    catalogue.put("x", to=(("b", 2.0), ("a", 1.0)), of=(("a", 3.0),))
    memory = catalogue.snapshot()
    found = {source: [array.tolist() for array in memory.of(source)] for source in (0, 1, 10, 99)}
    assert found == {0: [[10], [3.0]], 1: [[], []], 10: [[0, 1], [1.0, 2.0]], 99: [[], []]}
