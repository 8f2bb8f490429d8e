"""Queries that a ranker learns from, out of the log that its model was trained on, split as then.

Knows the training configurations in bundles. Does not know what a model retrieves.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from espalier.arrays import Int64
from espalier.bundle import Bundle
from espalier.errors import InvalidConfig, InvalidData
from espalier.queries import HistoryKind, QueryBatch, TextKind, VectorKind

from ..data.csr import as_rows
from ..data.splits import LEARNED_VALIDATION, EvaluationPair, halves, whole_lists, without_seen
from ..data.xmc import LabelledPoints
from ..evaluate import in_rows, labelled
from ..held_out import split_as_trained
from ..rankers.graded_queries import GradedQueries, QuerySplit, equally_relevant
from ..specification.deep import DeepConfig
from ..specification.linear import LinearConfig
from ..specification.models import config_of, was_trained_here

VECTOR_NUMBERS = 1 << 27
"""Most numbers of training vectors; of more queries, evenly spaced ones are used."""

Users = Literal["training", "validation"]


def default_users(bundle: Bundle) -> Users:
    """The default users whose lists a ranker learns from: for a model with users, those that it was not trained on. A model retrieves
    better candidates for its training users than for others, so a ranker would trust it too much."""
    return "validation" if isinstance(bundle.manifest.query, HistoryKind | VectorKind) else "training"


def query_source(bundle: Bundle, users: Users) -> str:
    """A description of the queries of `from_log`, for people."""
    condition = "" if users == "validation" else ", which the model was trained on"
    return (f"{users} users" if isinstance(bundle.manifest.query, HistoryKind) else f"{users} queries") + condition


def from_log(bundle: Bundle, data: Path | None, users: Users, exclude_seen: bool) -> QuerySplit:
    """The queries of the log that a model was trained on, split as then.

    data   the log, if it is no longer at the configured path
    users  of models of histories and vectors: whose lists the ranker learns from. `training`, or `validation`, which the model was not
           trained on: then half of the validation users choose the weights. Of other models: `training`, without texts of items
    Raises InvalidConfig for a bundle that was not trained here, or whose log has only texts of items; InvalidData if the log is not the one
    that it was trained on.
    """
    if not was_trained_here(bundle.manifest):
        raise InvalidConfig("--model", bundle.manifest.name, "a model that was trained here, or --judgements")
    if exclude_seen and not isinstance(bundle.manifest.query, HistoryKind):
        raise InvalidConfig("--exclude-seen", True, f"a model of histories, not of {bundle.manifest.query.kind} queries")
    if isinstance(bundle.manifest.query, HistoryKind | VectorKind):
        return _from_lists(bundle, data, users, exclude_seen)
    if users != "training":
        raise InvalidConfig("--users", users, f"training: the log of a model of {bundle.manifest.query.kind} queries has no users")
    return _from_points(bundle, data)


def _from_lists(bundle: Bundle, data: Path | None, users: Users, exclude_seen: bool) -> QuerySplit:
    config = config_of(bundle.manifest, DeepConfig)
    with split_as_trained(bundle, data) as (interactions, split, row_of):
        if interactions.fingerprint != bundle.manifest.data.get("sha256"):
            expected = "the one that the model was trained on: it says who is a test user"
            raise InvalidData(str(data or config.data.log), "another log", expected)

        def in_bundle(pairs: Sequence[EvaluationPair]) -> list[EvaluationPair]:
            mapped = in_rows(pairs, row_of)
            return without_seen(mapped) if exclude_seen else mapped

        if interactions.vectors_UF is None:
            pairs = halves(split.lists, split.train, seed=config.seed)
        else:
            most = max(1, VECTOR_NUMBERS // interactions.vectors_UF.shape[1])
            pairs = whole_lists(split.lists, split.train[:: -(-len(split.train) // most)])
        train, valid, test = in_bundle(pairs), in_bundle(split.validation), in_bundle(split.test)
    if users == "validation":
        if bundle.manifest.data.get(LEARNED_VALIDATION):
            expected = "training, since this model has learned from validation users; or a model that was trained with refit = false"
            raise InvalidConfig("--users", users, expected)
        if len(valid) < 2:
            problem = f"validation, and {len(valid)} validation users of the model have a query"
            raise InvalidConfig("--users", problem, "at least 2 of them, or training")
        order = np.random.default_rng(config.seed).permutation(len(valid))
        train, valid = [valid[i] for i in order[len(order) // 2 :]], [valid[i] for i in order[: len(order) // 2]]
    return QuerySplit(*(_of_pairs(bundle, pairs_of_split, exclude_seen) for pairs_of_split in (train, valid, test)))


def _of_pairs(bundle: Bundle, pairs: Sequence[EvaluationPair], exclude_seen: bool) -> GradedQueries:
    items = [np.unique(pair.relevant) for pair in pairs]
    seen = [pair.history for pair in pairs] if exclude_seen else None
    return equally_relevant(labelled(bundle.manifest.query, pairs).queries, items, seen)


def _from_points(bundle: Bundle, data: Path | None) -> QuerySplit:
    from ..linear.prepare import prepare

    config = config_of(bundle.manifest, LinearConfig)
    if data is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"train": data})})
    prepared = prepare(config, vectoriser=bundle.vectoriser if isinstance(bundle.manifest.query, TextKind) else None)
    if prepared.fingerprint != bundle.manifest.data.get("sha256"):
        raise InvalidData(str(data or config.data.train), "other data", "those that the model was trained on: they say what is held out")

    row_of = bundle.items.rows_of(prepared.items.column("id").to_pylist())

    def grade_points(points: LabelledPoints, rows: Int64) -> GradedQueries:
        row_lists = [row_of[points.labels_of(b)] for b in rows.tolist()]  # −1 for items that were deleted and folded
        labels = [rows_of_query[rows_of_query >= 0] for rows_of_query in row_lists]
        with_labels = np.flatnonzero([len(rows_of_query) > 0 for rows_of_query in labels])
        queries = QueryBatch(bundle.manifest.query, as_rows(points.points[rows[with_labels]]))
        return equally_relevant(queries, [labels[k] for k in with_labels.tolist()])

    order = np.random.default_rng(config.seed).permutation(prepared.train.unseen)
    if len(order) < 2:
        problem = f"{len(order)} training queries that are not texts of items"
        raise InvalidConfig("--model", problem, "at least 2, for a ranker would learn to look for whole texts of items; or --judgements")
    cut = max(1, len(order) // 10)
    return QuerySplit(
        grade_points(prepared.train, np.sort(order[cut:])),
        grade_points(prepared.train, np.sort(order[:cut])),
        grade_points(prepared.test, np.arange(len(prepared.test))),
    )
