"""What the service adds to a search: POST /retrieve over a trivial engine, beside a bare FastAPI route that answers a constant.

    python -m benchmarks.service_overhead --json FILE

The server is one process on one core, the client (closed loop, keep-alive) runs on another. Requests hold 20-item histories and ask
for 50 items; the bare route validates the same request with pydantic and answers the same document with orjson.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import re
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import uvicorn
from fastapi import FastAPI
from starlette.responses import Response

from espalier.bundle import Bundle, BundleContent, write_bundle
from espalier.items import ItemTable
from espalier.manifest import ManifestDraft, Ranking, SearchDefaults
from espalier.queries import HistoryKind, QueryBatch
from espalier.search import Engine, SearchParams, SearchResult
from espalier.tree import complete_tree
from service.__main__ import listen
from service.app import create_app
from service.schemas import RetrieveRequest
from service.settings import Settings

ITEMS, HISTORY, M = 1024, 20, 50
CONCURRENCY = (1, 16)


class TrivialEngine:
    """Answers the items 0 … m − 1, whatever was asked."""

    name, rounding = "trivial", 0.0

    def warm_up(self) -> None:
        """Nothing to build."""

    def search(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
        shape = (len(queries), int(params.m_B.max(initial=0)))
        scores_BM = np.broadcast_to(np.linspace(1, 0.5, shape[1], dtype=np.float32), shape)
        rows_BM = np.broadcast_to(np.arange(shape[1]), shape)
        return SearchResult(rows_BM, scores_BM, scores_BM, params.m_B, np.ones(shape[0], np.bool_))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service_overhead", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the measurements here")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each measurement (default 4)")
    parser.add_argument("--serve", choices=("service", "bare route"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    cores = sorted(os.sched_getaffinity(0))
    rows: list[dict[str, Any]] = []
    for case in ("bare route", "service"):
        with running(case, cores[0]) as port:
            os.sched_setaffinity(0, {cores[-1]})
            measure(port, 1, 0.5)  # warm
            rows += [{"case": case} | measure(port, concurrency, options.seconds) for concurrency in CONCURRENCY]
            os.sched_setaffinity(0, cores)
    print(f"{'case':<12}{'concurrency':>12}{'p50 ms':>10}{'p99 ms':>10}{'requests/s':>12}{'engine p50 ms':>15}")
    for row in rows:
        engine = "" if row["engine_p50_ms"] is None else f"{row['engine_p50_ms']:.3f}"
        print(
            f"{row['case']:<12}{row['concurrency']:>12}{row['p50_ms']:>10.3f}{row['p99_ms']:>10.3f}{row['requests_per_s']:>12.0f}{engine:>15}"
        )
    if options.json:
        report = {"hardware": hardware(), "date": datetime.now(UTC).date().isoformat(), "rows": rows}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def measure(port: int, concurrency: int, seconds: float) -> dict[str, Any]:
    """Closed loop over `concurrency` connections: each sends its next request when it has its answer."""
    request = _request()
    selector = selectors.DefaultSelector()
    buffers: dict[socket.socket, bytearray] = {}
    sent: dict[socket.socket, float] = {}
    for _ in range(concurrency):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(connection, selectors.EVENT_READ)
        buffers[connection] = bytearray()
    latencies, engine_ms = [], []
    began = time.perf_counter()
    for connection in buffers:
        sent[connection] = time.perf_counter()
        connection.sendall(request)
    while time.perf_counter() - began < seconds:
        for key, _ in selector.select(timeout=5):
            connection = key.fileobj  # type: ignore[assignment]  # only sockets are registered
            buffer = buffers[connection]
            buffer += connection.recv(65536)
            body = _body(buffer)
            if body is None:
                continue
            latencies.append(time.perf_counter() - sent[connection])
            if len(latencies) % 16 == 0:
                engine_ms.append(orjson.loads(body)["timing"]["search_ms"])
            buffer.clear()
            sent[connection] = time.perf_counter()
            connection.sendall(request)
    elapsed = time.perf_counter() - began
    for connection in buffers:
        connection.close()
    engine = [value for value in engine_ms if value is not None]
    return {
        "concurrency": concurrency,
        "p50_ms": float(np.percentile(latencies, 50)) * 1e3,
        "p99_ms": float(np.percentile(latencies, 99)) * 1e3,
        "requests_per_s": len(latencies) / elapsed,
        "engine_p50_ms": float(np.percentile(engine, 50)) if engine else None,
    }


@contextmanager
def running(case: str, core: int) -> Iterator[int]:
    """A server process on one core; gives its port."""
    command = [sys.executable, "-m", "benchmarks.service_overhead", "--serve", case]
    os.sched_setaffinity(0, {core})  # the child inherits it
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line.strip().isdecimal():
                raise RuntimeError(f"the server of {case!r} did not start")
            port = int(line)
            while _status(port, "/readyz") != 200:
                time.sleep(0.05)
            yield port
        finally:
            process.terminate()


def _status(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def serve(case: str) -> None:
    """Run one of the two servers, after printing its port."""
    listening = listen("127.0.0.1", 0)
    with tempfile.TemporaryDirectory() as folder:
        if case == "service":
            _write_model(Path(folder))
            app = create_app(Settings(models=Path(folder)), _open_trivial)
        else:
            app = FastAPI()
            answer = _constant_answer()

            @app.post("/retrieve")
            async def bare(request: RetrieveRequest) -> Response:
                return Response(orjson.dumps(answer), media_type="application/json")

            @app.get("/readyz")
            async def ready() -> Response:
                return Response()

        config = uvicorn.Config(app, log_config=None, access_log=False)
        print(listening.getsockname()[1], flush=True)
        uvicorn.Server(config).run(sockets=[listening])


def _open_trivial(bundle: Bundle, device: str, engine: str | None, threads: int) -> Engine:
    return TrivialEngine()


def _write_model(folder: Path) -> None:
    ids = [f"item-{i}" for i in range(ITEMS)]
    tree = complete_tree(np.arange(ITEMS), 2)
    draft = ManifestDraft(
        name="trivial",
        version=1,
        algorithm="none",
        created=datetime.now(UTC),
        query=HistoryKind(length=HISTORY),
        ranking=Ranking(own="logit", gamma=0),
        search=SearchDefaults(beam_size=M, m=M, max_beam_size=ITEMS, max_m=ITEMS),
    )
    history = pa.array([["item-0"]], pa.list_(pa.string()))
    golden = pa.table({"history": history, "beam_size": [1], "m": [1], "item_rows": [[0]], "ranks": [[0.0]], "margin": [1.0]})
    heldout = pa.table({"history": history, "relevant": [["item-0"]]})
    items = ItemTable.build(pa.table({"id": ids}))
    rows_ND = np.zeros((tree.node_count, 1), np.float32)
    write_bundle(folder / "trivial" / "1", draft, BundleContent(tree, rows_ND, 1, 1, b"none", b"none", items, golden, heldout))


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
    body = orjson.dumps({"queries": [{"history": history}], "m": M})
    head = f"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


def _body(answer: bytearray) -> bytearray | None:
    """The body of a complete answer, None while some is missing. Raises RuntimeError on another status than 200."""
    end = answer.find(b"\r\n\r\n")
    length = _LENGTH.search(answer, 0, end) if end >= 0 else None
    if length is None or len(answer) < end + 4 + int(length[1]):
        return None
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(bytes(answer).decode(errors="replace"))
    return answer[end + 4 :]


def hardware() -> str:
    """The processor's name and how many cores this process may use."""
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.is_file() else []
    return f"{names[0] if names else platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores"


if __name__ == "__main__":
    main()
