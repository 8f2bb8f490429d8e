"""What held-out queries and customers' queries a service shows, and that they are queries which it answers."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pyarrow as pa
import pytest
from starlette.types import Message

from benchmarks.random_bundles import make_bundle, make_linear_bundle
from espalier.bundle import Bundle
from espalier.bundle_writer import write_bundle
from espalier.checks.heldout import read_heldout
from espalier.engines import open_engine
from espalier.manifest import Ranking
from espalier.metrics import precision_recall_f
from espalier.queries import QueryBatch
from espalier.search import SearchParams
from espalier.tree import complete_tree
from service.batching.request_parts import Answer
from service.http import console_routes
from service.http.console_routes import heldout_queries
from service.http.frontier_route import MAX_BEAMS, MAX_QUERIES, interval
from service.retrieval.schemas import Query
from service.watch.query_samples import MAX_BYTES, PER_REQUEST, QUERY_BYTES, QuerySamples, as_json
from tests.espalier.bundle.parts import content_of, draft_of
from tests.service.conversation import Conversation
from tests.service.exported_models import HELD_OUT, exported
from tests.service.running import Json, Running, bearer, document, problem, run

ADMIN = "an-admin-key-of-tests"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return exported(tmp_path_factory.mktemp("heldout"), np.random.default_rng(5))


@pytest.fixture(scope="module")
def measured(bundle: Bundle) -> Iterator[Running]:
    with run(bundle.path.parents[1], lambda opened: open_engine(opened, "cpu")) as started:
        yield started


def shown(running: Running, **params: int) -> list[Json]:
    found: list[Json] = document(running.client.get("/models/books/heldout", params=params))["queries"]
    return found


# -- held-out queries -----------------------------------------------------------------------------------------------------


def test_all_queries_come_with_what_they_should_find_and_the_list_ends_where_it_is_large(
    measured: Running, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = bundle.heldout().to_pylist()
    assert len(table) == HELD_OUT
    wanted = [
        {"query": {"history": row["history"]}, "relevant": row["relevant"], "recall": {m: row[f"recall@{m}"] for m in ("2", "5")}}
        for row in table
    ]
    assert shown(measured, limit=1000) == wanted
    assert shown(measured) == [wanted[i] for i in np.linspace(0, HELD_OUT - 1, 20).astype(int)]
    assert shown(measured, limit=1) == [wanted[0]]
    for one in shown(measured, limit=5):
        items = measured.retrieve(queries=[one["query"]], m=5, beam_size=8)["results"][0]["items"]
        found = {item["id"] for item in items}
        assert len(found & set(one["relevant"])) / len(set(one["relevant"])) == pytest.approx(one["recall"]["5"])
    whole = heldout_queries(bundle, 1000)
    monkeypatch.setattr(console_routes, "MAX_HELDOUT_BYTES", sum(map(len, whole[:3])))
    assert heldout_queries(bundle, 1000) == whole[:4]


def test_features_are_queries_too_and_unknown_relevant_items_are_left_out(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    features = [{"indices": [i], "values": [0.5]} for i in range(3)]
    kind = pa.struct({"indices": pa.list_(pa.int64()), "values": pa.list_(pa.float32())})
    relevant = [["item-1", "no-item"], ["no-item"], ["item-2"]]
    table = pa.table({"features": pa.array(features, kind), "relevant": pa.array(relevant)})
    make_linear_bundle(tmp_path, rng, complete_tree(rng.permutation(8), 2), Ranking(own="log_activation", gamma=1.0), heldout=table)
    with run(tmp_path, lambda opened: open_engine(opened, "cpu")) as running:
        found = running.client.get("/models/linear/heldout").json()["queries"]
        assert found == [
            {"query": {"features": features[0]}, "relevant": ["item-1"], "recall": {}},
            {"query": {"features": features[2]}, "relevant": ["item-2"], "recall": {}},
        ]
        body = {"model": "linear", "queries": [one["query"] for one in found]}
        assert running.client.post("/retrieve", json=body).status_code == 200


# -- customers' queries: only where a setting asks for them, in memory, bounded --------------------------------------------


def query(**fields: object) -> Query:
    return Query.model_validate(fields)


@pytest.mark.settings(admin_keys=ADMIN, sample_queries=2)
def test_the_newest_queries_of_customers_are_kept(running: Running) -> None:
    def body(*items: str) -> Json:
        return {"model": "books", "queries": [{"history": [item]} for item in items]}

    def kept(params: str = "") -> Json:
        found: Json = running.client.get(f"/models/books/samples{params}", headers=bearer(ADMIN)).json()
        return found

    running.client.post("/retrieve", json=body("item-1", "item-2", "item-3"))
    running.client.post("/retrieve", json=body("item-4"), headers={"Espalier-Priority": "background"})
    running.client.post("/retrieve", json=body("item-5") | {"m": 10**6})  # is refused
    assert [one["query"] for one in kept()["queries"]] == [{"history": ["item-3"]}, {"history": ["item-2"]}]
    assert {one["version"] for one in kept()["queries"]} == {1}
    assert kept()["most"] == 2
    assert [one["query"] for one in kept("?limit=1")["queries"]] == [{"history": ["item-3"]}]
    assert kept("?version=2")["queries"] == []
    running.retrieve(queries=[kept()["queries"][0]["query"]])


def test_samples_are_bounded_in_number_bytes_and_by_request() -> None:
    samples = QuerySamples(10_000, lambda: 1.0)
    samples.note("books", 1, [query(text="x" * QUERY_BYTES)])  # too large
    samples.note("books", 1, [query(text=str(i)) for i in range(100)])
    assert len(samples.of("books", 1000)) == PER_REQUEST
    for _ in range(2 * MAX_BYTES // 60_000):
        samples.note("books", 1, [query(text="x" * 60_000)])
    kept = samples.of("books", 10_000)
    assert MAX_BYTES - 61_000 < sum(len(one.query) for one in kept) <= MAX_BYTES
    samples.note("films", 1, [query(text="film")])
    samples.forget("books")
    assert (samples.of("books", 10), len(samples.of("films", 10))) == ([], 1)
    for _ in range(MAX_BYTES // 61_000):
        samples.note("books", 1, [query(text="x" * 60_000)])
    assert len(samples.of("films", 10)) == 1, "what was forgotten takes no room"
    few = QuerySamples(3)
    for i in range(10):
        few.note("books", 1, [query(text=str(i))])
    assert [orjson.loads(one.query)["text"] for one in few.of("books", 10)] == ["9", "8", "7"]


def test_what_was_not_set_is_not_shown() -> None:
    samples = QuerySamples(1, lambda: 12.5)
    samples.note("books", 3, [query(history=["a"], exclude_seen=True)])
    kept = {"at": 12.5, "version": 3, "query": {"history": ["a"], "exclude_seen": True}}
    assert orjson.loads(as_json(samples.of("books", 1), 1)) == {"queries": [kept], "most": 1}


# -- POST /models/{name}/frontier: what each beam finds of held-out queries, and what it costs, a line a beam -------------


PATH = "/models/books/frontier"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder whose model has no golden queries, so that an engine of a test may serve it."""
    return written(tmp_path_factory.mktemp("served"), "item-0")


