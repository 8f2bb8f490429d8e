"""Loading of a version: its files are verified, its engine opened, its golden queries answered, its graphs warmed up.

Knows bundles and engines. Does not know which versions should serve.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import pyarrow as pa

from espalier.bundle import ALL_PARTS, Bundle
from espalier.checks.golden import verify_golden, verify_golden_together
from espalier.content.rows import ContentRows
from espalier.engines import open_engine, runs_on_gpu
from espalier.errors import BundleCorrupt, EspalierError
from espalier.manifest import Manifest
from espalier.masks.filters import ItemFilters
from espalier.rerank.ranker import Reranker, verify_ranker
from espalier.search import Device, Engine, Precision

from ..batching.admission import Limits
from ..batching.batcher import Batcher
from ..errors import NotReady, ShardsMissing
from ..live.live_version import LiveVersion
from ..models.shard_version import ShardVersion
from ..settings import Settings
from ..watch.metrics import Metrics, ModelMetrics
from ..watched_files import Signature, signature

log = logging.getLogger(__name__)

CPU_BATCH, GPU_BATCH = 16, 512
"""Default of the most queries per engine call. Batching gains almost nothing on one CPU thread."""
LOADER_NICENESS = 10
"""Niceness of the loader's thread."""
USUAL_SWITCH_S, OVERLOAD_SWITCH_S, LOADER_SWITCH_S = sys.getswitchinterval(), 5e-4, 1e-4
"""How long one thread may keep the interpreter from another: usually, in overload, and while a version is loaded. With Python's default of
5 ms, the engine's thread would wait longer than a search takes while the event loop writes refusals, and every request would wait for the
loader. At other times switching costs more than it gains."""

MANIFEST = "manifest.json"

OpenEngine = Callable[[Bundle, Device, str | None, int, Precision], Engine]
Files = dict[Path, Signature | None]


class EngineSource:
    """How versions get their engines. Tests and the router bring their own.

    open   opens the engine of a bundle
    calls  engine calls of one version at once
    """

    calls = 1

    def __init__(self, open: OpenEngine = open_engine) -> None:
        self.open = open

    def awaits(self, path: Path) -> str | None:
        """What the version in a folder waits for before it can be opened; None: nothing."""
        return None

    def layout(self, path: Path) -> int | None:
        """Into how many shards the version in a folder is cut now; None if it is not cut, or a shard is missing."""
        return None

    def layout_of(self, engine: Engine) -> int | None:
        """How many shards an engine asks; None: it is no router's. If `layout` becomes another number, the version is opened anew."""
        return None


class LoadFailed(EspalierError):
    """A version cannot serve. The text says why and may be shown to users."""


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """One version of a model that serves. It is closed after the last reference to it has gone.

    files       the signatures of its files when their content was compared last
    file_maps   keep the inode numbers in these signatures from being reused for other files
    searched_shards  how many shards the engine asks; None: it is no router's
    """

    bundle: Bundle
    engine: Engine
    batcher: Batcher
    metrics: ModelMetrics
    filters: ItemFilters
    files: Files
    file_maps: tuple[pa.Buffer, ...]
    live: LiveVersion
    reranker: Reranker | None = None
    shard: ShardVersion | None = None
    searched_shards: int | None = None

    @cached_property
    def name(self) -> str:
        return self.bundle.manifest.name

    @cached_property
    def version(self) -> int:
        return self.bundle.manifest.version


def load_version(
    settings: Settings, metrics: Metrics, engines: EngineSource, name: str, version: int, join: Callable[[LoadedModel], None]
) -> LoadedModel:
    """Open, verify and warm up models/<name>/<version>/. Raises LoadFailed or ShardsMissing, and frees then what it opened.

    join  brings its live items up to date, and keeps them so
    """
    steps, missing = ["opening its files"], False  # the last step is the one that an error happened in
    try:
        return _load(settings, metrics, engines, name, version, join, steps)
    except NotReady as error:  # shards are missing, or the service is shutting down
        traceback.clear_frames(error.__traceback__)
        reason, missing = str(error), isinstance(error, ShardsMissing)
    except Exception as error:
        log.exception("%s version %d failed to load, %s", name, version, steps[-1])
        reason = _reason(error, name, version, steps[-1], settings.models)
        traceback.clear_frames(error.__traceback__)  # a kept exception must not keep the engine
    raise ShardsMissing(reason) if missing else LoadFailed(reason)


