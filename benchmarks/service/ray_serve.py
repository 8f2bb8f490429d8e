"""Ray Serve beside the bare service: `serve run` to the first answer, requests/s, a replica that is killed, a second one under load.

    python -m benchmarks.ray_serve --json FILE [--model DIR]

The bundle in two shards, one replica each. Beside the service that holds it whole: the router with its shards over HTTP, the same under Ray
Serve behind Ray's proxy, and behind Ray's HAProxy (RAY_SERVE_ENABLE_HA_PROXY=1). Then, behind Ray's proxy, clients ask all the time: Ray
adds a replica to each shard, and the first replica of a shard is killed. All on this machine, the clients too, one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.service.ray_running import LOCAL, ROOT, Load, RayServing, ray_serving, serve_run
from benchmarks.service.serving import serving
from espalier.bundle import Bundle
from espalier.hardware import hardware
from loadtest.loops import closed_loop, percentiles_ms, request_bytes, statuses
from training.shard.command import shard

SHARDS, HISTORY, M = 2, 8, 50
WITHIN_S = 300.0
"""For everything that is waited for."""
CPUS = 0.4
"""Reserved by each of five replicas of three deployments: two cores are enough."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ray_serve", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the measurements here")
    parser.add_argument("--model", type=Path, default=ROOT / "models/debian-depends/1", help="bundle of histories (default: the sample)")
    parser.add_argument("--seconds", type=float, default=10, help="length of each measurement of requests/s (default 10)")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8], help="clients of the closed loops (default 1 8)")
    options = parser.parse_args()
    bundle = Bundle.open(options.model)
    bodies = queries(bundle)
    with tempfile.TemporaryDirectory(prefix="ray-serve-") as temporary:
        models, shards = Path(temporary) / "models", Path(temporary) / f"{bundle.manifest.name}-shards"
        (models / bundle.manifest.name).mkdir(parents=True)
        (models / bundle.manifest.name / str(bundle.manifest.version)).symlink_to(options.model.absolute())
        shard(options.model, SHARDS, shards)
        arguments = {
            "models": str(models),
            "ingress": {"cpus": CPUS},
            "shards": [{"folder": str(shards), "count": SHARDS, "cpus": CPUS}],
            "settings": {"log_level": "WARNING"},
        }
        rows, first_answer_s = [], {}
        with serving(["service"], LOCAL | {"ESPALIER_MODELS": str(models), "ESPALIER_LOG_LEVEL": "WARNING"}) as port:
            rows += measured("service", port, bodies, options.clients, options.seconds)
        rows += by_http(models, shards, bodies, options.clients, options.seconds)
        for name, environment in (("ray", {}), ("ray, HAProxy", {"RAY_SERVE_ENABLE_HA_PROXY": "1"})):
            with ray_serving(serve_run(), arguments, environment) as ray:
                ray.wait_for(bodies[0], WITHIN_S)
                first_answer_s[name] = time.monotonic() - ray.started
                print(f"{name}: first answer {first_answer_s[name]:.1f} s after the command", flush=True)
                rows += measured(name, ray.port, bodies, options.clients, options.seconds)
        scaled = {"min": 1, "max": 2, "target": 0.3, "up_after_s": 1, "down_after_s": 2, "average_over_s": 10.5}
        arguments["shards"] = [{"folder": str(shards), "count": SHARDS, "cpus": CPUS, "autoscale": scaled}]
        with ray_serving(serve_run(), arguments) as ray:
            ray.wait_for(bodies[0], WITHIN_S)
            changes = changed(ray, f"{shards.name}-0", bodies[0])
    report = {"first_answer_s": first_answer_s, **changes, "rows": rows}
    print(json.dumps({key: value for key, value in report.items() if key != "rows"}, indent=2))
    if options.json:
        head = {"hardware": hardware(), "date": datetime.now(UTC).date().isoformat(), "model": bundle.manifest.name, "shards": SHARDS}
        options.json.write_text(json.dumps(head | {"seconds": options.seconds} | report, indent=2) + "\n")


