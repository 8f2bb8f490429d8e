"""Estimates the time that a method needs on a log, from a small part of the work.

Knows a task and a clock. Does not know methods, nor the time that they get: see `training.compare.plan`.

A method's steps are those that it makes on the log by default, without a time limit. A fit may be planned with fewer, so that its learning
rate falls to 0 in time. It has then made that share of the steps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..retrieval.task import Clock, Method, Task

ENOUGH = 0.5
"""The share of its steps, or of its data, that a method must have seen to be judged."""
SPARE = 1.1
"""Factor on the measured time of a step, which may take longer in training."""
FIRST_USERS = 250
"""Training users of the first timed part; each further part has four times as many."""
LONG_ENOUGH_S = 0.5
"""The last timed part takes at least so long, if there are enough users."""
LEAST_S, FULL_S = 1.0, 5.0
"""Smallest estimates: shorter times are not worth measuring."""
TIMED, TIMED_S = 5, 1.5
"""Most timed repetitions, and the seconds after which no further one begins."""


@dataclass(frozen=True)
class Needs:
    """Seconds of choosing and training.

    least_s  until the method may be judged: for ENOUGH of its steps, or for one fit to all data
    full_s   for all steps, or for the whole search over options
    steps    of a fit without a time limit; None for a method without steps
    """

    least_s: float
    full_s: float
    steps: int | None = None

    def share(self, seconds: float) -> float:
        """Of its steps, or of its data: how much the method sees in so many seconds; at most 1."""
        if self.steps is None or seconds < self.least_s:
            return min(1.0, (ENOUGH if self.steps else 1.0) * seconds / max(self.least_s, 1e-9))
        beyond = (seconds - self.least_s) / max(self.full_s - self.least_s, 1e-9)
        return min(1.0, ENOUGH + (1 - ENOUGH) * beyond)


Estimate = Callable[[Task], Needs]
"""Raises the method's error if it cannot be fitted to the log."""


def of_steps(fixed_s: float, step_s: float, steps: int) -> Needs:
    """The needs of a method that makes `steps` steps and takes `fixed_s` besides."""
    return Needs(fixed_s + SPARE * ENOUGH * steps * step_s, fixed_s + SPARE * steps * step_s, steps)


def seconds_each(work: Callable[[], object], clock: Clock) -> float:
    """The median seconds of some repetitions, after a first one that compiles and allocates."""
    work()
    times_s: list[float] = []
    while len(times_s) < TIMED and sum(times_s) < TIMED_S:
        begin = clock()
        work()
        times_s.append(clock() - begin)
    return float(np.median(times_s))


@contextmanager
def silence() -> Iterator[None]:
    """Inside, log only warnings: another process or the whole fit logs the rest."""
    logger = logging.getLogger(__name__.partition(".")[0])
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def by_parts(method: Method, trials: float, once: float = 1) -> Estimate:
    """An estimate for a method whose time grows with the users, from its shortest fits to parts of them.

    trials  about how many shortest fits to all users the search over options takes
    once    how many shortest fits one fit takes
    """

    @silence()
    def estimate(task: Task) -> Needs:
        order_U = np.random.default_rng(task.seed).permutation(task.split.train)
        validation, users = task.validation_pairs(), len(order_U)
        users_of_part, times_s = [0], [0.0]
        size = min(FIRST_USERS, users)
        while True:
            pairs = validation[:: max(1, users // size)]
            part = replace(task, split=replace(task.split, train=np.sort(order_U[:size]), validation=pairs), seconds=0.0)
            if size == min(FIRST_USERS, users):
                method(part)  # compiles
            begin = task.clock()
            method(part)
            users_of_part.append(size)
            times_s.append(task.clock() - begin)
            if size == users or times_s[-1] >= LONG_ENOUGH_S:
                break
            size = min(4 * size, users)
        shortest_s = times_s[-1] + _further_s(users_of_part, times_s, users)
        return Needs(max(LEAST_S, once * shortest_s), max(FULL_S, trials * shortest_s))

    return estimate


def _further_s(users_of_part: Sequence[int], times_s: Sequence[float], users: int) -> float:
    """The seconds for all users beyond those of the largest part.

    The seconds of one more user grow with a power, between 0 and 1, of the users that are there: pairs of items and their neighbours become
    more, too. Three parts show the power; with fewer it is 0. The first entries stand for no users.
    """
    last_s, power = max(0.0, times_s[-1] - times_s[-2]), 0.0
    if len(times_s) > 3 and times_s[-2] > times_s[-3]:
        size, middle, first = users_of_part[-1], users_of_part[-2], users_of_part[-3]
        rates = last_s / (size - middle), (times_s[-2] - times_s[-3]) / (middle - first)
        power = min(1.0, max(0.0, math.log(max(rates[0], 1e-12) / rates[1]) / math.log(size / middle)))
    to_middle, to_last, to_all = (math.pow(count, 1 + power) for count in (users_of_part[-2], users_of_part[-1], users))
    return last_s * (to_all - to_last) / (to_last - to_middle)


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """The smaller of the kernel's memory without swapping and the container's remaining limit (control group v2); 4 GiB if both fail."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        limits = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError):
        limits = []
    try:
        limit = int((cgroup / "memory.max").read_text())  # "max" without one
        limits.append(max(0, limit - int((cgroup / "memory.current").read_text())))
    except (OSError, ValueError):
        pass
    return min(limits, default=4 << 30)
