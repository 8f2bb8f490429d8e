"""Would another wire format make retrieval cheaper? Compares the service with prototypes of msgpack over HTTP/1.1 and of gRPC.

    python -m benchmarks.wire_formats --json FILE [--model models/debian-depends/1] [--seconds 5] [--rounds 3]

    json             the service as it is: JSON over HTTP/1.1, connections kept alive
    json-columns     the same, but an answer has a list of ids and a list of scores: the effect of the shape alone
    msgpack          the document of `json` as msgpack, scores as 32-bit floats
    msgpack-columns  that of `json-columns`
    grpc             protobuf over HTTP/2 with grpcio's asyncio server, in the shape of the columns, which is also protobuf's cheapest

Requests hold one or eight held-out histories and ask for 50 items with the model's beam. The engine `trivial` answers constants: its rows
measure the service alone, so its ratios bound what a format can change.

One worker on the first core; the client, in a process of its own, on the last one: raw sockets over HTTP; over gRPC grpcio's blocking
client for one client, its asyncio client for several. No client parses answers; `parse_us` is measured separately.
Processor time is that of all threads of a process: `server_cpu_us` includes grpcio's threads, but not the client. `busy` is a process's
share of its core. `others_busy` is the number of cores that everything else took, the host of a virtual machine included. `search_us` is
the wall time of the search of one request; if several are searched in one call, its share.

All cases are measured in turn in each round. Figures are medians over the rounds; ratios are medians of each round's ratio to `json`, and
`server_cpu_us_ratios` has the smallest and the largest. Needs grpcio, protobuf and msgpack, which the service does not.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from benchmarks.report_file import SAMPLE, command_line, print_row, write_report
from benchmarks.service.live_load import cpu_ms
from benchmarks.service.serving import Process, copied, free_port, settings
from benchmarks.service.wire_prototypes import CASES, METHOD, NEEDED, messages, serve
from espalier.bundle import Bundle
from loadtest.loops import closed_loop, request_bytes
from loadtest.queries import held_out

M, REQUESTS, WARM_S, SAMPLED = 50, 200, 0.3, 64
RATIOS = ("p50_ms", "p99_ms", "requests_per_s", "server_cpu_us", "client_cpu_us")


class Load(NamedTuple):
    """Queries a request, and clients: one, or enough to keep a worker busy without refusals."""

    queries: int
    clients: int


LOADS = {"own": (Load(1, 1), Load(1, 8), Load(8, 1), Load(8, 4)), "trivial": (Load(1, 1), Load(1, 8))}
"""By engine: the model's own, or one that answers constants."""


