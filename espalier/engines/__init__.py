"""The table of engines, and the choice of one for a bundle.

An engine is imported when it is opened: torch, numba and ONNX Runtime load slowly, and an image need not have them all.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from espalier.bundle import Bundle
from espalier.errors import DeviceUnavailable, UnsupportedGraph
from espalier.search import Device, Precision, check_device

if TYPE_CHECKING:
    from espalier.engines.pipeline import Pipeline
    from espalier.engines.stages import TreeSearch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineEntry:
    """One engine of the table.

    device      where it runs
    scorers     the kinds of scorers that it searches (`scorer.kind` of a manifest)
    precisions  in which it can compute
    libraries   that it needs besides the requirements of espalier
    chosen      False: opened only by name
    """

    device: Literal["cpu", "cuda"]
    scorers: tuple[Literal["graphs", "linear"], ...]
    precisions: tuple[Precision, ...] = ("float32",)
    libraries: tuple[str, ...] = ()
    chosen: bool = True

    def missing(self) -> str:
        """A message that names the libraries that are not installed; empty if all are."""
        missing = [library for library in self.libraries if find_spec(library) is None]
        return f"{' and '.join(missing)} not installed (extra `gpu`)" if missing else ""


def _opened(engine: str, bundle: Bundle, threads: int, precision: Precision) -> TreeSearch:
    """The tree search of an engine. Raises DeviceUnavailable or UnsupportedGraph."""
    match engine:
        case "triton":
            from espalier.engines.triton.graph_engine import TritonSearch

            return TritonSearch(bundle, precision=precision)
        case "sparse-cuda":
            from espalier.engines.triton.linear_engine import SparseCudaSearch

            return SparseCudaSearch(bundle, precision=precision)
        case "compiled-cpu":
            from espalier.engines.compiled.engine import DenseSearch

            return DenseSearch.of(bundle, threads)
        case "sparse-cpu":
            from espalier.engines.linear.engine import SparseSearch

            return SparseSearch(bundle, threads)
        case "reference":
            from espalier.engines.reference_search import ReferenceSearch

            return ReferenceSearch(bundle)
    from espalier.engines.onnx.engine import OnnxSearch

    return OnnxSearch(bundle, ENGINES[engine].device, threads)


_ALL_PRECISIONS: tuple[Precision, ...] = ("float32", "float16", "bfloat16")
ENGINES: Mapping[str, EngineEntry] = {
    "triton": EngineEntry("cuda", ("graphs",), _ALL_PRECISIONS, ("torch", "triton")),
    "onnx-cuda": EngineEntry("cuda", ("graphs",)),
    "sparse-cuda": EngineEntry("cuda", ("linear",), _ALL_PRECISIONS, ("torch", "triton")),
    "compiled-cpu": EngineEntry("cpu", ("graphs",)),
    "onnx-cpu": EngineEntry("cpu", ("graphs",)),
    "sparse-cpu": EngineEntry("cpu", ("linear",)),
    "reference": EngineEntry("cpu", ("graphs", "linear"), chosen=False),
}
"""By name. The first that fits a bundle and a device is chosen."""


def runs_on_gpu(engine: str | None) -> bool:
    """Whether the engine of this name runs on a GPU."""
    return engine is not None and engine in ENGINES and ENGINES[engine].device == "cuda"


def gpu_usable() -> bool:
    """Whether `auto` would find a GPU that some engine here can use."""
    if not gpu_present():
        return False
    if not ENGINES["triton"].missing():
        from espalier.engines.triton.gpu_engine import gpu_available

        if gpu_available():
            return True
    from espalier.engines.onnx.engine import cuda_available

    return cuda_available()


def open_engine(
    bundle: Bundle, device: Device = "auto", engine: str | None = None, threads: int = 1, precision: Precision = "float32"
) -> Pipeline:
    """The best engine for a bundle on a device.

    device     `auto` takes a GPU if some engine can use one. Raises DeviceUnavailable for `cuda` without a GPU, InvalidInput for others
    engine     an engine by name, instead of the choice by device. Raises DeviceUnavailable if it cannot search the bundle
    threads    intra-op threads of one CPU search; one process per core with one thread each scales best
    precision  of node rows and products, or of weights. Raises DeviceUnavailable if the engine does not support it
    """
    from espalier.engines.pipeline import Pipeline

    check_device(device)
    name = f"{bundle.manifest.name} version {bundle.manifest.version}"
    reasons: dict[str, str] = {}
    for candidate in _candidates(bundle, device, engine):
        entry = ENGINES[candidate]
        gpu_reasons = {gpu_engine: reason for gpu_engine, reason in reasons.items() if runs_on_gpu(gpu_engine)}
        if entry.device == "cpu" and len(gpu_reasons) == len(reasons) > 0:
            explained = "; ".join(f"{gpu_engine} cannot use it: {reason}" for gpu_engine, reason in gpu_reasons.items())
            log.warning("%s runs on the CPU: there is a GPU, but %s", name, explained)
        reason = entry.missing()
        if not reason:
            _check_precision(bundle, candidate, precision)
            try:
                pipeline = Pipeline(bundle, _opened(candidate, bundle, threads, precision))
            except UnsupportedGraph as error:
                reason = str(error)
            except DeviceUnavailable as error:
                if engine is not None or device != "auto":
                    raise
                reason = str(error)
            else:
                log.info("%s runs on %s", name, pipeline.name)
                return pipeline
        reasons[candidate] = reason
        log.info("%s cannot run on %s: %s", name, candidate, reason)
    raise DeviceUnavailable("; ".join(f"{candidate} cannot run {name}: {reason}" for candidate, reason in reasons.items()))


def _candidates(bundle: Bundle, device: Device, engine: str | None) -> list[str]:
    """The names of the engines to try, in this order. Raises DeviceUnavailable where a named one does not fit."""
    scorer = bundle.manifest.scorer.kind
    if engine is None:
        devices = {"cpu": ("cpu",), "cuda": ("cuda",), "auto": ("cuda", "cpu") if gpu_present() else ("cpu",)}[device]
        return [name for name, entry in ENGINES.items() if entry.chosen and scorer in entry.scorers and entry.device in devices]
    if engine not in ENGINES:
        raise DeviceUnavailable(f"engine {engine!r}: expected one of {', '.join(ENGINES)}")
    if device not in ("auto", ENGINES[engine].device):
        raise DeviceUnavailable(f"engine {engine} does not run on device {device}")
    if scorer not in ENGINES[engine].scorers:
        names = ", ".join(name for name, entry in ENGINES.items() if scorer in entry.scorers)
        raise DeviceUnavailable(
            f"engine {engine} cannot search {bundle.manifest.name}, which has {scorer} scorers: expected one of {names}"
        )
    return [engine]


def _check_precision(bundle: Bundle, engine: str, precision: Precision) -> None:
    if precision not in ENGINES[engine].precisions:
        scorer = bundle.manifest.scorer.kind
        names = ", ".join(name for name, entry in ENGINES.items() if scorer in entry.scorers and precision in entry.precisions)
        raise DeviceUnavailable(f"precision {precision} needs the engine {names}; {bundle.manifest.name} would run on {engine}")


@cache
def gpu_present() -> bool:
    """Whether NVIDIA's driver is here and shows this process a GPU.

    The driver itself is asked, so a machine without one need not load gigabytes of libraries to find out.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
