"""Seconds per batch of PLT, TDM and OTM in one run, beside the paper's ratio; any device.

    python -m benchmarks.training_speed --data DIR --set sasrec-amazon-games --json F
    python -m benchmarks.training_speed --items 1000000 --device cuda --json F          (a synthetic log; users/s and memory)

The paper's batch of 100 users took .184 s with PLT, .332 s with TDM and .671 s with OTM on one P100: 1 : 1.8 : 3.6. The published methods
train as there: the papers' scorer (24 numbers a row, 128–64–24), a user's first half the query, the whole second half its targets. `tdm`
draws this project's default number of nodes, fewer above the leaves; `tdm-2k` draws 2k on every level, as many as OTM's beam has
candidates, which is how the paper trains its baseline for fairness (footnote 10). `otm-robust` is the project's default recipe but for
the size of the batch, with its own scorer, random cuts, one target and a smaller beam: its ratio compares recipes, not objectives. Rows
hold the instances, the scorer and the objective that they are of, and how many targets an instance had.

Methods take turns in every round; a figure is the median over rounds. The tree and the weights are random: what a step costs hardly depends
on what was learned.

Legend: U users, E events, I items.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from tqdm import tqdm

from benchmarks import real_logs
from benchmarks.report_file import command_line, write_report
from espalier.items import ItemTable
from training.data.interactions import Interactions
from training.data.splits import Split
from training.deep.first_model import build_model
from training.deep.fit import InstanceSteps, pick_device, use_bfloat16
from training.deep.prepare import Prepared, prepare
from training.deep.topology import Topology
from training.specification.deep import DeepConfig, WindowConfig
from training.specification.models import deep_config, window_config
from training.specification.splits import UserSplit
from training.trees.balanced import random_tree

PAPER_PLT = 0.184
PAPER = {"plt": PAPER_PLT, "tdm": None, "tdm-2k": 0.332, "otm": 0.671, "otm-robust": None}
"""Method → seconds per batch in the paper."""
PUBLISHED: dict[str, dict[str, Any]] = {
    "scorer": {"kind": "mlp", "node_dim": 24, "hidden": [128, 64, 24]},
    "instances": {"split": "half", "targets": 500, "cold_share": 0},
}
"""What the published methods share; 500 targets are the whole second half of almost every list."""
EVENTS = 100
"""Events of a synthetic user: the mean of UserBehavior, on which the paper measured, is 103."""

Row = dict[str, Any]


def synthetic(items: int, users: int, seed: int = 0) -> Prepared:
    """Users with EVENTS items each, drawn alike."""
    rng = np.random.default_rng(seed)
    ids = pa.array([str(item) for item in range(items)], pa.large_string())
    interactions = Interactions(
        user_ids=pa.array([str(user) for user in range(users)], pa.large_string()),
        item_ids=ids,
        offset_U1=np.arange(users + 1, dtype=np.int64) * EVENTS,
        item_of_event_E=rng.integers(0, items, users * EVENTS, np.int32),
        category_of_item_I=None,
        category_names=(),
        fingerprint="",
        order="file",
    )
    split = Split(interactions, np.arange(users), validation=(), test=(), config=UserSplit())
    return Prepared(split, ItemTable.build(pa.table({"id": ids})))


def configured(config: DeepConfig, method: str, beam: int, batch: int) -> WindowConfig:
    """Scorer, instances and objective of the method instead of the configuration's own."""
    sections: dict[str, dict[str, Any]] = {"scorer": {}, "instances": {}} if method == "otm-robust" else PUBLISHED
    objective: dict[str, Any] = {}
    if method == "otm":
        objective = {"beam_size": beam}
    elif method == "tdm-2k":
        objective = {"negatives": 2 * beam, "negative_decay": 1.0}
    changed: dict[str, Any] = sections | {
        "kind": method.removesuffix("-2k"),
        "scorer": sections["scorer"] | {"init": "random"},
        "objective": objective,
        "optimiser": (config.optimiser.model_dump() if isinstance(config, WindowConfig) else {}) | {"batch": batch},
        "search": {},
    }
    return window_config(config.model_dump(mode="json") | changed)


