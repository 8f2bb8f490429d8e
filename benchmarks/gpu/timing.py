"""The card, the versions, timing on the card, and its peak rates."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.lines import Row
from espalier.hardware import hardware

ROUNDS = 7
PACKAGES = ("torch", "triton", "onnx", "onnxruntime", "onnxruntime-gpu", "onnxscript", "numpy", "numba", "pyarrow", "fastapi", "uvicorn")


def milliseconds(run: Callable[[], object], least: int = 20) -> float:
    """Median over ROUNDS of the time of one of `least` runs in a row."""
    for _ in range(3):
        run()
    times = []
    for _ in range(ROUNDS):
        wait()
        begin = time.perf_counter()
        for _ in range(least):
            run()
        wait()
        times.append((time.perf_counter() - begin) * 1e3 / least)
    return float(np.median(times))


def wait() -> None:
    """Wait for the device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """The launches as one CUDA graph; without a GPU, `run` itself."""
    if not torch.cuda.is_available():
        return run
    capture_stream = torch.cuda.Stream()
    capture_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(capture_stream):
        run()
    torch.cuda.current_stream().wait_stream(capture_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def ceilings(size: int = 8192, copied: int = 1 << 30) -> dict[str, float]:
    """Peak rates of the device: float16 products in TFLOP/s, copies in GB/s (read and written)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a = torch.randn(size, size, device=device, dtype=torch.float16 if device == "cuda" else torch.float32)
    products = milliseconds(partial(torch.mm, a, a))
    block = torch.ones(copied, dtype=torch.uint8, device=device)
    copies = milliseconds(partial(torch.empty_like(block).copy_, block))
    return {"tflops": significant(2 * size**3 / products / 1e9), "gb_per_s": significant(2 * copied / copies / 1e6)}


def significant(value: float) -> float:
    """Rounded to four digits."""
    return float(f"{value:.4g}")


def card() -> Iterator[Row]:
    """A row `device`, whose "gpu" says whether there is one; then its peak rates."""
    yield {"case": "device", "ok": None, "gpu": torch.cuda.is_available()} | _device() | {"versions": versions(), "host": hardware()}
    if torch.cuda.is_available():
        yield {"case": "at best", "ok": None} | ceilings()


def versions() -> dict[str, str | None]:
    """Versions of the packages that a result depends on; None: not installed."""
    version_by_package: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in PACKAGES:
        try:
            version_by_package[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            version_by_package[name] = None
    return version_by_package


def _device() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"card": None, "note": "torch finds no NVIDIA GPU"}
    properties = torch.cuda.get_device_properties(0)
    return {
        "card": properties.name,
        "memory_gb": round(properties.total_memory / 1e9, 1),
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": _driver(),
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        return None
