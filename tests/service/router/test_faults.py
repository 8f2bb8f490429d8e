"""Replicas and shards that die, hang or answer something else: what the router answers then. `test_shard_call` says who is asked when."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from espalier.queries import blank_queries
from espalier.search import NO_ITEM, Frontier, SearchContext, SearchParams
from espalier.shards.layout import shard_items
from espalier.shards.messages import ShardAnswer, decode_answer, decode_query, encode_answer
from service.models.loading import LoadedModel
from service.router.config import RouterConfig
from service.router.connections import HttpTransport
from service.router.fleet import Fleet
from service.router.replicas import LINES
from service.router.transport import ReplicaFailed
from service.shards.search import answer_search
from service.watch.metrics import Metrics
from tests.service.router.cluster import Cluster, cluster, shard_folders
from tests.service.running import Json, problem
from tests.service.shards.cutting import whole_bundle
from tests.waiting import until

QUERY: Json = {"queries": [{"history": ["item-1"]}], "m": 40, "beam_size": 64}
A, B = "http://shard-0-0", "http://shard-0-1"
OTHERS = "http://shard-1-0", "http://shard-1-1"


@contextmanager
def two_of_two(folder: Path) -> Iterator[Cluster]:
    """Two shards with two replicas each."""
    whole = whole_bundle(folder / "models")
    with cluster(folder / "models", shard_folders(whole, folder / "shards", 2, 2), timeout_ms=5000) as found:
        yield found


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with two_of_two(tmp_path_factory.mktemp("faults")) as found:
        yield found


@pytest.fixture
def shards(shared: Cluster) -> Iterator[Cluster]:
    """Of which all replicas are trusted; what a test does to them ends with it."""
    yield shared
    shared.transport.heal()
    shared.transport.sent.clear()

    def all_answer() -> bool:
        status = shared.client.post("/retrieve", json=QUERY).status_code
        return status == 200 and all(shared.asked(address) for address in (A, B, *OTHERS))

    until(all_answer, "all are asked")


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Cluster]:
    """Whose replicas have had no line in the log."""
    with two_of_two(tmp_path) as found:
        yield found


def loaded(shards: Cluster) -> LoadedModel:
    found = shards.app.state.service.registry.entry("books").loaded
    assert isinstance(found, LoadedModel)
    return found


def failures(shards: Cluster, reason: str) -> float:
    return shards.metric("espalier_router_failures_total", reason=reason)


def found_by(shards: Cluster, **body: Any) -> set[str]:
    """The items of an answer to one query."""
    return {item["id"] for item in shards.retrieve(**QUERY | body)["results"][0]["items"]}


def with_answers(shards: Cluster, address: str, change: Callable[[ShardAnswer], ShardAnswer]) -> Callable[[bytes], Any]:
    """A fault of a replica: its answers are changed."""

    async def changed(body: bytes) -> bytes:
        _, found = await answer_search(shards.transport.registries[address], body)
        return encode_answer(change(decode_answer(found)))

    return changed


def test_a_dead_replica_fails_no_request_and_is_asked_no_more(shards: Cluster) -> None:
    expected = shards.retrieve(**QUERY)["results"]
    shards.transport.dead.add(A)
    for _ in range(20):
        answer = shards.retrieve(**QUERY)
        assert answer["results"] == expected
        assert answer["coverage"]["items"] == 1
    before = shards.asked(A)
    for _ in range(20):
        shards.retrieve(**QUERY)
    assert shards.asked(A) == before
    shards.transport.dead.clear()
    until(lambda: shards.retrieve(**QUERY) and shards.asked(A) > before)


# -- answers that cannot be ----------------------------------------------------------------------------------------------

STRANGE = -7
"""Stands for a row that another shard has."""


def rows(*changed: int) -> Callable[[ShardAnswer], ShardAnswer]:
    """The first item rows are these instead; NO_ITEM: as they were."""

    def change(answer: ShardAnswer) -> ShardAnswer:
        rows_BM = answer.result.item_rows_BM.copy()
        for place, row in enumerate(changed):
            rows_BM[:, place] = rows_BM[:, 0] if row == NO_ITEM else row
        return replace(answer, result=replace(answer.result, item_rows_BM=rows_BM))

    return change


def result(**changed: Callable[[ShardAnswer], Any]) -> Callable[[ShardAnswer], ShardAnswer]:
    """Parts of the result are what these make of the answer."""
    return lambda answer: replace(answer, result=replace(answer.result, **{name: make(answer) for name, make in changed.items()}))


def pin(**changed: Any) -> Callable[[ShardAnswer], ShardAnswer]:
    return lambda answer: replace(answer, pin=replace(answer.pin, **changed))


FRONTIER = Frontier(np.zeros((1, 1), np.int64), np.zeros((1, 1), np.float32))
GARBAGE: dict[str, Callable[[ShardAnswer], ShardAnswer]] = {
    "rows that no bundle has": result(item_rows_BM=lambda answer: answer.result.item_rows_BM + 10_000),
    "an item twice": rows(NO_ITEM, NO_ITEM),
    "an item of another shard": rows(STRANGE),
    "a frontier that nobody asked for": result(frontiers=lambda answer: (FRONTIER,)),
    "huge scores": result(scores_BM=lambda answer: np.full_like(answer.result.scores_BM, 3.4e38)),
    "numbers that are not finite": result(finite_B=lambda answer: np.zeros(len(answer.result.count_B), np.bool_)),
}
MIXED: dict[str, Callable[[ShardAnswer], ShardAnswer]] = {
    "another version": pin(version=2),
    "another bundle": pin(digest="0" * 64),
    "another shard": pin(index=1),
    "another model": pin(of="films"),
    "another number of shards": pin(count=3),
    "another question": lambda answer: replace(answer, number=answer.number + 1),
}


@pytest.mark.parametrize("wrong", [*GARBAGE, *MIXED])
def test_an_answer_that_cannot_be_one_is_counted_and_never_used(shards: Cluster, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One to another question may come late on a connection that is used again, or by a proxy that confuses two."""
    expected, reason = shards.retrieve(**QUERY)["results"], "garbage" if wrong in GARBAGE else "mixed"
    change = (GARBAGE | MIXED)[wrong]
    if wrong == "an item of another shard":
        change = rows(int(shard_items(loaded(shards).bundle.tree, 2)[1][0]))
    shards.transport.faults[A] = with_answers(shards, A, change)
    before = failures(shards, reason), shards.metric("espalier_router_mixed_total")

    def is_counted() -> bool:
        assert shards.retrieve(**QUERY)["results"] == expected
        return failures(shards, reason) > before[0]

    until(is_counted)
    assert (shards.metric("espalier_router_mixed_total") > before[1]) == (reason == "mixed")


