"""Scans take few threads, few wait for one, and none waits or runs past its deadline: completion, and all that is scanned alike."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from espalier.items import ItemTable
from service.batching.priority import Turns
from service.errors import DeadlinePassed, QueueFull
from service.http.single_flight import SingleFlight
from service.retrieval import completion
from service.retrieval.scans import MAX_SCANS, MAX_WAITING, Scans
from service.watch.metrics import Metrics
from tests.service.own_time import settled
from tests.service.running import Running


@pytest.fixture
def items() -> ItemTable:
    return ItemTable.build(pa.table({"id": [f"item-{i}" for i in range(40)], "title": [f"Title {i}" for i in range(40)]}))


class Completer:
    """Completions of one process."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.scans = Scans("completions", timeout_s, clock)

    async def complete(self, items: ItemTable, prefix: str, limit: int) -> list[completion.Completion]:
        return await self.scans.run(lambda check: completion.completions(items, None, prefix, limit, check))


class Held:
    """Scans that begin and do not end before `go`; how many ran at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.began = threading.Event(), threading.Semaphore(0)
        self.running = self.most = self.total = 0
        self._counting, self._scan = threading.Lock(), completion.completions
        monkeypatch.setattr(completion, "completions", self._held)

    def _held(self, *arguments: Any) -> Any:
        with self._counting:
            self.running, self.total = self.running + 1, self.total + 1
            self.most = max(self.most, self.running)
        self.began.release()
        assert self.go.wait(20)
        try:
            return self._scan(*arguments)
        finally:
            with self._counting:
                self.running -= 1


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    found = Held(monkeypatch)
    yield found
    found.go.set()


async def begun(held: Held, scans: int = MAX_SCANS) -> None:
    for _ in range(scans):
        assert await asyncio.to_thread(held.began.acquire, timeout=20)


async def test_few_scans_run_and_few_wait(items: ItemTable, held: Held) -> None:
    completer = Completer(20.0)
    accepted = [asyncio.create_task(completer.complete(items, "item-1", 100)) for _ in range(MAX_SCANS + MAX_WAITING)]
    await begun(held)
    for _ in range(3):
        with pytest.raises(QueueFull) as raised:
            await completer.complete(items, "item-1", 100)
        assert raised.value.headers == (("Retry-After", "1"),)
    held.go.set()
    for found in await asyncio.gather(*accepted):
        assert [one["id"] for one in found] == ["item-1", *(f"item-1{i}" for i in range(10))]
    assert (held.most, held.total) == (MAX_SCANS, MAX_SCANS + MAX_WAITING)
    assert len(await completer.complete(items, "title 2", 3)) == 3  # there is room again


async def test_a_scan_whose_client_has_gone_counts_until_it_ends(items: ItemTable, held: Held) -> None:
    completer = Completer(20.0)
    gone = [asyncio.create_task(completer.complete(items, "", 1)) for _ in range(MAX_SCANS)]
    await begun(held)
    for task in gone:
        task.cancel()
    await asyncio.wait(gone)
    waiting = asyncio.create_task(completer.complete(items, "", 1))
    await settled()
    assert held.total == MAX_SCANS
    held.go.set()
    assert len(await waiting) == 1
    assert held.most == MAX_SCANS


async def test_a_scan_ends_at_its_deadline(items: ItemTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "SCANNED_ROWS", 10)
    looked: list[float] = []

    def clock() -> float:
        looked.append(len(looked))
        return looked[-1]  # a second passes between two looks

    with pytest.raises(DeadlinePassed):
        await Completer(3.0, clock).complete(items, "nothing", 1)
    assert len(looked) == 4  # the request, its turn, and two of four slices
    found = await Completer(3.0, clock).complete(items, "item-1", 2)
    assert found == [{"id": "item-1", "title": "Title 1"}, {"id": "item-10", "title": "Title 10"}]


SCANNED = ["items?prefix=x", "facets?column=title", "tree/0", "tree?item=item-1", "heldout"]


async def test_few_scans_of_each_kind_are_answered_at_a_time(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    for scans in (running.app.state.service.scans, running.app.state.service.completions):
        monkeypatch.setattr(scans, "_turns", Turns("scans", MAX_SCANS, 0))
    for address in SCANNED:
        flood = [running.client.http.get(f"/models/books/{address}") for _ in range(10)]
        statuses = [answer.status_code for answer in await asyncio.gather(*flood)]
        assert sorted(statuses) == [200] * MAX_SCANS + [429] * (10 - MAX_SCANS), address
        assert (await running.client.http.get(f"/models/books/{address}")).status_code == 200


# -- what takes a while is made once for all who want it at the same time -------------------------------------------------


class Making:
    """Makes the number of its calls, once it may."""

    def __init__(self) -> None:
        self.calls, self.go, self.began = 0, threading.Event(), threading.Semaphore(0)
        self.failure: Exception | None = None

    def __call__(self) -> int:
        self.calls += 1
        self.began.release()
        assert self.go.wait(20)
        if self.failure is not None:
            raise self.failure
        return self.calls


@pytest.mark.parametrize("keep", [False, True])
async def test_a_failure_is_everybodys_and_is_not_kept(keep: bool) -> None:
    making = Making()
    making.failure = RuntimeError("no")
    shared = SingleFlight(making, keep)
    waiting = [asyncio.create_task(shared.get()) for _ in range(3)]
    making.go.set()
    failed = await asyncio.gather(*waiting, return_exceptions=True)
    assert [str(error) for error in failed] == ["no"] * 3
    making.failure = None
    assert await shared.get() == 2


@pytest.fixture
def rendering(monkeypatch: pytest.MonkeyPatch) -> Making:
    """What metrics are rendered by, in a service that starts later."""
    making, render = Making(), Metrics.render

    def rendered(metrics: Metrics) -> bytes:
        making()
        return render(metrics)

    monkeypatch.setattr(Metrics, "render", rendered)
    return making


async def test_scrapes_at_the_same_time_share_one_rendering(rendering: Making, running: Running) -> None:
    scrapes = [asyncio.create_task(running.client.http.get("/metrics")) for _ in range(21)]
    assert await asyncio.to_thread(rendering.began.acquire, timeout=20)
    assert (await running.client.http.get("/livez")).status_code == 200
    scrapes.pop(0).cancel()  # who hangs up ends it for nobody else
    rendering.go.set()
    answers = await asyncio.gather(*scrapes)
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    assert rendering.calls == 1
    assert "espalier_workers 1.0" in (await running.client.http.get("/metrics")).text
    assert rendering.calls == 2


def test_the_description_of_the_interface_is_made_once(running: Running) -> None:
    app, described = running.app, 0
    plain = app.openapi

    def counted() -> dict[str, object]:
        nonlocal described
        described += 1
        return plain()

    app.openapi = counted  # type: ignore[method-assign]  # counts what is asked

    async def scenario() -> None:
        answers = await asyncio.gather(*(running.client.http.get("/openapi.json") for _ in range(20)))
        assert {answer.content for answer in answers} == {answers[0].content}
        assert answers[0].headers["content-type"] == "application/json"

    running.client.runner.run(scenario())
    running.client.get("/openapi.json")
    assert described == 1
