"""The transport over deployment handles: answers, failures and waits, and which versions a shard serves. Ray is not started."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'espalier[ray]'")

from ray.exceptions import ActorUnavailableError
from ray.serve.exceptions import DeploymentUnavailableError

from deploy.ray.handles import KEPT_S, HandleTransport
from espalier.shards.messages import Pin
from service.router.transport import MasksWanted, ReplicaFailed, Transport

SHARD = {"of": "books", "digest": "d" * 64, "index": 0, "count": 2, "engine": "compiled-cpu"}
FIRST, SECOND, THIRD = (SHARD | {"version": version} for version in (1, 2, 3))
DEAD = ActorUnavailableError("the actor is gone\nand a long trace", None)
Listed = Sequence[Mapping[str, Any]]


class Response:
    """A call of one replica; `work` makes its result."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work, self.cancelled = work, False

    def __await__(self) -> Generator[Any, None, Any]:
        return self._work.__await__()

    def cancel(self) -> None:
        self.cancelled = True


class Method:
    """A method of a deployment; every call of it is kept."""

    def __init__(self, answer: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._answer = answer
        self.calls: list[Response] = []

    def remote(self, *arguments: Any) -> Response:
        self.calls.append(Response(self._answer(*arguments)))
        return self.calls[-1]


class Broadcast:
    def __init__(self, found: Sequence[Listed] | Exception) -> None:
        self._found = found

    async def results_async(self, timeout_s: float) -> Sequence[Listed]:
        await asyncio.sleep(0)
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


class Deployment:
    """A handle. answer: of a search, None: never; all_say: what its replicas say when all are asked."""

    def __init__(self) -> None:
        self.search = Method(self._search)
        self.answer: tuple[int, bytes] | Exception | None = (200, b"found")
        self.all_say: Sequence[Listed] | Exception = [[FIRST]]
        self.broadcasts = 0

    def broadcast(self, method_name: str) -> Broadcast:
        assert method_name == "shards"
        self.broadcasts += 1
        return Broadcast(self.all_say)

    async def _search(self, body: bytes) -> tuple[int, bytes]:
        if self.answer is None:
            await asyncio.Event().wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        assert self.answer is not None
        return self.answer[0], body + b" " + self.answer[1]


@pytest.fixture
def deployment() -> Deployment:
    return Deployment()


@pytest.fixture
def transport(deployment: Deployment) -> Transport:
    return HandleTransport({"books-shards-0": deployment})


MOST = len(b"asked found")


def send(transport: Transport, timeout_s: float = 5) -> bytes:
    return asyncio.run(transport.send("books-shards-0/1", b"asked", MOST, timeout_s, {}))


def held(transport: Transport, timeout_s: float = 5) -> frozenset[Pin]:
    return asyncio.run(transport.held("books-shards-0/1", timeout_s))


def versions(found: frozenset[Pin]) -> list[int]:
    return sorted(pin.version for pin in found)


def test_a_deployment_has_an_address_for_each_try(transport: Transport) -> None:
    addresses = asyncio.run(transport.addresses("books-shards-0"))
    assert len({*addresses}) == 3
    for address in addresses:
        assert asyncio.run(transport.send(address, b"asked", MOST, 5, {})) == b"asked found"


def test_an_answer_that_is_longer_than_it_may_be_is_garbage(transport: Transport) -> None:
    with pytest.raises(ReplicaFailed, match="11 bytes, expected at most 10") as failed:
        asyncio.run(transport.send("books-shards-0/0", b"asked", MOST - 1, 5, {}))
    assert failed.value.reason == "garbage"


def test_an_answer_is_its_body_and_a_status_what_went_wrong(transport: Transport, deployment: Deployment) -> None:
    assert send(transport) == b"asked found"
    deployment.answer = (409, b"")
    with pytest.raises(ReplicaFailed, match="digests of masks were expected"):
        send(transport)
    for status, reason in ((410, "not_served"), (429, "full"), (504, "late"), (422, "refused")):
        deployment.answer = (status, b"")
        with pytest.raises(ReplicaFailed) as raised:
            send(transport)
        assert raised.value.reason == reason


def test_masks_that_a_shard_lacks_are_named(deployment: Deployment) -> None:
    async def wants() -> tuple[int, bytes]:
        return 409, orjson.dumps(["a", "b"])

    deployment.search = Method(lambda body: wants())
    with pytest.raises(MasksWanted) as raised:
        send(HandleTransport({"books-shards-0": deployment}))
    assert raised.value.digests == ("a", "b")


def test_a_replica_that_died_has_failed_in_one_line(transport: Transport, deployment: Deployment) -> None:
    deployment.answer = DEAD
    with pytest.raises(ReplicaFailed) as raised:
        send(transport)
    assert raised.value.reason == "connection"
    assert "\n" not in str(raised.value)


def test_a_dead_replica_that_ray_still_chooses_is_asked_past(transport: Transport, deployment: Deployment) -> None:
    failures = [DEAD, DEAD]

    async def search(body: bytes) -> tuple[int, bytes]:
        if failures:
            raise failures.pop()
        return 200, body

    deployment.search = Method(search)
    assert send(transport) == b"asked"
    assert len(deployment.search.calls) == 3


def test_what_is_late_or_given_up_is_cancelled_in_the_replica_too(transport: Transport, deployment: Deployment) -> None:
    deployment.answer = None
    with pytest.raises(ReplicaFailed) as raised:
        send(transport, timeout_s=0.01)
    assert raised.value.reason == "late"

    async def give_up() -> None:
        task = asyncio.create_task(transport.send("books-shards-0/0", b"asked", MOST, 5, {}))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    assert [call.cancelled for call in deployment.search.calls] == [True, True]


def test_a_shard_serves_what_all_its_replicas_serve(transport: Transport, deployment: Deployment) -> None:
    deployment.all_say = [[FIRST, SECOND], [SECOND, THIRD]]
    assert versions(held(transport)) == [2]
    deployment.all_say = [[FIRST, SECOND], [SECOND, FIRST]]
    assert versions(held(transport)) == [1, 2]


def test_no_replica_is_no_shard(transport: Transport, deployment: Deployment) -> None:
    assert versions(held(transport)) == [1]
    deployment.all_say = DeploymentUnavailableError.__new__(DeploymentUnavailableError)
    with pytest.raises(ReplicaFailed, match="no replica runs"):
        held(transport)


@pytest.mark.parametrize("broken", [TimeoutError(), DEAD])
def test_while_a_replica_hangs_what_all_said_before_counts(transport: Transport, deployment: Deployment, broken: Exception) -> None:
    deployment.all_say = broken
    with pytest.raises(ReplicaFailed, match="not all replicas say what they serve"):
        held(transport)
    deployment.all_say = [[FIRST, SECOND], [SECOND, THIRD]]
    held(transport)
    deployment.all_say = broken
    assert versions(held(transport)) == [2]


def test_what_all_said_before_is_forgotten_where_one_is_silent_for_too_long(
    transport: Transport, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("deploy.ray.handles.time", SimpleNamespace(monotonic=lambda: now))
    held(transport)
    deployment.all_say = TimeoutError()
    now += KEPT_S
    assert versions(held(transport)) == [1]
    now += 0.1
    with pytest.raises(ReplicaFailed, match="not all replicas say what they serve") as failed:
        held(transport)
    assert failed.value.reason == "late"
    deployment.all_say = [[SECOND]]
    assert versions(held(transport)) == [2]


@pytest.mark.parametrize("all_say", [[[FIRST]], TimeoutError()])
def test_all_addresses_of_a_deployment_are_looked_at_with_one_question(deployment: Deployment, all_say: Any) -> None:
    transport, deployment.all_say = HandleTransport({"books-shards-0": deployment}), all_say

    async def look() -> list[frozenset[Pin] | BaseException]:
        looks = [transport.held(address, 5) for address in await transport.addresses("books-shards-0")]
        return await asyncio.gather(*looks, return_exceptions=True)

    for number in (1, 2):
        found = asyncio.run(look())
        assert len(found) == 3
        assert [str(one) for one in found] == [str(found[0])] * 3
        assert deployment.broadcasts == number


def test_a_look_that_is_given_up_does_not_end_that_of_other_addresses(transport: Transport, deployment: Deployment) -> None:
    async def look() -> frozenset[Pin]:
        first, second = (asyncio.create_task(transport.held(f"books-shards-0/{number}", 5)) for number in range(2))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    assert versions(asyncio.run(look())) == [1]
    assert deployment.broadcasts == 1
