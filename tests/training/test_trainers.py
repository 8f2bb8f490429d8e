"""What every trainer promises: its result is a function of the seed, and a run that was killed goes on as if nothing had happened."""

from __future__ import annotations

import dataclasses
import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from numpy.testing import assert_array_equal

from espalier.arrays import Array
from espalier.bundle import Bundle
from espalier.chunks import ARRAYS
from espalier.errors import InvalidConfig
from tests.training import shared_runs
from tests.training.commands import written_toml
from tests.training.points import npz_files, random_points
from tests.training.shared_runs import CHECKPOINT_EVERY, Killed, configuration, write_log
from training.__main__ import fit
from training.assign import command
from training.assign.command import Assignment, assign
from training.assign.labelwise import Labelwise
from training.deep import fit as deep_fit
from training.linear.fit import LevelTrainer
from training.versions import only_run, work_folder


@dataclass(frozen=True)
class Made:
    """What a run made, and of how many steps."""

    arrays: dict[str, Array]
    steps: int


@dataclass(frozen=True)
class Asked:
    """A run: its files lie in `folder`, it writes beside `out`. last: the step in whose place it is killed, from 0."""

    folder: Path
    out: Path
    seed: int = 1
    resume: bool = False
    last: int | None = None


Trainer = Callable[[Asked], Made]


@contextmanager
def counted(owner: type, name: str, last: int | None) -> Iterator[list[int]]:
    """The steps that `owner.name` makes inside; it dies in place of step `last`."""
    made, step = list[int](), getattr(owner, name)

    def noted(*arguments: Any) -> Any:
        if len(made) == last:
            raise Killed
        made.append(len(made))
        return step(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, noted)
        yield made


def network(kind: str) -> Trainer:
    def train(asked: Asked) -> Made:
        if not (asked.folder / "log.csv").exists():
            write_log(asked.folder)
        raw, work = configuration(asked.folder, kind) | {"seed": asked.seed}, work_folder(asked.out)
        losses = shared_runs.train(raw, work, asked.resume, asked.last)
        if asked.last is not None:
            raise Killed
        with np.load(work / "weights.npz") as weights:
            return Made(dict(weights) | {"curve": np.array(shared_runs.curve(work)["recalls"])}, len(losses))

    return train


def linear(kind: str, **sections: dict[str, Any]) -> Trainer:
    def train(asked: Asked) -> Made:
        data = npz_files(asked.folder, train=random_points(np.random.default_rng(8), 200, 30, 40))
        raw = {"kind": kind, "name": "points", "seed": asked.seed, "data": data} | sections
        file = written_toml(asked.folder / "points.toml", raw)
        with counted(LevelTrainer, "train", asked.last) as levels:
            fit(config=file, out=asked.out, data=None, test=None, device="cpu", resume=asked.resume)
        bundle = Bundle.open(asked.out)
        arrays = {f"{place} {name}": getattr(chunks, name) for place, (_, chunks) in enumerate(bundle.trees) for name in ARRAYS}
        leaves = {f"{place} leaf_item": tree.leaf_item for place, (tree, _) in enumerate(bundle.trees)}
        return Made(arrays | leaves | (bundle.stacking.arrays() if bundle.stacking is not None else {}), len(levels))

    return train


def assignment(asked: Asked) -> Made:
    """For the model of another run; its result is a function of no seed, but of how many points an item gets."""
    model, out = asked.folder / "model" / "1", asked.out.with_suffix(".parquet")
    if not model.exists():
        linear("xreg", tree={"max_leaf": 4})(dataclasses.replace(asked, out=model, seed=1, resume=False, last=None))
    wanted = Assignment(per_item=4 + asked.seed, block=64)
    with counted(Labelwise, "predict", asked.last) as blocks, pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "KEEP_EVERY_S", -1.0)
        assign(Bundle.open(model), asked.folder / "train.npz", wanted, out, asked.resume)
    pairs = pl.read_parquet(out)
    return Made({name: pairs[name].to_numpy() for name in pairs.columns}, len(blocks))


GIVEN = {"cost": 1.0, "gamma": 0.5}
"""Options that are not chosen, so that all steps are those of the trees that are kept."""
TREE = {"branching": 4, "max_leaf": 4}
"""Three levels over 40 labels."""