def test_what_a_shard_says_of_places_without_an_item_does_not_count(shards: Cluster) -> None:
    expected, empty = shards.retrieve(**QUERY)["results"], 0

    def padded(answer: ShardAnswer) -> ShardAnswer:
        nonlocal empty
        is_none_BM = answer.result.item_rows_BM == NO_ITEM
        empty += int(is_none_BM.sum())
        keys_BM = np.where(is_none_BM, np.float32(np.inf), answer.result.keys_BM)
        return replace(answer, result=replace(answer.result, keys_BM=keys_BM))

    shards.transport.faults = {address: with_answers(shards, address, padded) for address in (A, B)}
    assert shards.retrieve(**QUERY)["results"] == expected
    assert empty


# -- shards that are missing ---------------------------------------------------------------------------------------------


def test_without_a_shard_answers_go_on_and_say_what_they_cover(shards: Cluster) -> None:
    whole = found_by(shards)
    shards.transport.dead |= {A, B}
    answer = shards.retrieve(**QUERY)
    coverage = answer["coverage"]
    assert (coverage["missing"], coverage["shards"], coverage["answered"]) == ([0], 2, 1)
    assert 0.3 < coverage["items"] < 0.7
    assert not answer["results"][0]["complete"]
    found = found_by(shards)
    assert found < whole
    assert len(found) == round(coverage["items"] * len(whole))
    some = [*sorted(found)[:4], *sorted(whole - found)[:4]]
    (result,) = shards.retrieve(**QUERY | {"m": 1}, explain_items=some)["results"]
    outcomes = {item["id"]: item["outcome"] for item in result["explain"]["items"]}
    assert {outcomes[item] for item in some[:4]} <= {"returned", "pruned"}
    assert [outcomes[item] for item in some[4:]] == ["not_searched"] * 4
    assert shards.retrieve(**QUERY, min_coverage=0.3)["coverage"] == coverage
    assert shards.retrieve(**QUERY, partial="allow")["coverage"] == coverage
    assert shards.client.post("/retrieve", json=QUERY | {"partial": "refuse"}).status_code == 503
    for timeout_ms, status in ((2500, "503-client"), (5000, "503")):  # by a client's own deadline it is no failure of the service
        before = shards.metric("espalier_requests_total", status=status)
        refused = shards.client.post("/retrieve", json=QUERY | {"min_coverage": 0.9, "timeout_ms": timeout_ms})
        assert refused.status_code == 503
        assert problem(refused)["detail"].startswith("coverage: got 0.")
        assert "these gave no answer: 0." in problem(refused)["detail"]
        assert shards.metric("espalier_requests_total", status=status) == before + 1
    shards.transport.dead |= {*OTHERS}
    refused = shards.client.post("/retrieve", json=QUERY)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")


