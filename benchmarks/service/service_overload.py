"""Ten times as many requests as the service can answer: what becomes of those that it accepts?

    python -m benchmarks.service_overload --json FILE [--models DIR]

A synthetic model of 2^20 items behind `python -m service` with its default settings. Measured one after the other: one client alone, the
capacity (four clients in a closed loop), a light load of a tenth of that, and multiples of it (open loop: requests come at random times
whether or not the service keeps up, and are timed from when they were due). Client and service share the machine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.service.serving import serving
from benchmarks.synthetic import synthetic_bundle
from espalier.hardware import hardware
from loadtest.loops import Answered, closed_loop, open_loop, percentiles_ms, request_bytes, statuses

HISTORY, M = 20, 100


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service_overload", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the measurements here")
    parser.add_argument("--models", type=Path, help="folder for the synthetic model, to use it again (default: a temporary one)")
    parser.add_argument("--seconds", type=float, default=30, help="length of the overload (default 30)")
    parser.add_argument("--beam-size", type=int, default=400, help="beam of every request (default 400)")
    parser.add_argument("--height", type=int, default=20, help="2^height items (default 20)")
    parser.add_argument("--times", type=float, nargs="+", default=[10], help="requests offered, as multiples of the capacity (default 10)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.models or Path(temporary)
        bundle = synthetic_bundle(folder, options.height)
        requests = retrievals(bundle.manifest.name, 1 << options.height, M, options.beam_size)
        with serving(["service"], {"ESPALIER_MODELS": str(folder), "ESPALIER_LOG_LEVEL": "WARNING"}) as port:
            closed_loop(("127.0.0.1", port), requests, 4, 2)  # warm
            alone = row("alone", closed_loop(("127.0.0.1", port), requests, 1, 10), 10)
            capacity = row("capacity", closed_loop(("127.0.0.1", port), requests, 4, 10), 10)
            light = row("light", open_loop(("127.0.0.1", port), requests, capacity["accepted_per_s"] / 10, 20), 20)
            rows = [alone, light, capacity]
            for times in options.times:
                offered = times * capacity["accepted_per_s"]
                overload = row(f"{times:g} times", open_loop(("127.0.0.1", port), requests, offered, options.seconds), options.seconds)
                rows.append(overload | {"times": times} | compared(overload, alone, light, capacity))
    print_rows(rows)
    if options.json:
        report = {"hardware": hardware(), "date": datetime.now(UTC).date().isoformat(), **vars_of(options), "rows": rows}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def compared(overload: dict[str, Any], alone: dict[str, Any], light: dict[str, Any], capacity: dict[str, Any]) -> dict[str, Any]:
    """An overload beside one client alone, a light load and the capacity."""
    return {
        "p99_ms_unloaded": light["p99_ms"],
        "goodput_share": overload["accepted_per_s"] / capacity["accepted_per_s"],
        "p99_ratio_alone": overload["p99_ms"] / alone["p99_ms"],
        "p99_ratio_light": overload["p99_ms"] / light["p99_ms"],
        "unplanned_5xx": sum(n for status, n in overload["statuses"].items() if status >= "500" and status not in ("503", "504")),
    }


def print_rows(rows: list[dict[str, Any]]) -> None:
    """A table of all rows, then a sentence for each overload, from the fourth on."""
    print(f"{'case':<10}{'offered/s':>11}{'answered 200/s':>16}{'p50 ms':>9}{'p99 ms':>9}  statuses")
    for line in rows:
        print(
            f"{line['case']:<10}{line['offered_per_s']:>11.0f}{line['accepted_per_s']:>16.0f}{line['p50_ms']:>9.2f}{line['p99_ms']:>9.2f}"
            f"  {line['statuses']}"
        )
    for line in rows[3:]:
        print(
            f"{line['case']} the capacity: goodput {line['goodput_share']:.0%}, p99 {line['p99_ratio_light']:.2f} times the light load's, "
            f"{line['p99_ratio_alone']:.2f} times that of one client alone, {line['unplanned_5xx']} unplanned 5xx, "
            f"{line['statuses'].get('0', 0)} unanswered"
        )


def retrievals(model: str, items: int, m: int, beam_size: int, count: int = 256) -> list[bytes]:
    """Requests with random histories."""
    rng = np.random.default_rng(0)
    histories = [[str(item) for item in rng.integers(items, size=HISTORY)] for _ in range(count)]
    return [
        request_bytes("/retrieve", {"model": model, "queries": [{"history": history}], "m": m, "beam_size": beam_size})
        for history in histories
    ]


def row(case: str, answered: list[Answered], seconds: float) -> dict[str, Any]:
    """Percentiles are of the accepted."""
    accepted = [answer for answer in answered if answer.status == 200]
    p50_ms, p99_ms = percentiles_ms(accepted)
    return {
        "case": case,
        "offered_per_s": len(answered) / seconds,
        "accepted_per_s": len(accepted) / seconds,
        "p50_ms": p50_ms,
        "p99_ms": p99_ms,
        "statuses": statuses(answered),
    }


def vars_of(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("seconds", "beam_size", "height", "times")}


if __name__ == "__main__":
    main()
