"""One worker process against two, on a CPU: requests/s of the same service with the same model.

    python -m benchmarks.service_workers --json FILE [--models DIR]

A synthetic model of 2^20 items, closed loop, one engine thread a worker. Client and service share the machine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.service.service_overload import M, retrievals
from benchmarks.service.serving import serving
from benchmarks.synthetic import synthetic_bundle
from espalier.hardware import hardware
from loadtest.loops import closed_loop, percentiles_ms, statuses

CONCURRENCY = 8


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service_workers", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the measurements here")
    parser.add_argument("--models", type=Path, help="folder for the synthetic model, to use it again (default: a temporary one)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="numbers of workers to compare (default 1 2)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each, in turn; the medians count (default 3)")
    parser.add_argument("--seconds", type=float, default=5, help="length of a measurement (default 5)")
    parser.add_argument("--beam-size", type=int, default=200, help="beam of every request (default 200)")
    parser.add_argument("--height", type=int, default=20, help="2^height items (default 20)")
    options = parser.parse_args()
    measured: dict[int, list[dict[str, Any]]] = {workers: [] for workers in options.workers}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.models or Path(temporary)
        name = synthetic_bundle(folder, options.height).manifest.name
        requests = retrievals(name, 1 << options.height, M, options.beam_size)
        for _ in range(options.rounds):
            for workers in options.workers:
                settings = {"ESPALIER_MODELS": str(folder), "ESPALIER_WORKERS": str(workers), "ESPALIER_LOG_LEVEL": "WARNING"}
                with serving(["service"], settings) as port:
                    closed_loop(("127.0.0.1", port), requests, CONCURRENCY, 2)  # warm
                    answered = closed_loop(("127.0.0.1", port), requests, CONCURRENCY, options.seconds)
                p50_ms, p99_ms = percentiles_ms(answered)
                found = {"requests_per_s": len(answered) / options.seconds, "p50_ms": p50_ms, "p99_ms": p99_ms}
                measured[workers].append(found | {"statuses": statuses(answered)})
                print(f"{workers} workers: {found['requests_per_s']:.0f} requests/s, p50 {p50_ms:.2f} ms, p99 {p99_ms:.2f} ms", flush=True)
    rows: list[dict[str, Any]] = []
    for workers, found_s in measured.items():
        medians = {key: float(np.median([found[key] for found in found_s])) for key in ("requests_per_s", "p50_ms", "p99_ms")}
        rows.append({"workers": workers, "concurrency": CONCURRENCY, **medians, "statuses": [found["statuses"] for found in found_s]})
    ratio = rows[-1]["requests_per_s"] / rows[0]["requests_per_s"]
    print(f"{rows[-1]['workers']} workers answer {ratio:.2f} times the requests/s of {rows[0]['workers']}")
    if options.json:
        report = {"hardware": hardware(), "date": datetime.now(UTC).date().isoformat(), "rows": rows, "ratio": ratio}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
