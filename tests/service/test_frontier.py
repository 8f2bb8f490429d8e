"""POST /models/{name}/frontier: what each beam finds of held-out queries, and what it costs, a line a beam."""

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

from benchmarks.random_bundles import make_bundle
from espalier.bundle_writer import write_bundle
from espalier.checks.heldout import read_heldout
from espalier.engines import open_engine
from espalier.metrics import precision_recall_f
from espalier.search import SearchParams
from espalier.tree import complete_tree
from service.http.frontier_route import MAX_BEAMS, MAX_QUERIES, interval
from tests.service.conversation import Conversation
from tests.service.damaged_models import content_of, draft_of
from tests.service.exported_models import HELD_OUT, exported
from tests.service.running import Json, Running, problem, run

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
    write_bundle(folder / "models" / "books" / "1", draft_of(bare, 1), replace(content_of(bare), heldout=heldout))
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


def test_the_number_of_queries_is_a_choice_and_they_see_the_trained_version_alone(running: Running) -> None:
    few, default = (lines(ask(running, beam_size=[4], **more))[0] for more in ({"queries": 7}, {}))
    assert (few["queries"], default["queries"], default["m"]) == (7, HELD_OUT, 5)
    masks = [mask for _, params in running.engines["books"].calls for mask in params.mask_B or (None,)]
    assert [mask is not None and mask.live_R is None and bool(mask.eligible_N.all()) for mask in masks] == [True] * (7 + HELD_OUT)


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
    assert sum(len(batch) for batch, _ in engine.calls) == 1 + 3  # the rest of the first is not searched


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
    assert [params.beam_size_B.tolist() for _, params in engine.calls] == [[7], [9]] + [[4]] * HELD_OUT
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
