"""What waits for an engine: parts of requests, and jobs that are done between its calls.

Knows their order and what they are expected to take. Does not know threads; the batcher's lock guards both queues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from espalier.search import Engine
from service.batching.admission import Limits
from service.batching.parts import Part, are_apart

T = TypeVar("T")

JOB_PAUSE = 3.0
"""After a job, queries have the engine for so many times as long as it took."""


class PartQueue:
    """Parts in the order of arrival.

    queries  of all of them
    seconds  what they are expected to take, one after the other
    """

    def __init__(self) -> None:
        self._parts: deque[Part] = deque()
        self.queries, self.seconds = 0, 0.0

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, parts: Sequence[Part]) -> None:
        """Put the parts of a request at the end."""
        for part in parts:
            part.waits = True
            self.queries += len(part.queries)
            self.seconds += part.cost_s
        self._parts.extend(parts)

    def remove(self, part: Part) -> None:
        """Take out a part whose request has ended; nothing where it does not wait any more."""
        if part.waits:
            self._parts.remove(part)
            self._left(part)

    def take(self, limits: Limits, now: float) -> list[Part]:
        """The parts of the next call, in the order of arrival; a traced part is alone. Parts that came too late are dropped."""
        taken: list[Part] = []
        size, seconds = 0, 0.0
        while self._parts:
            part = self._parts[0]
            if part.answer.done() or now >= part.deadline:  # the event loop answers it
                self._left(self._parts.popleft())
                continue
            size += len(part.queries)
            seconds += part.cost_s
            if taken and (size > limits.max_batch or seconds > limits.call_s or are_apart(taken[0], part)):
                break
            self._left(self._parts.popleft())
            taken.append(part)
        return taken

    def _left(self, part: Part) -> None:
        part.waits = False
        self.queries -= len(part.queries)
        self.seconds = self.seconds - part.cost_s if self.queries else 0.0


class Jobs:
    """What the engine's thread does between calls, in turn: at any time where no query waits, else with pauses for the queries.

    clock  seconds
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._jobs: deque[Callable[[Engine], None]] = deque()
        self._paused_until = 0.0

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def add(self, job: Callable[[Engine], T]) -> Future[T]:
        """Put a job at the end."""
        done: Future[T] = Future()

        def work(engine: Engine) -> None:
            began = self._clock()
            try:
                done.set_result(job(engine))
            except Exception as error:
                done.set_exception(error)
            ended = self._clock()
            self._paused_until = ended + JOB_PAUSE * (ended - began)

        self._jobs.append(work)
        return done

    def next(self, queries_wait: bool) -> Callable[[Engine], None] | None:
        """The job whose turn it is."""
        if not self._jobs or (queries_wait and self._clock() < self._paused_until):
            return None
        return self._jobs.popleft()
