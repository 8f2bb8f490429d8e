"""What a console in use costs customers: their p99 with it and without, in pairs whose order alternates.

One worker on a core of its own gets half of the retrievals that it can answer, at random times, from a client on another core. The browser
has the cores that are left. In use means that somebody drags the Lab's beam from its default to four times that and back, a second in every
five; without means that the same browser shows an empty page.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import numpy as np
from playwright.sync_api import Page

from benchmarks.service.live_load import retrieved
from loadtest.loops import closed_loop

SHARE = 0.5
CLIENTS = 16
PERIOD_S = 5.0
DRAG_BEAM = """({share, period_ms}) => {
  const slider = document.querySelector("main input[type=range]");
  const start = Number(slider.value);
  window.dragging = setInterval(() => {
    const now = performance.now() % period_ms / period_ms;
    if (now > share) return;
    slider.value = start + Math.round(3 * start * Math.sin(Math.PI * now / share));
    slider.dispatchEvent(new Event("input", {bubbles: true}));
  }, 16);
}"""
"""In `share` of each period the first slider goes to four times its value and back, an event a frame, as when somebody drags it."""


def beside(
    page: Page, address: tuple[str, int], lab: str, requests: Sequence[bytes], pairs: int, seconds: float, share: float
) -> dict[str, Any]:
    """Pairs of p99 and the median of their ratios.

    lab    address of the Lab
    share  of the time in which the slider is dragged
    """
    cores = sorted(os.sched_getaffinity(0))
    with ProcessPoolExecutor(1, get_context("spawn")) as pool, on_cores(cores[1:2] or cores):
        closed_loop(address, requests, CLIENTS, 2)  # warm
        capacity = len([one for one in closed_loop(address, requests, CLIENTS, seconds / 2) if one.status == 200]) / (seconds / 2)
        measured: dict[bool, list[float]] = {True: [], False: []}
        answers = []
        for number in range(pairs):
            for used in (True, False) if number % 2 else (False, True):
                with _in_use(page, lab, share) if used else _empty(page):
                    found = pool.submit(retrieved, address, requests, SHARE * capacity, seconds, number).result()
                    answers.append(int(page.evaluate("window.answers ?? 0")))
                measured[used].append(found["p99_ms"])
            print(f"pair {number + 1}: {measured[True][-1]:.2f} ms p99 with a console, {measured[False][-1]:.2f} without", flush=True)
    ratios = np.divide(measured[True], measured[False])
    return {
        "capacity_per_s": capacity,
        "offered_per_s": SHARE * capacity,
        "seconds": seconds,
        "p99_ms": measured[True],
        "p99_ms_without": measured[False],
        "ratios": ratios.tolist(),
        "median_ratio": float(np.median(ratios)),
        "console_requests_per_s": float(np.sum(answers)) / (pairs * seconds),
    }


@contextmanager
def _in_use(page: Page, lab: str, share: float) -> Iterator[None]:
    page.goto("about:blank")
    page.goto(lab)
    page.locator("main input[type=range]").first.wait_for()
    page.evaluate("""() => {
      const asked = window.fetch;
      window.answers = 0;
      window.fetch = (...given) => asked(...given).finally(() => { window.answers += 1; });
    }""")
    page.evaluate(DRAG_BEAM, {"share": share, "period_ms": 1000 * PERIOD_S})
    yield
    page.evaluate("clearInterval(window.dragging)")


@contextmanager
def _empty(page: Page) -> Iterator[None]:
    page.goto("about:blank")
    yield


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Processes that start in here have these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(cores))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
