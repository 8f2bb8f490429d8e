"""The console in Chromium: how soon it shows results, follows a slider and draws a search, what it weighs, what it costs customers.

    python -m benchmarks.console --json FILE [--part NAME ...]

| part | what |
|---|---|
| size | bytes of all files, each compressed by gzip at its best |
| first | milliseconds from the first byte of the page to the first painted result, in a browser that has nothing cached |
| slider | milliseconds from a slider's event until its answer stands in the page, and until it is painted |
| redraw | milliseconds to draw a search of beam 800 over 22 levels anew in Why not |
| hours | what a page of Today holds more after eight simulated hours |
| beside | customers' p99 with a console in use over that without, in alternated pairs |

The service has one core, the browser those but two. Frames of Chromium come every 16.7 ms at best, which times until painting include.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
from playwright.sync_api import Browser, CDPSession, Page

from benchmarks.service.chromium import chromium
from benchmarks.service.console_beside import beside, on_cores
from benchmarks.service.console_hours import watched_for_hours
from benchmarks.service.console_marks import FIRST_RESULT, MARK_ANSWERS, MOVE_ONCE, REDRAW
from benchmarks.service.live_load import copied
from benchmarks.service.serving import get, serving
from espalier.bundle import Bundle
from espalier.checks.random_bundles import make_bundle
from espalier.hardware import hardware
from espalier.tree import Tree, tree_from_children
from loadtest.loops import request_bytes
from loadtest.queries import held_out
from service.http.console import read_files

PARTS = ("size", "first", "slider", "redraw", "hours", "beside")
LEVELS, BEAM = 22, 800


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.console", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the measurements here")
    parser.add_argument("--part", nargs="*", choices=PARTS, default=PARTS, help="what to measure (default: all)")
    parser.add_argument("--model", type=Path, default=Path("models/debian-depends/1"), help="a bundle (default %(default)s)")
    parser.add_argument("--loads", type=int, default=20, help="times that the page is opened (default %(default)s)")
    parser.add_argument("--moves", type=int, default=200, help="moves of the slider, and redraws (default %(default)s)")
    parser.add_argument("--hours", type=float, default=8.0, help="simulated hours (default %(default)g)")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of loads (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a load (default %(default)g)")
    parser.add_argument(
        "--share", type=float, default=0.2, help="of the time in which a slider is dragged beside customers (default %(default)g)"
    )
    options = parser.parse_args()
    found: dict[str, Any] = {"hardware": hardware(), "date": datetime.now(UTC).date().isoformat(), "load_average": os.getloadavg()[0]}
    if "size" in options.part:
        found["size"] = size()
    if set(options.part) - {"size"}:
        found |= in_chromium(options)
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def in_chromium(options: argparse.Namespace) -> dict[str, Any]:
    """Measurements of the parts that need a browser, by part."""
    cores = sorted(os.sched_getaffinity(0))
    found: dict[str, Any] = {}
    with ExitStack() as opened:
        folder, name = opened.enter_context(copied(options.model))
        deep_model(folder)
        settings = {"ESPALIER_MODELS": str(folder), "ESPALIER_DEVICE": "cpu", "ESPALIER_LOG_LEVEL": "WARNING", "ESPALIER_PROBE_PER_S": "1"}
        port = opened.enter_context(serving(["service"], settings, core=cores[0]))
        with on_cores(cores[2:] or cores):
            browser = opened.enter_context(chromium())
        base = f"http://127.0.0.1:{port}/"
        lab = f"{base}#/lab?{urlencode({'model': name, 'beam': 100})}"
        parts: dict[str, Callable[[], Any]] = {
            "first": lambda: first_result(browser, base, options.loads),
            "slider": lambda: in_page(browser, lambda page: slider(page, lab, options.moves)),
            "redraw": lambda: in_page(browser, lambda page: redraw(page, base, options.moves)),
            "hours": lambda: in_page(browser, lambda page: hours(page, base, port, name, options.hours)),
            "beside": lambda: in_page(browser, lambda page: costs(page, lab, port, name, options)),
        }
        for part in (part for part in parts if part in options.part):
            print(part, flush=True)
            found[part] = parts[part]()
    return found


def size() -> dict[str, int]:
    zipped = {path: len(gzip.compress(file.content, 9, mtime=0)) for path, file in read_files().items()}
    return {"files": len(zipped), "bytes_compressed": sum(zipped.values())}


@contextmanager
def page_of(browser: Browser) -> Iterator[Page]:
    """A page of its own: nothing cached, nothing stored."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    try:
        yield context.new_page()
    finally:
        context.close()


