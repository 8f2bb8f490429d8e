"""The transport over deployment handles: answers, failures and waits, and which versions a shard serves. Ray is not started."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator, Mapping, Sequence
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


class Deployment:
    """A handle.

    answers  of searches in turn, the last again and again; None: never
    all_say  what its replicas say when all are asked
    """

    def __init__(self) -> None:
        self.search = SimpleNamespace(remote=self._remote)
        self.answers: list[tuple[int, bytes] | Exception | None] = [(200, b"found")]
        self.all_say: Sequence[Listed] | Exception = [[FIRST]]
        self.calls: list[Response] = []
        self.broadcasts = 0

    def broadcast(self, method_name: str) -> SimpleNamespace:
        assert method_name == "shards"
        self.broadcasts += 1
        return SimpleNamespace(results_async=self._all)

    def _remote(self, body: bytes) -> Response:
        self.calls.append(Response(self._search(body)))
        return self.calls[-1]

    async def _search(self, body: bytes) -> tuple[int, bytes]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        status, content = answer
        return status, body + b" " + content if status == 200 else content

    async def _all(self, timeout_s: float) -> Sequence[Listed]:
        await asyncio.sleep(0)
        if isinstance(self.all_say, Exception):
            raise self.all_say
        return self.all_say


@pytest.fixture
def deployment() -> Deployment:
    return Deployment()


@pytest.fixture
def transport(deployment: Deployment) -> Transport:
    return HandleTransport({"books-shards-0": deployment})


MOST = len(b"asked found")


def send(transport: Transport, timeout_s: float = 5, most: int = MOST) -> bytes:
    return asyncio.run(transport.send("books-shards-0/1", b"asked", most, timeout_s, {}))


def held(transport: Transport, timeout_s: float = 5) -> frozenset[Pin]:
    return asyncio.run(transport.held("books-shards-0/1", timeout_s))


def versions(found: frozenset[Pin]) -> list[int]:
    return sorted(pin.version for pin in found)


def test_a_deployment_has_an_address_for_each_try(transport: Transport) -> None:
    addresses = asyncio.run(transport.addresses("books-shards-0"))
    assert len({*addresses}) == 3
    for address in addresses:
        assert asyncio.run(transport.send(address, b"asked", MOST, 5, {})) == b"asked found"


@pytest.mark.parametrize(
    ("answers", "reason", "says"),
    [
        ([(410, b"")], "not_served", ""),
        ([(429, b"")], "full", ""),
        ([(504, b"")], "late", ""),
        ([(422, b"")], "refused", ""),
        ([(409, b"")], "garbage", "digests of masks were expected"),
        ([(200, b"found!")], "garbage", "12 bytes, expected at most 11"),
        ([DEAD], "connection", "ActorUnavailableError"),
    ],
)
def test_what_went_wrong_has_a_reason_and_one_line(
    transport: Transport, deployment: Deployment, answers: list[Any], reason: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment.answers = answers
    monkeypatch.setattr("deploy.ray.handles.NOTICED_S", 0.05)
    with pytest.raises(ReplicaFailed) as raised:
        send(transport)
    assert raised.value.reason == reason
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_masks_that_a_shard_lacks_are_named(transport: Transport, deployment: Deployment) -> None:
    deployment.answers = [(409, orjson.dumps(["a", "b"]))]
    with pytest.raises(MasksWanted) as raised:
        send(transport)
    assert raised.value.digests == ("a", "b")


def test_a_dead_replica_that_ray_still_chooses_is_asked_past(transport: Transport, deployment: Deployment) -> None:
    deployment.answers = [*[DEAD] * 5, (200, b"found")]
    assert send(transport) == b"asked found"
    assert len(deployment.calls) == 6


def test_what_is_late_or_given_up_is_cancelled_in_the_replica_too(transport: Transport, deployment: Deployment) -> None:
    deployment.answers = [None]
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
    assert [call.cancelled for call in deployment.calls] == [True, True]


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
    with pytest.raises(ReplicaFailed) as failed:
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