@pytest.fixture(scope="module")
def refusing(models: Path) -> Iterator[Running]:
    """A service for requests that it refuses."""
    with run(models) as running:
        yield running


def written(folder: Path, relevant: str) -> Path:
    """A models folder; `relevant` is the item that all held-out queries should find."""
    rng = np.random.default_rng(6)
    bare = make_bundle(folder / "bare", rng, complete_tree(rng.permutation(64), 2), name="books", beam_size=8, m=5)
    histories = [[f"item-{rng.integers(64)}"] for _ in range(HELD_OUT)]
    heldout = pa.table({"history": pa.array(histories, pa.list_(pa.string())), "relevant": pa.array([[relevant]] * HELD_OUT)})
    write_bundle(folder / "models" / "books" / "1", draft_of(bare), content_of(bare, heldout=heldout))
    return folder / "models"


def lines(answer: httpx.Response) -> list[Json]:
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-ndjson"), answer.text
    return [orjson.loads(line) for line in answer.content.splitlines()]


def ask(running: Running, **body: Any) -> httpx.Response:
    return running.client.post(PATH, json=body)


def test_each_beam_has_a_line_with_its_recall_interval_and_time(tmp_path: Path) -> None:
    bundle = exported(tmp_path, np.random.default_rng(5))
    held_out, engine = read_heldout(bundle), open_engine(bundle, "cpu")
    with run(bundle.path.parents[1], lambda opened: open_engine(opened, "cpu")) as running:
        found = lines(ask(running, beam_size=[8, 1, 4], m=5))
    assert [line["beam_size"] for line in found] == [8, 1, 4]
    assert [line["default"] for line in found] == [True, False, False]
    for line in found:
        rows_BM = engine.search(held_out.queries, SearchParams.uniform(HELD_OUT, line["beam_size"], 5)).item_rows_BM
        recall_B = precision_recall_f(rows_BM, held_out.relevant, 5)[1]
        assert line["recall"] == pytest.approx(recall_B.mean(), abs=1e-6)
        assert line["recall_ci"] == pytest.approx(interval(recall_B))
        assert line["recall_ci"][0] < line["recall"] < line["recall_ci"][1]
        assert (line["m"], line["queries"]) == (5, HELD_OUT)
        assert line["ms_per_query"] > 0
    assert found[0]["recall"] > found[1]["recall"]


