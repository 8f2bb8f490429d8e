"""How long the way through the code is: distinct files and functions of ours that nine ways cross.

    python -m benchmarks.code_path --json F [--walks]

log → bundle (`training fit` of a tree model and of a linear one, a few steps on made data) and query → answer, text → answer (one warm
POST /retrieve each to a service in this process). Counted are functions of espalier, training and service, in all threads, when they are
called; of the requests, what every one of eight crosses. Then the five walks of request_walks.py, on a bundle of 64 items; with --walks
these alone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import polars as pl

from benchmarks.report_file import command_line
from benchmarks.service.serving import free_port, get, request, wait_for
from benchmarks.speed import request_walks

ROOT = Path.cwd()
PACKAGES = tuple(f"{ROOT / name}{os.sep}" for name in ("espalier", "training", "service"))
REQUESTS = 8
BODIES: dict[str, dict[str, Any]] = {
    "query → answer": {"model": "planted", "queries": [{"history": ["item-3", "item-11", "item-19"]}], "m": 5},
    "text → answer": {"model": "shop", "queries": [{"text": "a red lamp"}], "m": 5},
}
PLANTED = """
kind = "otm-robust"
name = "planted"
data = {{ log = "{folder}/log.csv" }}
instances = {{ windows = [8, 4, 2], targets = 20 }}
scorer = {{ kind = "mlp", node_dim = 8, hidden = [32, 16] }}
optimiser = {{ steps = 6, batch = 60, average = 1 }}
search = {{ beam_size = 20, m = 10, max_beam_size = 32, max_m = 64 }}
"""
SHOP = """
kind = "xr-linear"
name = "shop"
data = {{ format = "log", train = "{folder}/searches.csv", items = "{folder}/items.parquet", own_texts = [["title"]] }}
tree = {{ branching = 4, max_leaf = 8 }}
"""

crossed: set[tuple[str, str]] | None = None


def _note(frame: FrameType, event: str, argument: object) -> None:
    code = frame.f_code
    if event == "call" and crossed is not None and code.co_filename.startswith(PACKAGES) and not code.co_name.startswith("<"):
        crossed.add((code.co_filename, code.co_qualname))


def _record(found: set[tuple[str, str]] | None) -> None:
    """Add what is crossed from now on to a set; None: to none."""
    global crossed
    crossed = found


def _counted(way: str, rounds: Sequence[set[tuple[str, str]]]) -> dict[str, Any]:
    """A row of what every round crossed."""
    found = set.intersection(*rounds)
    row = {"way": way, "files": len({file for file, _ in found}), "functions": len(found)}
    print(f"{way}: {row['files']} files, {row['functions']} functions", flush=True)
    return row


def write_data(folder: Path) -> None:
    rng = np.random.default_rng(42)
    users = [rng.permutation(16)[:14] * 8 + user % 8 for user in range(300)]
    events = [f"user-{user},item-{item}" for user, items in enumerate(users) for item in items]
    (folder / "log.csv").write_text("\n".join(["user,item", *events, ""]))
    items = [
        f"{colour} {thing}"
        for colour in ["red", "green", "blue", "black", "white"]
        for thing in ["lamp", "chair", "table", "cup", "pot", "pan", "bed", "desk"]
    ]
    searches = [f"{text},{item.replace(' ', '-')}" for item in items for text in (item, f"{item} for my kitchen", f"buy a {item}")]
    (folder / "searches.csv").write_text("\n".join(["query,item", *searches, ""]))
    pl.DataFrame({"id": [item.replace(" ", "-") for item in items], "title": items}).write_parquet(folder / "items.parquet")
    (folder / "planted.toml").write_text(PLANTED.format(folder=folder))
    (folder / "shop.toml").write_text(SHOP.format(folder=folder))


def trainings(folder: Path) -> list[dict[str, Any]]:
    """Both kinds of models, trained twice: what is cached after the first time, compiled code say, does not count."""
    from training.__main__ import main as train

    rows = []
    for name in ("planted", "shop"):
        for version in (1, 2):
            _record(found := set[tuple[str, str]]())
            out = folder / "models" / name / str(version)
            sys.argv = ["training", "fit", "--config", str(folder / f"{name}.toml"), "--out", str(out), "--device", "cpu"]
            try:
                train()
            except SystemExit as stop:
                if stop.code:
                    raise
            _record(None)
        rows.append(_counted(f"log → bundle, {name}", [found]))
    return rows


def requests(folder: Path) -> list[dict[str, Any]]:
    """One warm request of each kind, to a service on a free port of this process's own."""
    port = free_port()
    os.chdir(folder)  # where the service looks for `models`
    rows: list[dict[str, Any]] = []
    client = threading.Thread(target=_ask, args=(port, rows))
    client.start()
    from service.__main__ import main as serve

    serve(["--host", "127.0.0.1", "--port", str(port)])
    client.join()
    return rows


def _ask(port: int, rows: list[dict[str, Any]]) -> None:
    try:
        wait_for(lambda: get(port, "/readyz")[0] == 200, "the service is not ready")
        for way, body in BODIES.items():
            rounds = []
            for _ in range(1 + REQUESTS):
                time.sleep(0.3)  # so that nothing of the request before is counted
                _record(found := set[tuple[str, str]]())
                _, answer = request(port, "POST", "/retrieve", body)
                if not answer["results"][0]["items"]:
                    raise RuntimeError(f"{way}: no item came back")
                time.sleep(0.05)
                _record(None)
                rounds.append(found)
            rows.append(_counted(way, rounds[1:]))  # the first one warms up
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Count, print and write."""
    parser = command_line(__doc__)
    parser.add_argument("--walks", action="store_true", help="walk through request_walks.py alone")
    chosen = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    threading.setprofile(_note)
    sys.setprofile(_note)
    with tempfile.TemporaryDirectory() as name:
        rows = []
        if not chosen.walks:
            write_data(Path(name))
            rows = trainings(Path(name)) + requests(Path(name))
            os.chdir(ROOT)
        rows += request_walks.walks(Path(name), _record, _counted)
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
