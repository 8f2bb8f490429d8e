"""Writes during retrievals, on two workers: when a new item is found, how much slower retrieval gets, and how fast a bulk is.

    python -m benchmarks.live_load --json FILE [--model models/debian-depends/1] [--bulk MODEL ...]

Two workers get 70 % of the retrievals that they can answer, in turn without and with 100 items put a second. What they can answer is the
highest rate, in steps of a tenth, at which an open loop on the same cores has at most 1 % refused. Each item has a history as its
evidence. When its PUT is answered, both workers are asked by that history, over connections that are known to be theirs. Put-to-visible is
the time from the request until both have answered with the item. In the end every acknowledged item is read: one that is not there is lost.
A bulk is read by one worker on one core. Client and service share the machine.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from benchmarks.report_file import SAMPLE, command_line, write_report
from benchmarks.service.live_prober import Item, Probed, Prober, items_of, lost_of, percentile_ms
from benchmarks.service.serving import JSON, Process, connections_to, copied, exchange, retrievals, samples, serving, settings
from espalier.bundle import Bundle
from espalier_client import Client, Put, RequestFailed
from loadtest.loops import closed_loop, open_loop, percentiles_ms, statuses
from loadtest.queries import held_out
from loadtest.target import Target
from loadtest.writes import WRITTEN, delete_all

WORKERS, M, LOAD_SHARE = 2, 50, 0.7
CLIENTS = 16
ARRIVING_CLIENTS = 16
MOST_REFUSED, STEP = 0.01, 0.9
"""Largest share of refused retrievals at a rate that counts as capacity; factor from one tried rate to the next."""
COST_PER_S = 50
"""Puts a second while processor time is measured."""
KEY = "live-load-write-key"
COUNTS = ("found_at_once", "found_later", "invisible", "refused", "asked")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, default=SAMPLE, help="a bundle (default: the sample)")
    parser.add_argument("--bulk", type=Path, nargs="*", help="bundles to put items into in bulk (default: the one of --model)")
    parser.add_argument("--puts", type=float, default=100.0, help="items put per second (default %(default)g)")
    parser.add_argument("--share", type=float, default=LOAD_SHARE, help="share of the capacity that is offered (default %(default)g)")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a measurement (default %(default)g)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements without and with writes, in turn (default %(default)s)")
    parser.add_argument("--cost-items", type=int, default=500, help="puts whose processor time is measured (default %(default)s)")
    parser.add_argument("--arriving", type=float, nargs="*", default=[200.0, 400.0], help="puts a second beside nothing else")
    parser.add_argument("--bulk-items", type=int, default=2000, help="items of a bulk (default %(default)s)")
    options = parser.parse_args()
    report = measured(options.model, options.puts, options.seconds, options.rounds, options.share)
    report["bulk"] = [bulk(model, options.bulk_items) for model in ([options.model] if options.bulk is None else options.bulk)]
    report["puts_per_s_offered"] = options.puts
    report["put_cost"] = put_cost(options.model, options.cost_items)
    report["arriving"] = [arriving(options.model, 4 * options.cost_items, per_s) for per_s in options.arriving]
    print(json.dumps(report, indent=1))
    write_report(options.json, report)


def measured(model: Path, puts_per_s: float, seconds: float, rounds: int, share: float = LOAD_SHARE) -> dict[str, Any]:
    """The figures of both loads, medians of the rounds; counts are sums.

    As many retrievals are offered with writes as without: those that ask for the items count.
    """
    queries = held_out(Bundle.open(model, verify=False))
    with copied(model) as (folder, name), serving(["service"], settings(folder, workers=WORKERS, write_keys=KEY)) as port:
        address = "127.0.0.1", port
        writer = Target(*address, headers={"Authorization": f"Bearer {KEY}"})
        requests = retrievals(queries, {"model": name, "m": M})
        closed_loop(address, requests, CLIENTS, 2)  # warm
        answers = closed_loop(address, requests, CLIENTS, seconds / 2)
        capacity = sum(answer.status == 200 for answer in answers) / (seconds / 2)
        probes_per_s = WORKERS * puts_per_s
        quiet, busy, probes, lost_items = list[dict[str, Any]](), list[dict[str, Any]](), list[Probed](), 0
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # so that the two loads do not share an interpreter
            while refused_share(pool.submit(retrieved, address, requests, capacity, seconds / 2, 0).result()) > MOST_REFUSED:
                capacity *= STEP
            offered = share * capacity
            with Prober(address, name, KEY, WORKERS, M) as prober:
                for number in range(rounds):
                    quiet.append(pool.submit(retrieved, address, requests, offered, seconds, number).result())
                    load_job = pool.submit(retrieved, address, requests, max(offered - probes_per_s, 1.0), seconds, number)
                    items = items_of(queries, f"round-{number}-", round(puts_per_s * seconds), number)
                    probes.append(prober.run(items, puts_per_s))
                    busy.append(load_job.result())
                    lost_items += lost_of(address, name, KEY, probes[-1])
                    delete_all(writer, name, [item.id for item in items])
                    print(f"round {number + 1}: {busy[-1]['p99_ms']:.1f} ms p99 beside {quiet[-1]['p99_ms']:.1f} without", flush=True)
    medians = {
        "visible_p99_ms": [percentile_ms(probe.visible_s, 99) for probe in probes],
        "visible_p50_ms": [percentile_ms(probe.visible_s, 50) for probe in probes],
        "answered_p99_ms": [percentile_ms(probe.answered_s, 99) for probe in probes],
        "puts_per_s": [probe.per_s for probe in probes],
        **{f"retrieve_{name}": [load[name] for load in busy] for name in ("p99_ms", "p50_ms")},
        **{f"retrieve_{name}_without": [load[name] for load in quiet] for name in ("p99_ms", "p50_ms")},
        "client_cores": [load["cpu_s"] / seconds for load in busy],
        "refused_share": [refused_share(load) for load in busy],
        "refused_share_without": [refused_share(load) for load in quiet],
    }
    return {
        "model": name,
        "capacity_per_s": capacity,
        "offered_per_s": offered,
        **{name: float(np.median(values)) for name, values in medians.items()},
        "lost": lost_items,
        "acknowledged": sum(len(probe.sequences) for probe in probes),
        "sequences_twice": sum(len(probe.sequences) - len(set(probe.sequences.values())) for probe in probes),
        **{name: sum(getattr(probe, name) for probe in probes) for name in COUNTS},
        "visible_but_not_among_m": sum(probe.seen for probe in probes),
        "statuses": {"without": [load["statuses"] for load in quiet], "beside": [load["statuses"] for load in busy]},
        "put_statuses": [probe.statuses for probe in probes],
    }


def retrieved(address: tuple[str, int], requests: Sequence[bytes], per_s: float, seconds: float, seed: int) -> dict[str, Any]:
    """Figures of retrievals at random times. Runs in another process."""
    began_s = time.process_time()
    answered = open_loop(address, requests, per_s, seconds, seed, keep=lambda body: b"")
    cpu_s = time.process_time() - began_s
    p50_ms, p99_ms = percentiles_ms([answer for answer in answered if answer.status == 200])
    return {"p50_ms": p50_ms, "p99_ms": p99_ms, "statuses": statuses(answered), "cpu_s": cpu_s}


def refused_share(answers: dict[str, Any]) -> float:
    """Share of the retrievals that got no items."""
    counts: dict[str, int] = answers["statuses"]
    return 1 - counts.get("200", 0) / sum(counts.values())


def put_cost(model: Path, count: int) -> dict[str, Any]:
    """Processor milliseconds of a put, in the worker that answers it and in each other worker, without other load.

    The workers' time without puts, in as many seconds, is subtracted. Times come from the scheduler. `in_turn_ms` is the sum over all
    workers if they answer puts in turn, so that each must first apply another worker's writes.
    """
    queries = held_out(Bundle.open(model, verify=False))
    with started(model) as (process, name):
        writers = [connections[0] for connections in connections_to(("127.0.0.1", process.port), WORKERS, 1)]

        def paced(items: Sequence[Item], writers: Sequence[HTTPConnection] = writers[:1]) -> list[float]:
            """Processor milliseconds of each worker while items are put, or while nothing is."""
            before, began = [cpu_ms(worker) for worker in process.workers()], time.perf_counter()
            for number in range(count):
                if items:
                    put(writers[number % len(writers)], name, items[number])
                time.sleep(max(began + number / COST_PER_S - time.perf_counter(), 0))
            return [cpu_ms(worker) - earlier for worker, earlier in zip(process.workers(), before, strict=True)]

        for item in items_of(queries, "warm-", 50, 1):
            put(writers[0], name, item)
        idle, busy = paced([]), paced(items_of(queries, "cost-", count, 0))
        in_turn = paced(items_of(queries, "turns-", count, 2), writers)
    taking_ms, *following_ms = sorted(((b - i) / count for b, i in zip(busy, idle, strict=True)), reverse=True)
    all_ms = (sum(in_turn) - sum(idle)) / count
    return {"puts": count, "per_s": COST_PER_S, "taking_ms": taking_ms, "following_ms": following_ms, "in_turn_ms": all_ms}


def arriving(model: Path, count: int, per_s: float) -> dict[str, Any]:
    """Evenly paced puts over connections to all workers: processor time of a put, summed over workers, and latency."""
    queries = held_out(Bundle.open(model, verify=False))
    with started(model) as (process, name), ThreadPoolExecutor(ARRIVING_CLIENTS) as pool:
        free_connections: SimpleQueue[HTTPConnection] = SimpleQueue()
        for worker_connections in connections_to(("127.0.0.1", process.port), WORKERS, ARRIVING_CLIENTS // WORKERS):
            for connection in worker_connections:
                free_connections.put(connection)

        def answer_time_s(item: Item, due: float) -> float:
            connection = free_connections.get()
            put(connection, name, item)
            free_connections.put(connection)
            return time.perf_counter() - due

        for item in items_of(queries, "warm-", 50, 1):
            answer_time_s(item, 0.0)
        before, began = sum(map(cpu_ms, process.workers())), time.perf_counter()
        put_jobs = []
        for number, item in enumerate(items_of(queries, "arriving-", count, 0)):
            due = began + number / per_s
            time.sleep(max(due - time.perf_counter(), 0))
            put_jobs.append(pool.submit(answer_time_s, item, due))
        answered_s = [job.result() for job in put_jobs]
        cpu = (sum(map(cpu_ms, process.workers())) - before) / count
    return {
        "per_s": per_s,
        "puts": count,
        "all_ms": cpu,
        "answered_p50_ms": percentile_ms(answered_s, 50),
        "answered_p99_ms": percentile_ms(answered_s, 99),
    }


@contextmanager
def started(model: Path) -> Iterator[tuple[Process, str]]:
    """A service of a copied bundle, and the model's name."""
    with copied(model) as (folder, name):
        process = Process(["service"], settings(folder, workers=WORKERS, write_keys=KEY))
        process.start()
        try:
            process.wait_until_ready()
            yield process, name
        finally:
            process.end()