def test_the_first_call_with_a_beam_is_not_timed(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    batcher, searched = running.app.state.service.registry.entries["books"].loaded.batcher, set[int]()
    search = batcher.search

    async def slow_at_first(queries: QueryBatch, params: SearchParams, **rest: Any) -> Answer:
        beam = int(params.beam_size_B[0])
        answer: Answer = await search(queries, params, **rest)
        answer = replace(answer, engine_s=1e-3 if beam in searched else 5.0)
        searched.add(beam)
        return answer

    monkeypatch.setattr(batcher, "search", slow_at_first)
    assert [line["ms_per_query"] for line in lines(ask(running, beam_size=[4, 8]))] == [1.0, 1.0]


def test_the_number_of_queries_is_a_choice_and_they_see_the_trained_version_alone(running: Running) -> None:
    few, default = (lines(ask(running, beam_size=[4], **more))[0] for more in ({"queries": 7}, {}))
    assert (few["queries"], default["queries"], default["m"]) == (7, HELD_OUT, 5)
    masks = [mask for _, params in running.engines["books"].calls for mask in params.mask_B or (None,)]
    assert [mask is not None and mask.live_R is None and bool(mask.eligible_N.all()) for mask in masks] == [True] * (1 + 7 + 1 + HELD_OUT)


def test_an_interval_holds_the_mean_and_stays_a_share() -> None:
    assert interval(np.array([0.0, 1.0])) == (0.0, 1.0)
    assert interval(np.array([0.5])) == (0.0, 1.0)  # one query says nothing of others
    low, high = interval(np.tile([0.0, 1.0], 500))
    assert (low, high) == pytest.approx((0.5 - 1.96 * 0.5 / 1000**0.5, 0.5 + 1.96 * 0.5 / 1000**0.5), abs=1e-4)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"beam_size": []}, "beam_size"),
        ({"beam_size": [4] * (MAX_BEAMS + 1)}, "beam_size"),
        ({"beam_size": [4, 0]}, "beam_size[1]"),
        ({"beam_size": [4, 10**9]}, "beam_size[1]"),
        ({"m": 10**6}, "m"),
        ({"queries": MAX_QUERIES + 1}, "queries"),
        ({"more": 1}, "more"),
    ],
)
def test_a_wrong_value_is_422_and_named(refusing: Running, body: Json, field: str) -> None:
    answer = ask(refusing, **{"beam_size": [4]} | body)
    assert answer.status_code == problem(answer)["status"] == 422
    assert problem(answer)["errors"][0]["field"] == field
    assert not refusing.engines["books"].calls


def test_a_version_that_is_not_there_is_404_and_one_without_held_out_queries_409(refusing: Running, tmp_path: Path) -> None:
    assert problem(ask(refusing, beam_size=[4], version=9))["status"] == 404
    with run(written(tmp_path, "nobody")) as running:
        assert problem(ask(running, beam_size=[4]))["status"] == 409