class ClientFigures(NamedTuple):
    """A client's measurement: seconds of each request, bytes of all answers' bodies, the client's processor time, some answers."""

    seconds: list[float]
    answer_bytes: int
    cpu_s: float
    answers: list[bytes]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, default=SAMPLE, help="a bundle of histories (default: the sample)")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each measurement (default %(default)g)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each case, in turn; the medians count (default %(default)s)")
    parser.add_argument("--serve", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--engine", choices=LOADS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--grpc-port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if missing := [name for name in NEEDED if not is_installed(name)]:
        sys.exit(f"{', '.join(missing)}: not installed. This measurement needs them: pip install grpcio protobuf msgpack")
    if options.serve:
        serve(options.serve, options.engine == "trivial", options.port, options.grpc_port, min(os.sched_getaffinity(0)))
        return
    load_before = os.getloadavg()[0]
    rows = [row for engine in LOADS for row in measured(options.model, engine, options.seconds, options.rounds)]
    for row in rows:
        print_row(row)
    about = {"seconds": options.seconds, "rounds": options.rounds, "versions": {name: import_module(name).__version__ for name in NEEDED}}
    load = {"load_average_before": load_before, "load_average_after": os.getloadavg()[0]}
    load["others_busy_most"] = max(row["others_busy"] for row in rows)
    write_report(options.json, {**about, **load, "rows": rows}, "server on one, client on the other")


def is_installed(name: str) -> bool:
    with suppress(ModuleNotFoundError):
        return importlib.util.find_spec(name) is not None
    return False


def measured(model: Path, engine: str, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """A row for each load of an engine and each case."""
    histories = [list(query.body()["history"]) for query in held_out(Bundle.open(model, verify=False))]
    runs: dict[tuple[Load, str], list[dict[str, float]]] = {(load, case): [] for load in LOADS[engine] for case in CASES}
    with copied(model) as (folder, name), ExitStack() as running:
        servers = {case: server(case, engine, folder, running) for case in CASES}
        pool = running.enter_context(ProcessPoolExecutor(1, get_context("spawn"), on_last_core))
        check_equal(servers, documents(histories, 8, name), pool)
        for number in range(rounds):
            for (load, case), cells in runs.items():
                cells.append(measure(case, servers[case], documents(histories, load.queries, name), load.clients, seconds, pool))
            print(f"{engine}, round {number + 1} of {rounds}, load average {os.getloadavg()[0]:.2f}", file=sys.stderr, flush=True)
    return [
        {"engine": engine, **load._asdict(), "case": case, **summary(cells, runs[load, "json"])} for (load, case), cells in runs.items()
    ]


def server(case: str, engine: str, folder: Path, running: ExitStack) -> tuple[Process, int]:
    """A ready server, and the port that clients use."""
    grpc_port = free_port()
    command = ["benchmarks.wire_formats", "--serve", case, "--engine", engine, "--grpc-port", str(grpc_port)]
    process = Process(command, settings(folder, log_level="ERROR"))
    process.start()
    running.callback(process.end)
    process.wait_until_ready()
    return process, grpc_port if case == "grpc" else process.port


def on_last_core() -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def documents(histories: Sequence[list[str]], queries: int, name: str) -> list[dict[str, Any]]:
    """Requests of `queries` queries each, with held-out histories in turn."""
    turns = [[histories[(i * queries + j) % len(histories)] for j in range(queries)] for i in range(REQUESTS)]
    return [{"model": name, "queries": [{"history": history} for history in turn], "m": M} for turn in turns]


def request_of(case: str, document: dict[str, Any]) -> tuple[bytes, int]:
    """A request with its head (gRPC: without), and the number of bytes of its body."""
    if case == "grpc":
        content: bytes = messages().Request(**document).SerializeToString()
        return content, len(content)
    if case.startswith("json"):
        return request_bytes("/retrieve", document), len(orjson.dumps(document))
    content = import_module("msgpack").packb(document)
    head = f"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/msgpack\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content, len(content)


def measure(
    case: str, server: tuple[Process, int], bodies: list[dict[str, Any]], clients: int, seconds: float, pool: ProcessPoolExecutor
) -> dict[str, float]:
    process, port = server
    requests, sizes = zip(*[request_of(case, body) for body in bodies], strict=True)
    ask = ask_grpc if case == "grpc" else ask_http
    pool.submit(ask, port, requests, clients, WARM_S).result()
    machine_s, cpu_s, began = cpu_of_machine(), cpu_ms(process.pid) / 1e3, time.perf_counter()
    client_figures = pool.submit(ask, port, requests, clients, seconds).result()
    cpu_s, elapsed_s, count = cpu_ms(process.pid) / 1e3 - cpu_s, time.perf_counter() - began, len(client_figures.seconds)
    machine_s = cpu_of_machine() - machine_s
    p50_ms, p99_ms = (np.percentile(client_figures.seconds, (50, 99)) * 1e3).tolist()
    parse_us, ms_per_query = parsed(case, client_figures.answers)
    return {
        "p50_ms": p50_ms,
        "p99_ms": p99_ms,
        "requests_per_s": count / elapsed_s,
        "server_cpu_us": cpu_s / count * 1e6,
        "client_cpu_us": client_figures.cpu_s / count * 1e6,
        "server_busy": cpu_s / elapsed_s,
        "client_busy": client_figures.cpu_s / elapsed_s,
        "others_busy": (machine_s - cpu_s - client_figures.cpu_s) / elapsed_s,
        "search_us": ms_per_query * len(bodies[0]["queries"]) * 1e3,
        "parse_us": parse_us,
        "request_bytes": float(np.mean(sizes)),
        "answer_bytes": client_figures.answer_bytes / count,
    }


def summary(rows: list[dict[str, float]], base: list[dict[str, float]]) -> dict[str, Any]:
    """Medians of the rounds, and of their ratios to the same rounds of `json`."""
    medians: dict[str, Any] = {figure: float(np.median([row[figure] for row in rows])) for figure in rows[0]}
    ratios = {figure: [row[figure] / other[figure] for row, other in zip(rows, base, strict=True)] for figure in RATIOS}
    medians |= {f"{figure}_ratio": float(np.median(ratios[figure])) for figure in RATIOS}
    return medians | {"server_cpu_us_ratios": [min(ratios["server_cpu_us"]), max(ratios["server_cpu_us"])]}


def ask_http(port: int, requests: Sequence[bytes], clients: int, seconds: float) -> ClientFigures:
    cpu_s = time.process_time()
    answered = closed_loop(("127.0.0.1", port), requests, clients, seconds)
    cpu_s = time.process_time() - cpu_s
    if refused := [answer for answer in answered if answer.status != 200]:
        raise RuntimeError(f"{len(refused)} of {len(answered)}: {refused[0].status} {refused[0].body.decode(errors='replace')}")
    answers = [response.body for response in answered[:SAMPLED]]
    return ClientFigures([response.seconds for response in answered], sum(len(response.body) for response in answered), cpu_s, answers)


def ask_grpc(port: int, requests: Sequence[bytes], clients: int, seconds: float) -> ClientFigures:
    """Raises grpc.RpcError where a call fails."""
    cpu_s = time.process_time()
    address = f"127.0.0.1:{port}"
    if clients == 1:
        answered = one_grpc_client(address, requests, seconds)
    else:
        answered = asyncio.run(grpc_clients(address, requests, clients, seconds))
    cpu_s = time.process_time() - cpu_s
    answers = [body for _, body in answered[:SAMPLED]]
    return ClientFigures([answer_s for answer_s, _ in answered], sum(len(body) for _, body in answered), cpu_s, answers)


def one_grpc_client(address: str, requests: Sequence[bytes], seconds: float) -> list[tuple[float, bytes]]:
    answered: list[tuple[float, bytes]] = []
    with import_module("grpc").insecure_channel(address) as channel:
        call = channel.unary_unary(METHOD)
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            body = call(requests[len(answered) % len(requests)])
            answered.append((time.perf_counter() - began, body))
    return answered


async def grpc_clients(address: str, requests: Sequence[bytes], clients: int, seconds: float) -> list[tuple[float, bytes]]:
    """All clients share a connection, as HTTP/2 intends."""
    answered: list[tuple[float, bytes]] = []
    request_number = 0
    async with import_module("grpc.aio").insecure_channel(address) as channel:
        call = channel.unary_unary(METHOD)
        end = time.perf_counter() + seconds

        async def client() -> None:
            nonlocal request_number
            while (began := time.perf_counter()) < end:
                request, request_number = requests[request_number % len(requests)], request_number + 1
                body = await call(request)
                answered.append((time.perf_counter() - began, body))

        await asyncio.gather(*(client() for _ in range(clients)))
    return answered


def cpu_of_machine() -> float:
    """Processor seconds of the whole machine, those that its host took included."""
    user, nice, system, _, _, *other_times = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9])
    return (user + nice + system + sum(other_times)) / os.sysconf("SC_CLK_TCK")


