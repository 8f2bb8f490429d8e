"""The load test's sweep of a bundle, and whether recall through HTTP is what the offline measurement says.

    python -m benchmarks.sweep_recall --bundle models/debian-depends/1 --out DIR --json F
    python -m benchmarks.sweep_recall --synthetic 20 --models DIR --out DIR --json F

Starts `python -m service` on the bundle, runs `python -m loadtest.sweep` against it, then `training.evaluate` on the same held-out queries,
and compares recall@m at every beam. --synthetic N first makes `benchmarks.synthetic.planted_bundle` of 2^N items (some minutes at 20): the
papers' scorer, and held-out queries with known relevant items. The exit code is 1 where a difference is above .001.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.service.serving import serving
from benchmarks.synthetic import planted_bundle
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.hardware import hardware
from loadtest.sweep import main as sweep
from loadtest.sweep import numbers
from training.evaluate import evaluate, held_out_pairs

TOLERANCE = 0.001


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep_recall", description=__doc__.split("\n")[0])
    parser.add_argument("--bundle", type=Path, default=Path("models/debian-depends/1"), help="what to sweep (default %(default)s)")
    parser.add_argument("--synthetic", type=int, help="instead a synthetic model of 2^SYNTHETIC items")
    parser.add_argument("--models", type=Path, help="folder for the synthetic model, to use it again (default: a temporary one)")
    parser.add_argument("--queries", type=int, default=1000, help="held-out queries of the synthetic model (default %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the sweep")
    parser.add_argument("--json", type=Path, help="write the comparison here")
    parser.add_argument("--beam", default="10,25,50,100,200,400,800", help="beam sizes (default %(default)s)")
    parser.add_argument("--m", default="10,50,200", help="numbers of results (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=5, help="length of each loop (default %(default)g)")
    parser.add_argument("--rounds", type=int, default=3, help="of each loop (default %(default)s)")
    parser.add_argument("--budget-ms", default="2,5,10", help="p99 budgets (default %(default)s)")
    parser.add_argument("--exclude-seen", action="store_true", help="items of the history are neither returned nor relevant")
    parser.add_argument("--resume", action="store_true", help="go on with the sweep that is in the folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        if options.synthetic is None:
            bundle = Bundle.open(options.bundle.absolute())
        else:
            bundle = planted_bundle(options.models or Path(temporary) / "made", options.synthetic, options.queries)
        name, version = bundle.manifest.name, bundle.manifest.version
        models = Path(temporary) / "models"
        (models / name).mkdir(parents=True)
        (models / name / str(version)).symlink_to(bundle.path.absolute())  # alone, whatever else lies beside it
        arguments = ["--model", name, "--models", str(models), "--out", str(options.out), "--beam", options.beam, "--m", options.m]
        arguments += ["--seconds", str(options.seconds), "--rounds", str(options.rounds), "--budget-ms", options.budget_ms]
        arguments += [f"--{flag}" for flag, given in (("exclude-seen", options.exclude_seen), ("resume", options.resume)) if given]
        with serving(["service"], {"ESPALIER_MODELS": str(models), "ESPALIER_LOG_LEVEL": "WARNING"}) as port:
            code = sweep(["--url", f"http://127.0.0.1:{port}", *arguments])
        if code:
            return code
        rows = compare(bundle, json.loads((options.out / "sweep.json").read_text())["cells"], options)
    report(rows)
    difference = max(abs(row["difference"]) for row in rows)
    if options.json:
        summary = {"hardware": hardware(), "date": datetime.now(UTC).date().isoformat(), "model": name, "items": bundle.tree.item_count}
        options.json.write_text(json.dumps(summary | {"largest_difference": difference, "rows": rows}, indent=2) + "\n")
    return int(difference > TOLERANCE)


def compare(bundle: Bundle, cells: list[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows {"beam_size", "m", "http", "evaluate", "difference"}; a cell without a recall is as far off as can be."""
    beams, ms = numbers(options.beam), numbers(options.m)
    found = {(cell["beam_size"], cell["m"]): cell["recall"] for cell in cells}
    offline = evaluate(bundle, open_engine(bundle, "cpu"), held_out_pairs(bundle), beams, ms, options.exclude_seen)
    rows = []
    for row in offline:
        http = found[row["beam_size"], row["m"]]
        difference = 1.0 if http is None else http - row["recall"]
        rows.append({"beam_size": row["beam_size"], "m": row["m"], "http": http, "evaluate": row["recall"], "difference": difference})
    return rows


def report(rows: list[dict[str, Any]]) -> None:
    print(f"{'beam':>6} {'m':>5} {'through HTTP':>13} {'evaluate':>9} {'difference':>11}")
    for row in rows:
        http = "none" if row["http"] is None else f"{row['http']:.6f}"
        print(f"{row['beam_size']:6d} {row['m']:5d} {http:>13} {row['evaluate']:9.6f} {row['difference']:11.1e}")


if __name__ == "__main__":
    sys.exit(main())