def queries(bundle: Bundle, count: int = 500) -> list[dict[str, Any]]:
    """Requests with histories of random items."""
    rows = np.random.default_rng(1).integers(0, bundle.manifest.tree.items, (count, HISTORY))
    histories = [bundle.items.ids_of(row) for row in rows]
    return [{"queries": [{"history": history}], "m": M} for history in histories]


def by_http(
    models: Path, shards: Path, bodies: Sequence[Mapping[str, Any]], clients: Sequence[int], seconds: float
) -> list[dict[str, Any]]:
    """The router and its shards as processes that speak HTTP."""
    quiet = LOCAL | {"ESPALIER_LOG_LEVEL": "WARNING"}
    with ExitStack() as stack:
        each = [{"ESPALIER_MODELS": str(shards), "ESPALIER_SHARD": str(index)} for index in range(SHARDS)]
        ports = [stack.enter_context(serving(["service"], quiet | one)) for one in each]
        urls = ",".join(f"http://127.0.0.1:{port}" for port in ports)
        port = stack.enter_context(serving(["service.router", "--shards", urls], quiet | {"ESPALIER_MODELS": str(models)}))
        return measured("router, HTTP", port, bodies, clients, seconds)


def measured(name: str, port: int, bodies: Sequence[Mapping[str, Any]], clients: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """Closed loops against a port, one for each number of clients."""
    requests, rows = [request_bytes("/retrieve", body) for body in bodies], []
    for count in clients:
        closed_loop(("127.0.0.1", port), requests, count, 2)  # warm
        answered = closed_loop(("127.0.0.1", port), requests, count, seconds)
        whole = [found for found in answered if found.status == 200]
        p50_ms, p99_ms = percentiles_ms(whole)
        rows.append({"name": name, "clients": count, "requests_per_s": len(whole) / seconds, "p50_ms": p50_ms, "p99_ms": p99_ms})
        rows[-1]["statuses"] = statuses(answered)
        print(f"{name}, {count} clients: {len(whole) / seconds:.0f} requests/s, p50 {p50_ms:.2f} ms, p99 {p99_ms:.2f} ms", flush=True)
    return rows


def changed(ray: RayServing, deployment: str, body: Mapping[str, Any], clients: int = 4) -> dict[str, Any]:
    """Under load: from one replica to two, then the first one killed, until there are two again."""
    until_there(lambda: len(ray.replicas(deployment)) == 1, ray)  # the first queries may have been load enough
    (first,) = ray.replicas(deployment)
    with Load(ray, body, clients) as load:
        began = time.monotonic()
        until_there(lambda: len(ray.replicas(deployment)) == 2, ray)
        scaled_s = time.monotonic() - began
        seen = load.answered
        until_there(lambda: load.answered > seen + 100, ray)
        scaling: dict[str, Any] = {"answered": load.answered, "lacking": load.lacking, "failed": counted(load.other)}
        others = len(load.other)
        os.kill(first, signal.SIGKILL)
        began, seen = time.monotonic(), load.answered
        until_there(lambda: len([pid for pid in ray.replicas(deployment) if pid != first]) == 2, ray)
        healed_s = time.monotonic() - began
        until_there(lambda: load.answered > seen + 100, ray)
    killed = {
        "healed_s": healed_s,
        "answered": load.answered - scaling["answered"],
        "lacking": load.lacking - scaling["lacking"],
        "failed": counted(load.other[others:]),
    }
    return {"scaled_to_two": {"seconds": scaled_s} | scaling, "replica_killed": killed}


def counted(statuses: Sequence[int]) -> dict[str, int]:
    """How many of each status; 429 are requests that the queue of the ingress refused, 0 connections that were closed."""
    return {str(status): statuses.count(status) for status in sorted({*statuses})}


def until_there(there: Any, ray: RayServing) -> None:
    """Wait until it is. Raises RuntimeError."""
    give_up = time.monotonic() + WITHIN_S
    while not there():
        if time.monotonic() > give_up:
            raise RuntimeError(f"not within {WITHIN_S:g} s; the end of Ray's log:\n{ray.tail()}")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
