"""A router and its shards inside the test's process, without sockets; replicas can be told to misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.shards.messages import Pin
from service.models.loading import EngineSource
from service.models.registry import Registry
from service.router.app import create_router
from service.router.config import RouterConfig
from service.router.transport import ReplicaFailed, answer_body, parse_shard_list
from service.settings import Settings
from service.shards.search import answer_search
from service.watch.metrics import Metrics
from tests.service.running import BUILDING, PATIENT, Client, Json, Running, started, total
from tests.service.shards.cutting import cut
from tests.waiting import until

PATIENCE_S = 60.0
"""How long tests of the router wait at most."""
Fault = Callable[[bytes], Any]
"""The body of a query → what the replica does instead: raises, sleeps (a coroutine), or answers bytes; None: it answers as it should."""


@dataclass
class LocalTransport:
    """Calls registries of this process.

    faults  by address · hung: addresses that answer nothing at all · mute: that answer no looks · dead: where nobody listens
    lists   by address, what a replica says besides that it holds, anew at each look
    names   the addresses that a configured one stands for; others stand for themselves
    sent    address, body and headers of every query
    """

    registries: dict[str, Registry]
    faults: dict[str, Fault] = field(default_factory=dict)
    hung: set[str] = field(default_factory=set)
    mute: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    lists: dict[str, Callable[[], Sequence[Json]]] = field(default_factory=dict)
    names: dict[str, Sequence[str]] = field(default_factory=dict)
    sent: list[tuple[str, bytes, Mapping[str, str]]] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    def heal(self) -> None:
        """Nothing misbehaves any longer."""
        for told in (self.faults, self.hung, self.mute, self.dead, self.lists):
            told.clear()

    async def addresses(self, name: str) -> Sequence[str]:
        return self.names.get(name, (name,))

    async def send(self, address: str, body: bytes, most: int, timeout_s: float, headers: Mapping[str, str]) -> bytes:
        self.sent.append((address, body, headers))
        await self._reached(address, timeout_s)
        if address in self.faults:
            found = self.faults[address](body)
            found = await found if asyncio.iscoroutine(found) else found
            if found is not None:
                return bytes(found)
        return answer_body(*await answer_search(self.registries[address], body))

    async def served_shards(self, address: str, timeout_s: float) -> frozenset[Pin]:
        await self._reached(address, timeout_s)
        if address in self.mute:
            raise ReplicaFailed("late", f"{address} lets looks wait")
        more = self.lists[address]() if address in self.lists else ()
        return parse_shard_list(orjson.dumps({"shards": [*self.registries[address].shards.described(), *more]}))

    async def _reached(self, address: str, timeout_s: float) -> None:
        if address in self.dead:
            raise ReplicaFailed("connection", f"{address} is dead")
        if address in self.hung:
            await asyncio.sleep(timeout_s)
            raise ReplicaFailed("late", f"{address} hangs")

    def forget(self, address: str) -> None:
        self.forgotten.append(address)

    async def close(self) -> None:
        pass


@dataclass
class Cluster:
    """A router in front of shards, with `transport` between them."""

    router: Running
    transport: LocalTransport
    app: Any

    @property
    def client(self) -> Client:
        return self.router.client

    def retrieve(self, **body: Any) -> Json:
        return self.router.retrieve(**body)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's series with these labels."""
        return total(self.app.state.service.metrics, name, **labels) or 0.0

    def asked(self, address: str) -> int:
        """How many queries an address was sent."""
        return sum(sent == address for sent, *_ in self.transport.sent)


def serve_shards(folder: Path, **settings: Any) -> Registry:
    """A registry that serves a folder of shards."""
    opener = partial(open_engine, device="cpu")
    engines = EngineSource(lambda bundle, device, engine, threads, precision: opener(bundle, engine=engine))
    registry = Registry(Settings(models=folder, max_queue_ms=10_000.0, **settings), Metrics(), engines)
    registry.start_loading()
    assert registry.wait_until_loaded(PATIENCE_S)
    assert not registry.not_ready()
    return registry


@contextmanager
def cluster(
    models: Path,
    folders: Mapping[str, Path],
    config: Mapping[str, Any] | None = None,
    of_shards: Mapping[str, Any] | None = None,
    ready: bool = True,
    **settings: Any,
) -> Iterator[Cluster]:
    """A router over a models folder, and a registry for each of the folders of shards, by name.

    config     of the router · of_shards, settings: of the services
    ready      wait until the router is
    """
    with ExitStack() as ends:
        registries = {address: serve_shards(folder, **(of_shards or {})) for address, folder in folders.items()}
        transport = LocalTransport(registries)
        chosen = {"poll_s": 0.05, "poll_timeout_s": 0.2} | dict(config or {}) | {"shards": [f"http://{name}" for name in folders]}
        named = {f"http://{name}": registry for name, registry in registries.items()}
        transport.registries = named
        with BUILDING:
            app = create_router(Settings(models=models, max_queue_ms=10_000.0, **PATIENT | settings), RouterConfig(**chosen), transport)
        client = ends.enter_context(started(app))
        registry = app.state.service.registry
        registry.wait_until_loaded()
        if ready:
            until(lambda: not registry.not_ready())
        try:
            yield Cluster(Running(client, app, {}), transport, app)
        finally:
            for one in registries.values():
                asyncio.run(one.drain(1.0))


def shard_folders(whole: Bundle, folder: Path, count: int, replicas: int = 1) -> dict[str, Path]:
    """A folder for each replica of each shard: names like `0-0`."""
    cut(whole, folder / "together", count)
    found = {}
    for index in range(count):
        alone = folder / f"alone-{index}"
        alone.mkdir(parents=True)
        (alone / str(index)).symlink_to((folder / "together" / str(index)).absolute(), target_is_directory=True)
        for replica in range(replicas):
            found[f"shard-{index}-{replica}"] = alone
    return found
