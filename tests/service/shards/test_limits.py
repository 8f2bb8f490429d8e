"""What a shard refuses: messages that are wrong or ask for too much, and those that are for another shard."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.memory_lists import MemoryLists
from espalier.queries import HistoryKind, QueryBatch, VectorKind
from espalier.search import SearchParams
from espalier.shards.messages import MEDIA_TYPE, MaskBits, ShardQuery, encode_query
from espalier.text.sparse_rows import SparseRows
from service.shards import search as search_module
from tests.service.running import Json, Running, problem, run
from tests.service.shards.cutting import cut, pin_of, post, queries_of, query_for, search, whole_bundle

MAX_QUERIES, MAX_VALUES = 8, 200


@pytest.fixture(scope="module")
def service(shards: list[Bundle]) -> Iterator[Running]:
    folder = shards[0].path.parent.parent
    limits: dict[str, Any] = {"max_queries": MAX_QUERIES, "max_search_values": MAX_VALUES, "max_search_bytes": 100_000, "max_explained": 2}
    with run(folder, partial(open_engine, device="cpu"), mask_cache_bytes=3 * shards[0].tree.node_count, **limits) as running:
        yield running


def a_query(whole: Bundle, shard: Bundle, batch: int = 2, beam_size: int = 3, m: int = 4, **more: Any) -> ShardQuery:
    return query_for(whole, shard, queries_of(whole, batch), SearchParams.uniform(batch, beam_size, m), **more)


def refused(service: Running, query: ShardQuery | bytes, status: int = 422) -> Json:
    answer = post(service, query)
    assert answer.status_code == status, answer.text
    return problem(answer)


def count(service: Running, reason: str) -> float:
    found = service.app.state.service.metrics.counters["espalier_shard_refused_total"].labels(reason)
    return float(found._value.get())


def test_limits_of_beam_and_m_are_those_of_the_manifest(service: Running, whole: Bundle, shards: list[Bundle]) -> None:
    search(service, a_query(whole, shards[0], beam_size=64))
    before = count(service, "invalid")
    assert refused(service, a_query(whole, shards[0], beam_size=65))["errors"][0]["field"] == "beam_size"
    assert count(service, "invalid") == before + 1
    for m in (0, -1, 1025, 1 << 62):
        query = replace(a_query(whole, shards[0], batch=1), m_B=np.array([m]))
        assert refused(service, query)["errors"][0]["field"] == "m"


def test_a_message_holds_at_most_so_many_queries_and_an_answer_so_many_results(
    service: Running, whole: Bundle, shards: list[Bundle]
) -> None:
    search(service, a_query(whole, shards[0], MAX_QUERIES, m=MAX_VALUES // MAX_QUERIES))
    assert refused(service, a_query(whole, shards[0], MAX_QUERIES + 1))["errors"][0]["field"] == "queries"
    assert refused(service, a_query(whole, shards[0], MAX_QUERIES, m=MAX_VALUES // MAX_QUERIES + 1))["errors"][0]["field"] == "m"
    assert refused(service, replace(a_query(whole, shards[0], MAX_QUERIES, beam_size=26), frontier=True))["errors"][0]["field"] == "m"


def test_traces_are_for_few_queries(service: Running, whole: Bundle, shards: list[Bundle]) -> None:
    search(service, replace(a_query(whole, shards[0], 2), trace=True))
    assert refused(service, replace(a_query(whole, shards[0], 3), trace=True))["errors"][0]["field"] == "trace"


def test_no_more_masks_than_queries_and_than_there_is_room_for(service: Running, whole: Bundle, shards: list[Bundle]) -> None:
    bits = [MaskBits(np.full((shards[0].tree.item_count + 7) // 8, number, np.uint8)) for number in range(4)]
    sent = {one.digest: one for one in bits}
    four = a_query(whole, shards[0], 4, masks=tuple(sent), sent_masks=sent)
    assert refused(service, four)["errors"][0] == {"field": "sent", "value": "'4 masks'", "expected": "at most 3"}
    three = dict(list(sent.items())[:3])
    search(service, a_query(whole, shards[0], 4, masks=(*three, None), sent_masks=three))
    assert refused(service, a_query(whole, shards[0], 2, masks=(None, None), sent_masks=three))["errors"][0]["expected"] == "at most 2"
    gauge = service.app.state.service.metrics.gauges["espalier_shard_mask_bytes"].labels("0", 1)
    assert gauge._value.get() == 3 * shards[0].tree.node_count


def test_a_shard_asks_for_masks_that_it_does_not_hold(service: Running, whole: Bundle, shards: list[Bundle]) -> None:
    size = (shards[1].tree.item_count + 7) // 8
    one, other = (MaskBits(np.full(size, number, np.uint8)) for number in (255, 15))
    before = count(service, "unknown_masks")
    answer = post(service, a_query(whole, shards[1], masks=(one.digest, other.digest), sent_masks={one.digest: one}))
    assert answer.status_code == 409
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == [other.digest]
    assert count(service, "unknown_masks") == before + 1
    search(service, a_query(whole, shards[1], masks=(one.digest, one.digest)))


def test_a_mask_of_one_shard_is_not_held_for_another(service: Running, whole: Bundle, shards: list[Bundle]) -> None:
    bits = MaskBits(np.full((shards[0].tree.item_count + 7) // 8, 77, np.uint8))
    search(service, a_query(whole, shards[0], masks=(bits.digest, None), sent_masks={bits.digest: bits}))
    assert post(service, a_query(whole, shards[1], masks=(bits.digest, None))).json() == [bits.digest]


@pytest.mark.parametrize(
    "changed", [{"of": "films"}, {"version": 2}, {"digest": "0" * 64}, {"index": 1 << 40}, {"index": -1}, {"count": 3}, {"of": "x" * 9999}]
)
def test_another_shard_version_or_layout_is_not_served(
    service: Running, whole: Bundle, shards: list[Bundle], changed: dict[str, Any]
) -> None:
    before = count(service, "not_served")
    refusal = refused(service, replace(a_query(whole, shards[0]), pin=replace(pin_of(shards[0]), **changed)), 410)
    assert refusal["detail"].endswith("is not served here.")
    assert len(refusal["detail"]) < 300
    assert count(service, "not_served") == before + 1


def spoilt(**changed: Any) -> Callable[[ShardQuery], ShardQuery]:
    return lambda query: replace(query, **changed)


@pytest.mark.parametrize(
    ("field", "spoil"),
    [
        ("states", spoilt(states_BLS=None)),
        ("states_BLS", spoilt(states_BLS=np.zeros((2, 1, 4), np.float32))),
        ("states_BLS", spoilt(states_BLS=np.zeros((2, 4, 9), np.float32))),
        ("states", spoilt(states_BLS=np.full((2, 4, 4), np.inf, np.float32))),
        ("states", spoilt(states_BLS=np.full((2, 4, 4), np.nan, np.float32))),
        ("exclude", spoilt(exclude_BE=np.full((2, 1), 1 << 40))),
        ("exclude", spoilt(exclude_BE=np.full((2, 1), -2))),
        ("queries", spoilt(queries=QueryBatch(HistoryKind(length=5), np.full((2, 5), 1 << 40)))),
        ("queries", spoilt(queries=QueryBatch(HistoryKind(length=5), np.full((2, 5), -2)))),
        ("kind", spoilt(queries=QueryBatch(HistoryKind(length=4), np.full((2, 4), -1)))),
        ("kind", spoilt(queries=QueryBatch(VectorKind(width=4), np.zeros((2, 4), np.float32)))),
        ("memory.values", spoilt(memory=MemoryLists(np.array([0, 0, 1]), np.array([9]), np.array([3e38], np.float32)))),
        ("masks", spoilt(masks=("0", None), sent_masks={(bits := MaskBits(np.zeros(99, np.uint8))).digest: bits})),
    ],
)
def test_what_does_not_fit_the_shard_is_refused_by_its_name(
    service: Running, whole: Bundle, shards: list[Bundle], field: str, spoil: Callable[[ShardQuery], ShardQuery]
) -> None:
    assert refused(service, spoil(a_query(whole, shards[0])))["errors"][0]["field"] == field


def test_numbers_of_a_memory_that_the_shard_does_not_hold_are_harmless(service: Running, whole: Bundle, shards: list[Bundle]) -> None:
    lists = MemoryLists(np.array([0, 2, 3]), np.array([-5, 1 << 60, 7]), np.ones(3, np.float32))
    histories = QueryBatch(HistoryKind(length=5), np.full((2, 5), 1 << 60))  # live items of the router; nobody reads them here
    assert search(service, replace(a_query(whole, shards[0]), memory=lists, queries=histories)).result.count_B.tolist() == [4, 4]


def test_a_body_has_a_largest_size_of_its_own(service: Running) -> None:
    refused(service, b"\0" * 100_000)
    refused(service, b"\0" * 100_001, 413)
    answer = service.client.post("/retrieve", content=b" " * (1 << 20), headers={"content-type": "application/json"})
    assert answer.status_code == 422  # that of other routes is as it was


def test_only_the_media_type_of_messages_is_taken(service: Running) -> None:
    answer = service.client.post("/internal/search", content=b"{}", headers={"content-type": "application/json"})
    assert answer.status_code == 415
    assert MEDIA_TYPE in answer.json()["detail"]


def test_a_deadline_that_has_passed_is_504(service: Running, whole: Bundle, shards: list[Bundle]) -> None:
    before = count(service, "late")
    refused(service, a_query(whole, shards[0], timeout_ms=1e-6), 504)
    assert count(service, "late") == before + 1


def test_an_answer_that_is_written_after_its_deadline_is_not_given(
    service: Running, whole: Bundle, shards: list[Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    written, passed_s = search_module._written, [0.0]

    def written_late(*given: Any) -> bytes:
        passed_s[0] = 3600.0
        return written(*given)

    monkeypatch.setattr(search_module, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() + passed_s[0]))
    search(service, a_query(whole, shards[0]))
    monkeypatch.setattr(search_module, "_written", written_late)
    refused(service, a_query(whole, shards[0]), 504)


def test_answers_that_are_being_made_hold_a_share_of_the_memory(service: Running, whole: Bundle, shards: list[Bundle]) -> None:
    served, before = service.app.state.service.registry.shards, count(service, "full")
    with served.room(4 * MAX_VALUES - 7):
        search(service, a_query(whole, shards[0], batch=1, m=7))
        refused(service, a_query(whole, shards[0], batch=1, m=8), 429)
    assert count(service, "full") == before + 1
    search(service, a_query(whole, shards[0], batch=1, m=8))


def test_random_bytes_in_a_message_are_never_an_error_of_the_service(service: Running, whole: Bundle, shards: list[Bundle]) -> None:
    bits = MaskBits(np.full((shards[0].tree.item_count + 7) // 8, 60, np.uint8), (np.array([3]),))
    more: dict[str, Any] = {"masks": (bits.digest, None), "sent_masks": {bits.digest: bits}, "memory": MemoryLists(
        np.array([0, 1, 2]), np.array([9, 30]), np.ones(2, np.float32)
    )}  # fmt: skip
    bodies = [encode_query(replace(a_query(whole, shards[0], **kind), frontier=True)) for kind in (more, {})]
    rng = np.random.default_rng(0)
    statuses = set()
    logging.disable(logging.CRITICAL)
    try:
        for number in range(200):
            body = bytearray(bodies[number % 2])
            begin = int.from_bytes(body[:8], "little") + 8 if number % 4 < 2 else 0
            for _ in range(int(rng.integers(1, 5))):
                body[rng.integers(begin, len(body))] = rng.integers(0, 256)
            statuses.add(post(service, bytes(body)).status_code)
    finally:
        logging.disable(logging.NOTSET)
    assert 422 in statuses
    assert statuses <= {200, 409, 410, 422, 504}


WRAPPED = [0, 2**63 - 1, -(2**63), -1, 4]
"""Offsets whose differences, in 64 bits, are never below 0."""


def test_a_memory_whose_offsets_wrap_is_refused(service: Running, whole: Bundle, shards: list[Bundle]) -> None:
    lists = MemoryLists(np.array(WRAPPED), np.arange(1, 5), np.ones(4, np.float32))
    assert refused(service, a_query(whole, shards[0], 4, memory=lists))["errors"][0]["field"] == "memory.offset"


def test_features_whose_offsets_wrap_are_refused(tmp_path: Path) -> None:
    linear = whole_bundle(tmp_path / "models", "linear")
    shard = cut(linear, tmp_path / "shards")[0]
    rows = SparseRows(np.arange(5), np.arange(4, dtype=np.int32), np.ones(4, np.float32), linear.chunks.width)
    queries = QueryBatch(linear.manifest.query, rows)
    good = encode_query(query_for(linear, shard, queries, SearchParams.uniform(4, 3, 4)))
    with run(tmp_path / "shards", partial(open_engine, device="cpu")) as running:
        assert post(running, good).status_code == 200
        answer = refused(running, good.replace(np.arange(5).tobytes(), np.array(WRAPPED).tobytes()))
        assert "features.indptr" in str(answer["errors"][0])