TRAINERS: dict[str, tuple[Trainer, int, int]] = {
    **{kind: (network(kind), 8, CHECKPOINT_EVERY) for kind in ("otm-robust", "tdm", "plt", "otm-sequence", "attention")},
    **{kind: (network(kind), 8, CHECKPOINT_EVERY) for kind in ("otm-robust content", "otm-sequence content")},
    "otm before its first checkpoint": (network("otm"), 3, 0),
    "otm at a checkpoint": (network("otm"), 10, 10),
    "otm at its last step": (network("otm"), 11, 10),
    "xr-linear": (linear("xr-linear", linear=GIVEN, tree=TREE), 2, 2),
    "a forest": (linear("xr-linear", linear=GIVEN, tree=TREE | {"count": 2}), 3, 3),
    "a forest in its second tree": (linear("xr-linear", linear=GIVEN, tree=TREE | {"count": 2}), 5, 5),
    "stacking": (linear("xr-linear", linear=GIVEN, tree=TREE, stacking={"model": "network", "candidates": 5}), 2, 2),
    "xreg": (linear("xreg", tree={"max_leaf": 4}), 4, 4),
    "assign": (assignment, 3, 3),
}
"""By name: the trainer, the step in whose place a run is killed, and how many steps before it are kept."""


@pytest.fixture(autouse=True)
def short_ways_between_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_fit, "CHECKPOINT_EVERY", CHECKPOINT_EVERY)


def assert_equal(one: Made, other: Made) -> None:
    assert one.arrays.keys() == other.arrays.keys()
    for name, array in one.arrays.items():
        assert_array_equal(other.arrays[name], array, err_msg=name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Made]]:
    """The folder and the result of a run that nobody killed, made when it is first asked for."""
    runs: dict[str, tuple[Path, Made]] = {}

    def of(name: str) -> tuple[Path, Made]:
        if name not in runs:
            folder = tmp_path_factory.mktemp("trainer")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(deep_fit, "CHECKPOINT_EVERY", CHECKPOINT_EVERY)
                runs[name] = folder, TRAINERS[name][0](Asked(folder, folder / "points" / "1"))
        return runs[name]

    return of


@pytest.mark.parametrize("name", TRAINERS)
def test_a_killed_run_goes_on_from_what_it_kept_and_ends_as_an_uninterrupted_one(
    name: str, whole: Callable[[str], tuple[Path, Made]]
) -> None:
    train, last, kept = TRAINERS[name]
    folder, expected = whole(name)
    asked = Asked(folder, folder / "points" / "2", last=last)
    with pytest.raises(Killed):
        train(asked)
    assert not asked.out.exists()
    if kept:
        with pytest.raises(InvalidConfig, match=r"--resume: .*changed: the (configuration|options)"):
            train(dataclasses.replace(asked, seed=2, resume=True, last=None))
    resumed = train(dataclasses.replace(asked, resume=True, last=None))
    assert resumed.steps == expected.steps - kept
    assert_equal(resumed, expected)


@pytest.mark.parametrize("name", ["otm-robust", "otm-sequence", "xr-linear", "assign"])
def test_a_run_is_a_function_of_its_seed_whatever_an_earlier_one_left(name: str, whole: Callable[[str], tuple[Path, Made]]) -> None:
    train, last, _ = TRAINERS[name]
    folder, first = whole(name)
    asked = Asked(folder, folder / "points" / "3")
    with pytest.raises(Killed):
        train(dataclasses.replace(asked, seed=2, last=last))
    again, other = train(asked), train(Asked(folder, folder / "points" / "4", seed=2))
    assert again.steps == first.steps
    assert_equal(again, first)
    assert any(not np.array_equal(other.arrays[key], array) for key, array in first.arrays.items())


def test_a_lock_taken_while_its_last_holder_ends_keeps_other_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, real_flock = tmp_path / "m" / ".1.lock", fcntl.flock

    def ended_meanwhile(descriptor: int, kind: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real_flock)
        lock.unlink()
        lock.parent.rmdir()
        real_flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", ended_meanwhile)
    with only_run(work_folder(tmp_path / "m" / "1")):
        assert lock.exists()
        with pytest.raises(InvalidConfig, match="that no other run is writing"), only_run(work_folder(tmp_path / "m" / "1")):
            pytest.fail("two runs write one version")
        assert lock.exists()
    assert not lock.exists()


@pytest.mark.parametrize("name", ["xr-linear", "assign"])
def test_two_runs_cannot_write_one_file(name: str, whole: Callable[[str], tuple[Path, Made]]) -> None:
    folder, _ = whole(name)
    asked = Asked(folder, folder / "points" / "5")
    written = asked.out.with_suffix(".parquet") if name == "assign" else asked.out
    with only_run(work_folder(written)), pytest.raises(InvalidConfig, match=rf"--out: got '{written}', .* that no other run is writing"):
        TRAINERS[name][0](asked)
    TRAINERS[name][0](asked)
