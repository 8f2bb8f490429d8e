"""How much time a method needs on a log, from a small part of the work.

Knows a task and a clock. Does not know methods, nor what they get: see `training.compare.plan`.

A method's steps are those that it makes on that log with its defaults, if no time is set. A fit that is planned with fewer, so that its
learning rate falls to 0 in time, has made that share of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..retrieval.task import Clock, Method, Task

ENOUGH = 0.5
"""The share of its steps, or of its data, that a method must have seen to be judged."""
SPARE = 1.1
"""A step may take longer in training than when it is measured."""
FIRST_USERS = 250
"""Training users of the first part that is counted; each further part has four times as many."""
LONG_ENOUGH_S = 0.5
"""A part that takes so long says what the whole takes."""
LEAST_S, FULL_S = 1.0, 5.0
"""Any method is given so much: what is shorter is not worth measuring."""
TIMED, TIMED_S = 5, 1.5
"""Repetitions that are timed: so many, or fewer within so many seconds."""


@dataclass(frozen=True)
class Needs:
    """Seconds of choosing and training.

    least_s  until the method may be judged: for ENOUGH of its steps, or for all of its data once
    full_s   for all steps, or for the whole search over options
    steps    as a fit without a time limit makes them; None for a method that has none
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
"""Raises as the method itself would where it cannot be fitted to the log."""


def of_steps(fixed_s: float, step_s: float, steps: int) -> Needs:
    """Of a method that makes so many steps, and takes `fixed_s` besides."""
    return Needs(fixed_s + SPARE * ENOUGH * steps * step_s, fixed_s + SPARE * steps * step_s, steps)


def seconds_each(work: Callable[[], object], clock: Clock) -> float:
    """The median of some repetitions, after a first one that compiles and allocates."""
    work()
    taken: list[float] = []
    while len(taken) < TIMED and sum(taken) < TIMED_S:
        begin = clock()
        work()
        taken.append(clock() - begin)
    return float(np.median(taken))


@contextmanager
def silence() -> Iterator[None]:
    """Log warnings alone, for what another process or a whole fit logs too."""
    logger = logging.getLogger(__name__.partition(".")[0])
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def by_parts(method: Method, trials: float, once: float = 1) -> Estimate:
    """Of a method whose time grows with the users, by its shortest fit to parts of them.

    trials  shortest fits to the whole that its search over options takes, about
    once    those that one fit takes
    """

    @silence()
    def estimate(task: Task) -> Needs:
        order_U = np.random.default_rng(task.seed).permutation(task.split.train)
        validation, users = task.validation_pairs(), len(order_U)
        used, taken = [0], [0.0]
        size = min(FIRST_USERS, users)
        while True:
            pairs = validation[:: max(1, users // size)]
            part = replace(task, split=replace(task.split, train=np.sort(order_U[:size]), validation=pairs), seconds=0.0)
            if size == min(FIRST_USERS, users):
                method(part)  # compiles
            begin = task.clock()
            method(part)
            used.append(size)
            taken.append(task.clock() - begin)
            if size == users or taken[-1] >= LONG_ENOUGH_S:
                break
            size = min(4 * size, users)
        per_user_s = max(0.0, taken[-1] - taken[-2]) / (used[-1] - used[-2])
        shortest_s = taken[-1] + per_user_s * (users - used[-1])
        return Needs(max(LEAST_S, once * shortest_s), max(FULL_S, trials * shortest_s))

    return estimate


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """What the kernel can give without swapping, or what the limit of a container (control group v2) leaves; 4 GiB if neither is known."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        found = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError):
        found = []
    try:
        limit = int((cgroup / "memory.max").read_text())  # "max" without one
        found.append(max(0, limit - int((cgroup / "memory.current").read_text())))
    except (OSError, ValueError):
        pass
    return min(found, default=4 << 30)
