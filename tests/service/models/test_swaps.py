"""Versions come and go while requests are served: none fails, and what nobody holds is taken apart."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path

from tests.service.fake_engine import FakeEngine
from tests.service.models.registry import ITEMS, add_version, run, search
from tests.waiting import until

SWAPS = 8


def test_no_request_fails_over_many_swaps(models: Path) -> None:
    """Requests choose, think, and search, as retrieve.py does, while versions come and go."""
    answered: dict[int, int] = {}
    stop = asyncio.Event()

    async def client(number: int) -> None:
        while not stop.is_set():
            model = running.registry.choose("books", None)
            await asyncio.sleep(0)  # ids become arrays in a thread
            await asyncio.sleep(0.0005 * (number % 3))
            assert await search(model) == [0, 1, 2]
            answered[model.version] = answered.get(model.version, 0) + 1

    async def swaps() -> None:
        clients = [asyncio.create_task(client(number)) for number in range(16)]
        try:
            for swap in range(SWAPS):
                new, old = 2 - swap % 2, 1 + swap % 2
                await running.registry.changes.load("books", new, default=True)
                await running.registry.changes.unload("books", old)
                before = sum(answered.values())
                while sum(answered.values()) < before + 32:
                    await asyncio.sleep(0)
                    assert not any(task.done() for task in clients)
        finally:
            stop.set()
            await asyncio.gather(*clients)

    add_version(models, 2)
    with run(models, lambda bundle: FakeEngine(ITEMS)) as running:
        running.run(running.registry.changes.set_default("books", 1))
        running.run(swaps())
        assert sum(answered.values()) >= 32 * SWAPS
        assert set(answered) == {1, 2}
        until(lambda: running.count("unloaded") == SWAPS, "all former versions are taken apart")


def test_a_version_is_taken_apart_once_nobody_holds_it(models: Path) -> None:
    add_version(models, 2)
    with run(models) as running:
        assert running.served() == 2
        running.run(running.registry.changes.set_default("books", 1))
        held = running.registry.choose("books", 2)
        engine = weakref.ref(running.engines.pop(2))
        running.run(running.registry.changes.unload("books", 2))
        until(lambda: running.states() == {1: "ready", 2: "draining"}, "the versions are so")
        assert running.run(search(held)) == [0, 1, 2]
        gc.disable()  # it must need no collection
        try:
            del held
            until(lambda: running.states() == {1: "ready", 2: "available"}, "version 2 is taken apart")
            until(lambda: engine() is None, "its engine is freed")
        finally:
            gc.enable()
        assert running.count("unloaded") == 1
