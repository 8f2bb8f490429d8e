"""Trainings with noted losses: each of a folder's configurations, in one process or under torchrun. Run by test_row_shares.py."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from espalier.tree import Tree
from tests.training.pretended_gpu import pretended_gpu
from training.deep import fit as fit_module
from training.deep.fit import InstanceSteps
from training.deep.fit import fit as fit_model
from training.deep.parallel import average, joined, process, shared_tree
from training.deep.prepare import build_tree, prepare
from training.deep.sequence.rules import with_rules
from training.deep.sequence.steps import SequenceSteps
from training.specification.models import deep_config

CPU = torch.device("cpu")
Rows = Literal["shared", "whole"]


class Killed(Exception):
    """Raised in place of a step."""


def noted(make: Callable[[Any, int], torch.Tensor], losses: list[float], last: int | None) -> Callable[[Any, int], torch.Tensor]:
    """The step function `make`, that notes the batch's losses in float64 and dies at step `last`."""

    def step(steps: Any, number: int) -> torch.Tensor:
        if number == last:
            raise Killed
        loss = make(steps, number)
        losses.append(float(average(loss.double().clone())))
        return loss

    return step


def train(
    raw: dict[str, Any], folder: Path, rows: Rows, resume: bool = False, last: int | None = None, device: torch.device = CPU
) -> list[float]:
    """Train a configuration; returns its losses. Process 0 leaves weights.npz, the recalls and the tables' sizes in the folder.

    last  the step that is not made: the run is killed before it
    """
    own = folder / f"process-{process()}-{os.getpid()}"
    own.mkdir(parents=True)
    config = deep_config(raw)
    prepared = prepare(config, None, own)
    config = with_rules(config, prepared)
    losses: list[float] = []
    made: list[tuple[Any, Any]] = [(kind, kind.make) for kind in (InstanceSteps, SequenceSteps)]

    def tree() -> Tree:
        return build_tree(config, prepared)

    for kind, make in made:
        kind.make = noted(make, losses, last)
    try:
        model = fit_model(config, prepared, shared_tree(tree, CPU), device, folder, resume, rows == "shared")
    except Killed:
        return losses
    finally:
        for kind, make in made:
            kind.make = make
    if process() == 0:
        np.savez(folder / "weights.npz", **{name: values.cpu().numpy() for name, values in model.state_dict().items()})
    return losses


def main() -> None:
    """Train what the lines of a file say, one after the other: [configuration, folder, rows, resume, last]."""
    runs, results = Path(sys.argv[1]), []
    torch.set_num_threads(1)
    fit_module.CHECKPOINT_EVERY = 5
    with joined(CPU):
        for line in runs.read_text().splitlines():
            raw, folder, rows, resume, last = json.loads(line)
            if rows == "shared on a GPU":
                with pretended_gpu() as device:
                    results.append(train(raw, Path(folder), "shared", resume, last, device))
            else:
                results.append(train(raw, Path(folder), rows, resume, last))
        number = process()
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    assert not any("gloo" in thread for thread in threads), threads  # one that outlives the group may abort the process at its end
    runs.with_name(f"losses-{number}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