def begun(running: Running, kind: type[Conversation] = Conversation, **body: Any) -> Conversation:
    """A request whose client stays until it leaves."""
    talk = kind(running, PATH, {"Content-Type": "application/json"})
    talk.say(orjson.dumps(body), more=False)
    return talk


async def test_one_is_measured_at_a_time_and_ends_when_its_client_goes(running: Running) -> None:
    engine, http = running.engines["books"], running.client.http
    engine.go.clear()
    talk = begun(running, beam_size=[4, 5, 6])
    assert await asyncio.to_thread(engine.started.wait, 10)
    others = await asyncio.gather(*(http.post(PATH, json={"beam_size": [4]}) for _ in range(10)))
    assert [(answer.status_code, answer.headers["retry-after"]) for answer in others] == [(429, "1")] * 10
    await talk.leave()
    await talk.task
    assert await talk.head() == 200
    assert talk.silent
    engine.go.set()
    assert len(lines(await http.post(PATH, json={"beam_size": [4], "queries": 3}))) == 1
    assert sum(len(batch) for batch, _ in engine.calls) == 1 + 1 + 3  # the rest of the first is not searched


async def test_the_next_one_may_come_with_the_last_line(running: Running) -> None:
    body: Json = {"beam_size": [4, 5], "queries": 3}
    next_ones: list[int] = []

    class AsksAgain(Conversation):
        sent = 0

        async def _send(self, message: Message) -> None:
            self.sent += 1
            if self.sent == 3:  # the head, and two lines
                next_ones.append((await running.client.http.post(PATH, json=body)).status_code)
            await super()._send(message)

    talk = begun(running, AsksAgain, **body)
    await talk.task
    assert next_ones == [200]


async def test_customers_overtake_it_and_are_not_counted_with_it(running: Running) -> None:
    engine, http = running.engines["books"], running.client.http
    batcher = running.app.state.service.registry.entries["books"].loaded.batcher

    def customer(beam_size: int) -> asyncio.Task[httpx.Response]:
        body = {"queries": [{"history": ["item-1"]}], "m": 1, "beam_size": beam_size}
        return asyncio.create_task(http.post("/retrieve", json=body))

    engine.go.clear()
    first = customer(7)
    assert await asyncio.to_thread(engine.started.wait, 10)
    talk = begun(running, beam_size=[4])
    while not batcher._background:  # its first query waits
        await asyncio.sleep(0)
    second = customer(9)
    while not batcher.depth:
        await asyncio.sleep(0)
    engine.go.set()
    assert [(await answer).status_code for answer in (first, second)] == [200, 200]
    await talk.task
    assert [params.beam_size_B.tolist() for _, params in engine.calls] == [[7], [9]] + [[4]] * (1 + HELD_OUT)
    text = (await http.get("/metrics")).text
    assert 'espalier_queries_total{model="books"} 2.0' in text
    assert 'espalier_requests_total{model="books",status="200"} 2.0' in text


def test_a_failing_engine_ends_the_answer_with_a_problem_document(running: Running) -> None:
    running.engines["books"].failure = RuntimeError("secret")
    found = lines(ask(running, beam_size=[4, 5]))
    assert ([line["status"] for line in found], "secret" in str(found)) == ([500], False)
    assert len(lines(ask(running, beam_size=[4, 5]))) == 2


async def test_a_version_that_is_dropped_is_measured_no_longer_and_not_kept(running: Running) -> None:
    engine, entry = running.engines["books"], running.app.state.service.registry.entries["books"]
    engine.go.clear()
    gc.disable()
    try:
        talk = begun(running, beam_size=[4, 5])
        assert await asyncio.to_thread(engine.started.wait, 10)
        kept, entry.ready = weakref.ref(entry.ready[1]), {}
        loaded, entry.loaded = entry.loaded, None
        engine.go.set()
        await talk.task
        assert [line["status"] async for line in talk.answers()] == [503]
        assert kept() is loaded
        del loaded, talk
        assert kept() is None
    finally:
        gc.enable()