def _load(
    settings: Settings,
    metrics: Metrics,
    engines: EngineSource,
    name: str,
    version: int,
    join: Callable[[LoadedModel], None],
    steps: list[str],
) -> LoadedModel:
    path = settings.models / name / str(version)
    file_maps = tuple(_map_files(path))
    files = files_of(path)
    bundle = Bundle.open(path, verify=settings.verify)
    manifest = bundle.manifest
    if (manifest.name, manifest.version) != (name, version):
        correct = f"{manifest.name}/{manifest.version}"
        raise BundleCorrupt(f"{path}: its manifest says {manifest.name} version {manifest.version}; rename the folder to {correct}")
    steps.append("opening its engine")
    engine = engines.open(bundle, settings.device, settings.engine, settings.threads, settings.precision)
    if runs_on_gpu(engine.name):
        metrics.watches_gpus = True
    filters = ItemFilters([alone.tree for alone in bundle.alone], bundle.items, settings.mask_cache_bytes)
    metrics.show("espalier_model_info", False, name, version, engine.name)
    metrics.show("espalier_model_created_timestamp_seconds", manifest.created.timestamp(), name, version)
    steps.append("answering its golden queries")
    log.info("%s version %d: golden overlap %.4f", name, version, verify_golden(bundle, engine))
    if runs_on_gpu(engine.name):
        verify_golden_together(bundle, engine, GPU_BATCH)
    if manifest.content is not None:
        steps.append("opening its content")
        ContentRows(bundle)
    reranker = None
    if manifest.ranker is not None:
        steps.append("opening its ranker")
        reranker = Reranker(bundle, "cuda" if engine.name == "onnx-cuda" else "cpu")
        verify_ranker(bundle, reranker)
    steps.append("warming up its engine")
    engine.warm_up()
    shards = engines.layout_of(engine)
    limits = limits_of(settings, bundle, engine, engines.calls, remote=shards is not None)
    batcher = Batcher(engine, limits, name, on_overload=in_overload(path))
    model_metrics = ModelMetrics(metrics, name, version, engine.name, lambda: batcher.depth)
    batcher.on_call = model_metrics.call
    live = LiveVersion(bundle, engine, filters)
    shard = ShardVersion.of(bundle, settings.mask_cache_bytes)
    loaded = LoadedModel(bundle, engine, batcher, model_metrics, filters, files, file_maps, live, reranker, shard, shards)
    steps.append("applying its live items")
    join(loaded)
    return loaded


def limits_of(settings: Settings, bundle: Bundle, engine: Engine, calls: int = 1, remote: bool = False) -> Limits:
    """The limits of the queue of an engine. A shard never shrinks a beam: all shards use the beam size that the router chose.

    A call of an engine that waits for other machines costs hardly more with more queries. The event loop never waits for it.
    """
    gpu = runs_on_gpu(engine.name)
    return Limits(
        max_batch=settings.max_batch or (GPU_BATCH if gpu else CPU_BATCH),
        serial=not gpu and not remote,
        max_queue=settings.max_queue,
        burst_s=settings.max_queue_ms / 1e3,
        max_wait_s=settings.max_wait_us / 1e6,
        smallest_beam_size=bundle.manifest.search.smallest_beam_size if bundle.manifest.shard is None else None,
        calls=calls,
        remote=remote,
        inline_s=settings.max_inline_us / 1e6 if not gpu and not remote and not settings.max_wait_us else 0.0,
    )


def files_of(path: Path) -> Files:
    """The signatures of a bundle's files. They change when the bundle is changed, replaced or deleted."""
    return {path / name: signature(path / name) for name in (*ALL_PARTS, MANIFEST)}


def _map_files(path: Path) -> Iterator[pa.Buffer]:
    """Map each of a bundle's files, without a descriptor that stays open.

    A map keeps the inode of a deleted file in use. Otherwise the file system might give its number to the file that replaces it, and
    `compare_files` would take the replacement for the old file, written to.
    """
    for name in (*ALL_PARTS, MANIFEST):
        with suppress(OSError), pa.memory_map(str(path / name)) as file:  # Bundle.open reports a missing file
            yield file.read_buffer(1)  # keeps the map of the whole file; closing only closes the descriptor


