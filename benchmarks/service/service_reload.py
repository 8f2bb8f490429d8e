"""Reloads under load: does anybody notice?

    python -m benchmarks.service_reload --json FILE [--models DIR]

Two versions of a synthetic model of 2^20 items lie in the models folder. A steady open-loop load (a third of the capacity) goes to the
default version, while an admin key makes the other version the default, twenty times: each time it is opened, verified, warmed up, swapped
in, and the former one drained and dropped. Requests that began within a reload are compared with those outside.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shutil
import tempfile
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.service.service_overload import M, retrievals
from benchmarks.service.serving import serving
from benchmarks.synthetic import synthetic_bundle
from espalier.hardware import hardware
from loadtest.loops import Answered, closed_loop, open_loop, percentiles_ms, statuses

KEY = "reload-benchmark-key"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service_reload", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the measurements here")
    parser.add_argument("--models", type=Path, help="folder for the synthetic model, to use it again (default: a temporary one)")
    parser.add_argument("--reloads", type=int, default=20, help="how many (default 20)")
    parser.add_argument("--pause", type=float, default=3.0, help="seconds between two reloads (default 3)")
    parser.add_argument("--beam-size", type=int, default=200, help="beam of every request (default 200)")
    parser.add_argument("--height", type=int, default=20, help="2^height items (default 20)")
    options = parser.parse_args()
    measured = measure(options)
    rows, summary = measured.by_case(), measured.summary()
    for row in rows:
        print("{case:<16}{requests:>8} requests  p50 {p50_ms:7.2f} ms  p99 {p99_ms:7.2f} ms  {statuses}".format(**row))
    print(", ".join(f"{key} {value}" for key, value in summary.items()))
    if options.json:
        report = {"hardware": hardware(), "date": datetime.now(UTC).date().isoformat(), "rows": rows, **summary}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


@dataclass
class Measured:
    """What was answered while versions were reloaded. windows: begin and end of each reload; failed: what the failed ones said."""

    offered_per_s: float
    answered: list[Answered]
    windows: list[tuple[float, float]]
    failed: list[str]

    def by_case(self) -> list[dict[str, Any]]:
        """Latencies of the requests that began outside of all reloads, and of those within one."""
        inside = [any(begin <= answer.began <= end for begin, end in self.windows) for answer in self.answered]
        rows = []
        for case, wanted in (("outside", False), ("within a reload", True)):
            part = [answer for answer, within in zip(self.answered, inside, strict=True) if within == wanted]
            p50_ms, p99_ms = percentiles_ms(part)
            rows.append({"case": case, "requests": len(part), "p50_ms": p50_ms, "p99_ms": p99_ms, "statuses": statuses(part)})
        return rows

    def summary(self) -> dict[str, Any]:
        took_s = sorted(end - begin for begin, end in self.windows)
        outside, within = self.by_case()
        return {
            "reloads": len(self.windows),
            "failed_reloads": self.failed,
            "reload_median_s": took_s[len(took_s) // 2],
            "offered_per_s": self.offered_per_s,
            "failed_requests": sum(answer.status != 200 for answer in self.answered),
            "p99_ratio": within["p99_ms"] / outside["p99_ms"],
        }


def measure(options: argparse.Namespace) -> Measured:
    """A third of the capacity of two clients is offered while two versions of one model take turns."""
    with tempfile.TemporaryDirectory() as temporary:
        source = synthetic_bundle(options.models or Path(temporary) / "source", options.height)
        name = source.manifest.name
        folder = Path(temporary) / "models"
        for version in (1, 2):
            copy_version(source.path, folder / name / str(version), version)
        (folder / name / "serving.json").write_text(json.dumps({"generation": 1, "versions": [1], "default": 1}))
        environment = {"ESPALIER_MODELS": str(folder), "ESPALIER_ADMIN_KEYS": KEY, "ESPALIER_LOG_LEVEL": "WARNING"}
        requests = retrievals(name, 1 << options.height, M, options.beam_size)
        with serving(["service"], environment) as port:
            closed_loop(("127.0.0.1", port), requests, 4, 2)
            capacity = len(closed_loop(("127.0.0.1", port), requests, 2, 5)) / 5
            windows: list[tuple[float, float]] = []
            failed: list[str] = []
            reloader = threading.Thread(target=reload, args=(port, name, options.reloads, options.pause, windows, failed))
            began = time.perf_counter()
            reload_once(port, name, 2)  # how long one takes, and a rehearsal
            reload_once(port, name, 1)
            seconds = options.reloads * ((time.perf_counter() - began) / 2 * 1.5 + options.pause) + options.pause
            reloader.start()
            answered = open_loop(("127.0.0.1", port), requests, capacity / 3, seconds)
            reloader.join()
    return Measured(capacity / 3, answered, windows, failed)


def copy_version(source: Path, target: Path, version: int) -> None:
    """The same bundle as another version."""
    shutil.copytree(source, target)
    manifest = json.loads((target / "manifest.json").read_text())
    (target / "manifest.json").write_text(json.dumps(manifest | {"version": version}))


def reload(port: int, name: str, times: int, pause_s: float, windows: list[tuple[float, float]], failed: list[str]) -> None:
    for i in range(times):
        time.sleep(pause_s)
        began = time.perf_counter()
        answer = reload_once(port, name, 2 - i % 2)
        windows.append((began, time.perf_counter()))
        if answer:
            failed.append(answer)


def reload_once(port: int, name: str, version: int) -> str:
    """Make a version the default and drop the other; what went wrong, or nothing."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    for action, wanted in (("default", version), ("unload", 3 - version)):
        connection.request("POST", f"/models/{name}/{action}", json.dumps({"version": wanted}), headers)
        answer = connection.getresponse()
        body = answer.read().decode()
        if answer.status != 200:
            return body
    connection.close()
    return ""


if __name__ == "__main__":
    main()
