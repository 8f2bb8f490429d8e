"""XR-Linear beside its peers on a set of points with labels: quality, milliseconds, training time, size.

    python -m benchmarks.xrlinear_peers --data DIR --set eurlex-4k [--peers forest,pecos,…] --beam 1,10,50,200 [--work W] --json F
    python -m benchmarks.xrlinear_peers --data DIR --set eurlex-4k --choose --json F

DIR/SET: see xmc_sets.py. All systems get points of length 1. `espalier` is what `fit` trains by its defaults but without stacking, which
peers do not have; `forest` three trees of it; `stacked` the whole default; `ova` one node over all labels. `pecos-3`, `omikuji-3` and
`bonsai-3` have three trees from different seeds; PECOS's models are averaged here. Peers have their own defaults: PECOS searches its
compiled memory-mapped model, its fastest here; omikuji's `densify_weights` made its models slower. A peer that is not installed is named
and skipped. --peer-python names an interpreter that has them, because libpecos needs an older NumPy:

    python -m venv peers && peers/bin/pip install 'numpy<2' scipy libpecos omikuji napkinxc

Every system runs on one thread, in processes of its own, all on one core. Quality is at m = 100. Milliseconds are the median of single
queries, queries/s are those of one call with all test points, both at m = 10. They are medians of three rounds with every system in each,
so that other load on the machine affects all systems. `of_fastest_peer`: milliseconds over those of the fastest peer with as many trees,
at the same beam. CPU seconds of training are those of the whole `fit`, with what it chooses and checks; those of peers, of label
features, tree and weights. `model_mb` is what a search needs, on disk. `batch_mb` is the memory by which the call with all test points
makes a fresh process grow.

With --work, trained models are kept there, so that a run that was stopped goes on, and another run measures time alone. --choose holds
out a fifth of the training points, twice, and prints figures of options.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers.product_search.xrlinear_choose import choose
from benchmarks.papers.product_search.xrlinear_ours import OURS, STEPS
from benchmarks.papers.xreg.xmc_figures import quality
from benchmarks.papers.xreg.xmc_sets import read_set, write_npz
from benchmarks.papers.xreg.xmc_systems import ONE_THREAD
from benchmarks.report_file import command_line, print_row, write_report
from espalier.errors import EspalierError
from training.data.xmc import LabelledPoints

PEERS = ("forest", "stacked", "pecos", "pecos-3", "omikuji", "omikuji-3", "bonsai", "bonsai-3", "napkinxc", "ova")
BATCHED = (*OURS, "pecos")
"""Systems that search many queries in one call."""
ROUNDS = 3
Row = dict[str, Any]


def compare(
    data: LabelledPoints, test: LabelledPoints, peers: Sequence[str], beams: Sequence[int], peer_python: str, folder: Path
) -> list[Row]:
    """A row for each system and beam. Trained models are those of the folder, where it has them."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # processes of every step inherit it
    if not (folder / "train.txt").is_file():
        write_npz(folder, data, test)
        _as_text(data, folder / "train.txt")
    reports: dict[str, Row] = {}
    for system in ("espalier", *peers):
        training_report = _trained(folder, system, beams, peer_python)
        if training_report is not None:
            reports[system] = training_report
    rounds = [{system: _step(folder, system, "time", beams, peer_python) or {} for system in reports} for _ in range(ROUNDS)]
    rows: list[Row] = []
    for system, report in reports.items():
        for beam in _beams(system, beams):
            row: Row = {"system": system, "beam_size": None if system == "ova" else beam}
            row |= quality(np.load(folder / f"{system}-{beam}.npy"), test, data)
            for figure, digits in (("ms_p50", 4), ("queries_per_s", None)):
                row[figure] = round(float(np.median([times[system][str(beam)][figure] for times in rounds])), digits)
            if system in BATCHED:
                row |= _step(folder, system, "memory", [beam], peer_python) or {}
            rows.append(row | report)
    for row in rows:
        _beside_the_fastest(row, rows)
        print_row(row)
    return rows


