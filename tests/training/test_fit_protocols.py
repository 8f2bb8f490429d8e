"""Training, `evaluate --data` and the queries of a ranker under each protocol: the same queries everywhere, nothing learned from them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import torch
from numpy.testing import assert_array_equal

from espalier.bundle import Bundle
from training.baselines.methods import METHODS
from training.compare.compare import Asked, compare
from training.deep.run import fit_and_export
from training.evaluate import held_out_pairs
from training.held_out import pairs_of_log
from training.rankers.log_queries import from_log
from training.specification.deep import DeepConfig
from training.specification.models import config_of, deep_config
from training.specification.splits import DateSplit
from training.versions import work_folder

CPU = torch.device("cpu")
USERS, ITEMS, EVENTS = 60, 40, 12
SPLITS: dict[str, dict[str, Any]] = {
    "users": {"test_share": 0.2, "validation_share": 0.2},
    "last": {},
    "date": {},
    "file": {"validation_share": 0.3},
}


def write_log(file: Path, users: int = USERS) -> Path:
    """User u's event n is at time 3 n + u mod 3."""
    rng = np.random.default_rng(7)
    rows = [(f"u{user}", f"i{item}", 3 * n + user % 3) for user in range(users) for n, item in enumerate(rng.permutation(ITEMS)[:EVENTS])]
    file.write_text("user,item,time\n" + "".join(f"{user},{item},{time}\n" for user, item, time in rows))
    return file


def config_under(kind: str, folder: Path, log: Path) -> DeepConfig:
    (folder / "test.csv").write_text("user,item,time\n" + "".join(f"u{user},i{user % ITEMS},99\n" for user in range(0, USERS, 4)))
    split = {"kind": kind} | SPLITS[kind] | ({"test": str(folder / "test.csv")} if kind == "file" else {})
    return deep_config(
        {
            "kind": "otm-robust",
            "name": "shop",
            "data": {"log": str(log), "format": {"timestamp": "time", "order": "timestamp", "min_user_events": 1}, "split": split},
            "instances": {"windows": [4, 2]},
            "scorer": {"node_dim": 4, "hidden": []},
            "optimiser": {"steps": 3, "batch": 8},
            "search": {"beam_size": 8, "m": 5, "max_m": 40, "max_beam_size": 64},
        }
    )


@pytest.mark.parametrize(("kind", "queries", "relevant"), [("users", 12, 6), ("last", USERS, 1), ("date", USERS, None), ("file", 15, 1)])
def test_a_model_is_measured_on_the_queries_of_its_protocol(tmp_path: Path, kind: str, queries: int, relevant: int | None) -> None:
    log = write_log(tmp_path / "log.csv")
    bundle = fit_and_export(config_under(kind, tmp_path, log), None, tmp_path / "shop/1", CPU, resume=False)
    assert bundle is not None
    held, of_log = held_out_pairs(bundle), pairs_of_log(bundle, log)
    assert len(held) == len(of_log) == queries
    assert [set(pair.relevant) for pair in held] == [set(pair.relevant) for pair in of_log]
    if relevant is not None:
        assert {len(pair.relevant) for pair in held} == {relevant}
    of_ranker = from_log(bundle, None, "training", exclude_seen=False)
    assert [set(items) for items in of_ranker.test.items] == [set(pair.relevant) for pair in of_log]
    assert len(of_ranker.train) > 0


def test_dates_that_training_chose_hold_for_a_log_that_has_grown(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.csv")
    bundle = fit_and_export(config_under("date", tmp_path, log), None, tmp_path / "shop/1", CPU, resume=False)
    assert bundle is not None
    split = config_of(bundle.manifest, DeepConfig).data.split
    assert isinstance(split, DateSplit)
    assert split.test_from is not None
    before = pairs_of_log(bundle, log)
    with log.open("a") as file:
        file.writelines(f"u{user},i{(user + n) % ITEMS},{200 + n}\n" for user in range(USERS) for n in range(20))
    after = pairs_of_log(bundle, log)
    assert [pair.history.tolist() for pair in before] == [pair.history.tolist() for pair in after]
    assert all(len(late.relevant) > len(early.relevant) for early, late in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("last", "training.data.interactions._kept_items"),
        ("last", "training.data.cut_lists.counts_by_user"),
        ("file", "training.data.splits._rows"),
    ],
)
def test_what_a_killed_run_was_writing_goes_when_it_goes_on(tmp_path: Path, kind: str, place: str) -> None:
    config, out = config_under(kind, tmp_path, write_log(tmp_path / "log.csv")), tmp_path / "shop/1"
    work, left = work_folder(out), tmp_path / "left"

    def end_at(name: str, resume: bool) -> set[Path]:
        """What lies in the work folder when the run is killed."""

        def killed(*_: object, **__: object) -> None:
            shutil.rmtree(left, ignore_errors=True)
            shutil.copytree(work, left)
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(name, killed)
            with pytest.raises(KeyboardInterrupt):
                fit_and_export(config, None, out, CPU, resume)
        shutil.rmtree(work)
        shutil.copytree(left, work)
        return {path.relative_to(left) for path in left.rglob("*")}

    trained = "training.deep.run.train_and_export"
    whole, unfinished = end_at(trained, resume=False), end_at(place, resume=False)
    assert not unfinished <= whole
    assert end_at(trained, resume=True) == whole


def recalls(bundle: Bundle) -> list[tuple[str, int, float, float]]:
    tested = bundle.manifest.metrics["test"]
    return [(key, row["m"], row["recall"], row["precision"]) for key, rows in tested.items() for row in rows]


@pytest.mark.parametrize("kind", ["users", "date"])
def test_a_log_in_parquet_gives_the_model_and_the_figures_of_the_same_log_in_text(tmp_path: Path, kind: str) -> None:
    text = write_log(tmp_path / "log.csv")
    rows, folder = pa_csv.read_csv(text), tmp_path / "log"
    for number, start in enumerate(range(0, len(rows), 171)):
        file = folder / f"day={number}" / "part.parquet"
        file.parent.mkdir(parents=True)
        pq.write_table(rows.slice(start, 171), file, row_group_size=50)
    config = config_under(kind, tmp_path, text)
    first = fit_and_export(config, None, tmp_path / "text/1", CPU, resume=False)
    other = fit_and_export(config, folder, tmp_path / "parquet/1", CPU, resume=False)
    assert first is not None
    assert other is not None
    assert_array_equal(first.node_rows_ND, other.node_rows_ND)
    assert_array_equal(first.tree.leaf_item, other.tree.leaf_item)
    assert first.heldout().equals(other.heldout())
    assert recalls(first) == recalls(other)
    assert recalls(first)
    measured = [[(pair.history.tolist(), pair.relevant.tolist()) for pair in pairs_of_log(first, log)] for log in (text, folder)]
    assert measured[0] == measured[1]


def test_a_comparison_on_parquet_finds_what_it_finds_on_text(tmp_path: Path) -> None:
    text = write_log(tmp_path / "log.csv")
    pq.write_table(pa_csv.read_csv(text), tmp_path / "log.parquet")
    names = ("popularity", "item-cf")
    fuse: Any = None  # nothing is fused
    reports = [
        compare(Asked(config_under("users", tmp_path, text), log, names, METHODS, fuse, [8], None, CPU), None)
        for log in (text, tmp_path / "log.parquet")
    ]
    figures = [[(row["method"], row["figures"]) for row in report["rows"]] for report in reports]
    assert [method for method, _ in figures[0]] == list(names)
    assert figures[0] == figures[1]
