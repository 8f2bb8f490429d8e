"""The application under test, with a fake engine unless told otherwise, and requests to it without a network."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from benchmarks.random_bundles import make_bundle
from espalier.bundle import Bundle
from espalier.search import Engine
from espalier.tree import complete_tree
from service.app import create_app
from service.models.loading import EngineSource
from service.settings import Settings
from service.watch.metric_table import COUNTERS, GAUGES, HISTOGRAMS
from service.watch.metrics import Metrics
from tests.service.fake_catalogue import FakeCatalogues
from tests.service.fake_engine import FakeEngine
from tests.service.own_time import OwnTime

ITEMS = 32
PATIENT: dict[str, Any] = {"timeout_ms": 60_000}
"""Settings of services whose answers may be late: on a busy machine a second may pass at any moment."""
LIMITS: dict[str, Any] = {"beam_size": 16, "m": 4, "max_beam_size": 64, "max_m": 40}
Json = dict[str, Any]

# FastAPI silences a warning of pydantic's while it makes a route's fields, and the filters of warnings belong to the
# whole process: of two threads that do so at once, one would meet the warning as an error.
BUILDING = threading.Lock()


def small_model(folder: Path, version: int = 1, name: str = "books", items: int = ITEMS, seed: int = 0, **parts: Any) -> Bundle:
    """A version of a model over a binary tree under a models folder. parts: those of `make_bundle`."""
    rng = np.random.default_rng(seed)
    return make_bundle(folder, rng, complete_tree(rng.permutation(items), 2), name=name, version=version, **LIMITS | parts)


class Client:
    """Sends requests to the application inside an event loop of its own, without a network."""

    def __init__(self, app: FastAPI, runner: asyncio.Runner) -> None:
        self.runner = runner
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://test")

    def request(self, method: str, path: str, **rest: Any) -> httpx.Response:
        return self.runner.run(self.http.request(method, path, **rest))

    def get(self, path: str, **rest: Any) -> httpx.Response:
        return self.request("GET", path, **rest)

    def post(self, path: str, **rest: Any) -> httpx.Response:
        return self.request("POST", path, **rest)


@contextmanager
def started(app: FastAPI) -> Iterator[Client]:
    """The application between its start and its shutdown."""
    with asyncio.Runner(loop_factory=OwnTime) as runner:
        lifespan = app.router.lifespan_context(app)
        runner.run(_enter(lifespan))
        yield Client(app, runner)
        runner.run(_leave(lifespan))


async def _enter(lifespan: AbstractAsyncContextManager[Any]) -> None:
    await lifespan.__aenter__()


async def _leave(lifespan: AbstractAsyncContextManager[Any]) -> None:
    await lifespan.__aexit__(None, None, None)


@dataclass
class Running:
    """A service whose models have been tried; `engines` by model name."""

    client: Client
    app: FastAPI
    engines: dict[str, FakeEngine]

    @property
    def runner(self) -> asyncio.Runner:
        return self.client.runner

    def retrieve(self, **body: Any) -> Json:
        """The answer to a request of `books` that must succeed."""
        return document(self.client.post("/retrieve", json={"model": "books"} | body))


@contextmanager
def run(
    models: Path, open_model: Callable[[Bundle], Engine] | None = None, catalogues: FakeCatalogues | None = None, **settings: Any
) -> Iterator[Running]:
    engines: dict[str, FakeEngine] = {}

    def open_fake(bundle: Bundle, device: str, engine: str | None, threads: int, precision: str) -> Engine:
        if open_model is not None:
            return open_model(bundle)
        return engines.setdefault(bundle.manifest.name, FakeEngine(bundle.tree.item_count, bundle.tree.leaf_of_item))

    with BUILDING:
        app = create_app(Settings(models=models, **PATIENT | {"max_inline_us": 0} | settings), EngineSource(open_fake))
    if catalogues is not None:
        app.state.service.registry.catalogue = catalogues.of
    with started(app) as client:
        app.state.service.registry.wait_until_loaded()
        try:
            yield Running(client, app, engines)
        finally:
            for engine in engines.values():
                engine.go.set()


def settings_of(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the marker `settings` of a test says."""
    marker = request.node.get_closest_marker("settings")
    return {} if marker is None else dict(marker.kwargs)


def every_metric() -> str:
    """An exposition with a sample of everything that the service can expose."""
    metrics = Metrics()
    for name, counter in COUNTERS.items():
        metrics.count(name, *_some(counter.labels))
    for name, gauge in GAUGES.items():
        metrics.show(name, 1, *_some(gauge.labels))
    for name, histogram in HISTOGRAMS.items():
        metrics.observe(name, 1e-3, *_some(histogram.labels))
    return metrics.render().decode()


def _some(labels: Sequence[str]) -> list[str]:
    """A value for each label."""
    return [{"model": "books", "version": "1", "status": "200"}.get(label, "0") for label in labels]


def total(metrics: Metrics, name: str, **labels: str) -> float | None:
    """The sum of a metric's series with these labels; None where there are none."""
    values = [value for found, own, value in metrics.samples() if found == name and labels.items() <= own.items()]
    return sum(values) if values else None


def bearer(key: str) -> dict[str, str]:
    """The header of a request with a key."""
    return {"Authorization": f"Bearer {key}"}


def counted(running: Running) -> dict[str, float]:
    """Every sample of /metrics by its name and labels."""
    lines = [line for line in running.client.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def ids(result: Json) -> list[str]:
    return [item["id"] for item in result["items"]]


def document(answer: httpx.Response) -> Json:
    """The document of an answer that must succeed."""
    assert answer.status_code == 200, answer.text
    content: Json = answer.json()
    return content


def problem(answer: httpx.Response) -> Json:
    """The problem document of an answer."""
    assert answer.headers["content-type"] == "application/problem+json"
    content: Json = answer.json()
    assert {"type", "title", "status", "detail"} <= set(content)
    return content
