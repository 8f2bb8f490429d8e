"""Queries that a ranker learns from, with what answers them: from the log that a model was trained on, or from judgements.

Knows where queries come from and whose they are. Does not know candidates.

Legend: B queries, Q queries of a file.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.checks.golden import encode_table
from espalier.errors import InvalidConfig, InvalidData
from espalier.queries import HistoryKind, QueryBatch, pad_histories
from espalier.rerank.features import NOTHING_SENT, Sent
from training.data.splits import EvaluationPair
from training.data.xmc import LabelledPoints

log = logging.getLogger(__name__)
Int64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Asked:
    """B queries with what answers them.

    items, grades  of each query: int64 item rows that are relevant, each once, and float32 grades above 0
    seen           of each query: int64 item rows that its history holds, where they are not to come back
    sent           the features that come with each query; none: nothing comes with any
    """

    queries: QueryBatch
    items: list[Int64]
    grades: list[NDArray[np.float32]]
    seen: list[Int64] | None = None
    sent: list[Sent] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.queries)

    def sent_with(self, b: int) -> Sent:
        return self.sent[b] if self.sent else NOTHING_SENT

    def take(self, places: Int64) -> Asked:
        """The queries at some positions (int64)."""
        chosen = places.tolist()
        return Asked(
            self.queries.take(places),
            [self.items[b] for b in chosen],
            [self.grades[b] for b in chosen],
            None if self.seen is None else [self.seen[b] for b in chosen],
            [self.sent[b] for b in chosen] if self.sent else [],
        )

    def sample(self, most: int, seed: int) -> Asked:
        """At most so many of them, drawn at random."""
        if len(self) <= most:
            return self
        return self.take(np.sort(np.random.default_rng(seed).permutation(len(self))[:most]))


@dataclass(frozen=True)
class Parts:
    """Queries to learn from, to choose by and to measure on; nobody is in two of them."""

    train: Asked
    valid: Asked
    test: Asked


def from_log(bundle: Bundle, data: Path | None, users: str, exclude_seen: bool) -> Parts:
    """The queries of the log that a model was trained on, split as then.

    data   the log, where it is no longer at the configured place
    users  whose lists a model of histories learns from: `training`, or `validation`, which the model was not trained on; half of the
           validation users choose then

    Raises InvalidConfig for a bundle that was not trained here, InvalidData for another log than the one it was trained on.
    """
    if not bundle.manifest.training:
        raise InvalidConfig("--model", bundle.manifest.name, "a model that was trained here, or --judgements")
    if isinstance(bundle.manifest.query, HistoryKind):
        return _from_histories(bundle, data, users, exclude_seen)
    if users != "training":
        raise InvalidConfig("--users", users, f"training: the log of a model of {bundle.manifest.query.kind} queries has no users")
    if exclude_seen:
        raise InvalidConfig("--exclude-seen", True, f"a model of histories, not of {bundle.manifest.query.kind} queries")
    return _from_points(bundle, data)


def _from_histories(bundle: Bundle, data: Path | None, users: str, exclude_seen: bool) -> Parts:
    from training.config import check_config
    from training.data.interactions import read_interactions
    from training.data.splits import halves, split_users, without_seen

    config = check_config(bundle.manifest.training)
    with tempfile.TemporaryDirectory() as work:
        interactions = read_interactions(data or config.data.log, config.data.format, Path(work))
        if interactions.fingerprint != bundle.manifest.data.get("sha256"):
            raise InvalidData(
                str(data or config.data.log), "another log", "the one that the model was trained on: it says who is a test user"
            )
        split = split_users(interactions, config.data.test_share, config.data.validation_share, seed=config.seed)
        row_of = bundle.items.rows_of(interactions.item_ids.to_pylist())

        def pairs(part: Int64) -> list[EvaluationPair]:
            found = [EvaluationPair(p.user, row_of[p.history], row_of[p.relevant]) for p in halves(interactions, part, seed=config.seed)]
            return without_seen(found) if exclude_seen else found

        train, valid, test = pairs(split.train), pairs(split.validation), pairs(split.test)
    if users == "validation":
        order = np.random.default_rng(config.seed).permutation(len(valid))
        train, valid = [valid[i] for i in order[len(order) // 2 :]], [valid[i] for i in order[: len(order) // 2]]
    return Parts(*(_of_pairs(bundle, part, exclude_seen) for part in (train, valid, test)))


def _of_pairs(bundle: Bundle, pairs: Sequence[EvaluationPair], exclude_seen: bool) -> Asked:
    kind = bundle.manifest.query
    if not isinstance(kind, HistoryKind):
        raise InvalidData("queries", kind.kind, "a model of history queries")
    histories = [pair.history for pair in pairs]
    items = [np.unique(pair.relevant) for pair in pairs]
    return Asked(
        pad_histories(kind, histories), items, [np.ones(len(rows), np.float32) for rows in items], histories if exclude_seen else None
    )


def _from_points(bundle: Bundle, data: Path | None) -> Parts:
    from training.config import checked
    from training.linear.config import LinearConfig
    from training.linear.prepare import prepare

    raw = bundle.manifest.training
    if raw.get("algorithm") != "xr-linear":
        raise InvalidConfig("--model", bundle.manifest.name, "a model that was trained here, or --judgements")
    config = checked(LinearConfig, raw | ({"data": raw["data"] | {"train": str(data)}} if data is not None else {}))
    prepared = prepare(config)
    if prepared.fingerprint != bundle.manifest.data.get("sha256"):
        raise InvalidData(str(data or config.data.train), "other data", "those that the model was trained on: they say what is held out")

    def asked(points: LabelledPoints, places: Int64) -> Asked:
        places = places[np.diff(points.labels_from)[places] > 0]
        items = [points.labels_of(b).astype(np.int64) for b in places.tolist()]
        return Asked(
            QueryBatch(bundle.manifest.query, points.points.take(places)), items, [np.ones(len(rows), np.float32) for rows in items]
        )

    order = np.random.default_rng(config.seed).permutation(len(prepared.train))
    cut = max(1, len(order) // 10)
    return Parts(
        asked(prepared.train, np.sort(order[cut:])),
        asked(prepared.train, np.sort(order[:cut])),
        asked(prepared.test, np.arange(len(prepared.test))),
    )


def from_judgements(bundle: Bundle, file: Path, seed: int) -> Parts:
    """The queries of a Parquet file with a row for each judged item: `query_id`, the query as the model takes it (a column named as its
    kind), `item`, `grade` (at least 0) and any columns `query.NAME` and `item.NAME`, which become features of the ranker.

    A tenth of the queries choose, a tenth are measured on. Items that are not judged have the grade 0. Raises InvalidData with the row.
    """
    kind = bundle.manifest.query
    try:
        frame = pl.read_parquet(file)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise InvalidData(str(file), str(error).splitlines()[0], "a readable Parquet file") from error
    for column in ("query_id", kind.kind, "item", "grade"):
        if column not in frame.columns:
            raise InvalidData(f"{file}, columns", frame.columns, f"a column {column!r}")
    numbers = [name for name in frame.columns if name.startswith(("query.", "item."))]
    for name in ("grade", *numbers):
        if not (frame.schema[name].is_numeric() or frame.schema[name] == pl.Boolean):
            raise InvalidData(f"{file}, {name}", str(frame.schema[name]), "a column of numbers")
    frame = frame.with_columns(pl.col("grade", *numbers).cast(pl.Float64), pl.col("item").cast(pl.String))
    wrong = ~(frame["grade"].is_finite().fill_null(False) & (frame["grade"].fill_null(-1) >= 0))
    if wrong.any():
        row = int(wrong.arg_max() or 0)
        raise InvalidData(f"{file}, row {row + 1}, grade", frame["grade"][row], "a number of at least 0")
    row_of = bundle.items.rows_of(frame["item"].fill_null("").to_list())
    frame = frame.with_columns(pl.Series("row", row_of))
    groups = frame.group_by("query_id", maintain_order=True).agg(pl.all())
    queries = encode_table(bundle, pa.table({kind.kind: groups[kind.kind].list.first().to_arrow()}))
    items, grades, sent = [], [], []
    for group in groups.iter_rows(named=True):
        rows, grade = np.array(group["row"], np.int64), np.array(group["grade"], np.float32)
        if len(np.unique(rows[rows >= 0])) != np.count_nonzero(rows >= 0):
            raise InvalidData(f"{file}, query_id {group['query_id']}", "an item twice", "each item once for a query")
        relevant = (rows >= 0) & (grade > 0)
        items.append(rows[relevant])
        grades.append(grade[relevant])
        sent.append(_sent(group, numbers, rows))
    asked = Asked(queries, items, grades, None, sent if numbers else [])
    if (row_of < 0).any():
        log.warning("%d of %d judged items are not in the catalogue", int((row_of < 0).sum()), len(row_of))
    order = np.random.default_rng(seed).permutation(len(asked))
    cut = len(asked) // 10
    if cut == 0:
        raise InvalidData(str(file), f"{len(asked)} queries", "at least 10")
    return Parts(*(asked.take(np.sort(part)) for part in (order[2 * cut :], order[:cut], order[cut : 2 * cut])))


def _sent(group: dict[str, list[float | None]], numbers: Sequence[str], rows: Int64) -> Sent:
    query = {name.removeprefix("query."): group[name][0] for name in numbers if name.startswith("query.")}
    items: dict[int, dict[str, float]] = {}
    for name in numbers:
        if name.startswith("item."):
            for row, value in zip(rows.tolist(), group[name], strict=True):
                if row >= 0 and value is not None:
                    items.setdefault(row, {})[name.removeprefix("item.")] = value
    return Sent({name: value for name, value in query.items() if value is not None}, items)