def _beside_the_fastest(row: Row, rows: Sequence[Row]) -> None:
    """Add how long one of our trees takes, of the fastest peer with as many at the same beam."""
    alike = [
        other["ms_p50"]
        for other in rows
        if other["system"] not in OURS and (other["beam_size"], other["trees"]) == (row["beam_size"], row["trees"])
    ]
    if alike and row["system"] in OURS:
        row["of_fastest_peer"] = round(row["ms_p50"] / min(alike), 2)


def _trained(folder: Path, system: str, beams: Sequence[int], peer_python: str) -> Row | None:
    """The report of a system's training, of this run or of one before."""
    file = folder / f"{system}.json"
    if not file.is_file() or not all((folder / f"{system}-{beam}.npy").is_file() for beam in _beams(system, beams)):
        for leftover in (folder / system, *folder.glob(f"{system}-mapped-*")):  # of a training that was stopped
            shutil.rmtree(leftover, ignore_errors=True)
        training_report = _step(folder, system, "train", beams, peer_python)
        if training_report is None:
            return None
        file.write_text(json.dumps(training_report))
    report: Row = json.loads(file.read_text())
    return report


def _as_text(data: LabelledPoints, path: Path) -> None:
    points = data.points
    with path.open("w") as file:
        print(*points.shape, data.labels.shape[1], file=file)
        for b in range(len(data)):
            labels = ",".join(map(str, data.labels_of(b)))
            entries = slice(points.indptr[b], points.indptr[b + 1])
            pairs = " ".join(f"{f}:{v:.7g}" for f, v in zip(points.indices[entries].tolist(), points.data[entries].tolist(), strict=True))
            print(labels, pairs, file=file)


def _beams(system: str, beams: Sequence[int]) -> Sequence[int]:
    """Without a tree there is no beam."""
    return beams[:1] if system == "ova" else beams


def _step(folder: Path, system: str, step: str, beams: Sequence[int], peer_python: str) -> Row | None:
    """The report of a process that runs one step; None where it fails."""
    environment, beams_text = os.environ | ONE_THREAD, ",".join(map(str, _beams(system, beams)))
    if system in OURS:
        command = [sys.executable, "-m", "benchmarks.xrlinear_peers", "--run", system, str(folder), step, "--beam", beams_text]
        environment["NUMBA_CACHE_DIR"] = str(folder / "compiled")  # cold at first
    else:
        command = [peer_python, str(Path(__file__).with_name("xrlinear_peer.py")), system, str(folder), step, beams_text]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if completed.returncode:
        print(f"{system} is left out: {(completed.stderr.strip().splitlines() or ['no message'])[-1]}", flush=True)
        return None
    print(system, step, completed.stdout.strip().splitlines()[-1], flush=True)
    report: Row = json.loads(completed.stdout.splitlines()[-1])
    return report


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--set", default="eurlex-4k")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--beam", default="1,10,50,200")
    parser.add_argument("--work", type=Path, help="where trained models are kept, a folder for each set; by default nowhere")
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    beams = [int(beam) for beam in args.beam.split(",")]
    if args.run:
        system, folder, step = args.run
        print(json.dumps(STEPS[step](system, Path(folder), beams)))
        return
    if args.data is None:
        parser.error("--data is missing: the folder that holds the set")
    unknown = set(args.peers.split(",")) - set(PEERS) - {""}
    if unknown:
        parser.error(f"--peers: got {', '.join(sorted(unknown))}, expected some of {', '.join(PEERS)}")
    try:
        data, test = read_set(args.data, args.set)
    except EspalierError as error:
        parser.error(str(error))
    peers = [peer for peer in args.peers.split(",") if peer]
    if args.choose:
        rows = choose(data)
    else:
        with tempfile.TemporaryDirectory() if args.work is None else nullcontext(args.work / args.set) as name:
            work = Path(name)
            work.mkdir(parents=True, exist_ok=True)
            rows = compare(data, test, peers, beams, args.peer_python, work.absolute())
    write_report(args.json, {"set": args.set, "rows": rows}, "one thread used")


if __name__ == "__main__":
    main()