def put(connection: HTTPConnection, name: str, item: Item) -> None:
    body = {"events": [next(iter(item.query.values()))]}
    status, _ = exchange(connection, "PUT", f"/models/{name}/items/{item.id}", body, JSON | {"Authorization": f"Bearer {KEY}"})
    if status not in WRITTEN:
        raise RuntimeError(f"a put of {item.id} was answered {status}")


def cpu_ms(pid: int | None) -> float:
    """Processor milliseconds of a process's living threads."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e6


def bulk(model: Path, count: int) -> dict[str, Any]:
    """Items a second of one bulk into one worker on one core, of new items and of changes of their fields alone."""
    queries = held_out(Bundle.open(model, verify=False))
    cores = sorted(os.sched_getaffinity(0))
    with copied(model) as (folder, name), serving(["service"], settings(folder, workers=1, write_keys=KEY), core=cores[0]) as port:
        os.sched_setaffinity(0, set(cores[1:]) or set(cores))
        try:
            with Client(f"http://127.0.0.1:{port}", api_key=KEY, timeout_s=120) as client:
                items = items_of(queries, "bulk-", count, 0)
                warm = [Put(f"warm-{item.id}", events=[item.event]) for item in items[: count // 4]]
                list(client.bulk(name, warm))
                cpu_s, began = worker_cpu_s(port), time.perf_counter()
                outcomes = list(client.bulk(name, (Put(item.id, events=[item.event]) for item in items)))
                seconds, cpu_s = time.perf_counter() - began, worker_cpu_s(port) - cpu_s
        finally:
            os.sched_setaffinity(0, set(cores))
    failed = [str(outcome) for outcome in outcomes if isinstance(outcome, RequestFailed)]
    return {
        "model": name,
        "algorithm": Bundle.open(model, verify=False).manifest.algorithm,
        "items": count,
        "items_per_s": count / seconds,
        "items_per_cpu_s": count / cpu_s,  # what a core of its own would take, on a machine that does other things too
        "failed": len(failed),
        "first_failure": failed[:1],
    }


def worker_cpu_s(port: int) -> float:
    """Processor seconds of all workers so far. Workers update the metric at most once a second."""
    time.sleep(1.1)
    return sum(seconds for _, seconds in samples(port, "espalier_worker_cpu_seconds_total"))


if __name__ == "__main__":
    main()
