"""`espalier trial`: compares what users did with the answers of several versions, with intervals.

Knows a log of answers. Users are drawn at random; requests of one user are not independent. So a version's figure is the mean over its
users of each user's sum. The interval of a difference is Welch's with a normal distribution, which is close enough from 20 users on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import polars as pl

from espalier.errors import InvalidConfig, InvalidData

from .data.query_logs import read_columns
from .specification.log_format import TextTable

Z = 1.96
"""Standard errors from a mean to the ends of its 95 % interval."""
LEAST_USERS = 20
"""With fewer, the interval of a mean is wrong."""


class Arm(NamedTuple):
    """A version. mean, low, high: over its users; difference: its mean minus the baseline's and the interval, None for the baseline."""

    version: str
    users: int
    rows: int
    mean: float
    low: float
    high: float
    difference: tuple[float, float, float] | None


class Judged(NamedTuple):
    """users_of_both: number of users with answers of several versions, who are left out; a trial that begins or ends makes such."""

    arms: list[Arm]
    users_of_both: int


def judge(file: Path, user: str, version: str, value: str, against: str | None = None) -> Judged:
    """The versions of a log, the baseline first.

    file     CSV, TSV or Parquet with a row for each answer
    value    a column of numbers, or true and false: the outcome of the answer
    against  the baseline; None: the version with most users
    Raises InvalidData if a column has wrong values, a version has too few users, or there is only one version.
    """
    frame = read_columns(file, [user, version, value], TextTable())
    values = frame[value]
    if values.dtype == pl.String:
        values = values.str.to_lowercase().replace({"true": "1", "false": "0"})
    numbers = values.cast(pl.Float64, strict=False)
    wrong = numbers.is_null() | numbers.is_nan() | numbers.is_infinite() | frame[user].is_null() | frame[version].is_null()
    if wrong.any():
        row = int(wrong.arg_max() or 0)
        row_values = frame.row(row)
        raise InvalidData(f"{file.name}: row {row + 1}", row_values, f"a {user}, a {version} and a number or true or false in {value}")
    of_user = (
        pl.DataFrame({"user": frame[user].cast(pl.String), "version": frame[version].cast(pl.String), "value": numbers})
        .group_by("user", maintain_order=True)
        .agg(pl.col("version").n_unique().alias("versions"), pl.col("version").first(), pl.col("value").sum(), pl.len().alias("rows"))
    )
    users_of_one = of_user.filter(pl.col("versions") == 1)
    arms = users_of_one.group_by("version", maintain_order=True).agg(
        pl.len().alias("users"), pl.col("rows").sum(), pl.col("value").mean().alias("mean"), pl.col("value").var().alias("variance")
    )
    rows = {row["version"]: row for row in arms.sort("users", "version", descending=[True, False]).iter_rows(named=True)}
    if len(rows) < 2:
        raise InvalidData(f"{file.name}: {version}", sorted(rows), "at least two versions with users of their own")
    if (smallest := min(rows.values(), key=lambda row: int(row["users"])))["users"] < LEAST_USERS:
        raise InvalidData(f"{file.name}: version {smallest['version']}", f"{smallest['users']} users", f"at least {LEAST_USERS}")
    baseline = next(iter(rows)) if against is None else against
    if baseline not in rows:
        raise InvalidConfig("--against", baseline, f"one of {', '.join(rows)}")
    order = [baseline, *(name for name in rows if name != baseline)]
    means = {name: (row["mean"], row["variance"] / row["users"]) for name, row in rows.items()}
    all_arms = []
    for name in order:
        mean, square = means[name]
        half = Z * math.sqrt(square)
        difference = None
        if name != baseline:
            gap, width = mean - means[baseline][0], Z * math.sqrt(square + means[baseline][1])
            difference = gap, gap - width, gap + width
        all_arms.append(Arm(name, rows[name]["users"], rows[name]["rows"], mean, mean - half, mean + half, difference))
    return Judged(all_arms, len(of_user) - len(users_of_one))


def print_judged(judged: Judged, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"versions": [arm._asdict() for arm in judged.arms], "users_of_both": judged.users_of_both}, indent=1))
        return
    for arm in judged.arms:
        print(f"version {arm.version}: {arm.mean:.6g} a user [{arm.low:.6g}, {arm.high:.6g}], {arm.users:,} users, {arm.rows:,} answers")
    if judged.users_of_both:
        print(f"{judged.users_of_both:,} users had answers of several versions and are left out")
    print(*_sentences(judged.arms), sep="\n")


def _sentences(arms: Sequence[Arm]) -> list[str]:
    sentences = []
    for arm in arms[1:]:
        gap, low, high = arm.difference or (0.0, 0.0, 0.0)
        verdict = "more" if low > 0 else "less" if high < 0 else "no difference that could not be chance"
        percent = f" ({100 * gap / arms[0].mean:+.2f} %)" if arms[0].mean else ""
        sentences.append(f"version {arm.version} against {arms[0].version}: {gap:+.6g}{percent} [{low:+.6g}, {high:+.6g}]: {verdict}")
    return sentences
