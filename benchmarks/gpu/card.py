"""Which card, which versions, and what the card does at best. Knows torch's view of the machine and the packages that are installed."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch

from benchmarks.gpu.lines import Row
from benchmarks.gpu.timing import ceilings
from espalier.hardware import hardware

PACKAGES = ("torch", "triton", "onnx", "onnxruntime", "onnxruntime-gpu", "onnxscript", "numpy", "numba", "pyarrow", "fastapi", "uvicorn")


def card(best: bool = True) -> Iterator[Row]:
    """A row `device` with "gpu", whether there is one; then what it does at best, unless `best` says not to measure it."""
    yield {"case": "device", "ok": None, "gpu": torch.cuda.is_available()} | _device() | {"versions": versions(), "host": hardware()}
    if best and torch.cuda.is_available():
        yield {"case": "at best", "ok": None} | ceilings()


def versions() -> dict[str, str | None]:
    """Of the packages that a result depends on; None where one is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


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
