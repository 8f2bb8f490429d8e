"""Two processes train what one does: the same losses, the same tree, the same weights, in one bundle."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.testing import assert_allclose, assert_array_equal

import training.deep.fit as fit_module
from espalier.bundle import Bundle
from tests import ROOT
from training.deep.parallel import drawn_rows, joined, own_rows
from training.deep.prepare import build_tree, prepare
from training.specification.models import read_deep_config

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")

TWO = """
import json, os, sys
import training.deep.fit as fit
from training.__main__ import main
from training.deep.parallel import average

losses, step_of = [], fit.train_step


def noted(*arguments):
    loss = step_of(*arguments)
    losses.append(average(loss.clone()).item())
    return loss


fit.train_step = noted
file = sys.argv.pop(1)
try:
    main()  # ends by raising SystemExit
finally:
    open(file + os.environ["RANK"], "w").write(json.dumps(losses))
"""
"""The command, with the losses of each process written to a file."""


def configuration(folder: Path) -> Path:
    """A log of 120 users in 4 clusters; 6 steps of TDM with its negatives, then 6 of OTM with random nodes."""
    rng = np.random.default_rng(3)
    lines = ["user,item"]
    for user in range(120):
        lines += [f"u{user},i{item}" for item in rng.permutation(16)[:12] * 4 + user % 4]
    (folder / "log.csv").write_text("\n".join(lines) + "\n")
    file = folder / "two.toml"
    file.write_text(f"""
kind = "otm"
name = "two"
data = {{ log = "{folder / "log.csv"}" }}
instances = {{ windows = [4, 2, 1], targets = 5 }}
tree = {{ kind = "random" }}
scorer = {{ node_dim = 6, hidden = [12, 8], init = "random" }}
objective = {{ beam_size = 6, random_nodes = 4, negatives = 10, warm_start = 0.5 }}
optimiser = {{ steps = 12, batch = 16, precision = "float32" }}
search = {{ beam_size = 16, m = 5, max_beam_size = 32, max_m = 10, gamma = 0.0 }}
""")
    return file


@pytest.mark.parametrize("rows", ["--no-shard-rows", "--shard-rows"])
def test_two_processes_train_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: str) -> None:
    config, script = configuration(tmp_path), tmp_path / "script.py"
    script.write_text(TWO)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    out = tmp_path / "two" / "1"
    two = subprocess.run(
        [*command, str(tmp_path / "losses"), "fit", "--config", str(config), "--device", "cpu", "--out", str(out), rows],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("120 users") + two.stderr.count("120 users") == 1, "one process tells"
    assert ("2 processes share" in two.stdout + two.stderr) == (rows == "--shard-rows")

    losses, step_of = [], fit_module.train_step

    def noted(*arguments: Any) -> torch.Tensor:
        loss = step_of(*arguments)
        losses.append(loss.item())
        return loss

    monkeypatch.setattr(fit_module, "train_step", noted)
    prepared = prepare(read_deep_config(config), None, tmp_path)
    tree = build_tree(read_deep_config(config), prepared, CPU)
    model = fit_module.fit(read_deep_config(config), prepared, tree, CPU, tmp_path, resume=False)
    assert len(losses) == 12
    for rank in "01":
        assert_allclose(json.loads((tmp_path / f"losses{rank}").read_text()), losses, rtol=1e-6)

    bundle = Bundle.open(out)
    assert_array_equal(bundle.tree.leaf_item, tree.leaf_item)
    assert_allclose(bundle.node_rows_ND, model.node_rows.detach(), atol=1e-4)
    assert not list(out.parent.glob(".*")), "no work folder and no lock is left"


def test_processes_wait_while_one_builds_a_tree_for_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0, "TORCHELASTIC_RUN_ID": "one"}
    for name, value in one.items():
        monkeypatch.setenv(name, str(value))
    with joined(CPU):
        assert dist.group.WORLD is not None
        assert dist.group.WORLD._get_backend(CPU).options._timeout >= timedelta(days=1)


def test_processes_share_the_draws_that_one_alone_would_make(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(rows: int) -> torch.Tensor:
        return torch.randint(0, 1000, (rows, 3), generator=torch.Generator().manual_seed(5))

    alone = drawn_rows(draw, 12)
    monkeypatch.setattr("training.deep.parallel.processes", lambda: 3)
    shares = []
    for number in range(3):
        monkeypatch.setattr("training.deep.parallel.process", partial(int, number))
        shares.append(drawn_rows(draw, 4))
        assert torch.equal(alone[own_rows(12)], shares[-1])
    assert torch.equal(torch.cat(shares), alone)
