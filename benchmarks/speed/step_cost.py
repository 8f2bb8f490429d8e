"""Seconds of a training step by the number of items, with the same batch, negatives, list length and width of rows.

    python -m benchmarks.step_cost --items 10000,100000,1000000 --json F [--kind otm-sequence] [--steps 8] [--node-dim 256]

A random tree over synthetic lists of 100 uniformly drawn items. One thread. Each row has the CPU seconds, least over the steps after the
first two, of a step and of its optimiser (collecting and clipping gradients, updating weights, refreshing rows); the number of rows with a
gradient in a step; and the peak memory of the process so far: to compare memory, run each size by itself.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.papers.otm.training_speed import EVENTS, synthetic
from benchmarks.report_file import command_line, print_row, write_report
from training.deep.first_model import build_model
from training.deep.fit import steps_of
from training.deep.row_adam import RowAdam
from training.deep.topology import Topology
from training.specification.deep import DeepConfig
from training.specification.models import deep_config
from training.trees.balanced import random_tree

WARM_STEPS = 2
USERS = 20_000
CPU = torch.device("cpu")


class Stopwatch:
    """CPU seconds inside some functions, nested calls counted once; and the number of updated rows."""

    def __init__(self) -> None:
        self.seconds, self.rows, self._inside = 0.0, 0, False

    def timing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            if self._inside:
                return function(*arguments)
            self._inside, begin = True, time.process_time()
            try:
                return function(*arguments)
            finally:
                self._inside = False
                self.seconds += time.process_time() - begin

        return timed

    def counting(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def counted(adam: RowAdam, places_R: torch.Tensor, *step_arguments: Any) -> Any:
            self.rows = len(places_R)
            return step(adam, places_R, *step_arguments)

        return counted


def configured(kind: str, node_dim: int, places: int, steps: int) -> DeepConfig:
    raw: dict[str, Any] = {"kind": kind, "name": "synthetic", "data": {"log": "none"}, "scorer": {"init": "random", "node_dim": node_dim}}
    raw["optimiser"] = {"steps": steps}
    if kind == "otm-sequence":
        raw["instances"] = {"nearness": 1.0}
        raw["scorer"] |= {"kind": "sequence", "length": EVENTS, "dropout": 0.5}
        raw["optimiser"] |= {"places": places}
    return deep_config(raw)


def measure(config: DeepConfig, items: int, steps: int) -> dict[str, Any]:
    """The row of one size."""
    prepared, tree = synthetic(items, USERS), random_tree(items, config.tree.children(items), seed=0)
    model, watch = build_model(config, tree, prepared), Stopwatch()
    training_steps = steps_of(config, model, Topology(tree, CPU), prepared)
    training_steps.optimiser.refresh()  # writes all moments, so that their memory is allocated, as in most steps of a run
    step_s, optimiser_s = [], []
    patches = (
        patch.object(training_steps.optimiser, "step", watch.timing(training_steps.optimiser.step)),
        patch.object(RowAdam, "refresh", watch.timing(RowAdam.refresh)),
        patch.object(RowAdam, "step", watch.counting(RowAdam.step)),
    )
    with patches[0], patches[1], patches[2]:
        for step in range(WARM_STEPS + steps):
            watch.seconds, begin = 0.0, time.process_time()
            training_steps.make(step)
            step_s.append(time.process_time() - begin)
            optimiser_s.append(watch.seconds)
            if step % 5 == 4:
                training_steps.optimiser.average()
    return {
        "items": items,
        "nodes": tree.node_count,
        "step_s": round(min(step_s[WARM_STEPS:]), 4),
        "optimiser_s": round(min(optimiser_s[WARM_STEPS:]), 4),
        "rows_updated": watch.rows,
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--items", default="10000,100000,1000000", help="sizes of catalogues")
    parser.add_argument("--kind", default="otm-sequence")
    parser.add_argument("--node-dim", type=int, default=256)
    parser.add_argument("--places", type=int, default=4096, help="of a batch of otm-sequence")
    parser.add_argument("--steps", type=int, default=8, help="that are timed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = configured(args.kind, args.node_dim, args.places, WARM_STEPS + args.steps)
    rows = []
    for items in map(int, args.items.split(",")):
        rows.append(measure(config, items, args.steps))
        print_row(rows[-1])
    options = {"kind": args.kind, "node_dim": args.node_dim, "places": args.places}
    write_report(args.json, {"options": options, "rows": rows}, "one thread used")


if __name__ == "__main__":
    main()
