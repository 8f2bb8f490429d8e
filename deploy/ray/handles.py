"""The router's transport over Ray's deployment handles.

A handle stands for all replicas of a shard: Ray knows which are alive and chooses the one that gets a message. When an address fails or is
slow, the router's fleet tries another one. A deployment therefore has as many addresses as the fleet makes tries: with each, Ray chooses a
replica again.
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
from service.router.shard_call import TRIES
from service.router.transport import ReplicaFailed, answer_body, parse_shard_list

PAUSE_S = 0.1
"""Pause between two calls after Ray chose a dead replica."""
NOTICED_S = 5.0
"""Seconds in which Ray notices a dead replica, even on a busy machine. Until then it chooses the replica again and again."""
KEPT_S = 60.0
"""How long the last list of shards is valid while a replica does not answer. Ray notices a dead replica within 2 s, and one that hangs
after three health checks of 5 s; with two busy cores its successor answers after 16 s."""


class HandleTransport:
    """Sends messages to deployments. An address is NAME/TRY."""

    def __init__(self, handles: Mapping[str, Any]) -> None:
        """handles: of Ray's deployments, by name."""
        self._handles = handles
        # By the deployment's name: the shards that all its replicas served last, and when; and the poll in flight.
        self._served: dict[str, tuple[frozenset[Pin], float]] = {}
        self._polls: dict[str, asyncio.Task[frozenset[Pin]]] = {}

    async def send(self, address: str, body: bytes, max_bytes: int, timeout_s: float, headers: Mapping[str, str]) -> bytes:
        """The body of one replica's whole answer. Raises ReplicaFailed, MasksWanted."""
        name = address.rpartition("/")[0]
        status, answer = await _search(name, self._handles[name], body, timeout_s)
        if len(answer) > max_bytes:
            raise ReplicaFailed("garbage", f"{name}: {len(answer)} bytes, expected at most {max_bytes}")
        return bytes(answer_body(status, answer))

    async def addresses(self, name: str) -> Sequence[str]:
        """One address for each try."""
        return [f"{name}/{number}" for number in range(TRIES)]

    async def served_shards(self, address: str, timeout_s: float) -> frozenset[Pin]:
        """The shards that every replica of the deployment serves: a message may reach any of them. Raises ReplicaFailed.

        If a replica hangs or has just died, the last complete answer counts: Ray is about to replace the replica. All addresses of a
        deployment share one poll of its replicas.
        """
        name = address.rpartition("/")[0]
        poll = self._polls.get(name)
        if poll is None or poll.done():
            poll = self._polls[name] = asyncio.create_task(self._served_by_all(name, timeout_s))
        return await asyncio.shield(poll)  # a cancelled caller does not end the poll for the others

    async def _served_by_all(self, name: str, timeout_s: float) -> frozenset[Pin]:
        try:
            lists = await self._handles[name].broadcast("shards").results_async(timeout_s=timeout_s)
        except DeploymentUnavailableError:
            raise ReplicaFailed("connection", f"{name}: no replica runs") from None
        except (TimeoutError, RayError, RayServeException):
            served, polled_at = self._served.get(name, (frozenset(), -math.inf))
            if time.monotonic() - polled_at > KEPT_S:
                raise ReplicaFailed("late", f"{name}: not all replicas say what they serve") from None
            return served
        served = frozenset.intersection(*(parse_shard_list(orjson.dumps({"shards": shards})) for shards in lists))
        self._served[name] = served, time.monotonic()
        return served

    def forget(self, address: str) -> None:
        """Nothing to free: Ray owns the handles."""

    async def close(self) -> None:
        """Nothing to free: Ray owns the handles."""


async def _search(name: str, handle: Any, body: bytes, timeout_s: float) -> Any:
    """A replica's answer to a search. Raises ReplicaFailed.

    Until Ray notices that a replica has died, it may choose it again because it seems idle. The call is therefore repeated for NOTICED_S.
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
            response.cancel()  # otherwise the replica would finish the search
        if isinstance(error, asyncio.CancelledError):
            raise
        raise ReplicaFailed("late", f"{name}: no answer within {timeout_s:g} s") from None
    except BackPressureError as error:
        raise ReplicaFailed("full", f"{name}: {error}") from None
    except (RayError, RayServeException) as error:
        raise ReplicaFailed("connection", f"{name}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from None
