"""How long something takes on a device, and what the device does at best."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

ROUNDS = 7


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
    """For the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """The same launches as one CUDA graph; without a GPU the run itself."""
    if not torch.cuda.is_available():
        return run
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def ceilings(size: int = 8192, copied: int = 1 << 30) -> dict[str, float]:
    """What this device does at best: float16 products in TFLOP/s, copies in GB/s (read and written)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a = torch.randn(size, size, device=device, dtype=torch.float16 if device == "cuda" else torch.float32)
    products = milliseconds(partial(torch.mm, a, a))
    block = torch.ones(copied, dtype=torch.uint8, device=device)
    copies = milliseconds(partial(torch.empty_like(block).copy_, block))
    return {"tflops": significant(2 * size**3 / products / 1e9), "gb_per_s": significant(2 * copied / copies / 1e6)}


def significant(value: float) -> float:
    """To four digits."""
    return float(f"{value:.4g}")