def in_page(browser: Browser, measure: Callable[[Page], Any]) -> Any:
    with page_of(browser) as page:
        return measure(page)


def summary(values_ms: Sequence[float]) -> dict[str, float]:
    return {f"p{p}_ms": round(float(np.percentile(values_ms, p)), 2) for p in (50, 95, 99)} | {"count": len(values_ms)}


def first_result(browser: Browser, base: str, loads: int) -> dict[str, float]:
    times_ms = []
    for _ in range(loads):
        with page_of(browser) as page:
            page.add_init_script(f"({FIRST_RESULT})()")
            page.goto(base)
            first_byte = "performance.getEntriesByType('navigation')[0].responseStart"
            times_ms.append(float(page.evaluate(f"window.firstResult.then((painted) => painted - {first_byte})")))
    return summary(times_ms)


def slider(page: Page, lab: str, moves: int) -> dict[str, Any]:
    """One move after the other, each to another beam, from 10 to 400."""
    page.add_init_script(f"({MARK_ANSWERS})(0)")
    page.goto(lab)
    page.locator(".results .result").first.wait_for()
    beams = np.random.default_rng(0).permutation(np.arange(10, 400))
    moved = [page.evaluate(MOVE_ONCE, int(beam)) for beam in np.resize(beams, moves + 10)][10:]
    return {name: summary([one[f"{name}_ms"] for one in moved]) for name in ("changed", "painted")}


def deep_model(folder: Path) -> None:
    """A model `deep`, 22 levels of which have more than 800 nodes."""
    rng = np.random.default_rng(0)
    make_bundle(folder, rng, deep_tree(rng), name="deep", integer=False, max_beam_size=1000, m=20)


def deep_tree(rng: np.random.Generator) -> Tree:
    """Ten levels of two children each, then 22 on which every twentieth node has two."""
    children = [np.full(2**level, 2) for level in range(10)]
    for _ in range(LEVELS):
        children.append(1 + (rng.random(int(children[-1].sum())) < 0.05))
    return tree_from_children(children, rng.permutation(int(children[-1].sum())))


def redraw(page: Page, base: str, times: int) -> dict[str, Any]:
    """Of the levels' drawing, by a change of the colours, once a frame.

    script is from the change to the end of layout, frame from one redraw to the next, cpu the main thread's, whoever else wants cores.
    """
    item = {"model": "deep", "q": json.dumps({"history": ["item-0"]}), "beam": BEAM, "item": "item-7"}
    page.set_viewport_size({"width": 1440, "height": 1600})
    page.goto(f"{base}#/whynot?{urlencode(item)}")
    page.locator(".whynot-strip canvas").first.wait_for()
    rows = page.locator(".whynot-strip canvas").count()
    if rows < LEVELS:
        raise RuntimeError(f"Why not: got {rows} levels, expected {LEVELS}")
    page.wait_for_timeout(500)
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    before = main_thread_ms(session)
    drawn = page.evaluate(REDRAW, times)
    cpu_ms = {name: round((spent - before[name]) / times, 2) for name, spent in main_thread_ms(session).items()}
    return {"levels": rows, "script": summary(drawn["script_ms"]), "frame": summary(drawn["frame_ms"]), "cpu_ms_each": cpu_ms}


def main_thread_ms(session: CDPSession) -> dict[str, float]:
    """Processor time of the page's main thread so far: of everything, and of parts of it."""
    found = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    return {name: 1000 * found[f"{name}Duration"] for name in ("Task", "Script", "RecalcStyle", "Layout")}


def hours(page: Page, base: str, port: int, name: str, simulated: float) -> dict[str, Any]:
    health = json.loads(get(port, f"/models/{name}/health")[1])
    grown = watched_for_hours(page, f"{base}#/today?model={name}", health, simulated)
    if not grown.answers:
        raise RuntimeError("Today: asked for no health in all that time")
    return vars(grown)


def costs(page: Page, lab: str, port: int, name: str, options: argparse.Namespace) -> dict[str, Any]:
    queries = held_out(Bundle.open(options.model, verify=False))
    requests = [request_bytes("/retrieve", {"model": name, "queries": [query.body()], "m": 50}) for query in queries]
    return beside(page, ("127.0.0.1", port), lab, requests, options.pairs, options.seconds, options.share)


if __name__ == "__main__":
    main()
