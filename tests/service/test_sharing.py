"""What takes a while is made once for all who want it at the same time."""

from __future__ import annotations

import asyncio
import threading

import pytest

from service.http.single_flight import SingleFlight
from service.watch.metrics import Metrics
from tests.service.running import Running


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


async def test_those_who_ask_at_the_same_time_get_the_same() -> None:
    making = Making()
    shared = SingleFlight(making)
    first = [asyncio.create_task(shared.get()) for _ in range(20)]
    assert await asyncio.to_thread(making.began.acquire, timeout=20)
    first.append(asyncio.create_task(shared.get()))
    first[0].cancel()  # who hangs up ends it for nobody else
    making.go.set()
    assert await asyncio.gather(*first[1:]) == [1] * 20
    assert await shared.get() == 2


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
    scrapes = [asyncio.create_task(running.client.http.get("/metrics")) for _ in range(20)]
    assert await asyncio.to_thread(rendering.began.acquire, timeout=20)
    assert (await running.client.http.get("/livez")).status_code == 200
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
