"""A registry without HTTP, whose engines are fakes, and versions of bundles for it."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
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

ITEMS = 32


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


async def set_removed(registry: Registry, name: str, ids: Sequence[str]) -> list[str]:
    """Replace a model's standing exclusions. Returns the ids that its catalogue does not have."""
    listed = tuple(dict.fromkeys(ids))
    await registry.changes.edit_removed(name, lambda _: listed, replace=True)
    return await registry.unknown(name, listed)


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

    def states(self) -> dict[int, str]:
        return {info.version: info.state for info in self.books.states()}

    def served(self, version: int | None = None) -> int:
        return self.registry.choose("books", version).version

    def count(self, outcome: str) -> float:
        """espalier_reload_total."""
        line = f'espalier_reload_total{{model="books",outcome="{outcome}"}} '
        found = [text for text in self.metrics.render().decode().splitlines() if text.startswith(line)]
        return float(found[0].removeprefix(line)) if found else 0.0


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
        registry = Registry(Settings(models=models, **settings), metrics, EngineSource(open_fake))
        running = Running(registry, metrics, models, runner)
        registry.start_loading()
        try:
            assert registry.wait_until_loaded(30)
            yield running
        finally:
            runner.run(registry.drain(10))


def held_back(version: int) -> tuple[Callable[[Bundle], Engine], threading.Event, threading.Event]:
    """How an engine is opened whose version waits: (the opener, set when it has begun, to be set to let it go on)."""
    opening, let_go = threading.Event(), threading.Event()

    def open_late(bundle: Bundle) -> Engine:
        if bundle.manifest.version == version:
            opening.set()
            assert let_go.wait(10)
        return FakeEngine(bundle.tree.item_count, bundle.tree.leaf_of_item)

    return open_late, opening, let_go


async def search(model: LoadedModel) -> list[int]:
    """Item rows of a search without a filter."""
    queries = blank_queries(model.bundle.manifest.query, 1)
    answer = await model.batcher.search(queries, SearchParams.uniform(1, 10, 3, mask=model.filters.standing))
    rows: list[int] = answer.result.item_rows_BM[0].tolist()
    return rows
