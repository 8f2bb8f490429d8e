"""The length of code paths: how many of our files and functions each of five requests crosses.

    python -m benchmarks.code_path --json F

Served in this process, without sockets, by the `reference` engine over a bundle of 64 items. The profiler sees all threads, and counts
calls of functions of espalier, training and service. A function counts if all ROUNDS warm requests cross it, so unrelated work does not.
A search of so few items would run in the event loop, but is slow under the profiler; MOST_US raises the limit. One row goes through the
engine's thread.

Rows: {"way", "files", "functions"}.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import numpy as np
import orjson
from fastapi import FastAPI
from pydantic import SecretStr

from benchmarks.random_bundles import make_bundle
from benchmarks.report_file import command_line
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.shards.messages import Pin
from espalier.tree import complete_tree
from service.app import create_app
from service.models.loading import EngineSource
from service.models.registry import Registry
from service.router.app import create_router
from service.router.config import RouterConfig
from service.router.transport import answer_body, parse_shard_list
from service.settings import Settings
from service.shards.search import answer_search
from service.watch.metrics import Metrics
from training.shard.command import shard

PACKAGES = tuple(f"{Path.cwd() / name}{os.sep}" for name in ("espalier", "training", "service"))
ITEMS, ROUNDS, SHARDS = 64, 16, 2
QUIET_S = 0.1
"""Pause between requests, so that work that one leaves to other threads does not count for the next."""
MOST_US = 10_000
KEY = "a-key-of-this-benchmark"
Ask = Callable[[httpx.AsyncClient, int], Awaitable[httpx.Response]]
Row = dict[str, Any]

crossed: set[tuple[str, str]] | None = None
"""(file, function) pairs that the present request has crossed; None: do not count."""


def _note(frame: FrameType, event: str, argument: object) -> None:
    code = frame.f_code
    if event == "call" and crossed is not None and code.co_filename.startswith(PACKAGES) and not code.co_name.startswith("<"):
        crossed.add((code.co_filename, code.co_qualname))


class ShardsHere:
    """A router's transport to registries of this process, by address."""

    def __init__(self, registries: Mapping[str, Registry]) -> None:
        self._registries = registries

    async def addresses(self, name: str) -> Sequence[str]:
        return (name,)

    async def send(self, address: str, body: bytes, max_bytes: int, timeout_s: float, headers: Mapping[str, str]) -> bytes:
        return answer_body(*await answer_search(self._registries[address], body))

    async def served_shards(self, address: str, timeout_s: float) -> frozenset[Pin]:
        return parse_shard_list(orjson.dumps({"shards": self._registries[address].shards.described()}))

    def forget(self, address: str) -> None: ...

    async def close(self) -> None: ...


def retrieve(*history: str) -> Ask:
    """A POST /retrieve of one history."""
    return lambda client, number: client.post("/retrieve", json={"queries": [{"history": [*history]}], "m": 5})


async def put(client: httpx.AsyncClient, number: int) -> httpx.Response:
    """A PUT of a new item."""
    document = {"events": [["item-1", "item-3"]]}
    return await client.put(f"/models/tiny/items/new-{number}", json=document, headers={"Authorization": f"Bearer {KEY}"})


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application that is ready."""
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://walks") as client:
        while (await client.get("/readyz")).status_code != 200:
            await asyncio.sleep(0.05)
        yield client


async def counted(way: str, client: httpx.AsyncClient, ask: Ask) -> Row:
    """The row of files and functions that all ROUNDS requests cross, after a warm-up."""
    global crossed
    rounds = []
    for number in range(1 + ROUNDS):
        await asyncio.sleep(QUIET_S)
        rounds.append(calls := set[tuple[str, str]]())
        crossed = calls
        answer = await ask(client, number)
        crossed = None
        if answer.status_code not in (200, 201):
            raise RuntimeError(f"{answer.request.url}: {answer.status_code} {answer.text}")
    common = set.intersection(*rounds[1:])
    row = {"way": way, "files": len({file for file, _ in common}), "functions": len(common)}
    print(f"{way}: {row['files']} files, {row['functions']} functions", flush=True)
    return row


async def of_one_service(models: Path) -> list[Row]:
    """Rows of a query on two paths, a write, and a query with a live item in its history."""
    async with serving(create_app(Settings(models=models, engine="reference", max_inline_us=0))) as client:
        rows = [await counted("/retrieve, by the engine's thread", client, retrieve("item-1", "item-3"))]
    settings = Settings(models=models, engine="reference", write_keys=(SecretStr(KEY),), max_inline_us=MOST_US)
    async with serving(create_app(settings)) as client:
        rows.append(await counted("/retrieve", client, retrieve("item-1", "item-3")))
        rows.append(await counted("PUT of an item", client, put))
        rows.append(await counted("/retrieve, live item in the history", client, retrieve("item-1", "new-0")))
    return rows


async def of_a_router(bundle: Bundle, folder: Path) -> Row:
    """A query through a router and its shards, all in this process."""
    shard(bundle.path, SHARDS, folder)
    source = EngineSource(lambda bundle, *_: open_engine(bundle, "cpu", "reference"))
    async with AsyncExitStack() as closers:
        registries = {}
        for index in range(SHARDS):
            (folder / f"alone-{index}").mkdir()
            (folder / f"alone-{index}" / str(index)).symlink_to((folder / str(index)).absolute(), target_is_directory=True)
            registry = Registry(Settings(models=folder / f"alone-{index}", max_inline_us=MOST_US), Metrics(), source)
            registry.start_loading()
            registry.wait_until_loaded()
            registries[f"http://shard-{index}"] = registry
            closers.push_async_callback(partial(registry.drain, 1.0))
        config = RouterConfig(shards=tuple(registries), poll_s=60.0, hedge=0)  # a busy machine would ask twice
        app = create_router(Settings(models=bundle.path.parent.parent), config, ShardsHere(registries))
        client = await closers.enter_async_context(serving(app))
        return await counted("/retrieve, router of two shards", client, retrieve("item-1", "item-3"))


def main() -> None:
    options = command_line(__doc__).parse_args()
    threading.setprofile(_note)
    sys.setprofile(_note)
    tree = complete_tree(np.arange(ITEMS), 2)
    with tempfile.TemporaryDirectory() as name:
        single, sharded = (make_bundle(Path(name) / models, np.random.default_rng(0), tree, kind="product") for models in ("one", "many"))
        rows = asyncio.run(of_one_service(single.path.parent.parent))
        rows.append(asyncio.run(of_a_router(sharded, Path(name) / "shards")))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