class Trainee:
    def __init__(self, config: WindowConfig, prepared: Prepared, topology: Topology) -> None:
        self.config, self.topology, self.steps = config, topology, 0
        self.model = build_model(config, topology.tree, prepared).to(topology.device)
        self.training = InstanceSteps(config, self.model, topology, prepared, None)

    def targets(self) -> float:
        """Targets of an instance, the mean over the first batch."""
        return float((self.training.source.batch(0, self.config.optimiser.batch).target_BP >= 0).sum(axis=1).mean())

    def run(self, steps: int) -> float:
        """Seconds per step, the device's work included."""
        begin = time.perf_counter()
        for _ in range(steps):
            loss = self.training.make(self.steps)
            self.steps += 1
        loss.item()  # waits for the device
        return (time.perf_counter() - begin) / steps


def measure(config: DeepConfig, prepared: Prepared, device: torch.device, args: argparse.Namespace) -> list[Row]:
    """Rows {"method", "s_per_batch", "users_per_s", "ratio", "paper_s_per_batch", "paper_ratio", "targets", and the sections of the
    configuration "instances", "scorer" and "objective"}; ratios are to PLT.
    """
    tree = random_tree(prepared.interactions.item_count, config.tree.children(prepared.interactions.item_count), seed=config.seed)
    topology = Topology(tree, device)
    trainees = {m: Trainee(configured(config, m, args.beam, args.batch), prepared, topology) for m in PAPER}
    for trainee in trainees.values():
        trainee.run(2)  # the first steps allocate
    times: dict[str, list[float]] = {method: [] for method in trainees}
    for _ in tqdm(range(args.rounds), unit="round", disable=None, leave=False):
        for method, trainee in trainees.items():
            times[method].append(trainee.run(args.steps))
    median = {method: float(np.median(values)) for method, values in times.items()}
    rows = []
    for method, paper in PAPER.items():
        targets = trainees[method].targets()
        rows.append(
            {
                "method": method,
                "s_per_batch": round(median[method], 5),
                "users_per_s": round(args.batch / median[method], 1),
                "ratio": round(median[method] / median["plt"], 2),
                "paper_s_per_batch": paper,
                "paper_ratio": paper and round(paper / PAPER_PLT, 2),
                "targets": round(targets, 1),
            }
            | trainees[method].config.model_dump(mode="json", include={"instances", "scorer", "objective"})
        )
        shown = f"{paper:.3f} s, ratio {paper / PAPER_PLT:.2f}" if paper else "–"
        ratio = median[method] / median["plt"]
        print(f"{method:10s} {median[method]:.4f} s/batch  ratio {ratio:5.2f}  {targets:5.1f} targets   paper: {shown}", flush=True)
    return rows


def memory_mib(device: torch.device) -> int:
    """The most memory that was in use: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() >> 20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def main() -> None:
    parser = command_line(__doc__)
    real_logs.add_arguments(parser)
    parser.add_argument("--items", type=int, help="a synthetic log of so many items instead of a real one")
    parser.add_argument("--users", type=int, default=200_000, help="users of the synthetic log")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--beam", type=int, default=200)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="steps of a method in a round")
    args = parser.parse_args()
    device = pick_device(args.device)
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        if args.items is None:
            real = real_logs.load(args)
            name, config, prepared = real.name, real.config, prepare(real.config, real.log, Path(folder))
        else:
            name = f"synthetic, {args.items} items"
            config = deep_config({"kind": "otm-robust", "name": "synthetic", "data": {"log": "none"}})
            prepared = synthetic(args.items, args.users)
        rows = measure(config, prepared, device, args)
    report = {
        "log": name,
        "items": prepared.interactions.item_count,
        "batch": args.batch,
        "beam_size": args.beam,
        "precision": "bfloat16" if use_bfloat16(config, device) else "float32",
        "memory_mib": memory_mib(device),
        "rows": rows,
    }
    print(f"{report['precision']}, at most {report['memory_mib']} MiB for all {len(PAPER)} models together")
    gpu = f"{torch.cuda.get_device_name()}, " if device.type == "cuda" else ""
    write_report(args.json, report, f"{gpu}{args.threads} threads used")


if __name__ == "__main__":
    main()
