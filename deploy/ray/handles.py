"""The router's transport over Ray's deployment handles.

A handle stands for all replicas of a shard: which of them gets a message, which are alive and how many there are is Ray's affair. When an
address fails or is slow, the router's fleet tries another one. It gets as many addresses for a deployment as it makes tries, so that a
further try is Ray's choice of a replica again.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

from espalier.shards.messages import Pin
from service.router.asking import TRIES
from service.router.transport import ReplicaFailed, answered, held_of

PAUSE_S = 0.1
"""Between two calls where a replica was found dead."""
NOTICED_S = 5.0
"""Seconds in which Ray notices a dead replica, on a busy machine too; until then it chooses it again and again."""
KEPT_S = 60.0
"""How long what all replicas have said counts while one of them says nothing. Ray notices a dead one within 2 s and one that hangs after
three looks of 5 s; with two busy cores another one answers after 16 s."""


class HandleTransport:
    """Sends messages to deployments. An address is NAME/TRY."""

    def __init__(self, handles: Mapping[str, Any]) -> None:
        """handles: of Ray's deployments, by name."""
        self._handles = handles
        # By the deployment's name: what all its replicas said last, and when; and the question that is under way to all of them.
        self._served: dict[str, tuple[frozenset[Pin], float]] = {}
        self._asked: dict[str, asyncio.Task[frozenset[Pin]]] = {}

    async def send(self, address: str, body: bytes, most: int, timeout_s: float, headers: Mapping[str, str]) -> bytes:
        """The body of the answer of one replica, once Ray has brought all of it. Raises ReplicaFailed, MasksWanted."""
        name = address.rpartition("/")[0]
        status, answer = await _searched(name, self._handles[name], body, timeout_s)
        if len(answer) > most:
            raise ReplicaFailed("garbage", f"{name}: {len(answer)} bytes, expected at most {most}")
        return bytes(answered(status, answer))

    async def addresses(self, name: str) -> Sequence[str]:
        """One for each try."""
        return [f"{name}/{number}" for number in range(TRIES)]

    async def held(self, address: str, timeout_s: float) -> frozenset[Pin]:
        """The shards that every replica of the deployment serves: a message may reach any of them. Raises ReplicaFailed.

        Where one of them does not say so, because it hangs or has just died, what all said before counts: Ray is about to replace it.
        The addresses of a deployment are looked at together, and its replicas are asked once for all of them.
        """
        name = address.rpartition("/")[0]
        asked = self._asked.get(name)
        if asked is None or asked.done():
            asked = self._asked[name] = asyncio.create_task(self._served_by_all(name, timeout_s))
        return await asyncio.shield(asked)  # who gives up does not end it for the others

    async def _served_by_all(self, name: str, timeout_s: float) -> frozenset[Pin]:
        try:
            found = await self._handles[name].broadcast("shards").results_async(timeout_s=timeout_s)
        except DeploymentUnavailableError:
            raise ReplicaFailed("connection", f"{name}: no replica runs") from None
        except (TimeoutError, RayError, RayServeException):
            served, said_at = self._served.get(name, (frozenset(), -math.inf))
            if time.monotonic() - said_at > KEPT_S:
                raise ReplicaFailed("late", f"{name}: not all replicas say what they serve") from None
            return served
        served = frozenset.intersection(*(held_of(orjson.dumps({"shards": shards})) for shards in found))
        self._served[name] = served, time.monotonic()
        return served

    def forget(self, address: str) -> None:
        """Nothing is held: handles are Ray's."""

    async def close(self) -> None:
        """Nothing is held: handles are Ray's."""


async def _searched(name: str, handle: Any, body: bytes, timeout_s: float) -> Any:
    """What a replica answers to a search. Raises ReplicaFailed.

    Until Ray has noticed that a replica died, it may choose it again, for it is idle: the call is made again and again for NOTICED_S.
    """
    response, noticed_at = None, time.monotonic() + NOTICED_S
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                response = handle.search.remote(body)
                try:
                    return await response
                except RayActorError:
                    if time.monotonic() >= noticed_at:
                        raise
                    await asyncio.sleep(PAUSE_S)
    except (TimeoutError, asyncio.CancelledError) as error:
        if response is not None:
            response.cancel()  # Ray would let the replica finish what nobody waits for
        if isinstance(error, asyncio.CancelledError):
            raise
        raise ReplicaFailed("late", f"{name}: no answer within {timeout_s:g} s") from None
    except BackPressureError as error:
        raise ReplicaFailed("full", f"{name}: {error}") from None
    except (RayError, RayServeException) as error:
        raise ReplicaFailed("connection", f"{name}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from None
