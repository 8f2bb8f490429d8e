"""Compare two checkouts by one benchmark: how much longer does it take here than there?

    python -m benchmarks.paired --before DIR --pairs 10 --by beam_size,batch --without engine=numpy-loop --json F -- engine_cpu --rounds 3

The benchmark runs in both checkouts in turn, each with its own code and this process's Python. Its name and options follow `--`; {side} in
them becomes `before` or `after`, for folders that each side keeps. Rows of its report that agree in the fields of --by are a pair; rows
that match --without are left out. The result is the geometric mean over pairs of after ÷ before, with its 95 % interval (Student's t on
logarithms).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t

from benchmarks.report_file import command_line, write_report

Key = tuple[str, ...]


def rows_of(folder: Path, side: str, options: argparse.Namespace) -> dict[Key, float]:
    """Run one side: the values of the fields of --by → the figure of that row."""
    name, *benchmark_options = (word.format(side=side) for word in options.command)
    with tempfile.TemporaryDirectory() as report_folder:
        file = Path(report_folder) / "report.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", *benchmark_options, "--json", str(file)]
        environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        rows = json.loads(file.read_text())["rows"]
    excluded_field, _, excluded_value = options.without.partition("=")
    figures: dict[Key, float] = {}
    for row in rows:
        key = tuple(str(row[field]) for field in options.by.split(","))
        if row.get(options.figure) is None or (excluded_field and str(row.get(excluded_field)) == excluded_value):
            continue
        if key in figures:
            raise SystemExit(f"--by: got {options.by}, expected fields that name a row; two have {', '.join(key)}")
        figures[key] = row[options.figure]
    return figures


def compared(before: list[float], after: list[float]) -> dict[str, Any]:
    """The medians of both sides, and the ratio with its interval."""
    ratios = np.log(after) - np.log(before)
    error = ratios.std(ddof=1) / np.sqrt(len(ratios)) * t.ppf(0.975, len(ratios) - 1)
    ratio, low, high = np.exp([ratios.mean(), ratios.mean() - error, ratios.mean() + error])
    medians = {"before": round(float(np.median(before)), 4), "after": round(float(np.median(after)), 4)}
    return medians | {"ratio": round(float(ratio), 4), "low": round(float(low), 4), "high": round(float(high), 4), "pairs": len(ratios)}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--pairs", type=int, default=10, help="at least 2")
    parser.add_argument("--by", default="beam_size,batch", help="the fields that name a row")
    parser.add_argument("--without", default="", metavar="FIELD=VALUE", help="rows that do not count")
    parser.add_argument("--figure", default="ms_per_query")
    parser.add_argument("command", nargs="+", help="the benchmark's name and options, after --")
    options = parser.parse_args()
    sides = {"before": options.before.resolve(), "after": Path.cwd()}
    figures_by_key: dict[Key, dict[str, list[float]]] = defaultdict(lambda: {"before": [], "after": []})
    for pair in range(options.pairs):
        for side in sorted(sides, reverse=bool(pair % 2)):
            for key, value in rows_of(sides[side], side, options).items():
                figures_by_key[key][side].append(value)
        print(f"pair {pair + 1} of {options.pairs}", flush=True)
    fields = options.by.split(",")
    rows = [dict(zip(fields, key, strict=True)) | compared(**values) for key, values in figures_by_key.items() if all(values.values())]
    for row in rows:
        row_name = " ".join(row[field] for field in fields)
        print(f"{row_name:40} {row['before']:8.4f} → {row['after']:8.4f}, {row['ratio']:.3f} × [{row['low']:.3f}, {row['high']:.3f}]")
    write_report(options.json, {"command": " ".join(options.command), "figure": options.figure, "rows": rows})


if __name__ == "__main__":
    main()
