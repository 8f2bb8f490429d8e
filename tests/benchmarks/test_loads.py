"""What is said of a service under load: both workers are asked, what is lost is counted, and answers of two versions are seen."""

from __future__ import annotations

import time
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest

from benchmarks.random_bundles import make_bundle
from benchmarks.service import live_load, live_prober
from benchmarks.service.live_load import KEY, measured
from benchmarks.service.live_prober import PAUSE_S, Item, Prober, items_of, lost_of
from benchmarks.service.shard_answers import SeenAnswer, is_mixed, went_back
from benchmarks.service.shard_fleet import SHIFT
from benchmarks.service.shards import quantile_ms
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


def test_a_refused_retrieval_is_sent_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([(201, {"sequence": 1}), (429, {}), (429, {}), (200, {"results": [{"items": [{"id": "new"}]}]})])
    pauses: list[float] = []
    monkeypatch.setattr(live_prober, "exchange", lambda *_: next(answers))
    monkeypatch.setattr(live_prober, "connections_to", lambda *_: [[HTTPConnection("nowhere")]])
    monkeypatch.setattr(time, "sleep", lambda seconds: pauses.append(seconds) if seconds else None)
    with Prober(("nowhere", 80), "books", KEY, workers=1, m=5) as prober:
        probed = prober.run([Item("new", ("a",), {"history": ["a"]})], per_s=1)
    assert (probed.refused, pauses, len(probed.visible_s), probed.found_at_once) == (2, [PAUSE_S, PAUSE_S], 1, 1)


@pytest.mark.release
def test_every_worker_is_asked_for_every_item_and_a_short_run_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a bundle of which a search finds every item that is near its evidence."""
    rng = np.random.default_rng(0)
    make_bundle(tmp_path, rng, complete_tree(rng.permutation(256), 2), name="books", beam_size=400, max_beam_size=400, max_m=400)
    with service(tmp_path, 2, ESPALIER_WRITE_KEYS=KEY) as running:
        address = "127.0.0.1", running.port
        with Prober(address, "books", KEY, workers=2, m=400) as prober:
            probed = prober.run(items_of([Query("history", ("item-1", "item-2"))], "new-", 40, 0), per_s=100)
        assert probed.statuses == {201: 40}
        assert (len(probed.visible_s), probed.found_at_once, probed.invisible) == (40, 40, 0)
        assert sorted(probed.sequences.values()) == [*range(1, 41)]
        assert lost_of(address, "books", KEY, probed) == 0
        probed.sequences["never"] = 99
        assert lost_of(address, "books", KEY, probed) == 1
    monkeypatch.setattr(live_load, "M", 400)
    found = measured(tmp_path / "books" / "1", puts_per_s=20, seconds=1, rounds=1)
    assert {"visible_p99_ms", "puts_per_s", "retrieve_p99_ms", "retrieve_p99_ms_without"} <= found.keys()
    assert (found["lost"], found["acknowledged"], found["sequences_twice"], found["invisible"]) == (0, 20, 0, 0)


# -- shards ---------------------------------------------------------------------------------------------------------------

FIRST = (0.9, 0.5, 0.2)


def of_version(version: int, scores: tuple[float, ...] = FIRST) -> tuple[float, ...]:
    log_odds = [np.log(score / (1 - score)) + SHIFT * (version - 1) for score in scores]
    return tuple(float(1 / (1 + np.exp(-value))) for value in log_odds)


def answer(version: int, scores: tuple[float, ...], began: float = 0.0, ended: float = 1.0) -> SeenAnswer:
    return SeenAnswer(0, began, ended, version, 1.0, scores)


def test_an_answer_is_mixed_unless_all_its_scores_are_those_of_its_version() -> None:
    assert not any(is_mixed(answer(version, of_version(version)), {0: FIRST}, 1) for version in (1, 2, 21))
    assert is_mixed(answer(3, (*of_version(3)[:2], of_version(2)[2])), {0: FIRST}, 1)
    assert is_mixed(answer(2, of_version(2)[:2]), {0: FIRST}, 1)


def test_an_answer_goes_back_if_a_higher_version_had_answered_before_it_began() -> None:
    higher, lower = answer(2, (), 0.0, 1.0), answer(1, (), 1.5, 2.0)
    assert went_back([higher, lower]) == 1
    assert went_back([higher, replace(lower, began=0.5)]) == 0, "it was under way already"


def test_a_quantile_is_of_what_was_counted_between_two_looks() -> None:
    before, after = [(0.001, 100.0), (0.002, 100.0), (0.004, 100.0)], [(0.001, 100.0), (0.002, 110.0), (0.004, 110.0)]
    assert quantile_ms(before, after, 0.5) == pytest.approx(1.5)
