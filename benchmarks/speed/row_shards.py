"""Training in one process and in two that share the node rows: losses, bytes of rows and optimiser, seconds of a step.

    python -m benchmarks.row_shards --json F [--kinds otm-sequence,otm-robust] [--items 100000] [--users 5000] [--dims 64] [--steps 20]

Each number of processes is a run of torchrun, one thread a process, on the same synthetic lists and random tree. Bytes are those of the
tensors that a process holds after the last step: node rows, gradient, Adam's means, averaged and best rows. On a machine where all cores
are busy two processes take turns, so a step's ratio says little there: the report has the load.

Legend: N nodes, D node row.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.speed.training_speed import synthetic
from espalier.hardware import hardware
from training.deep.averaging import AVERAGE_EVERY
from training.deep.fit import Run
from training.deep.parallel import average, joined, process, processes
from training.deep.scorers.model import NodeScorer
from training.deep.sequence.rules import with_rules
from training.specification.models import deep_config
from training.trees.balanced import random_tree

CPU = torch.device("cpu")
WARM_STEPS = 3
"""Steps whose time does not count: they allocate."""
KINDS = ("otm-sequence", "otm-robust")


def configuration(kind: str, dims: int, steps: int) -> dict[str, Any]:
    """The kind with its defaults, but for the width of a row and what would be made from the log."""
    raw: dict[str, Any] = {"kind": kind, "name": "rows", "data": {"log": "none"}, "scorer": {"node_dim": dims, "init": "random"}}
    raw["optimiser"] = {"steps": steps, "precision": "float32"}
    return raw


def row_tensors(run: Run) -> list[Tensor]:
    """What a process holds of the node rows."""
    model, kept = run.model, run.averaged.module
    if not isinstance(kept, NodeScorer) or model.node_rows.grad is None:
        raise ValueError("a run that has made no step")
    means = [value for value in run.steps.optimiser.state[model.node_rows].values() if value.dim() == 2]
    return [model.node_rows, model.node_rows.grad, *means, kept.node_rows, run.state.best["node_rows"]]


def measure(kind: str, items: int, users: int, dims: int, steps: int, folder: Path) -> dict[str, Any]:
    """One process's part of a run of some steps."""
    prepared = synthetic(items, users)
    config = with_rules(deep_config(configuration(kind, dims, steps)), prepared)
    tree = random_tree(items, config.tree.branching, seed=0)
    run = Run(config, prepared, tree, CPU, folder / f"{kind}-{processes()}.pt", resume=False, shared=processes() > 1)
    losses, seconds = [], []
    for step in range(steps):
        begin = time.perf_counter()
        loss = run.steps.make(step)
        losses.append(float(average(loss.double().clone())))
        if (step + 1) % AVERAGE_EVERY == 0:
            run.averaged.update_parameters(run.model)
        seconds.append(time.perf_counter() - begin)
    run.state.add(0.0, run.model)
    return {
        "losses": losses,
        "row_bytes": sum(tensor.nbytes for tensor in row_tensors(run)),
        "step_s": float(np.median(seconds[min(WARM_STEPS, steps - 1) :])),
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "nodes": tree.node_count,
    }


def work(args: argparse.Namespace) -> None:
    """In one of torchrun's processes: measure, and write what this process held."""
    torch.set_num_threads(1)
    with joined(CPU):
        for kind in args.kinds.split(","):
            found = measure(kind, args.items, args.users, args.dims, args.steps, args.work)
            (args.work / f"{kind}-{processes()}-{process()}.json").write_text(json.dumps(found))


def start(args: argparse.Namespace, count: int, folder: Path) -> None:
    """Run `work` in so many processes."""
    given = [f"--{name}={getattr(args, name)}" for name in ("kinds", "items", "users", "dims", "steps")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "-m", "benchmarks.row_shards"]
    subprocess.run([*command, "--work", str(folder), *given], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def row(kind: str, folder: Path) -> dict[str, Any]:
    """One process beside two."""
    one, *two = (json.loads((folder / f"{kind}-{name}.json").read_text()) for name in ("1-0", "2-0", "2-1"))
    difference = np.abs(np.array(two[0]["losses"]) / np.array(one["losses"]) - 1).max()
    return {
        "kind": kind,
        "nodes": one["nodes"],
        "loss_difference": float(difference),
        "losses": {"one": one["losses"], "two": two[0]["losses"]},
        "row_bytes": {"one": one["row_bytes"], "two": [part["row_bytes"] for part in two]},
        "row_bytes_ratio": round(max(part["row_bytes"] for part in two) / one["row_bytes"], 4),
        "resident_bytes": {"one": one["resident_bytes"], "two": [part["resident_bytes"] for part in two]},
        "step_s": {"one": round(one["step_s"], 4), "two": round(max(part["step_s"] for part in two), 4)},
        "step_ratio": round(max(part["step_s"] for part in two) / one["step_s"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of deep models, with commas")
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--users", type=int, default=5_000, help="each with 100 events")
    parser.add_argument("--dims", type=int, default=64, help="width of a node row")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work is not None:
        work(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        for count in (1, 2):
            start(args, count, Path(folder))
        rows = [row(kind, Path(folder)) for kind in args.kinds.split(",")]
    report = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "hardware": f"{hardware()}; one thread a process",
        "load": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "items": args.items,
        "dims": args.dims,
        "rows": rows,
    }
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
