"""What users did with the answers of two versions: means over users, and intervals that hold what they must."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from espalier.errors import InvalidConfig, InvalidData
from training.__main__ import main
from training.trial import LEAST_USERS, judge


def log(file: Path, seed: int, users: int = 400, gain: float = 0.0) -> Path:
    """Users of two versions, one in four of the second, with one to five answers each, of which a third are clicked."""
    rng = np.random.default_rng(seed)
    answers = rng.integers(1, 6, users)
    version = np.where(rng.random(users) < 0.25, 2, 1)
    user = np.repeat(np.arange(users), answers)
    clicked = rng.random(len(user)) < 1 / 3 + gain * (version[user] == 2)
    pl.DataFrame({"who": user, "version": version[user], "clicked": clicked}).write_parquet(file)
    return file


def test_means_are_of_users_and_their_difference_has_welchs_interval(tmp_path: Path) -> None:
    file = log(tmp_path / "log.parquet", 0)
    first, second = judge(file, "who", "version", "clicked").arms
    frame = pl.read_parquet(file).group_by("who", "version").agg(pl.col("clicked").sum())
    one, two = (frame.filter(pl.col("version") == number)["clicked"].to_numpy().astype(float) for number in (1, 2))
    assert (first.version, second.version, first.users, second.users) == ("1", "2", len(one), len(two))
    assert first.rows + second.rows == len(pl.read_parquet(file))
    error = np.sqrt(one.var(ddof=1) / len(one) + two.var(ddof=1) / len(two))
    apart = two.mean() - one.mean()
    assert second.difference == pytest.approx((apart, apart - 1.96 * error, apart + 1.96 * error))
    assert first.difference is None
    assert (first.low, first.high) == pytest.approx((one.mean() - 1.96 * one.std(ddof=1) / len(one) ** 0.5, 2 * first.mean - first.low))


def test_a_gain_is_found_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = log(tmp_path / "log.parquet", 1, users=4000, gain=0.1)
    assert main(["trial", str(file), "--user", "who", "--version", "version", "--value", "clicked"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("version 1: ")
    assert said[-1].startswith("version 2 against 1: +")
    assert said[-1].endswith(": more")
    assert main(["trial", str(file), "--user", "who", "--version", "version", "--value", "clicked", "--against", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [arm["version"] for arm in document["versions"]] == ["2", "1"]
    assert document["versions"][1]["difference"][2] < 0


def test_users_of_both_versions_are_left_out(tmp_path: Path) -> None:
    file = log(tmp_path / "log.parquet", 2)
    frame = pl.read_parquet(file)
    changed = pl.concat([frame, frame.filter(pl.col("who") < 30).with_columns(version=3 - pl.col("version"))])
    changed.write_parquet(file)
    found = judge(file, "who", "version", "clicked")
    assert found.users_of_both == 30
    assert sum(arm.users for arm in found.arms) == 370


def test_text_is_read_and_what_is_wrong_is_said_with_its_place(tmp_path: Path) -> None:
    file = log(tmp_path / "log.parquet", 3)
    frame = pl.read_parquet(file).with_columns(pl.col("clicked").cast(pl.Int64))
    text = tmp_path / "log.csv"
    frame.write_csv(text)
    assert judge(text, "who", "version", "clicked") == judge(file, "who", "version", "clicked")
    pl.read_parquet(file).write_csv(text)  # true and false
    assert judge(text, "who", "version", "clicked") == judge(file, "who", "version", "clicked")
    frame.write_csv(text)
    with pytest.raises(InvalidData, match="bought"):
        judge(text, "who", "version", "bought")
    text.write_text(text.read_text().replace("\n0,", "\n,", 1))
    with pytest.raises(InvalidData, match="row 1"):
        judge(text, "who", "version", "clicked")
    frame.filter(pl.col("version") == 1).write_csv(text)
    with pytest.raises(InvalidData, match="at least two versions"):
        judge(text, "who", "version", "clicked")
    with pytest.raises(InvalidConfig, match="--against"):
        judge(file, "who", "version", "clicked", "7")
    with pytest.raises(InvalidData, match=f"at least {LEAST_USERS}"):
        judge(log(tmp_path / "few.parquet", 4, users=2 * LEAST_USERS), "who", "version", "clicked")