def test_a_router_with_one_call_at_once_has_deadlines_too(tmp_path: Path) -> None:
    """However quick its shards were, the event loop does not search them itself: it would answer nobody else meanwhile."""
    folders = shard_folders(whole_bundle(tmp_path / "models"), tmp_path / "shards", 2)
    with cluster(tmp_path / "models", folders, {"calls": 1}, max_inline_us=10_000, timeout_ms=5000) as shards:
        shards.retrieve(**QUERY)
        shards.transport.dead.add(A)
        assert shards.retrieve(**QUERY)["coverage"]["missing"] == [0]
        assert loaded(shards).batcher.limits.inline_s == 0


def test_an_answer_comes_before_the_deadline_without_a_shard_that_is_slow(shards: Cluster) -> None:
    given_up = []

    async def slow(body: bytes) -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            given_up.append(body)
            raise

    shards.transport.faults = {A: slow, B: slow}
    engine, kind = loaded(shards).engine, loaded(shards).bundle.manifest.query
    context = SearchContext(time.perf_counter() + 1)
    coverage = engine.search(blank_queries(kind, 1), SearchParams.uniform(1, 64, 40), context).coverage
    assert coverage is not None
    assert coverage.answered_BS.tolist() == [[False, True]]
    assert given_up


def test_a_search_without_a_deadline_waits_for_shards_that_let_looks_wait(shards: Cluster) -> None:
    """It is the service's own: golden queries, where live items go."""
    shards.transport.mute |= {A, B}
    until(lambda: shards.metric("espalier_router_replicas") == 2)
    assert shards.retrieve(**QUERY)["coverage"]["missing"] == [0]
    engine, kind = loaded(shards).engine, loaded(shards).bundle.manifest.query
    coverage = engine.search(blank_queries(kind, 1), SearchParams.uniform(1, 64, 40)).coverage
    assert coverage is not None
    assert coverage.items_B[0] == 1


def test_bits_of_a_filter_are_sent_where_a_shard_lacks_them(shards: Cluster) -> None:
    chosen = {"filter": {"title": ["Title 1", "Title 2", "Title 3"]}}
    hedged = shards.metric("espalier_router_hedges_total")
    for _ in range(20):
        assert found_by(shards, **chosen) == {"item-1", "item-2", "item-3"}
    with_bits = [query for query in (decode_query(sent) for _, sent, _ in shards.transport.sent) if query.sent_masks]
    hedged = shards.metric("espalier_router_hedges_total") - hedged
    assert 2 <= len(with_bits) <= 4 + hedged  # once for each replica that was asked; a second try brings what the first one lacked
    assert all(bits.digest in (query.masks or ()) for query in with_bits for bits in query.sent_masks.values())


