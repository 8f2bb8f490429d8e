"""One shard's answer to a query, whichever of its replicas gives it.

A replica that fails is followed by another one, once. One that takes longer than the shard's 95th percentile gets company, where the budget
allows it, and the first answer counts; one that does not even answer a look is followed, too. An answer of another shard or version than
was asked for, or to another question, never counts. Knows replicas and messages. Does not know what an answer is for.
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

from ..router.fleet import HEDGE_UNKNOWN_S, Fleet
from ..router.replicas import Replica, after, choose
from ..router.transport import MasksWanted, ReplicaFailed

log = logging.getLogger(__name__)

TRIES = 3
"""Replicas that one query is sent to at most: the first, one after a failure, and one beside a slow one."""
PAUSE_S = 0.1
"""Before those are asked again that were too busy."""


@dataclass(frozen=True)
class Question:
    """What one shard is asked.

    body    of the digests of masks that the shard wants the bits of, the seconds that are left, and a number that its answer repeats
    most    bytes that the answer may have
    check   raises InvalidMessage where a result cannot be the answer
    """

    pin: Pin
    body: Callable[[Sequence[str], float, int], bytes]
    most: int
    check: Callable[[ShardAnswer], None]
    headers: Mapping[str, str]


class Asking:
    """A question on its way. Belongs to the fleet's loop.

    Its `answer` raises ReplicaFailed, that of the last failure; reason `late` where the deadline passed.
    """

    def __init__(self, fleet: Fleet, question: Question, deadline: float, patient: bool = False) -> None:
        """deadline: point of time.perf_counter(). patient: until then, ask those too that let looks wait, and again who was too busy."""
        self._fleet, self._question, self._deadline, self._patient = fleet, question, deadline, patient
        self._loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[ShardAnswer] = self._loop.create_future()
        self._tries: dict[Replica, asyncio.Task[None]] = {}
        self._tried: list[Replica] = []
        self._retried = False
        self.began = self.ended = time.perf_counter()
        self._latencies = fleet.latencies(question.pin.index)
        fleet.budget.first_try()
        self._late = self._loop.call_later(max(deadline - time.perf_counter(), 0), self._expire)
        self._hedge = self._loop.call_later(self._latencies.p95_s, self._try_beside)
        self.answer.add_done_callback(self._finish)
        if not self._try_another():
            self.answer.set_exception(
                ReplicaFailed("connection", f"no replica of shard {question.pin.index} of {question.pin.count} answers")
            )

    def _try_another(self) -> bool:
        """Send the question to one more replica. False where none is left."""
        holders = self._fleet.holders(self._question.pin, self._patient)
        replica = choose(holders, self._tried) if len(self._tried) < TRIES else None
        if replica is None:
            return False
        self._tried.append(replica)
        self._tries[replica] = self._loop.create_task(self._try(replica))
        return True

    def _try_beside(self) -> None:
        """Ask a second replica beside a slow one, or a third where one has failed before."""
        if self.answer.done() or not self._tries:
            return
        if self._fleet.budget.take() and self._try_another():
            self._fleet.metrics.count("espalier_router_hedges_total")

    async def _try(self, replica: Replica) -> None:
        """Ask one replica, and take its answer where it is the first."""
        began = time.perf_counter()
        replica.under_way += 1
        replica.waiting.add(self._lost)
        try:
            answer = await self._answer_of(replica)
        except ReplicaFailed as error:
            self._failed(replica, error)
        except Exception as error:
            log.exception("a question to %s failed", replica.address)
            self._failed(replica, ReplicaFailed("broken", repr(error)))
        else:
            seconds = time.perf_counter() - began
            replica.answered()
            self._latencies.add(seconds)
            self._fleet.metrics.observe("espalier_router_shard_seconds", seconds, self._question.pin.index)
            self._tries.pop(replica, None)
            self._overtaken()
            if not self.answer.done():
                self.answer.set_result(answer)
        finally:
            replica.under_way -= 1
            replica.waiting.discard(self._lost)

    async def _answer_of(self, replica: Replica) -> ShardAnswer:
        """A replica's answer, checked. Raises ReplicaFailed."""
        question, number = self._question, secrets.randbits(63)
        try:
            try:
                body = await self._sent(replica, (), number)
            except MasksWanted as wanted:
                body = await self._sent(replica, wanted.digests, number)
            answer = decode_answer(body)
            if answer.pin != question.pin:
                raise ReplicaFailed("mixed", f"it answered as {_shown(answer.pin)}, asked as {_shown(question.pin)}")
            if answer.number != number:
                raise ReplicaFailed("mixed", f"it answered question {answer.number}, asked was {number}")
            question.check(answer)
        except InvalidMessage as error:
            raise ReplicaFailed("garbage", str(error)) from None
        except MasksWanted as error:
            raise ReplicaFailed("garbage", f"it was sent all masks that it lacked: {error}") from None
        return answer

    async def _sent(self, replica: Replica, wanted: Sequence[str], number: int) -> bytes:
        left_s = self._deadline - time.perf_counter()
        body = self._question.body(wanted, left_s, number)
        return await self._fleet.transport.send(replica.address, body, self._question.most, left_s, self._question.headers)

    def _overtaken(self) -> None:
        """The first replica of all had a head start: where another one was faster, it lets one wait."""
        if self._tried[0] in self._tries:
            self._tried[0].suspect("late", time.monotonic())

    def _failed(self, replica: Replica, error: ReplicaFailed) -> None:
        """Another replica's turn, once."""
        metrics, reason = self._fleet.metrics, error.reason
        self._tries.pop(replica, None)
        metrics.count("espalier_router_failures_total", reason)
        if reason == "mixed":
            metrics.count("espalier_router_mixed_total")
        if reason == "not_served":
            replica.lacks(self._question.pin)
        elif reason not in ("full", "refused") and (reason != "late" or self._was_patient()):
            replica.suspect("late" if reason == "late" else "failed", time.monotonic())
        if reason in ("garbage", "mixed", "broken", "refused") and (left_out := replica.failures_told.take()) is not None:
            log.warning("shard %d: %s: %s%s", self._question.pin.index, replica.address, error, after(left_out))
        if self.answer.done():
            return
        if not self._retried and self._try_another():
            self._retried = True
            metrics.count("espalier_router_retries_total")
        elif not self._tries and self._patient and reason in ("full", "late"):
            self._loop.call_later(PAUSE_S, self._ask_again, error)
        elif not self._tries:
            self.answer.set_exception(error)

    def _ask_again(self, error: ReplicaFailed) -> None:
        """All were too busy a moment ago."""
        self._tried.clear()
        if not self.answer.done() and not self._try_another():
            self.answer.set_exception(error)

    def _lost(self, replica: Replica) -> None:
        """A replica does not even say what it holds: ask another one, unless one is asked already."""
        if not self.answer.done() and replica in self._tries and len(self._tries) == 1 and self._try_another():
            self._fleet.metrics.count("espalier_router_retries_total")

    def _expire(self) -> None:
        if not self.answer.done():
            for replica in self._tries:
                if self._was_patient():
                    replica.suspect("late", time.monotonic())
                self._fleet.metrics.count("espalier_router_failures_total", "late")
            index, count = self._question.pin.index, self._question.pin.count
            self.answer.set_exception(ReplicaFailed("late", f"shard {index} of {count} did not answer in time"))

    def _was_patient(self) -> bool:
        """Whether whoever has not answered is slow, or the question's deadline is short: customers say it."""
        return time.perf_counter() - self.began >= max(self._latencies.p95_s, HEDGE_UNKNOWN_S)

    def _finish(self, _: asyncio.Future[ShardAnswer]) -> None:
        """Give up what is still under way."""
        self.ended = time.perf_counter()
        self._late.cancel()
        self._hedge.cancel()
        for task in self._tries.values():
            task.cancel()


def _shown(pin: Pin) -> str:
    return f"{pin.of:.64} version {pin.version} shard {pin.index} of {pin.count}, digest {pin.digest:.12}"
