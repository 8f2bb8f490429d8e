"""An event loop whose time a test lets pass: what waits in it for a minute need not take one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class OwnTime(asyncio.SelectorEventLoop):
    """Its time is what the test has let pass, after the system's own, unless it stands still otherwise."""

    def __init__(self, stands_still: bool = False) -> None:
        super().__init__()
        self.stands_still, self.passed_s = stands_still, 0.0

    def time(self) -> float:
        return self.passed_s if self.stands_still else super().time() + self.passed_s


async def pass_time(seconds: float) -> None:
    """Let it pass on the running loop, once every task waits: whoever waits for so long goes on."""
    await settled()
    loop = asyncio.get_running_loop()
    assert isinstance(loop, OwnTime)
    loop.passed_s += seconds
    await settled()


async def settled(turns: int = 20) -> None:
    """Let every task run until it waits for something that does not come by itself."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def turns_until(condition: Callable[[], object], within_s: float = 20) -> None:
    """Give other tasks and threads turns until it holds. The loop's own time may stand still, so the limit is of the system's."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:g} s"
        await asyncio.sleep(0)


class Time:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.s = 1000.0

    def __call__(self) -> float:
        return self.s
