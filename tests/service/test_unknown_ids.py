"""Which unknown ids are asked for most is known in little memory, and over all workers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from service.watch import unknown_ids
from service.watch.unknown_ids import BLOCK_S, COUNTERS, MAX_ID_BYTES, PER_REQUEST, Counts, UnknownIds, add, cut, most_frequent
from tests.service.running import counted, run


def counts_of(ids: Iterable[str]) -> Counts:
    counts: Counts = {}
    for item_id in ids:
        add(counts, item_id)
    return counts


def test_counts_are_exact_while_there_are_counters_and_bounded_where_there_are_not() -> None:
    rng = np.random.default_rng(0)
    ids = [f"id-{i}" for i in rng.zipf(1.5, 5000) % COUNTERS]
    assert counts_of(ids) == dict(Counter(ids))
    found = counts_of([item_id for i in range(200_000) for item_id in ([f"id-{i}"] if i % 100 else [f"id-{i}", "broken"])])
    assert len(found) <= COUNTERS
    assert max(found, key=lambda item_id: found[item_id]) == "broken"
    assert 1000 < found["broken"] <= 2000
    assert max(sorted(found.values())[:-1], default=0) <= 2  # no id that came once looks frequent


@pytest.mark.parametrize("seed", range(2))
def test_frequent_ids_are_found_and_no_count_is_too_high(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, counters = np.random.default_rng(seed), 50
    monkeypatch.setattr(unknown_ids, "COUNTERS", counters)
    ids = [f"id-{i}" for i in rng.zipf(1.3, 20_000)]
    true, found = Counter(ids), counts_of(ids)
    assert len(found) <= counters
    assert all(1 <= count <= true[item_id] for item_id, count in found.items())
    assert {item_id for item_id, count in true.items() if count > len(ids) / counters} <= found.keys()


def test_ids_requests_and_the_sums_of_many_processes_are_bounded(tmp_path: Path) -> None:
    assert cut("short") == "short"
    assert cut("x" * 10**6) == "x" * MAX_ID_BYTES
    assert cut("€" * 500) == "€" * (MAX_ID_BYTES // 3)
    assert len(cut("😀" * 500).encode()) == MAX_ID_BYTES
    ids = UnknownIds()
    ids.note("books", [[f"{b}-{i}" for i in range(70)] for b in range(5)])
    [models] = ids.counts().values()
    assert len(models["books"]) == PER_REQUEST
    for pid in range(1, 5):
        unknown_ids.write(tmp_path, pid, {0: {"books": {f"{pid}-{i}": 1 for i in range(COUNTERS)} | {"most": 7}}})
    frequent = most_frequent(unknown_ids.read(tmp_path), "books", 0.0)
    assert (len(frequent), frequent[0]) == (unknown_ids.TOP, ("most", 28))


def test_counts_are_of_this_half_day_and_the_last() -> None:
    clock = [BLOCK_S * 100]
    ids = UnknownIds(lambda: clock[0])

    def top() -> list[tuple[str, int]]:
        return most_frequent([ids.counts()], "books", clock[0])

    ids.note("books", [["old"], [], ["old", "b"]])
    ids.note("films", [["film"]])
    assert top() == [("old", 2), ("b", 1)]
    clock[0] += BLOCK_S
    ids.note("books", [["new"], ["b"]])
    assert top() == [("b", 2), ("old", 2), ("new", 1)]
    clock[0] += BLOCK_S
    assert top() == [("b", 1), ("new", 1)]
    clock[0] += 5 * BLOCK_S
    assert top() == []
    ids.note("books", [["new"]])
    assert (top(), len(ids._blocks)) == ([("new", 1)], 1)


def test_processes_add_up_also_those_that_ended_until_their_counts_are_old(tmp_path: Path) -> None:
    now = time.time()
    block = unknown_ids.block_of(now)
    counts: list[unknown_ids.Blocks] = [{block: {"books": {"a": 2, "b": 1}}}, {block: {"books": {"a": 1}}, block - 1: {"books": {"c": 4}}}]
    for pid, own in enumerate([*counts, {block - 2: {"books": {"d": 9}}}], start=10):
        unknown_ids.write(tmp_path, pid, own)
    for clock, files in ((now, 3), (now + 2 * BLOCK_S - 60, 3), (now + 2 * BLOCK_S + 60, 0)):  # times of files lag some milliseconds behind
        unknown_ids.drop_old(tmp_path, clock)
        read = unknown_ids.read(tmp_path)
        assert len(read) == files
        assert most_frequent(read, "books", now) == ([("c", 4), ("a", 3), ("b", 1)] if files else [])
    assert unknown_ids.read(tmp_path) == []
    (tmp_path / "unknown_13.json").symlink_to("dropped-while-it-is-read")
    assert unknown_ids.read(tmp_path) == []


def test_customers_unknown_ids_are_counted_and_those_of_background_requests_are_not(versions: Path) -> None:
    with run(versions) as running:
        body = {"model": "books", "queries": [{"history": ["lost", "item-1", "lost"], "exclude": ["gone"]}, {"history": ["lost"]}]}
        assert running.client.post("/retrieve", json=body).status_code == 200
        assert running.client.post("/retrieve", json=body, headers={"Espalier-Priority": "background"}).status_code == 200
        lines = running.client.post("/retrieve/stream", json=body, headers={"Content-Type": "application/x-ndjson"})
        assert lines.status_code == 200
        found = running.client.get("/models/books/health").json()
        assert found["unknown_ids"] == [{"id": "lost", "count": 4}, {"id": "gone", "count": 2}]
        assert counted(running)['espalier_unknown_ids_total{model="books"}'] == 6
