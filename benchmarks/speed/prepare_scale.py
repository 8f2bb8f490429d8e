"""Millions of items from a log on disk to a tree in training: seconds and memory of every phase.

    python -m benchmarks.prepare_scale --items 4000000 --events 100000000 --json F [--work DIR] [--steps 200]

Each phase is a process of its own, with its own peak memory: `log` (a synthetic one, `topical_log.py`), `prepare` (read, split, item
table: what `fit` does first), `tree` (co-occurrence embeddings and balanced k-means), `train` (steps of the default kind, with the mean of
the weights, and the recall of validation users after them). A phase that is done is not done again: a run that was killed goes on, and
`--steps` may be changed. `--work` is kept; without it everything is deleted. The node rows are as wide as `--node-dim` says: training holds
five arrays of them, and at the default of 256 numbers a tree over 4 M items has 22 GB of these.

Peak memory is the resident set, mapped files included. CPU seconds are those of all threads.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.speed.stored_log import load_prepared, load_tree, save_prepared, save_tree
from benchmarks.speed.topical_log import FORMAT, item_of, topic_of, write_log
from espalier.hardware import hardware
from training.deep.averaging import AVERAGE_EVERY, averaged_over
from training.deep.first_model import build_model
from training.deep.fit import steps_of
from training.deep.prepare import build_tree, prepare
from training.deep.scorers.model import NodeScorer
from training.deep.sequence.rules import with_rules
from training.deep.topology import Topology
from training.deep.validation import validation_pairs, validation_recall
from training.specification.deep import DeepConfig
from training.specification.models import deep_config

PHASES = ("log", "prepare", "tree", "train")
QUICK = {"items": 3000, "events": 60_000, "steps": 5}
WARM_STEPS = 3
"""Steps that are not timed: they allocate and compile."""
VALIDATION_QUERIES = 500
Figures = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prepare_scale", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--items", type=int, default=4_000_000)
    parser.add_argument("--events", type=int, default=100_000_000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--node-dim", type=int, default=32, help="width of a node row")
    parser.add_argument("--branching", type=int, default=16)
    parser.add_argument("--quick", action="store_true", help="a small log, to see that it runs")
    parser.add_argument("--work", type=Path, help="a folder for the log and what becomes of it")
    parser.add_argument("--until", choices=PHASES, default=PHASES[-1], help="the last phase")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        vars(options).update(QUICK)
    if options.phase is not None:
        logging.basicConfig(format="%(message)s", level=logging.INFO)
        print(json.dumps(run_phase(options, options.phase)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        options.work = options.work or Path(scratch)
        report = run(options)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def run(options: argparse.Namespace) -> Figures:
    """All phases, those that are done from their files."""
    options.work.mkdir(parents=True, exist_ok=True)
    asked = {name: getattr(options, name) for name in ("items", "events", "node_dim", "branching")}
    _check_same(options.work / "asked.json", asked)
    report: Figures = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "hardware": hardware(), **asked, "phases": {}}
    for phase in PHASES[: PHASES.index(options.until) + 1]:
        file = options.work / f"{phase}.json"
        if not file.exists() or (phase == "train" and json.loads(file.read_text())["steps"] != options.steps):
            file.write_text(json.dumps(_measured(options, phase)) + "\n")
        report["phases"][phase] = json.loads(file.read_text())
        print(phase, _line(report["phases"][phase]), flush=True)
    return report


def _check_same(file: Path, asked: Figures) -> None:
    if file.exists() and (found := json.loads(file.read_text())) != asked:
        raise SystemExit(f"--work: holds the phases of {found}; delete it or take another folder")
    file.write_text(json.dumps(asked) + "\n")


def _measured(options: argparse.Namespace, phase: str) -> Figures:
    """A phase's own figures with its seconds, CPU seconds and peak memory, those of its children included."""
    command = [sys.executable, "-m", "benchmarks.prepare_scale", "--phase", phase, "--work", str(options.work)]
    for name in ("items", "events", "steps", "node_dim", "branching"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"phase {phase} ended with {process.returncode}")
    seconds = {"seconds": time.perf_counter() - begin, "cpu_seconds": usage.ru_utime + usage.ru_stime, "peak_gb": usage.ru_maxrss / 2**20}
    return {name: round(value, 2) for name, value in seconds.items()} | dict(json.loads(output.splitlines()[-1]))


def _line(figures: Figures) -> str:
    return ", ".join(f"{name} {value}" for name, value in figures.items())


def run_phase(options: argparse.Namespace, phase: str) -> Figures:
    """One phase in this process, with what it found."""
    work: Path = options.work
    if phase == "log":
        shutil.rmtree(work / "log", ignore_errors=True)
        write_log(work / "log", options.items, options.events)
        return {"mb": round(sum(file.stat().st_size for file in (work / "log").rglob("*.parquet")) / 1e6)}
    config = configuration(options)
    if phase == "prepare":
        prepared = prepare(config, work / "log", work / "events")
        save_prepared(prepared, work / "prepared")
        found = prepared.interactions
        return {"users": found.user_count, "items": found.item_count, "events": found.event_count}
    prepared = load_prepared(work / "prepared", work / "events")
    if phase == "tree":
        tree = build_tree(config, prepared)
        save_tree(tree, work / "tree")
        topic_I = topic_of(item_of(prepared.items.column("id").to_pylist()))
        return {"levels": tree.height + 1, "nodes": tree.node_count, "purity": _purity(topic_I[tree.leaf_item], options.branching)}
    tree = load_tree(work / "tree")
    config = with_rules(config, prepared)
    begin = time.perf_counter()
    model = build_model(config, tree, prepared)
    topology = Topology(tree, torch.device("cpu"))
    steps = steps_of(config, model, topology, prepared)
    averaged = averaged_over(config.optimiser.average, model)
    built_s, times, losses = time.perf_counter() - begin, [], []
    for step in range(options.steps):
        begin = time.perf_counter()
        losses.append(float(steps.make(step)))
        if (step + 1) % AVERAGE_EVERY == 0:
            averaged.update_parameters(model)
        times.append(time.perf_counter() - begin)
    pairs = validation_pairs(config, prepared, VALIDATION_QUERIES)
    kept = averaged.module
    assert isinstance(kept, NodeScorer)
    recall = validation_recall(config, topology, kept, pairs)
    return {
        "steps": options.steps,
        "build_s": round(built_s, 1),
        "step_s": round(float(np.mean(times[min(WARM_STEPS, len(times) - 1) :])), 3),
        "places": config.optimiser.model_dump().get("places"),
        "loss": [round(losses[0], 3), round(losses[-1], 3)],
        f"recall@{config.search.m}": round(recall, 4),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "own_peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def configuration(options: argparse.Namespace) -> DeepConfig:
    return deep_config(
        {
            "kind": "otm-sequence",
            "name": "scale",
            "data": {"log": str(options.work / "log"), "format": FORMAT},
            "tree": {"branching": options.branching},
            "scorer": {"node_dim": options.node_dim},
        }
    )


def _purity(topic_n: np.ndarray, branching: int) -> float:
    """The share of neighbouring leaves under one parent that are of one topic; at random it is that of two items drawn."""
    same = topic_n[1:] == topic_n[:-1]
    return round(float(same.mean()), 4)


if __name__ == "__main__":
    main()
