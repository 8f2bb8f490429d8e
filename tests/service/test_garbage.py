"""No end of a request leaves a reference cycle: the collector may not visit for hours what it holds, bodies and versions among it."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from espalier.errors import EspalierError, InvalidInput
from espalier.items import Items
from espalier.live.operations import ItemBody
from espalier.placement.placer import Candidates
from service.http.middleware import RequestInfo
from tests.service.conversation import LINES, Conversation
from tests.service.live_running import ADMIN, Nearest, live_service
from tests.service.own_time import pass_time, settled, turns_until
from tests.service.running import Running, bearer, run, small_model
from tests.service.test_batching import idle

ITEMS = 2048
JSON = {"Content-Type": "application/json"}
FREE, LIMITED, WRITE = "free-key-000000001", "limited-key-000001", "a-key-that-may-write"
KEYS = "".join(
    f'[[keys]]\nname = "{name}"\nkey = "{key}"\nrole = "retrieve"\n{limit}'
    for name, key, limit in (("free", FREE, ""), ("limited", LIMITED, "rate = 0.001\nburst = 1\n"))
)
Scenario = Callable[[Running], Coroutine[Any, Any, None]]


def body(queries: int = 1, **rest: Any) -> bytes:
    many = {"model": "books", "queries": [{"history": []}] * queries, "m": 3, "beam_size": ITEMS, "timeout_ms": 60_000}
    return json.dumps(many | rest).encode()


def begun(running: Running, path: str, *bodies: bytes, more: bool = False, key: str = FREE) -> Conversation:
    talk = Conversation(running, path, (LINES if path.endswith("stream") else JSON) | bearer(key))
    talk.say(*bodies, more=more)
    return talk


async def held(running: Running, path: str, *bodies: bytes) -> Conversation:
    """While the engine searches for it."""
    engine = running.engines["books"]
    engine.go.clear()
    engine.started.clear()
    talk = begun(running, path, *bodies, more=path.endswith("stream"))
    await turns_until(engine.started.is_set)
    return talk


async def over(running: Running, talk: Conversation) -> None:
    """The application has ended, and the engine too: a call of several may be under way when the first one has failed."""
    await asyncio.wait([talk.task])
    running.engines["books"].go.set()
    await idle(running.app.state.service.registry.choose("books", None).batcher)


async def answered(running: Running) -> None:
    for status, content in ((200, body()), (200, body(60)), (422, body(m=0)), (422, b"{"), (404, body(model="no")), (422, body(5000))):
        talk = begun(running, "/retrieve", content)
        assert await talk.head() == status
        await over(running, talk)


async def answered_in_lines(running: Running) -> None:
    talk = begun(running, "/retrieve/stream", body(), body(m=0), b"{", body(model="no"), more=True)
    answers = talk.answers()
    assert [(await anext(answers)).get("status", 200) for _ in range(4)] == [200, 422, 422, 404]
    await talk.leave()
    await over(running, talk)


async def late(running: Running) -> None:
    talk = await held(running, "/retrieve", body(60))
    await pass_time(60)
    assert await talk.head() == 504
    await over(running, talk)


async def failed(running: Running) -> None:
    """In the event loop itself, in a call of the engine's thread, and in one of several calls."""
    for queries in (1, 2, 60):
        running.engines["books"].failure = RuntimeError("broken")
        talk = begun(running, "/retrieve", body(queries))
        assert await talk.head() == 500
        await over(running, talk)


async def hung_up(running: Running) -> None:
    for path in ("/retrieve", "/retrieve/stream"):
        talk = await held(running, path, *[body(60)] * (3 if path.endswith("stream") else 1))
        await asyncio.sleep(0.01)  # a request that is searched for is watched after a moment
        await talk.leave()
        await over(running, talk)


async def hung_up_in_its_body(running: Running) -> None:
    for path in ("/retrieve", "/retrieve/stream"):
        talk = begun(running, path, more=True)
        talk.say_piece(b'{"mod')
        await settled()
        await talk.leave()
        await over(running, talk)


async def silent(running: Running) -> None:
    for path, status in (("/retrieve", 408), ("/retrieve/stream", 200)):
        talk = begun(running, path, more=True)
        talk.say_piece(b'{"mod')
        await pass_time(3600)
        assert await talk.head() == status
        await talk.leave()
        await over(running, talk)


async def unread(running: Running) -> None:
    talk = begun(running, "/retrieve", body(8, m=ITEMS))
    assert await talk.head() == 200
    talk.take(False)
    await pass_time(3600)
    await over(running, talk)


