"""Small trainings of every kind of network, with noted losses, in one process or under torchrun. Run by test_row_shares.py."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from threadpoolctl import threadpool_limits

from espalier.tree import Tree
from tests.training.pretended_gpu import pretended_gpu
from training.deep import fit as fit_module
from training.deep.checkpoint import check_run
from training.deep.fit import InstanceSteps
from training.deep.fit import fit as fit_model
from training.deep.parallel import average, process, process_group, shared_tree
from training.deep.prepare import build_tree, prepare
from training.deep.sequence.rules import with_rules
from training.deep.sequence.steps import SequenceSteps
from training.run_files import stored_tree
from training.specification.models import deep_config

CPU = torch.device("cpu")
STEPS, CHECKPOINT_EVERY = 12, 5
KINDS = ("otm-sequence", "otm-sequence whole", "otm-sequence content", "otm-robust", "otm", "otm-no-bs", "tdm", "plt", "hsm", "attention")


def write_log(folder: Path) -> None:
    """200 users who walk along circles of 24 items, of which there are 4."""
    rng = np.random.default_rng(3)
    lines = ["user,item"]
    for user in range(200):
        first = int(rng.integers(24))
        lines += [f"u{user},i{(first + place) % 24 * 4 + user % 4}" for place in range(int(rng.integers(5, 15)))]
    (folder / "log.csv").write_text("\n".join(lines) + "\n")
    rows = range(100)  # the last 4 are in no list
    pq.write_table(pa.table({"id": [f"i{row}" for row in rows], "circle": [f"c{row % 4}" for row in rows]}), folder / "items.parquet")


def configuration(folder: Path, kind: str) -> dict[str, Any]:
    """A small model of a kind, with random nodes, dropout and validation where the kind has them."""
    name, _, variant = kind.partition(" ")
    raw: dict[str, Any] = {
        "kind": "tdm" if name == "attention" else name,  # OTM's targets jump where rounding turns a beam
        "name": "small",
        "data": {"log": str(folder / "log.csv"), "format": {"order": "file"}, "split": {"validation_share": 0.3}},
        "tree": {"branching": 3},
        "instances": {"windows": [4, 2, 1], "targets": 5},
        "scorer": {"node_dim": 6},
        "objective": {},
        "optimiser": {"steps": STEPS, "batch": 16, "precision": "float32", "validate_every": 5, "average": 6},
        "search": {"beam_size": 8, "m": 5, "max_beam_size": 32, "max_m": 10},
    }
    if name == "otm-sequence":
        raw["instances"] = {"targets": 3}
        raw["scorer"] = {"kind": "sequence", "node_dim": 8, "layers": 1, "heads": 1, "length": 10, "window_hidden": 8}
        raw["objective"] = {"negatives": 12, "whole": 200 if variant == "whole" else 12}
        rate = 3e-4 if variant == "content" else 1e-3  # roundings grow with it, with content to 1e-5 from a start that differs by 1e-8
        raw["optimiser"] |= {"places": 160, "warm_steps": 3, "learning_rate": rate}
        del raw["optimiser"]["batch"]
    elif name in ("otm-robust", "otm"):
        raw["objective"] = {"beam_size": 4, "random_nodes": 3}
    elif name == "tdm":
        raw["objective"] = {"negatives": 10}
    elif name == "attention":
        raw["scorer"] = {"kind": "attention", "node_dim": 4, "hidden": [8, 4], "attention_hidden": 4}
        raw["objective"] = {"negatives": 10}
    if variant == "content":
        raw["data"]["items"] = str(folder / "items.parquet")
        raw["content"] = {"columns": "auto"}
    return raw


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


def train(raw: dict[str, Any], folder: Path, resume: bool = False, last: int | None = None, device: torch.device = CPU) -> list[float]:
    """Train a configuration; returns its losses. Process 0 leaves weights.npz, the recalls and the tables' sizes in the folder.

    last  the step that is not made: the run is killed before it
    """
    own = folder / f"process-{process()}-{os.getpid()}"
    own.mkdir(parents=True, exist_ok=True)
    config = deep_config(raw)
    prepared = prepare(config, None, own)
    config = with_rules(config, prepared)
    check_run(config, prepared, folder, resume)
    losses: list[float] = []
    made: list[tuple[Any, Any]] = [(kind, kind.make) for kind in (InstanceSteps, SequenceSteps)]

    def tree() -> Tree:
        with threadpool_limits(1):  # of NumPy's BLAS: torchrun gives its processes one thread, and more would round another tree
            return stored_tree(folder / "tree.npz", partial(build_tree, config, prepared), resume)

    for kind, make in made:
        kind.make = noted(make, losses, last)
    try:
        model = fit_model(config, prepared, shared_tree(tree, CPU), device, folder, resume)
    except Killed:
        return losses
    finally:
        for kind, make in made:
            kind.make = make
    if process() == 0:
        np.savez(folder / "weights.npz", **{name: values.cpu().numpy() for name, values in model.state_dict().items()})
    return losses


def curve(folder: Path) -> dict[str, Any]:
    """What was measured on the way."""
    read: dict[str, Any] = json.loads((folder / "curve.json").read_text())
    return read


def main() -> None:
    """Train what the lines of a file say, one after the other: [configuration, folder, "cpu" or "gpu", resume, last]."""
    runs, results = Path(sys.argv[1]), []
    torch.set_num_threads(1)
    fit_module.CHECKPOINT_EVERY = CHECKPOINT_EVERY
    with process_group(CPU):
        for line in runs.read_text().splitlines():
            raw, folder, device, resume, last = json.loads(line)
            if device == "gpu":
                with pretended_gpu() as gpu:
                    results.append(train(raw, Path(folder), resume, last, gpu))
            else:
                results.append(train(raw, Path(folder), resume, last))
        number = process()
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    assert not any("gloo" in thread for thread in threads), threads  # one that outlives the group may abort the process at its end
    runs.with_name(f"losses-{number}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
