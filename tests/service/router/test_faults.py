"""Replicas and shards that die, hang, are slow or answer something else: what the router answers then."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from espalier.engines.pipeline import Pipeline
from espalier.engines.stages import Frontier, ShardResult
from espalier.queries import blank_queries
from espalier.search import NO_ITEM, SearchParams
from espalier.shards.layout import shard_items
from espalier.shards.messages import Pin, decode_answer, decode_query, encode_answer
from service.models.loading import LoadedModel
from service.router.config import RouterConfig
from service.router.connections import HttpTransport
from service.router.fleet import Fleet
from service.router.metrics import RouterMetrics
from service.router.replicas import LINES
from service.router.shard_search import ShardSearch
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


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[Cluster]:
    """Two shards with two replicas each."""
    whole = whole_bundle(tmp_path / "models")
    with cluster(tmp_path / "models", shard_folders(whole, tmp_path / "shards", 2, 2), timeout_ms=5000) as found:
        yield found


def asked(shards: Cluster, address: str) -> int:
    return sum(sent == address for sent, *_ in shards.transport.sent)


def loaded(shards: Cluster) -> LoadedModel:
    found = shards.app.state.service.registry.entry("books").loaded
    assert isinstance(found, LoadedModel)
    return found


def failures(shards: Cluster, reason: str) -> float:
    samples = shards.app.state.service.metrics.samples()
    return next(
        float(value) for name, labels, value in samples if name == "espalier_router_failures_total" and labels == {"reason": reason}
    )


def test_a_dead_replica_fails_no_request(shards: Cluster) -> None:
    expected = shards.retrieve(**QUERY)["results"]
    shards.transport.dead.add(A)
    for _ in range(20):
        answer = shards.retrieve(**QUERY)
        assert answer["results"] == expected
        assert answer["coverage"]["items"] == 1
    before = asked(shards, A)
    for _ in range(20):
        shards.retrieve(**QUERY)
    assert asked(shards, A) == before
    shards.transport.dead.clear()
    until(lambda: shards.retrieve(**QUERY) and asked(shards, A) > before)


def test_a_hanging_replica_delays_few_requests_and_is_asked_no_more(shards: Cluster) -> None:
    for _ in range(40):  # the percentile is known
        shards.retrieve(**QUERY)
    shards.transport.hung.add(A)
    before = asked(shards, A)
    began = time.perf_counter()
    answers = [shards.retrieve(**QUERY) for _ in range(40)]
    assert time.perf_counter() - began < 4
    assert [answer["coverage"]["missing"] for answer in answers] == [[]] * 40
    assert 1 <= asked(shards, A) - before <= 8, "half of forty, if it were trusted"
    assert shards.metric("espalier_router_hedges_total") + shards.metric("espalier_router_retries_total") >= 1


def test_garbage_is_never_used(shards: Cluster) -> None:
    expected = shards.retrieve(**QUERY)["results"]
    shards.transport.faults[A] = lambda body: b"\0" * 100
    assert [shards.retrieve(**QUERY)["results"] for _ in range(20)] == [expected] * 20
    assert failures(shards, "garbage") >= 1


def test_an_answer_of_other_item_rows_than_there_are_is_garbage(shards: Cluster) -> None:
    expected = shards.retrieve(**QUERY)["results"]

    async def wild(body: bytes) -> bytes:
        answer = decode_answer(await answer_search(shards.transport.registries[A], body))
        return encode_answer(replace(answer, result=replace(answer.result, item_rows_BM=answer.result.item_rows_BM + 10_000)))

    shards.transport.faults[A] = wild
    assert [shards.retrieve(**QUERY)["results"] for _ in range(20)] == [expected] * 20
    assert failures(shards, "garbage") >= 1


def twice(result: ShardResult, strange: int) -> ShardResult:
    rows_BM = result.item_rows_BM.copy()
    rows_BM[:, 1] = rows_BM[:, 0]
    return replace(result, item_rows_BM=rows_BM)


def of_another_shard(result: ShardResult, strange: int) -> ShardResult:
    rows_BM = result.item_rows_BM.copy()
    rows_BM[:, 0] = strange
    return replace(result, item_rows_BM=rows_BM)


def with_a_frontier(result: ShardResult, strange: int) -> ShardResult:
    return replace(result, frontiers=(Frontier(np.zeros((1, 1), np.int64), np.zeros((1, 1), np.float32)),))


def with_huge_scores(result: ShardResult, strange: int) -> ShardResult:
    return replace(result, scores_BM=np.full_like(result.scores_BM, 3.4e38))


def not_finite(result: ShardResult, strange: int) -> ShardResult:
    return replace(result, finite_B=np.zeros(len(result.count_B), np.bool_))


@pytest.mark.parametrize("spoilt", [twice, of_another_shard, with_a_frontier, with_huge_scores, not_finite])
def test_a_result_that_no_shard_can_find_is_garbage(shards: Cluster, spoilt: Callable[[ShardResult, int], ShardResult]) -> None:
    expected = shards.retrieve(**QUERY)["results"]
    strange = int(shard_items(loaded(shards).bundle.tree, 2)[1][0])

    async def wrong(body: bytes) -> bytes:
        answer = decode_answer(await answer_search(shards.transport.registries[A], body))
        return encode_answer(replace(answer, result=spoilt(answer.result, strange)))

    shards.transport.faults[A] = wrong
    assert [shards.retrieve(**QUERY)["results"] for _ in range(20)] == [expected] * 20
    assert failures(shards, "garbage") >= 1


def test_what_a_shard_says_of_places_without_an_item_does_not_count(shards: Cluster) -> None:
    expected = shards.retrieve(**QUERY)["results"]
    empty = 0

    def padded(address: str) -> Callable[[bytes], Any]:
        async def wrong(body: bytes) -> bytes:
            nonlocal empty
            answer = decode_answer(await answer_search(shards.transport.registries[address], body))
            is_none_BM = answer.result.item_rows_BM == NO_ITEM
            empty += int(is_none_BM.sum())
            keys_BM = np.where(is_none_BM, np.float32(np.inf), answer.result.keys_BM)
            return encode_answer(replace(answer, result=replace(answer.result, keys_BM=keys_BM)))

        return wrong

    shards.transport.faults = {address: padded(address) for address in (A, B)}
    assert shards.retrieve(**QUERY)["results"] == expected
    assert empty


def test_a_search_without_a_deadline_waits_for_a_shard_that_lets_looks_wait(shards: Cluster) -> None:
    engine, kind = loaded(shards).engine, loaded(shards).bundle.manifest.query
    shards.transport.mute |= {A, B}
    until(lambda: shards.metric("espalier_router_replicas") == 2)
    assert shards.retrieve(**QUERY)["coverage"]["missing"] == [0]
    for _ in range(3):
        coverage = engine.search(blank_queries(kind, 1), SearchParams.uniform(1, 64, 40)).coverage
        assert coverage is not None
        assert coverage.items_B[0] == 1


def test_a_search_without_a_deadline_asks_busy_shards_again(shards: Cluster) -> None:
    left = 5

    def full(body: bytes) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise ReplicaFailed("full", "too much to do")

    shards.transport.faults = {A: full, B: full}
    engine, kind = loaded(shards).engine, loaded(shards).bundle.manifest.query
    coverage = engine.search(blank_queries(kind, 1), SearchParams.uniform(1, 64, 40)).coverage
    assert coverage is not None
    assert coverage.items_B[0] == 1
    assert left < 0


def test_the_log_says_when_a_replica_fails_otherwise_than_before(shards: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    shards.transport.dead.add(A)
    until(lambda: f"{A} is dead" in caplog.text)
    shards.transport.hung.add(A)
    shards.transport.dead.remove(A)
    until(lambda: f"{A} hangs" in caplog.text)


@pytest.mark.parametrize("change", [{"version": 2}, {"digest": "0" * 64}, {"index": 1}, {"of": "films"}, {"count": 3}])
def test_an_answer_of_another_version_or_shard_is_counted_and_never_used(shards: Cluster, change: dict[str, Any]) -> None:
    expected = shards.retrieve(**QUERY)["results"]

    async def other(body: bytes) -> bytes:
        answer = decode_answer(await answer_search(shards.transport.registries[A], body))
        pin: Pin = replace(answer.pin, **change)
        return encode_answer(replace(answer, pin=pin))

    shards.transport.faults[A] = other
    assert [shards.retrieve(**QUERY)["results"] for _ in range(20)] == [expected] * 20
    assert shards.metric("espalier_router_mixed_total") >= 1


def test_an_answer_to_another_question_is_counted_and_never_used(shards: Cluster) -> None:
    """One that comes late on a connection that is used again, or by a proxy that confuses two."""
    questions = [QUERY | {"queries": [{"history": [f"item-{i}"]}]} for i in range(6)]
    expected = [shards.retrieve(**question)["results"] for question in questions]
    assert len({str(results) for results in expected}) == len(expected)
    before: list[bytes] = []

    async def the_last_one(body: bytes) -> bytes:
        before.append(await answer_search(shards.transport.registries[A], body))
        return before[max(len(before) - 2, 0)]

    shards.transport.faults[A] = the_last_one
    assert [shards.retrieve(**question)["results"] for _ in range(5) for question in questions] == expected * 5
    assert shards.metric("espalier_router_mixed_total") >= 1


def test_without_a_shard_answers_go_on_and_say_what_they_cover(shards: Cluster) -> None:
    whole = {item["id"] for item in shards.retrieve(**QUERY)["results"][0]["items"]}
    shards.transport.dead |= {A, B}
    answer = shards.retrieve(**QUERY)
    coverage = answer["coverage"]
    assert coverage["missing"] == [0]
    assert (coverage["shards"], coverage["answered"]) == (2, 1)
    assert 0.3 < coverage["items"] < 0.7
    (result,) = answer["results"]
    assert not result["complete"]
    found = {item["id"] for item in result["items"]}
    assert found < whole
    assert len(found) == round(coverage["items"] * len(whole))
    assert shards.retrieve(**QUERY, min_coverage=0.3)["coverage"] == coverage
    refused = shards.client.post("/retrieve", json=QUERY | {"min_coverage": 0.9})
    assert refused.status_code == 503
    assert problem(refused)["detail"].startswith("coverage: got 0.")
    assert "did not answer in time: 0." in problem(refused)["detail"]


@pytest.mark.parametrize(("timeout_ms", "status"), [(200, "503-client"), (1000, "503")])
def test_a_coverage_that_fails_by_a_client_s_own_deadline_is_no_failure_of_the_service(
    tmp_path: Path, timeout_ms: float, status: str
) -> None:
    whole = whole_bundle(tmp_path / "models")
    with cluster(tmp_path / "models", shard_folders(whole, tmp_path / "shards", 2), timeout_ms=1000) as shards:
        shards.retrieve(**QUERY)
        shards.transport.dead.add(A)
        refused = shards.client.post("/retrieve", json=QUERY | {"min_coverage": 1, "timeout_ms": timeout_ms})
        assert refused.status_code == 503
        assert f'espalier_requests_total{{model="books",status="{status}"}} 1.0' in shards.client.get("/metrics").text


def test_without_any_shard_every_request_is_refused(shards: Cluster) -> None:
    shards.transport.dead |= {A, B, *OTHERS}
    refused = shards.client.post("/retrieve", json=QUERY)
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"


def test_an_answer_comes_before_the_deadline_without_a_shard_that_is_slow(shards: Cluster) -> None:
    async def slow(body: bytes) -> None:
        await asyncio.sleep(1)

    shards.transport.faults = {A: slow, B: slow}
    began = time.perf_counter()
    answer = shards.retrieve(**QUERY, timeout_ms=300)
    assert time.perf_counter() - began < 0.6
    assert answer["coverage"]["missing"] == [0]


def test_a_full_replica_is_followed_by_another_one_and_is_no_suspect(shards: Cluster) -> None:
    def full(body: bytes) -> bytes:
        raise ReplicaFailed("full", "too much to do")

    shards.transport.faults[A] = full
    assert all(shards.retrieve(**QUERY)["coverage"]["items"] == 1 for _ in range(30))
    assert failures(shards, "full") >= 5


def test_bits_of_a_filter_are_sent_where_a_shard_lacks_them(shards: Cluster) -> None:
    shards.transport.sent.clear()
    body = QUERY | {"filter": {"title": ["Title 1", "Title 2", "Title 3"]}}
    found = {item["id"] for item in shards.retrieve(**body)["results"][0]["items"]}
    assert found == {"item-1", "item-2", "item-3"}
    for _ in range(20):
        assert {item["id"] for item in shards.retrieve(**body)["results"][0]["items"]} == found
    queries = [decode_query(sent) for _, sent, _ in shards.transport.sent]
    with_bits = [query for query in queries if query.sent_masks]
    assert 2 <= len(with_bits) <= 4  # once for each replica that was asked
    assert all(bits.digest in (query.masks or ()) for query in with_bits for bits in query.sent_masks.values())


def test_a_short_deadline_of_a_customer_makes_nobody_suspect(shards: Cluster) -> None:
    shards.retrieve(**QUERY)

    async def slowly(body: bytes) -> None:
        await asyncio.sleep(0.02)

    shards.transport.faults |= dict.fromkeys((A, B, *OTHERS), slowly)
    for _ in range(8):
        shards.client.post("/retrieve", json=QUERY | {"timeout_ms": 5})
    assert failures(shards, "late") > 0
    engine = loaded(shards).engine
    assert isinstance(engine, Pipeline)
    assert isinstance(engine.tree_search, ShardSearch)
    fleet = engine.tree_search.fleet
    assert {replica.trust for replica in fleet.replicas.values()} == {"trusted"}


def test_what_a_replica_lists_besides_costs_no_series_and_few_lines(shards: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """Neither other models nor other versions of a model that is served, however many and at every look others."""
    caplog.set_level(logging.INFO, "service.router.fleet")
    (own, *_) = shards.transport.registries[A].shards.described()
    looks = 0

    def changing() -> list[Json]:
        nonlocal looks
        looks += 1
        return [own | {"of": of, "version": 1000 * looks + place} for place in range(500) for of in ("books", "films")]

    shards.transport.lists[A] = changing
    until(lambda: looks >= LINES + 5)
    samples = [labels for name, labels, _ in shards.app.state.service.metrics.samples() if name == "espalier_router_replicas"]
    assert {(labels["model"], labels["version"]) for labels in samples} == {("books", "1")}
    assert shards.metric("espalier_router_replicas") == 4
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith(f"{A} holds")]
    assert 1 <= len(lines) <= LINES
    assert max(map(len, lines)) < 500
    assert lines[-1].endswith("shard 0 of 2 and 993 more")


def test_a_replica_that_always_fails_gets_few_lines_each_with_its_address_once(shards: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    def wrong(body: bytes) -> None:
        raise ReplicaFailed("garbage", "nonsense\n")

    shards.transport.faults |= {A: wrong, B: lambda body: b"\0" * 100}

    def failed() -> bool:
        shards.retrieve(**QUERY)
        return failures(shards, "garbage") >= 6 * LINES

    until(failed)
    for address in (A, B):
        lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith(f"shard 0: {address}: ")]
        assert 1 <= len(lines) <= LINES + 1
        assert all(line.count(address) == 1 and line.isprintable() for line in lines)


def test_nothing_ends_the_following_of_addresses(caplog: pytest.LogCaptureFixture) -> None:
    """Not even a name that cannot be one."""
    config = RouterConfig(shards=("http://127.0.0.1:9", f"dns+http://{'x' * 70}:80"), poll_s=0.05)
    fleet = Fleet(HttpTransport(config), config.shards, config, RouterMetrics(Metrics()))
    fleet.start()
    assert fleet.wait_until_looked(10)
    assert [*fleet.replicas] == ["http://127.0.0.1:9"]
    assert "x" * 70 in caplog.text
    fleet.close()