# -- what is logged ------------------------------------------------------------------------------------------------------


def told(caplog: pytest.LogCaptureFixture, begin: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(begin)]


def test_the_log_says_when_a_replica_fails_otherwise_than_before(fresh: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    fresh.transport.dead.add(A)
    until(lambda: f"{A} is dead" in caplog.text)
    fresh.transport.hung.add(A)
    fresh.transport.dead.remove(A)
    until(lambda: f"{A} hangs" in caplog.text)


def test_a_replica_that_always_fails_gets_few_lines_each_with_its_address_once(fresh: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    def wrong(body: bytes) -> None:
        raise ReplicaFailed("garbage", "nonsense\n")

    fresh.transport.faults |= {A: wrong, B: lambda body: b"\0" * 100}
    before = failures(fresh, "garbage")
    until(lambda: fresh.retrieve(**QUERY) and failures(fresh, "garbage") >= before + 6 * LINES)
    for address in (A, B):
        lines = told(caplog, f"shard 0: {address}: ")
        assert len(lines) <= LINES + 1
        assert all(line.count(address) == 1 and line.isprintable() for line in lines)
    assert told(caplog, "shard 0: ")


def test_what_a_replica_lists_besides_costs_no_series_and_few_lines(fresh: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """Neither other models nor other versions of a model that is served, however many and at every look others."""
    caplog.set_level(logging.INFO, "service.router.fleet")
    (own, *_) = fresh.transport.registries[A].shards.described()
    looks = 0

    def changing() -> list[Json]:
        nonlocal looks
        looks += 1
        return [own | {"of": of, "version": 1000 * looks + place} for place in range(50) for of in ("books", "films")]

    fresh.transport.lists[A] = changing
    until(lambda: looks >= LINES + 5)
    samples = [labels for name, labels, _ in fresh.app.state.service.metrics.samples() if name == "espalier_router_replicas"]
    assert {(labels["model"], labels["version"]) for labels in samples} == {("books", "1")}
    assert fresh.metric("espalier_router_replicas") == 4
    lines = told(caplog, f"{A} holds")
    assert 1 <= len(lines) <= LINES
    assert max(map(len, lines)) < 500
    assert any(line.endswith("shard 0 of 2 and 93 more") for line in lines)


def test_nothing_ends_the_following_of_addresses(caplog: pytest.LogCaptureFixture) -> None:
    """Not even a name that cannot be one."""
    config = RouterConfig(shards=("http://127.0.0.1:9", f"dns+http://{'x' * 70}:80"), poll_s=0.05)
    fleet = Fleet(HttpTransport(config), config.shards, config, Metrics())
    fleet.start()
    assert fleet.wait_until_polled(10)
    assert [*fleet.replicas] == ["http://127.0.0.1:9"]
    assert "x" * 70 in caplog.text
    fleet.close()


def test_a_name_that_is_known_no_more_is_logged_once_and_its_addresses_stay(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, looks, known = RouterConfig(shards=("dns+http://shard:9",), poll_s=0.02), 0, True

    async def addresses(self: HttpTransport, name: str) -> Sequence[str]:
        nonlocal looks
        looks += 1
        if not known:
            raise ReplicaFailed("connection", f"{name}: not known")
        return ("http://127.0.0.1:9",)

    def several() -> None:
        enough = looks + 10
        until(lambda: looks >= enough)

    monkeypatch.setattr(HttpTransport, "addresses", addresses)
    fleet = Fleet(HttpTransport(config), config.shards, config, Metrics())
    fleet.start()
    assert fleet.wait_until_polled(10)
    for lines in (1, 2):
        known = False
        several()
        assert told(caplog, "dns+http://shard:9: not known") == ["dns+http://shard:9: not known"] * lines
        assert [*fleet.replicas] == ["http://127.0.0.1:9"]
        known = True
        several()
    fleet.close()
