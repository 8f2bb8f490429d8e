"""Gets one shard's answer to a query, from any of its replicas.

After a failure the request is sent to another replica, once. Replicas that were too busy are asked again until the deadline: one request of
many queries is several calls, of which a shard may refuse some. If a replica takes longer than the shard's 95th percentile and the budget
allows it, the request is sent to a second one too, and the first answer counts. The same happens when the replica stops answering polls. An
answer of another shard or version, or to another request, never counts. Knows replicas and messages. Does not know what an answer is for.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from espalier.errors import InvalidMessage
from espalier.shards.messages import Pin, ShardAnswer, decode_answer

from ..router.fleet import Fleet
from ..router.replicas import UNKNOWN_S, Replica, choose, omitted_text
from ..router.transport import MasksWanted, ReplicaFailed

log = logging.getLogger(__name__)

TRIES = 3
"""Most replicas that one request is sent to: the first, one after a failure, and one beside a slow one."""
PAUSE_S = 0.1
"""Pause before a request is sent again to replicas that were too busy."""
SLACK_S = 0.1
"""How much longer than the call a transport may wait. If its timer fired first, another replica would be asked with no time left."""


@dataclass(frozen=True)
class ShardRequest:
    """A request to one shard.

    body       makes the message of the digests of the masks that the shard asks for, the seconds left, and a number that the answer repeats
    max_bytes  of the answer
    check      raises InvalidMessage if a result cannot be the answer
    """

    pin: Pin
    body: Callable[[Sequence[str], float, int], bytes]
    max_bytes: int
    check: Callable[[ShardAnswer], None]
    headers: Mapping[str, str]


class ShardCall:
    """A request in flight. Belongs to the fleet's loop.

    Its `answer` raises the last ReplicaFailed. Its reason is `late` if the deadline passed.
    """

    def __init__(self, fleet: Fleet, request: ShardRequest, deadline: float, patient: bool = False) -> None:
        """deadline: of time.perf_counter(). patient: try replicas that answer polls late too, and retry late ones until the deadline."""
        self._fleet, self._request, self._deadline, self._patient = fleet, request, deadline, patient
        self._loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[ShardAnswer] = self._loop.create_future()
        self._tasks: dict[Replica, asyncio.Task[None]] = {}  # of the replicas that have not answered yet
        self._tried_replicas: list[Replica] = []
        self._retried = False
        self._busy: ReplicaFailed | None = None  # the failure of one of them that was too busy
        self.began = self.ended = self._tried_at = time.perf_counter()
        self._latencies = fleet.latencies[request.pin.index]
        fleet.budget.first_try()
        self._expiry_timer = self._loop.call_later(max(deadline - time.perf_counter(), 0), self._expire)
        self._hedge_timer = self._loop.call_later(self._latencies.p95_s, self._hedge)
        self.answer.add_done_callback(self._finish)
        if not self._try_another():
            self.answer.set_exception(
                ReplicaFailed("connection", f"no replica of shard {request.pin.index} of {request.pin.count} answers")
            )

    def _try_another(self, may_try: Callable[[], bool] = lambda: True) -> bool:
        """Send the request to one more replica. False if there is none, or if there is one but `may_try` is False."""
        holders = self._fleet.holders(self._request.pin, self._patient)
        replica = choose(holders, self._tried_replicas) if len(self._tried_replicas) < TRIES else None
        if replica is None or not may_try():
            return False
        self._tried_replicas.append(replica)
        self._tasks[replica] = self._loop.create_task(self._try(replica))
        return True

    def _hedge(self) -> None:
        """The replica is slow: send the request to another one too."""
        if self.answer.done() or not self._tasks:
            return
        if self._try_another(self._fleet.budget.take):  # which pays only if there is another one
            self._fleet.metrics.count("espalier_router_hedges_total")

    async def _try(self, replica: Replica) -> None:
        """Send the request to one replica. Its answer counts if it is the first."""
        began = time.perf_counter()
        replica.in_flight += 1
        replica.on_gone.add(self._replica_gone)
        try:
            answer = await self._answer_of(replica)
        except ReplicaFailed as error:
            error.__traceback__ = error.__context__ = None  # they hold this call, as `answer` will hold the error
            self._failed(replica, error)
        except Exception as error:
            log.exception("a question to %s failed", replica.address)
            self._failed(replica, ReplicaFailed("broken", repr(error)))
        else:
            seconds = time.perf_counter() - began
            replica.answered()
            self._latencies.add(seconds)
            self._fleet.metrics.observe("espalier_router_shard_seconds", seconds, self._request.pin.index)
            self._tasks.pop(replica, None)
            self._suspect_first()
            if not self.answer.done():
                self.answer.set_result(answer)
        finally:
            replica.in_flight -= 1
            replica.on_gone.discard(self._replica_gone)

    async def _answer_of(self, replica: Replica) -> ShardAnswer:
        """A replica's checked answer. Raises ReplicaFailed."""
        request, number = self._request, secrets.randbits(63)
        try:
            try:
                body = await self._send(replica, (), number)
            except MasksWanted as wanted:
                body = await self._send(replica, wanted.digests, number)
            answer = decode_answer(body)
            if answer.pin != request.pin:
                raise ReplicaFailed("mixed", f"it answered as {_shard_text(answer.pin)}, asked as {_shard_text(request.pin)}")
            if answer.number != number:
                raise ReplicaFailed("mixed", f"it answered question {answer.number}, asked was {number}")
            request.check(answer)
        except InvalidMessage as error:
            raise ReplicaFailed("garbage", str(error)) from None
        except MasksWanted as error:
            raise ReplicaFailed("garbage", f"it was sent all masks that it lacked: {error}") from None
        return answer

    async def _send(self, replica: Replica, digests: Sequence[str], number: int) -> bytes:
        left_s = self._deadline - time.perf_counter()
        body = self._request.body(digests, left_s, number)
        wait_s = left_s + SLACK_S
        return await self._fleet.transport.send(replica.address, body, self._request.max_bytes, wait_s, self._request.headers)

    def _suspect_first(self) -> None:
        """If another replica answered before the first one, which had a head start, the first is late."""
        if self._tried_replicas[0] in self._tasks:
            self._tried_replicas[0].suspect("late", time.monotonic())

    def _failed(self, replica: Replica, error: ReplicaFailed) -> None:
        """Note a replica's failure, and try another replica, once."""
        metrics, reason = self._fleet.metrics, error.reason
        self._tasks.pop(replica, None)
        metrics.count("espalier_router_failures_total", reason)
        if reason == "mixed":
            metrics.count("espalier_router_mixed_total")
        if reason == "not_served":
            replica.lacks(self._request.pin)
        elif reason not in ("full", "refused") and (reason != "late" or self._had_time()):
            replica.suspect("late" if reason == "late" else "failed", time.monotonic())
        if reason in ("garbage", "mixed", "broken", "refused") and (omitted := replica.failure_log_lines.take()) is not None:
            log.warning("shard %d: %s: %s%s", self._request.pin.index, replica.address, error, omitted_text(omitted))
        if reason == "full" or (self._patient and reason == "late"):
            self._busy = error
        if self.answer.done():
            return
        if not self._retried and self._try_another():
            self._retried = True
            metrics.count("espalier_router_retries_total")
        elif not self._tasks and self._busy is not None and reason != "refused":
            self._loop.call_later(PAUSE_S, self._start_over, self._busy)
        elif not self._tasks:
            self.answer.set_exception(error)

    def _start_over(self, error: ReplicaFailed) -> None:
        """A replica was too busy a moment ago: try it and the others again."""
        self._tried_replicas.clear()
        self._busy = None
        self._tried_at = time.perf_counter()
        if not self.answer.done() and not self._try_another():
            self.answer.set_exception(error)

    def _replica_gone(self, replica: Replica) -> None:
        """A replica has stopped answering polls: try another one, unless two are tried already."""
        if not self.answer.done() and replica in self._tasks and len(self._tasks) == 1 and self._try_another():
            self._fleet.metrics.count("espalier_router_retries_total")

    def _expire(self) -> None:
        if not self.answer.done():
            for replica in self._tasks:
                if self._had_time():
                    replica.suspect("late", time.monotonic())
                self._fleet.metrics.count("espalier_router_failures_total", "late")
            index, count = self._request.pin.index, self._request.pin.count
            self.answer.set_exception(ReplicaFailed("late", f"shard {index} of {count} did not answer in time"))

    def _had_time(self) -> bool:
        """Whether the replicas had the usual time to answer. If not, the deadline was short, which says nothing about them."""
        return time.perf_counter() - self._tried_at >= max(self._latencies.p95_s, UNKNOWN_S)

    def _finish(self, _: asyncio.Future[ShardAnswer]) -> None:
        """Cancel the tries that are still in flight."""
        self.ended = time.perf_counter()
        self._expiry_timer.cancel()
        self._hedge_timer.cancel()
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()  # they hold the error that ends them, and that error this call


def _shard_text(pin: Pin) -> str:
    return f"{pin.of:.64} version {pin.version} shard {pin.index} of {pin.count}, digest {pin.digest:.12}"