def compare_files(files: Files) -> Literal["same", "elsewhere", "written", "changed"]:
    """What happened to a loaded bundle's files.

    same       nothing
    elsewhere  a file was deleted, renamed or replaced by another: the mapped content is unchanged
    written    a file was written to or touched: the mapped content may differ from the verified one
    changed    a file has another size: the mapped content differs
    """
    change: Literal["same", "elsewhere", "written"] = "same"
    for file, before in files.items():
        now = signature(file)
        if now == before:
            continue
        if now is not None and before is not None and now[1] == before[1]:
            if now[2] != before[2]:
                return "changed"
            change = "written"
        elif change == "same":
            change = "elsewhere"
    return change


def is_replaced(loaded: LoadedModel) -> bool:
    """Whether another manifest has been renamed into its folder."""
    file = loaded.bundle.path / MANIFEST
    before, now = loaded.files[file], signature(file)
    try:
        return before is not None and now is not None and now[1] != before[1] and not _is_unchanged(loaded.bundle, file)
    except OSError:
        return False


def compare_contents(loaded: LoadedModel) -> bool | None:
    """Whether the written files have the content that was loaded. If so, keep their new signatures. Reads the files whole.

    None if a file was written or deleted meanwhile, so that the result is unknown.
    """
    now = {file: signature(file) for file, before in loaded.files.items()}
    written = [file for file, before in loaded.files.items() if now[file] is not None and now[file] != before]
    try:
        same = all(_is_unchanged(loaded.bundle, file) for file in written)
    except OSError:
        return None
    if any(signature(file) != now[file] for file in written):
        return None
    if same:
        loaded.files.update({file: now[file] for file in written})
    return same


def _is_unchanged(bundle: Bundle, file: Path) -> bool:
    if file.name == MANIFEST:
        try:
            return Manifest.model_validate_json(file.read_bytes()) == bundle.manifest
        except ValueError:
            return False
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == bundle.manifest.files[file.name].sha256


def lower_priority() -> None:
    """Lower the priority of the calling thread, so that loading takes only idle cores."""
    if sys.platform == "linux":
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOADER_NICENESS)
        except OSError as error:  # a container may not allow it
            log.warning("the loader cannot lower its priority (%s): requests may be slower while a version is loaded", error.strerror)


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """While a version is loaded, requests get the interpreter after LOADER_SWITCH_S."""
    _switch_after("loader", LOADER_SWITCH_S)
    try:
        yield
    finally:
        _switch_after("loader", None)


def in_overload(version: Path) -> Callable[[bool], None]:
    """A callback for the batcher, to call when the overload of a version begins (True) and ends (False)."""
    return lambda overloaded: _switch_after(version, OVERLOAD_SWITCH_S if overloaded else None)


def _switch_after(owner: object, seconds: float | None) -> None:
    """Set the switch interval to the shortest that any owner asks for. seconds: what `owner` asks for; None withdraws it."""
    with _switching:
        _switch_s.pop(owner, None)
        if seconds is not None:
            _switch_s[owner] = seconds
        sys.setswitchinterval(min(_switch_s.values(), default=USUAL_SWITCH_S))


_switching, _switch_s = threading.Lock(), dict[object, float]()


def relative_paths(text: str, models: Path) -> str:
    """A text whose paths are relative to the models folder, so that users may read it."""
    for folder in (models.absolute(), models.resolve(), models):
        text = re.sub(rf"(?<![\w./-]){re.escape(f'{folder}{os.sep}')}", "", text)
    return text


_OUT_OF_MEMORY = re.compile(r"out of memory|failed to allocate memory|OUT_OF_MEMORY|ALLOC_FAILED|bad_alloc", re.IGNORECASE)


def _reason(error: Exception, name: str, version: int, step: str, models: Path) -> str:
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(str(error)):
        message = (str(error) or "MemoryError").splitlines()[0][:200]
        text = (
            f"out of memory while {step} ({message}). Other versions go on serving. Unload another version first, or export "
            f"{name} {version} with a smaller max_beam_size, or lower ESPALIER_MAX_BATCH"
        )
    elif isinstance(error, EspalierError):
        text = str(error)
    else:
        text = f"{type(error).__name__} while {step}; the log says more"
    return relative_paths(text, models)
