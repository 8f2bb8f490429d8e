"""The measurement of writes beside retrievals: every item is asked for at both workers, and what is lost is counted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest

from benchmarks.service import live_load, live_prober
from benchmarks.service.live_load import KEY, measured
from benchmarks.service.live_prober import PAUSE_S, Item, Probed, Prober, connections_to, items_of, lost_of
from espalier.checks.random_bundles import make_bundle
from espalier.tree import complete_tree
from loadtest.queries import Query
from tests.service.processes import service


def test_evidence_is_a_query_or_a_part_of_a_history() -> None:
    history, features = Query("history", ("a", "b", "c")), Query("features", {"indices": [3, 5], "values": [1.0, 2.0]})
    items = items_of([history], "x-", 50, 0)
    assert len({item.id for item in items}) == 50
    assert {item.query["history"] == list(item.event) for item in items} == {True}
    assert all(0 < len(item.event) <= 3 for item in items)
    assert len({item.event for item in items}) > 3
    assert items_of([features], "x-", 1, 0) == [Item("x-0", {3: 1.0, 5: 2.0}, {"features": features.values})]
    assert items_of([Query("text", "words")], "x-", 1, 0) == [Item("x-0", "words", {"text": "words"})]


def test_percentiles_of_nothing_are_no_numbers() -> None:
    assert np.isnan(Probed().percentile_ms(99))
    assert Probed(visible_s=[0.001, 0.002]).percentile_ms(50) == pytest.approx(1.5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of 256 items, of which a search finds every one that is near its evidence."""
    folder = tmp_path_factory.mktemp("models")
    rng = np.random.default_rng(0)
    make_bundle(folder, rng, complete_tree(rng.permutation(256), 2), name="books", beam_size=400, max_beam_size=400, max_m=400)
    return folder / "books" / "1"


@pytest.fixture(scope="module")
def port(model: Path) -> Iterator[int]:
    with service(model.parent.parent, 2, ESPALIER_WRITE_KEYS=KEY) as running:
        yield running.port


@pytest.mark.slow
def test_every_worker_is_asked_for_every_item(port: int) -> None:
    address = "127.0.0.1", port
    with Prober(address, "books", KEY, workers=2, m=400) as prober:
        probed = prober.run(items_of([Query("history", ("item-1", "item-2"))], "new-", 40, 0), per_s=100)
    assert probed.statuses == {201: 40}
    assert (len(probed.visible_s), probed.found_at_once, probed.invisible) == (40, 40, 0)
    assert sorted(probed.sequences.values()) == [*range(1, 41)]
    assert lost_of(address, "books", KEY, probed) == 0
    probed.sequences["never"] = 99
    assert lost_of(address, "books", KEY, probed) == 1


def test_a_refused_retrieval_is_sent_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([(201, {"sequence": 1}), (429, {}), (429, {}), (200, {"results": [{"items": [{"id": "new"}]}]})])
    pauses: list[float] = []
    monkeypatch.setattr(live_prober, "exchange", lambda *_: next(answers))
    monkeypatch.setattr(live_prober, "connections_to", lambda *_: [[HTTPConnection("nowhere")]])
    monkeypatch.setattr(time, "sleep", lambda seconds: pauses.append(seconds) if seconds else None)
    with Prober(("nowhere", 80), "books", KEY, workers=1, m=5) as prober:
        probed = prober.run([Item("new", ("a",), {"history": ["a"]})], per_s=1)
    assert (probed.refused, pauses, len(probed.visible_s), probed.found_at_once) == (2, [PAUSE_S, PAUSE_S], 1, 1)


@pytest.mark.slow
def test_connections_are_known_by_their_worker(port: int) -> None:
    pairs = connections_to(("127.0.0.1", port), 2, 3)
    assert [len(pair) for pair in pairs] == [2, 2, 2]
    for pair in pairs:
        for connection in pair:
            connection.close()
    with pytest.raises(RuntimeError, match="of 3 workers"):
        connections_to(("127.0.0.1", port), 3, 1)


@pytest.mark.slow
def test_the_figures_of_a_short_run(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_load, "M", 400)
    found = measured(model, puts_per_s=20, seconds=1, rounds=1)
    assert {"visible_p99_ms", "puts_per_s", "retrieve_p99_ms", "retrieve_p99_ms_without", "lost"} <= found.keys()
    assert (found["lost"], found["acknowledged"], found["sequences_twice"], found["invisible"]) == (0, 20, 0, 0)
    row = live_load.bulk(model, 100)
    assert (row["items"], row["failed"]) == (100, 0)
    assert row["items_per_s"] > 0
