"""The time that the service adds to a search: POST /retrieve over a trivial engine, compared to a FastAPI route that answers a constant.

    python -m benchmarks.service_overhead --json FILE

The server is one process on one core, the client (closed loop, keep-alive) runs on another. Requests hold 20-item histories and ask
for 50 items. The compared route validates the same request with pydantic and answers the same document with orjson.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import uvicorn
from fastapi import FastAPI
from starlette.responses import Response

from benchmarks.random_bundles import make_bundle
from benchmarks.report_file import command_line, print_row, write_report
from benchmarks.service.serving import serving
from espalier.queries import QueryBatch
from espalier.search import NO_CONTEXT, SearchContext, SearchParams, SearchResult
from espalier.tree import complete_tree
from loadtest.loops import closed_loop, percentiles_ms, request_bytes
from service.__main__ import listen
from service.app import create_app
from service.models.loading import EngineSource
from service.processes.server import Server
from service.retrieval.schemas import RetrieveRequest
from service.settings import Settings

ITEMS, HISTORY, M = 1024, 20, 50
CASES = ("bare route", "service")
CONCURRENCY = (1, 16)


class TrivialEngine:
    """Answers every query with the items 0 … m − 1."""

    name, rounding = "trivial", 0.0

    def warm_up(self) -> None:
        """Nothing to build."""

    def close(self) -> None:
        """Nothing to free."""

    def search(self, queries: QueryBatch, params: SearchParams, context: SearchContext = NO_CONTEXT) -> SearchResult:
        shape = (len(queries), int(params.m_B.max(initial=0)))
        scores_BM = np.broadcast_to(np.linspace(1, 0.5, shape[1], dtype=np.float32), shape)
        rows_BM = np.broadcast_to(np.arange(shape[1]), shape)
        return SearchResult(rows_BM, scores_BM, scores_BM, scores_BM, params.m_B, np.ones(shape[0], np.bool_))

    candidates = search

    def parents(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
        """Not needed: this benchmark places no items."""
        raise NotImplementedError


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each measurement (default 4)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each case, in turn; the medians count (default 3)")
    parser.add_argument("--serve", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.port)
        return
    cells = [(case, concurrency) for case in CASES for concurrency in CONCURRENCY]
    rounds = [[measure(*cell, options.seconds) for cell in cells] for _ in range(options.rounds)]
    rows = [median(list(measurements)) for measurements in zip(*rounds, strict=True)]
    bare_row, service_row = (row for row in rows if row["concurrency"] == CONCURRENCY[-1])
    single_client_row = rows[len(CONCURRENCY)]
    summary = {
        "overhead_p50_ms": single_client_row["p50_ms"] - single_client_row["engine_p50_ms"],
        "share_of_bare_route": service_row["requests_per_s"] / bare_row["requests_per_s"],
    }
    for row in (*rows, summary):
        print_row(row)
    write_report(options.json, {"rows": rows, **summary})


def measure(case: str, concurrency: int, seconds: float) -> dict[str, Any]:
    """One server on one core, its clients on another."""
    cores = sorted(os.sched_getaffinity(0))
    with serving(["benchmarks.service_overhead", "--serve", case], {}, core=cores[0]) as port:
        os.sched_setaffinity(0, {cores[-1]})
        closed_loop(("127.0.0.1", port), [_request()], 1, 0.5)  # warm
        answered = closed_loop(("127.0.0.1", port), [_request()], concurrency, seconds)
        os.sched_setaffinity(0, cores)
    if refused := [answer for answer in answered if answer.status != 200]:
        raise RuntimeError(f"{case}: {refused[0].status} {refused[0].body.decode(errors='replace')}")
    engine = [orjson.loads(answer.body)["timing"]["search_ms"] for answer in answered[::16]]
    p50_ms, p99_ms = percentiles_ms(answered)
    return {
        "case": case,
        "concurrency": concurrency,
        "p50_ms": p50_ms,
        "p99_ms": p99_ms,
        "requests_per_s": len(answered) / seconds,
        "engine_p50_ms": None if None in engine else float(np.percentile(engine, 50)),
    }


def median(rows: list[dict[str, Any]]) -> dict[str, Any]:
    numbers = {key: float(np.median([row[key] for row in rows])) for key, value in rows[0].items() if isinstance(value, float)}
    return rows[0] | numbers


def serve(case: str, port: int) -> None:
    listening = listen("127.0.0.1", port)
    if case == "service":
        with tempfile.TemporaryDirectory() as folder:
            rng, tree = np.random.default_rng(0), complete_tree(np.arange(ITEMS), 2)
            limits: dict[str, Any] = {"beam_size": M, "m": M, "max_beam_size": ITEMS, "max_m": ITEMS}
            make_bundle(Path(folder), rng, tree, name="trivial", length=HISTORY, **limits)
            settings = Settings(models=Path(folder))
            Server(create_app(settings, EngineSource(lambda *_: TrivialEngine())), settings).serve_on(listening)
        return
    app = FastAPI()
    answer = _constant_answer()

    @app.post("/retrieve")
    async def retrieve(request: RetrieveRequest) -> Response:
        return Response(orjson.dumps(answer), media_type="application/json")

    @app.get("/readyz")
    async def ready() -> Response:
        return Response()

    uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False)).run(sockets=[listening])


def _constant_answer() -> dict[str, Any]:
    items = [{"id": f"item-{i}", "score": round(1 - i / 100, 8)} for i in range(M)]
    stages = ("queue_ms", "encode_ms", "serialise_ms", "total_ms", "ms_per_query")
    return {
        "model": "trivial",
        "version": 1,
        "engine": "trivial",
        "results": [{"items": items, "complete": True, "beam_size": M, "unknown": []}],
        "timing": dict.fromkeys(stages, 0.1234) | {"search_ms": None, "batch": 1},
    }


def _request() -> bytes:
    history = [f"item-{i}" for i in np.random.default_rng(0).integers(ITEMS, size=HISTORY)]
    return request_bytes("/retrieve", {"queries": [{"history": history}], "m": M})


if __name__ == "__main__":
    main()
