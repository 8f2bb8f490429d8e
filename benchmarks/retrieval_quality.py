"""Recall of popularity, Item-CF, TDM, PLT, OTM and OTM (−OptEst) on one log, trained alike: same tree, network and wall-clock.

    python -m benchmarks.retrieval_quality --set debian --json F
    python -m benchmarks.retrieval_quality --set ml-1m --data DIR --minutes 6 --json F     (DIR/ml-1m/ratings.dat.gz)

Held-out users as in OTM (first half → second half). Nothing is tuned on test users: Item-CF's neighbours and the trees' γ are chosen on
validation users; γ = 0 stands beside it. The trees are searched by the serving engine with the beam they were trained for. Each tree
method gets the same wall-clock on the same threads: a few steps are timed first, then the number of steps is set.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.manifest import Ranking
from espalier.metrics import precision_recall_f
from espalier.search import open_engine
from training.baselines.item_cf import tune_neighbours
from training.baselines.popularity import fit_popularity
from training.config import TrainingConfig, read_config
from training.data.splits import EvaluationPair, halves, without_seen
from training.evaluate import evaluate
from training.export import export
from training.fit import build_model, fit, train_step
from training.instances import InstanceSource
from training.prepare import Prepared, build_tree, prepare
from training.topology import Topology

CONFIGS = Path(__file__).parent.parent / "training" / "configs"
Kind = Literal["tdm", "plt", "otm"]
TREES: dict[str, dict[str, dict[str, Any]]] = {
    "tdm": {"objective": {"kind": "tdm"}},
    "plt": {"objective": {"kind": "plt"}},
    "otm": {"objective": {"kind": "otm", "labels": "best-child"}},
    "otm-no-optest": {"objective": {"kind": "otm", "labels": "any-below"}},
    "tdm-random-rows": {"objective": {"kind": "tdm"}, "scorer": {"init": "random"}},
}
METHODS = ("popularity", "item-cf", *TREES)
"""`tdm-random-rows` is TDM without the initial node rows from co-occurrence; not among the default methods."""
MS = (10, 50, 200)
TIMED_STEPS = 20

Row = dict[str, Any]


def baseline_rows(method: str, prepared: Prepared, config: TrainingConfig) -> list[Row]:
    """Rows of popularity or Item-CF on test users."""
    test, validation = (
        halves(prepared.interactions, users, seed=config.seed) for users in (prepared.split.test, prepared.split.validation)
    )
    rows = []
    for exclude_seen in (False, True):
        begin = time.perf_counter()
        tune_on = without_seen(validation) if exclude_seen else validation
        if method == "popularity":
            rank, note = fit_popularity(prepared.interactions, prepared.split.train).rank, ""
        else:
            model, trials = tune_neighbours(
                prepared.interactions, prepared.split.train, tune_on, m=config.search.m, exclude_seen=exclude_seen
            )
            rank, note = model.rank, f"{max(trials, key=lambda n: trials[n])} neighbours"
        seconds = time.perf_counter() - begin
        pairs = without_seen(test) if exclude_seen else test
        found_BM = rank([pair.history for pair in pairs], max(MS), exclude_seen)
        rows += _measured(
            found_BM, pairs, {"method": method, "exclude_seen": exclude_seen, "train_seconds": round(seconds, 1), "note": note}
        )
    return rows


def tree_rows(method: str, prepared: Prepared, config: TrainingConfig, minutes: float, work: Path) -> list[Row]:
    """Rows of one tree method on test users, at the chosen γ and at γ = 0 where the method ranks by logits."""
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in TREES[method].items()}
    config = config.model_copy(update=sections)
    tree = build_tree(config, prepared)
    steps = _steps_for(config, prepared, minutes * 60)
    config = config.model_copy(update={"optimiser": config.optimiser.model_copy(update={"steps": steps, "checkpoint_every": steps})})
    begin = time.perf_counter()
    model = fit(config, prepared, tree, torch.device("cpu"), work, resume=False)
    seconds = time.perf_counter() - begin
    bundle = export(config, prepared, tree, model, work / method / "1")
    test = halves(prepared.interactions, prepared.split.test, seed=config.seed)
    rankings = {bundle.manifest.ranking.gamma: bundle.manifest.ranking}
    if config.objective.kind != "plt":
        rankings[0.0] = Ranking(own="logit", gamma=0.0)
    rows = []
    for gamma, ranking in rankings.items():
        ranked = Bundle(bundle.path, bundle.manifest.model_copy(update={"ranking": ranking}))
        engine = open_engine(ranked, "cpu")
        for exclude_seen in (False, True):
            for row in evaluate(ranked, engine, test, [config.search.beam_size], MS, exclude_seen):
                rows.append(
                    {"method": method, "gamma": gamma, "chosen": gamma == bundle.manifest.ranking.gamma, "exclude_seen": exclude_seen}
                    | {"steps": steps, "train_seconds": round(seconds, 1)}
                    | {key: value for key, value in row.items() if key != "batch"}
                )
    return rows


def _steps_for(config: TrainingConfig, prepared: Prepared, seconds: float) -> int:
    """How many steps fit into the given time, from a few timed ones (both objectives, where a warm start comes first)."""
    tree = build_tree(config, prepared)
    topology, model = Topology(tree, torch.device("cpu")), build_model(config, tree, prepared)
    source = InstanceSource(prepared.interactions, prepared.split.train, config.instances, config.seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-4)
    warm = config.objective.warm_start if config.objective.kind == "otm" else 0.0
    shares: list[tuple[Kind, float]] = [("tdm", warm), (config.objective.kind, 1 - warm)]
    cost = 0.0
    for kind, share in shares:
        if share:
            times = []
            for step in range(TIMED_STEPS):
                begin = time.perf_counter()
                train_step(config, model, topology, source, optimiser, step, kind)
                times.append(time.perf_counter() - begin)
            cost += share * float(np.median(times))
    return max(1, int(seconds / cost))


def _measured(found_BM: NDArray[np.int64], pairs: Sequence[EvaluationPair], about: Row) -> list[Row]:
    rows = []
    for m in MS:
        precision_B, recall_B, f_B = precision_recall_f(found_BM, [pair.relevant for pair in pairs], m)
        rows.append(about | {"m": m, "precision": float(precision_B.mean()), "recall": float(recall_B.mean()), "f": float(f_B.mean())})
    return rows


def print_rows(rows: Sequence[Row]) -> None:
    for row in rows:
        if row["m"] == MS[0]:
            same = [other for other in rows if all(other.get(key) == row.get(key) for key in ("method", "gamma", "exclude_seen"))]
            figures = "  ".join(f"R@{other['m']} {100 * other['recall']:6.2f}" for other in same)
            gamma = f"γ {row['gamma']:g}" if "gamma" in row else row.get("note", "")
            print(f"{row['method']:10s} {gamma:15s} {'seen excluded' if row['exclude_seen'] else 'raw':13s} {figures}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=("debian", "ml-1m"), required=True)
    parser.add_argument("--data", type=Path, help="folder of the data sets; ml-1m needs DIR/ml-1m/ratings.dat.gz")
    parser.add_argument("--methods", default=",".join(METHODS[:-1]))
    parser.add_argument("--minutes", type=float, default=3.0, help="training time of each tree method")
    parser.add_argument("--beam", type=int, default=200, help="training and serving beam")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, help="rows are written after every method; methods already there are not run again")
    args = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("training").setLevel(logging.INFO)
    config = read_config(CONFIGS / f"{'debian-depends' if args.set == 'debian' else args.set}.toml")
    config = config.model_copy(
        update={
            "objective": config.objective.model_copy(update={"beam_size": args.beam}),
            "search": config.search.model_copy(update={"beam_size": args.beam}),
        }
    )
    log = args.data / "ml-1m" / "ratings.dat.gz" if args.set == "ml-1m" and args.data else None
    if args.set == "ml-1m" and (log is None or not log.is_file()):
        raise SystemExit(f"--data: got {args.data}, expected a folder with ml-1m/ratings.dat.gz (MovieLens 1M, gzipped)")
    torch.set_num_threads(args.threads)
    report: dict[str, Any] = {
        "set": args.set,
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": f"{platform.machine()}, {args.threads} threads of {os.cpu_count()} cores",
        "minutes": args.minutes,
        "config": config.model_dump(mode="json"),
        "rows": json.loads(args.json.read_text())["rows"] if args.json and args.json.exists() else [],
    }
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare(config, log, Path(folder))
        for method in args.methods.split(","):
            if method not in METHODS:
                raise SystemExit(f"--methods: got {method!r}, expected some of {', '.join(METHODS)}")
            if any(row["method"] == method for row in report["rows"]):
                continue
            if method in TREES:
                rows = tree_rows(method, prepared, config, args.minutes, Path(folder))
            else:
                rows = baseline_rows(method, prepared, config)
            print_rows(rows)
            report["rows"] += rows
            if args.json:
                args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
