"""Which models there are, in what state, and which one a request means.

Opens the highest version of every model in the models folder: checksums, golden queries, warm-up; then it serves. Knows bundles and
engines, not HTTP.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from espalier.bundle import Bundle, find_versions
from espalier.errors import BundleNotFound, EspalierError, InvalidQuery
from espalier.golden import verify_golden
from espalier.search import Device, Engine, open_engine
from service.batching import Batcher
from service.errors import ModelNotFound, NotReady
from service.monitoring import Metrics, ModelMetrics
from service.settings import Settings

log = logging.getLogger(__name__)

CPU_BATCH, GPU_BATCH = 16, 512
"""Default most queries per engine call: batching gains almost nothing on one CPU thread."""
GPU_ENGINES = ("onnx-cuda",)

OpenEngine = Callable[[Bundle, Device, str | None, int], Engine]


@dataclass(frozen=True)
class LoadedModel:
    """A model that serves."""

    bundle: Bundle
    engine: Engine
    batcher: Batcher
    metrics: ModelMetrics

    @property
    def name(self) -> str:
        return self.bundle.manifest.name

    @property
    def version(self) -> int:
        return self.bundle.manifest.version


@dataclass
class Entry:
    """A model of the models folder; `loaded` once it is ready, `reason` once it failed."""

    name: str
    versions: tuple[int, ...]
    state: Literal["loading", "ready", "failed"] = "loading"
    reason: str | None = None
    loaded: LoadedModel | None = None

    @property
    def version(self) -> int:
        """The version that is served, or would be."""
        return self.versions[-1]


class Registry:
    """The models of one folder. Raises BundleNotFound when it holds none.

    open_engine  how an engine is opened; tests bring their own
    """

    def __init__(self, settings: Settings, metrics: Metrics, open_engine: OpenEngine = open_engine) -> None:
        self._settings, self._metrics, self._open_engine = settings, metrics, open_engine
        found = find_versions(settings.models)
        if not found:
            raise BundleNotFound(
                f"{settings.models}: no model there; expected <name>/<version>/manifest.json, as `python -m training fit` writes them"
            )
        self.entries = {name: Entry(name, versions) for name, versions in found.items()}
        self.draining = False
        self._loader = threading.Thread(target=self._load_all, name="loader", daemon=True)

    def start_loading(self) -> None:
        """Load every model in the background."""
        self._loader.start()

    def wait_until_loaded(self) -> None:
        """Block until every model is ready or has failed."""
        self._loader.join()

    def not_ready(self) -> list[str]:
        """Why the service is not ready, one line per reason; empty when it is."""
        if self.draining:
            return ["shutting down"]
        return [
            f"{entry.name} version {entry.version}: {entry.state}" + (f": {entry.reason}" if entry.reason else "")
            for entry in self.entries.values()
            if entry.state != "ready"
        ]

    def entry(self, name: str) -> Entry:
        """A model by name. Raises ModelNotFound."""
        try:
            return self.entries[name]
        except KeyError:
            raise ModelNotFound(f"There is no model {name!r}. Models: {', '.join(self.entries)}.") from None

    def choose(self, name: str | None, version: int | None) -> LoadedModel:
        """The model that a request means: by name, or the only one; `version` must be the one that is loaded.

        Raises InvalidQuery when no name is given and there are several, ModelNotFound, NotReady.
        """
        if name is None:
            if len(self.entries) > 1:
                raise InvalidQuery("model", None, f"one of {', '.join(self.entries)}")
            name = next(iter(self.entries))
        entry = self.entry(name)
        if version is not None and version != entry.version:
            raise ModelNotFound(f"Version {version} of {name!r} is not loaded; version {entry.version} is served.")
        if self.draining:
            raise NotReady("The service is shutting down.")
        if entry.loaded is None:
            raise NotReady(f"Model {name!r} is {entry.state}; see /readyz.")
        return entry.loaded

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and finish the accepted ones, at most `timeout_s` per model."""
        self.draining = True
        for entry in self.entries.values():
            if entry.loaded is not None and not await entry.loaded.batcher.drain(timeout_s):
                log.warning("%s: accepted requests were not finished within %g s", entry.name, timeout_s)

    def _load_all(self) -> None:
        for entry in self.entries.values():
            if self.draining:
                return
            try:
                entry.loaded = self._load(entry)
            except Exception as error:  # one broken model must not stop the others
                log.exception("%s version %d failed to load", entry.name, entry.version)
                entry.reason = str(error) if isinstance(error, EspalierError) else repr(error)
                entry.state = "failed"
            else:
                entry.state = "ready"
        gc.collect()
        gc.freeze()  # what models hold lives as long as the process; collections need not walk it

    def _load(self, entry: Entry) -> LoadedModel:
        settings = self._settings
        bundle = Bundle.open(settings.models / entry.name / str(entry.version), verify=settings.verify)
        manifest = bundle.manifest
        if (manifest.name, manifest.version) != (entry.name, entry.version):
            raise BundleNotFound(f"{bundle.path}: its manifest says {manifest.name} version {manifest.version}")
        engine = self._open_engine(bundle, settings.device, settings.engine, settings.threads)
        self._metrics.model_state(entry.name, entry.version, engine.name, ready=False)
        overlap = verify_golden(bundle, engine)
        engine.warm_up()
        batch = settings.max_batch or (GPU_BATCH if engine.name in GPU_ENGINES else CPU_BATCH)
        batcher = Batcher(engine, batch, entry.name)
        metrics = ModelMetrics(self._metrics, entry.name, engine.name, lambda: batcher.depth)
        batcher.on_call = metrics.call
        self._metrics.model_state(entry.name, entry.version, engine.name, ready=True)
        log.info("%s version %d is ready on %s (golden overlap %.4f)", entry.name, entry.version, engine.name, overlap)
        return LoadedModel(bundle, engine, batcher, metrics)
