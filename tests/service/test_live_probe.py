"""The probe on a service with live items: its recall is that of the trained version, and it says what live items gain and cost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from espalier.bundle import Bundle
from service.live import live_version
from service.models.live_replay import CANARY_ANSWERS, MIN_CANARY_ANSWERS
from tests.service.exported_models import GOLDEN, HELD_OUT, exported
from tests.service.live_running import Live, Nearest, open_reference
from tests.service.probing import Probing
from tests.service.running import ids, run

M, ROUND = 5, HELD_OUT + GOLDEN
"""The largest m of recall at export; queries of a round."""


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    bundle = exported(tmp_path, np.random.default_rng(5))
    monkeypatch.setattr(live_version, "Placer", Nearest)
    with run(bundle.path.parents[1], open_reference) as running:
        yield Live(running)


def displacement(live: Live, bundle: Bundle, gone: set[str]) -> float:
    """Mean recall of the held-out queries with live items less that without, asked over HTTP; items that are gone are wanted by nobody."""
    gains = []
    for query in bundle.heldout().to_pylist():
        wanted = {*query["relevant"]} - gone
        if not wanted:
            continue
        body = {"queries": [{"history": query["history"]}], "m": M, "beam_size": 8}
        found = [{*ids(live.running.retrieve(**body, live=sees)["results"][0])} for sees in (True, False)]
        with_live, without = (len(wanted & own) / len(wanted) for own in found)
        gains.append(with_live - without)
    assert len(gains) == HELD_OUT
    return float(np.mean(gains))


def test_writes_are_no_damage_and_what_they_displace_is_measured(live: Live) -> None:
    probing = Probing(live.running)
    probing.ask(2 * ROUND)
    expected = probing.recall()
    assert probing.recall(metric="expected_recall") == pytest.approx(expected, abs=1e-12)
    assert probing.value("live_displacement") is None  # nothing was ever written
    bundle = live.running.app.state.service.registry.entries["books"].loaded.bundle
    gone = {item for query in bundle.heldout().to_pylist()[:3] for item in query["relevant"][:1]}
    for item in gone:
        live.delete(item)
    for i in range(0, 64, 2):
        live.put(f"copy-{i}", like=(f"item-{i}",))
    probing.ask(3 * ROUND)
    found = probing.value("live_displacement")
    assert found is not None
    assert found == pytest.approx(displacement(live, bundle, gone), abs=1e-12)
    assert found < -0.05
    assert probing.recall() == pytest.approx(expected, abs=1e-12)
    assert probing.drift() == pytest.approx(0, abs=1e-7)


def test_the_canary_asks_for_new_items_by_their_histories_until_they_are_deleted(live: Live) -> None:
    probing = Probing(live.running)
    found = live.found("item-3", m=60, beam_size=8)
    missed = next(f"item-{i}" for i in range(64) if f"item-{i}" not in found)
    live.put("near", like=(found[0],), events=(["item-3"],))  # its place and row are those of what it is like
    probing.ask(4 * MIN_CANARY_ANSWERS)
    assert probing.value("live_canary_recall") == 1.0
    live.put("far", like=(missed,), events=(["item-3"],))
    probing.ask(4 * 2 * CANARY_ANSWERS)
    assert probing.value("live_canary_recall") == 0.5
    live.delete("near")
    live.delete("far")
    probing.ask(3)
    assert np.isnan(probing.value("live_canary_recall") or 0.0)
    assert probing.queries("failed") == 0
