"""A registry without HTTP, whose engines are fakes, and versions of bundles for it."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from espalier.bundle import Bundle
from espalier.queries import blank_queries
from espalier.search import Engine, SearchParams
from service.models.loading import EngineSource, LoadedModel
from service.models.registry import Registry
from service.models.registry_entry import Entry
from service.settings import Settings
from service.watch.metrics import Metrics
from tests.service.fake_engine import FakeEngine
from tests.service.running import total

Result = TypeVar("Result")


def add_version(models: Path, version: int, name: str = "books", damaged: bool = False) -> Path:
    """Another version of a model, as training would put it there."""
    source = next(path for path in sorted((models / "books").iterdir()) if path.name.isdecimal())
    hidden = shutil.copytree(source, models / f".{name}.{version}")
    manifest = json.loads((hidden / "manifest.json").read_text()) | {"version": version, "name": name}
    (hidden / "manifest.json").write_text(json.dumps(manifest))
    if damaged:
        damage(hidden)
    (models / name).mkdir(exist_ok=True)
    return hidden.rename(models / name / str(version))


def damage(bundle: Path) -> None:
    """Change a byte in place."""
    with (bundle / "nodes.safetensors").open("r+b") as stream:
        stream.seek(-1, 2)
        byte = stream.read(1)
        stream.seek(-1, 2)
        stream.write(bytes([byte[0] ^ 1]))


@dataclass
class Running:
    """A registry that has loaded what should serve. `engines` by version, the latest that was opened."""

    registry: Registry
    metrics: Metrics
    models: Path
    runner: asyncio.Runner
    engines: dict[int, FakeEngine] = field(default_factory=dict)
    opened: list[int] = field(default_factory=list)

    @property
    def books(self) -> Entry:
        return self.registry.entry("books")

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return self.runner.run(coroutine)

    def found(self, version: int | None = None) -> list[int]:
        """Item rows of a search without a filter."""
        return self.run(search(self.registry.choose("books", version)))

    def remove(self, *ids: str) -> list[str]:
        """Replace the removed items of `books`. Returns the ids that its catalogue does not have."""
        return self.run(self._remove(tuple(dict.fromkeys(ids))))

    async def _remove(self, ids: tuple[str, ...]) -> list[str]:
        await self.registry.changes.edit_removed("books", lambda _: ids, replace=True)
        return await self.registry.unknown("books", ids)

    def states(self) -> dict[int, str]:
        return {info.version: info.state for info in self.books.states()}

    def served(self, version: int | None = None) -> int:
        return self.registry.choose("books", version).version

    def count(self, outcome: str) -> float:
        """espalier_reload_total."""
        return total(self.metrics, "espalier_reload_total", model="books", outcome=outcome) or 0.0


@contextmanager
def run(models: Path, open_model: Callable[[Bundle], Engine] | None = None, **settings: Any) -> Iterator[Running]:
    metrics = Metrics()

    def open_fake(bundle: Bundle, device: str, engine: str | None, threads: int, precision: str) -> Engine:
        version = bundle.manifest.version
        running.opened.append(version)
        if open_model is not None:
            return open_model(bundle)
        running.engines[version] = FakeEngine(bundle.tree.item_count, bundle.tree.leaf_of_item)
        return running.engines[version]

    with asyncio.Runner() as runner:
        registry = Registry(Settings(models=models, **{"max_inline_us": 0} | settings), metrics, EngineSource(open_fake))
        running = Running(registry, metrics, models, runner)
        registry.start_loading()
        try:
            assert registry.wait_until_loaded(30)
            yield running
        finally:
            runner.run(registry.drain(10))


@dataclass
class Held:
    """Opens fake engines, of which those of one version or model wait.

    opening  set when one of them has begun
    let_go   to be set to let it go on
    """

    of: int | str
    opening: threading.Event = field(default_factory=threading.Event)
    let_go: threading.Event = field(default_factory=threading.Event)

    def open(self, bundle: Bundle) -> Engine:
        if self.of in (bundle.manifest.version, bundle.manifest.name):
            self.opening.set()
            assert self.let_go.wait(10)
        return FakeEngine(bundle.tree.item_count, bundle.tree.leaf_of_item)

    async def begun(self, change: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """A change that waits now for the engine that it opens."""
        task = asyncio.create_task(change)
        assert await asyncio.to_thread(self.opening.wait, 10)
        return task


async def search(model: LoadedModel) -> list[int]:
    """Item rows of a search without a filter."""
    queries = blank_queries(model.bundle.manifest.query, 1)
    answer = await model.batcher.search(queries, SearchParams.uniform(1, 10, 3, mask=model.filters.standing))
    rows: list[int] = answer.result.item_rows_BM[0].tolist()
    return rows
