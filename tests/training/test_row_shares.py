"""Two processes that share the node rows train what one does, and each goes on from the other; training keeps to the device that it is
given.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.testing import assert_allclose

import training.deep.fit as fit_module
from tests import ROOT
from tests.training import shared_runs
from tests.training.pretended_gpu import GPU, TwoDevices, pretended_gpu
from tests.training.shared_runs import CHECKPOINT_EVERY, KINDS, STEPS, configuration, write_log
from training.deep import checkpoint
from training.deep.checkpoint import Checkpoint, RunState
from training.deep.parallel import process_group
from training.versions import clear

pytestmark = pytest.mark.slow

KILLED = 8
LOSS_RTOL = 5e-6
"""Some forty roundings of float32: sums of two processes are of other parts, and Adam makes whole steps of gradients that are nearly 0."""

KEPT = ("checkpoint.pt", "identity.json", "tree.npz")
RESUMED = ("otm-sequence", "otm")


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
    file.write_text("".join(json.dumps([raw, str(path), device, resume, last]) + "\n" for raw, path, device, resume, last in runs))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.training.shared_runs", str(file)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(folder)},
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit_module, "CHECKPOINT_EVERY", CHECKPOINT_EVERY)
        runs = {kind: Run(shared_runs.train(configuration(folder, kind), folder / f"{kind}-one"), folder / f"{kind}-one") for kind in KINDS}
        for kind in RESUMED:
            path = folder / f"{kind}-one-killed"
            runs[f"{kind} killed"] = Run(shared_runs.train(configuration(folder, kind), path, last=KILLED), path)
    return runs


@pytest.fixture(scope="module")
def together(folder: Path, alone: dict[str, Run]) -> dict[str, Run]:
    """What two processes make of each kind, and from where runs were killed."""
    wanted: dict[str, tuple[dict[str, Any], Path, str, bool, int | None]] = {
        kind: (configuration(folder, kind), folder / f"{kind}-two", "cpu", False, None) for kind in KINDS
    }
    wanted["otm-sequence on a GPU"] = configuration(folder, "otm-sequence"), folder / "pretended", "gpu", False, None
    for kind in RESUMED:
        raw = configuration(folder, kind)
        wanted[f"{kind} resumed"] = raw, alone[f"{kind} killed"].folder, "cpu", True, None
        wanted[f"{kind} killed"] = raw, folder / f"{kind}-two-killed", "cpu", False, KILLED
    return dict(zip(wanted, two_processes(folder, list(wanted.values())), strict=True))


def assert_same_end(run: Run, one: Run, biases: tuple[int, ...] = ()) -> None:
    """Of the weights the rows, less some biases: where a gradient is 0 but for rounding, Adam makes steps of noise. Such are those of an
    attention's keys' biases, and of content that adds the same to the biases of all leaves, which a softmax does not see."""
    assert_allclose(np.delete(run.weights["node_rows"], biases, 1), np.delete(one.weights["node_rows"], biases, 1), atol=5e-5)
    assert_allclose(run.curve["recalls"], one.curve["recalls"], rtol=1e-12)


@pytest.mark.parametrize("kind", [*KINDS, "otm-sequence on a GPU"])
def test_two_processes_have_the_losses_and_the_rows_of_one(together: dict[str, Run], alone: dict[str, Run], kind: str) -> None:
    run, one = together[kind], alone[kind.removesuffix(" on a GPU")]
    assert len(one.losses) == STEPS
    assert_allclose(run.losses, one.losses, rtol=LOSS_RTOL)
    assert_same_end(run, one, (3, 7) if kind == "otm-sequence content" else ())


@pytest.mark.parametrize("kind", RESUMED)
def test_two_processes_go_on_where_one_was_killed(together: dict[str, Run], alone: dict[str, Run], kind: str) -> None:
    run, one = together[f"{kind} resumed"], alone[kind]
    assert_allclose(run.losses, one.losses[-len(run.losses) :], rtol=LOSS_RTOL)
    assert len(run.losses) == STEPS - KILLED // CHECKPOINT_EVERY * CHECKPOINT_EVERY, "from the last checkpoint"
    assert_same_end(run, one)


@pytest.mark.parametrize("kind", RESUMED)
def test_one_process_goes_on_where_two_were_killed(folder: Path, together: dict[str, Run], alone: dict[str, Run], kind: str) -> None:
    path = together[f"{kind} killed"].folder
    assert sorted(file.name for file in path.iterdir() if file.is_file()) == [*KEPT], "no tables are left beside them"
    losses = shared_runs.train(configuration(folder, kind), path, resume=True)
    assert len(losses) == STEPS - KILLED // CHECKPOINT_EVERY * CHECKPOINT_EVERY
    assert_allclose(losses, alone[kind].losses[-len(losses) :], rtol=LOSS_RTOL)
    assert_same_end(Run(losses, path), alone[kind])


class State(dict[str, Any]):
    """A part of a checkpoint: its state, as it is."""

    def state_dict(self) -> dict[str, Any]:
        return self


def test_tables_that_a_killed_checkpoint_left_go_when_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, rows_ND = tmp_path / "work", torch.zeros(4, 2)
    model: Any = State(node_rows=rows_ND)
    optimiser: Any = State(rows={"first": rows_ND, "second": rows_ND}, averaged={"node_rows": rows_ND})
    work.mkdir()
    monkeypatch.setattr(checkpoint, "gather_rows", lambda *_: None)
    monkeypatch.setattr(checkpoint, "processes", lambda: 2)
    Checkpoint(work / "checkpoint.pt", model, optimiser, nodes=4).save(RunState(step=5))

    def killed(*_: object) -> None:
        shutil.copytree(work, tmp_path / "left")  # a kill deletes nothing
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        Checkpoint(work / "checkpoint.pt", model, optimiser, nodes=4).save(RunState(step=10))
    left = tmp_path / "left"
    assert len([file for file in left.rglob("*") if file.stat().st_size == rows_ND.nbytes]) == 4
    clear(left, resume=True)
    assert sorted(file.name for file in left.rglob("*")) == ["checkpoint.pt"]
    assert (left / "checkpoint.pt").read_bytes() == (work / "checkpoint.pt").read_bytes()


# -- a GPU that is not there --------------------------------------------------------------------------------------------


def test_what_a_gpu_would_refuse_is_refused() -> None:
    with pretended_gpu() as gpu:
        there = torch.zeros(3, device=gpu)
        assert (there + 1).device == there.to(gpu).device == torch.nn.Linear(2, 2).to(gpu).weight.device == GPU
        assert there.cpu().device == torch.device("cpu")
        with pytest.raises(TwoDevices, match="add"):
            there + torch.ones(3)
        with pytest.raises(TwoDevices, match="numpy"):
            there.numpy()
        with pytest.raises(TwoDevices, match="generator"):
            torch.rand(3, device=gpu, generator=torch.Generator())
        assert np.array_equal(there.cpu().numpy(), np.zeros(3))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "attention"])
def test_every_kind_trains_on_the_device_that_it_is_given(tmp_path: Path, kind: str) -> None:
    """Not attention: torch's recomputation of its hidden layers sees through the pretence."""
    write_log(tmp_path)
    raw = configuration(tmp_path, kind)
    losses = shared_runs.train(raw, tmp_path / "cpu")
    with pretended_gpu() as gpu:
        there = shared_runs.train(raw, tmp_path / "gpu", device=gpu)
    assert_allclose(there, losses, rtol=1e-5)


# -- processes ----------------------------------------------------------------------------------------------------------


CPU = torch.device("cpu")


def test_processes_wait_while_one_builds_a_tree_for_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0, "TORCHELASTIC_RUN_ID": "one"}
    for name, value in one.items():
        monkeypatch.setenv(name, str(value))
    with process_group(CPU):
        assert dist.group.WORLD is not None
        assert dist.group.WORLD._get_backend(CPU).options._timeout >= timedelta(days=1)