async def unread_in_lines(running: Running) -> None:
    """With an answer that waits to be taken, and lines that wait for the engine."""
    engine = running.engines["books"]
    talk = begun(running, "/retrieve/stream", body(), more=True)
    answers = talk.answers()
    await anext(answers)
    talk.take(False)
    engine.calls.clear()
    talk.say(body())
    await turns_until(lambda: engine.calls)
    await settled()
    engine.go.clear()
    talk.say(body(60), body(60))
    await settled()
    await pass_time(3600)
    await over(running, talk)


async def broken_in_lines(running: Running) -> None:
    """The server cannot send, for a reason that nobody expects."""
    talk = begun(running, "/retrieve/stream", body(), more=True)
    assert await talk.head() == 200
    talk.fails = RuntimeError("broken")
    await over(running, talk)
    assert isinstance(talk.task.exception(), RuntimeError)
    talk.fails = None
    del talk.task  # the error holds this conversation


async def over_a_limit(running: Running) -> None:
    for path in ("/retrieve", "/retrieve/stream"):
        talk = begun(running, path, body(), key=LIMITED)
        await pass_time(60)
        await talk.leave()
        await over(running, talk)


async def without_its_key(running: Running) -> None:
    """It is removed between two lines."""
    keys = running.app.state.service.keys
    talk = begun(running, "/retrieve/stream", body(), more=True)
    answers = talk.answers()
    assert "results" in await anext(answers)
    known, keys._keys = keys._keys, {}
    talk.say(body())
    assert [answer["status"] async for answer in answers] == [401]
    keys._keys = known
    await talk.leave()
    await over(running, talk)


async def refused_by_other_routes(running: Running) -> None:
    for method, path, content, headers, status in (
        ("PUT", "items/a", {"like": ["item-1"]}, bearer(WRITE) | {"If-None-Match": "*"}, 412),
        ("PUT", "items/b", {"like": ["nobody"]}, bearer(WRITE), 422),
        ("PUT", "items/b", {"like": ["item-1"], "fields": {"colour": 3}}, bearer(WRITE), 422),
        ("DELETE", "items/b", None, bearer(WRITE), 404),
        ("GET", "tree/9999", None, {}, 404),
        ("POST", "load", {"version": 9}, bearer(ADMIN), 404),
        ("POST", "unload", {"version": 9}, bearer(ADMIN), 404),
    ):
        answer = await running.client.http.request(method, f"/models/books/{path}", json=content, headers=headers)
        assert answer.status_code == status, answer.text


SCENARIOS = [
    answered,
    answered_in_lines,
    late,
    failed,
    hung_up,
    hung_up_in_its_body,
    silent,
    unread,
    unread_in_lines,
    broken_in_lines,
    over_a_limit,
    without_its_key,
]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service of a `books` of many items, with keys, in which answers that are not taken are soon given up."""
    folder = tmp_path_factory.mktemp("many")
    small_model(folder / "models", items=ITEMS, max_beam_size=ITEMS, max_m=ITEMS)
    keys = folder / "keys.toml"
    keys.write_text(KEYS)
    with run(folder / "models", stream_idle_s=60, write_timeout_s=60, keys_file=keys, max_inline_us=10_000, max_batch=16) as started:
        yield started


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_request_leaves_no_cycle(running: Running, scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("batching.batcher", "http.middleware"):  # the records of a test are kept, with their errors
        monkeypatch.setattr(f"service.{module}.log.disabled", True)
    assert left_in_cycles(running, scenario) == []


class Raising(Nearest):
    """Raises where the evidence names nobody, which `Nearest` would return."""

    def _place(self, body: ItemBody, known: Items) -> Candidates | EspalierError:
        if "nobody" in body.like:
            raise InvalidInput("like", "nobody", "somebody")
        return super()._place(body, known)


def test_a_refusal_of_another_route_leaves_no_cycle(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live_service(models, monkeypatch, Raising, write_keys=WRITE) as live:
        live.put("a", like=("item-1",))
        assert left_in_cycles(live.running, refused_by_other_routes) == []


def left_in_cycles(running: Running, scenario: Scenario) -> list[str]:
    """The classes of this project's objects in the cycles that a scenario leaves the second time; the first may fill caches."""
    running.runner.run(scenario(running))
    running.runner.run(_looked_through())
    gc.disable()
    try:
        running.runner.run(scenario(running))
        return running.runner.run(_looked_through())
    finally:
        gc.enable()


async def _looked_through() -> list[str]:
    found = list[str]()

    def is_over() -> bool:
        gc.collect()
        found.extend(type(one).__name__ for one in gc.garbage if type(one).__module__.startswith(("service.", "espalier.")))
        gc.garbage.clear()
        return bool(found) or not any(isinstance(one, RequestInfo) for one in gc.get_objects())

    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        await turns_until(is_over)  # a thread that searched or parsed lets go of a request a moment after its end
    finally:
        gc.set_debug(0)
    return found
