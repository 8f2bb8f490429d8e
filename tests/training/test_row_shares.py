"""Two processes that share the node rows train what one does: the same losses, recalls and rows; and each goes on from the other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.testing import assert_allclose

from tests import ROOT
from tests.training import shared_runs
from training.deep import checkpoint
from training.deep import fit as fit_module
from training.deep.checkpoint import Checkpoint, RunState
from training.deep.row_shares import FEW_BYTES, shares_rows
from training.trees.balanced import random_tree
from training.versions import clear

pytestmark = pytest.mark.slow

STEPS, KILLED = 12, 8
RESUMED = ("otm-sequence", "otm")
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
        raw["optimiser"] |= {"places": 160, "warm_steps": 3, "learning_rate": 5e-3}
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


@dataclass(frozen=True)
class Run:
    losses: list[float]
    folder: Path

    @property
    def weights(self) -> dict[str, np.ndarray]:
        with np.load(self.folder / "weights.npz") as file:
            return dict(file)

    @property
    def curve(self) -> dict[str, Any]:
        curve: dict[str, Any] = json.loads((self.folder / "curve.json").read_text())
        return curve


def two_processes(folder: Path, runs: list[tuple[dict[str, Any], Path, str, bool, int | None]]) -> list[Run]:
    """What two processes make of some runs."""
    file = folder / "runs.jsonl"
    file.write_text("".join(json.dumps([raw, str(path), rows, resume, last]) + "\n" for raw, path, rows, resume, last in runs))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.training.shared_runs", str(file)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "HOME": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    losses = [json.loads((folder / f"losses-{number}.json").read_text()) for number in range(2)]
    assert losses[0] == losses[1]
    return [Run(losses[0][number], path) for number, (_, path, *_) in enumerate(runs)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shares")
    write_log(folder)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Run]:
    """What one process makes of each kind; two of them killed and not resumed, for others to go on."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the two processes do: several threads are slow where other tests run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit_module, "CHECKPOINT_EVERY", 5)
        runs = {
            kind: Run(shared_runs.train(configuration(folder, kind), folder / f"{kind}-one", "whole"), folder / f"{kind}-one")
            for kind in KINDS
        }
        for kind in RESUMED:
            path = folder / f"{kind}-one-killed"
            runs[f"{kind} killed"] = Run(shared_runs.train(configuration(folder, kind), path, "whole", last=KILLED), path)
    torch.set_num_threads(threads)
    return runs


@pytest.fixture(scope="module")
def together(folder: Path, alone: dict[str, Run]) -> dict[str, Run]:
    """What two processes make of each kind with shared rows, of one with whole rows, and from where runs were killed."""
    wanted: dict[str, tuple[dict[str, Any], Path, str, bool, int | None]] = {
        kind: (configuration(folder, kind), folder / f"{kind}-two", "shared", False, None) for kind in KINDS
    }
    wanted["otm-sequence with whole rows"] = configuration(folder, "otm-sequence"), folder / "replicated", "whole", False, None
    wanted["otm-sequence on a GPU"] = configuration(folder, "otm-sequence"), folder / "pretended", "shared on a GPU", False, None
    for kind in RESUMED:
        raw = configuration(folder, kind)
        wanted[f"{kind} resumed"] = raw, alone[f"{kind} killed"].folder, "shared", True, None
        wanted[f"{kind} killed"] = raw, folder / f"{kind}-two-killed", "shared", False, KILLED
    return dict(zip(wanted, two_processes(folder, list(wanted.values())), strict=True))


def assert_same_end(run: Run, one: Run, biases: tuple[int, ...] = ()) -> None:
    """Of the weights the rows, less some biases: where a gradient is 0 but for rounding, Adam makes steps of noise. Such are those of an
    attention's keys' biases, and of content that adds the same to the biases of all leaves, which a softmax does not see."""
    assert_allclose(np.delete(run.weights["node_rows"], biases, 1), np.delete(one.weights["node_rows"], biases, 1), atol=2e-5)
    assert_allclose(run.curve["recalls"], one.curve["recalls"], rtol=1e-12)


@pytest.mark.parametrize("kind", [*KINDS, "otm-sequence with whole rows", "otm-sequence on a GPU"])
def test_two_processes_have_the_losses_and_the_rows_of_one(together: dict[str, Run], alone: dict[str, Run], kind: str) -> None:
    run, one = together[kind], alone[kind.removesuffix(" with whole rows").removesuffix(" on a GPU")]
    assert len(one.losses) == STEPS
    assert_allclose(run.losses, one.losses, rtol=1e-6)
    assert_same_end(run, one, (3, 7) if kind == "otm-sequence content" else ())


@pytest.mark.parametrize("kind", RESUMED)
def test_two_processes_go_on_where_one_was_killed(together: dict[str, Run], alone: dict[str, Run], kind: str) -> None:
    run, one = together[f"{kind} resumed"], alone[kind]
    assert_allclose(run.losses, one.losses[-len(run.losses) :], rtol=1e-6)
    assert len(run.losses) == STEPS - KILLED // 5 * 5, "from the last checkpoint"
    assert_same_end(run, one)


@pytest.mark.parametrize("kind", RESUMED)
def test_one_process_goes_on_where_two_were_killed(folder: Path, together: dict[str, Run], alone: dict[str, Run], kind: str) -> None:
    path = together[f"{kind} killed"].folder
    assert [file.name for file in path.iterdir() if file.is_file()] == ["checkpoint.pt"], "no tables are left beside it"
    losses = shared_runs.train(configuration(folder, kind), path, "whole", resume=True)
    assert len(losses) == STEPS - KILLED // 5 * 5
    assert_allclose(losses, alone[kind].losses[-len(losses) :], rtol=1e-6)
    assert_same_end(Run(losses, path), alone[kind])


class State(dict[str, Any]):
    """A part of a checkpoint: its state, as it is."""

    def state_dict(self) -> dict[str, Any]:
        return self


def test_tables_that_a_killed_checkpoint_left_go_when_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, rows_ND = tmp_path / "work", torch.zeros(4, 2)
    parts: Any = {
        "model": State(node_rows=rows_ND),
        "averaged": State({"module.node_rows": rows_ND}),
        "optimiser": State(state={}),
    }
    work.mkdir()
    monkeypatch.setattr(checkpoint, "gather_rows", lambda *_: None)
    Checkpoint(work / "checkpoint.pt", {}, parts, nodes=4).save(RunState(step=5))

    def killed(*_: object) -> None:
        shutil.copytree(work, tmp_path / "left")  # a kill deletes nothing
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        Checkpoint(work / "checkpoint.pt", {}, parts, nodes=4).save(RunState(step=10))
    left = tmp_path / "left"
    assert len([file for file in left.rglob("*") if file.stat().st_size == rows_ND.nbytes]) == 2
    clear(left, resume=True)
    assert sorted(file.name for file in left.rglob("*")) == ["checkpoint.part", "checkpoint.pt"]
    assert (left / "checkpoint.pt").read_bytes() == (work / "checkpoint.pt").read_bytes()


def test_rows_are_shared_where_they_are_large_or_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = random_tree(1000, 4, seed=0)
    fits = FEW_BYTES // (24 * tree.node_count)
    assert not shares_rows(True, tree, fits), "one process has nobody to share with"
    monkeypatch.setattr("training.deep.row_shares.processes", lambda: 2)
    assert [shares_rows(None, tree, width) for width in (fits, fits + 1)] == [False, True]
    assert shares_rows(True, tree, 1)
    assert not shares_rows(False, tree, 10 * fits)