def parser_of(case: str) -> Callable[[bytes], Any]:
    if case == "grpc":
        return lambda body: messages().Answer.FromString(body)
    return orjson.loads if case.startswith("json") else import_module("msgpack").unpackb


def parsed(case: str, answers: Sequence[bytes]) -> tuple[float, float]:
    """Medians over some answers: µs to parse one, and milliseconds of search for each query, as the answer reports them."""
    parse, times, searches = parser_of(case), list[float](), list[float]()
    for body in answers:
        began = time.perf_counter()
        answer = parse(body)
        times.append(time.perf_counter() - began)
        searches.append(answer.timing.ms_per_query if case == "grpc" else answer["timing"]["ms_per_query"])
    return float(np.median(times)) * 1e6, float(np.median(searches))


def check_equal(servers: dict[str, tuple[Process, int]], bodies: list[dict[str, Any]], pool: ProcessPoolExecutor) -> None:
    """Raise RuntimeError unless all cases give the same items the same scores."""
    answers = {}
    for case, (_, port) in servers.items():
        ask = ask_grpc if case == "grpc" else ask_http
        answer = parser_of(case)(pool.submit(ask, port, [request_of(case, bodies[0])[0]], 1, WARM_S).result().answers[0])
        answers[case] = [ranked(result) for result in (answer.results if case == "grpc" else answer["results"])]
    if different := [case for case in CASES if answers[case] != answers["json"]]:
        raise RuntimeError(f"{', '.join(different)}: other answers than json")


def ranked(result: Any) -> list[tuple[str, np.float32]]:
    """Items and scores of one query, of any case."""
    if not isinstance(result, dict):
        pairs = list(zip(result.ids, result.scores, strict=True))
    elif "ids" in result:
        pairs = list(zip(result["ids"], result["scores"], strict=True))
    else:
        pairs = [(item["id"], item["score"]) for item in result["items"]]
    return [(item_id, np.float32(score)) for item_id, score in pairs]


if __name__ == "__main__":
    main()
