"""Computes the features of candidates for a re-ranker. `espalier.rank_features` has their names and meaning.

Does not know rankers.

Legend: N candidates, F features, I items, T history length, D node row, W rows of live items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from espalier.arrays import Float32, Int64
from espalier.bundle import Bundle
from espalier.errors import BundleCorrupt
from espalier.node_rows import NodeRows
from espalier.queries import QueryBatch
from espalier.rank_features import COSINES, HALF_LIFE, HISTORY, compared_columns, needs_node_rows
from espalier.rerank.live_candidates import LiveCandidates
from espalier.rerank.text_matches import TextMatches, ranker_texts


@dataclass(frozen=True)
class CallerFeatures:
    """Features that a caller sends with one query: by NAME, and for items by item row and NAME."""

    query: Mapping[str, float] = field(default_factory=dict)
    items: Mapping[int, Mapping[str, float]] = field(default_factory=dict)


MIN_NORM = np.float32(1e-12)
NO_CALLER_FEATURES = CallerFeatures()


class RankFeatures:
    """Computes the features of a bundle's candidates.

    names  of the features, in the order of the columns. Raises BundleCorrupt if the bundle lacks a column or node rows that they need
    texts  of all items, which features `text.…` compare with queries; None: there are no such features
    """

    def __init__(self, bundle: Bundle, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._column = {name: f for f, name in enumerate(names)}
        self._attributes = {
            name: numeric_column(bundle, name.removeprefix("attribute.")) for name in names if name.startswith("attribute.")
        }
        self.caller_query, self.caller_item = self._caller_columns("query."), self._caller_columns("item.")
        """Columns of the features that a caller may send with a query, and for an item, by NAME."""
        self._cosines, self._historic = any(name in COSINES for name in names), any(name in HISTORY for name in names)
        self._rows_ND: NodeRows | None = None
        if any(map(needs_node_rows, names)):
            self._rows_ND = bundle.node_rows_ND
            self._leaf_of_item = bundle.tree.leaf_of_item
        self.texts = ranker_texts(bundle, names)
        self._matches = None if self.texts is None else TextMatches(bundle, compared_columns(names), self.texts)

    def _caller_columns(self, prefix: str) -> dict[str, int]:
        return {name.removeprefix(prefix): f for name, f in self._column.items() if name.startswith(prefix)}

    @np.errstate(over="ignore")
    def of(
        self,
        queries: QueryBatch,
        b: int,
        rows_N: Int64,
        ranks_N: Float32,
        scores_N: Float32,
        caller_features: CallerFeatures = NO_CALLER_FEATURES,
        live: LiveCandidates | None = None,
    ) -> Float32:
        """float32[N, F]: the features of query b's candidates (item rows, best first) with their ranks and scores.

        Features depend only on this query and its candidates, so the batch cannot change them. Caller features that are not in `names` are
        ignored. Numbers that no finite float32 holds are missing. live: fields and node rows of live items; None: there are none.
        """
        features_NF = np.full((len(rows_N), len(self.names)), np.nan, np.float32)
        log_position_N = np.log(np.arange(1, len(rows_N) + 1))
        retrieval = {"retrieval.log_position": log_position_N, "retrieval.rank": ranks_N, "retrieval.score": scores_N}
        columns: dict[str, Any] = {name: values for name, values in retrieval.items() if name in self._column}
        columns |= {name: _attribute(name, column_I, rows_N, live) for name, column_I in self._attributes.items()}
        if self._matches is not None:
            columns |= self._matches.of(queries, b, rows_N, live)
        rows_ND = None if self._rows_ND is None else self._node_rows(rows_N, live)
        if rows_ND is not None:
            columns["leaf.norm"] = _norms(rows_ND)
        if self._historic:
            history_T = queries.array[b].astype(np.int64)
            history_T = history_T[history_T >= 0]
            columns["history.length"] = len(history_T)
            age_by_row = dict(zip(history_T.tolist(), range(len(history_T) - 1, -1, -1), strict=True))  # of the newest event
            columns["history.seen"] = [age_by_row.get(row, np.nan) for row in rows_N.tolist()]
            if rows_ND is not None and self._cosines and len(history_T):
                columns |= _cosines(rows_ND, columns["leaf.norm"], self._node_rows(history_T, live))
        for name, values in columns.items():
            if name in self._column:
                features_NF[:, self._column[name]] = values
        for name in caller_features.query.keys() & self.caller_query.keys():
            features_NF[:, self.caller_query[name]] = caller_features.query[name]
        if caller_features.items:
            for n, row in enumerate(rows_N.tolist()):
                numbers = caller_features.items.get(row, {})
                for name in numbers.keys() & self.caller_item.keys():
                    features_NF[n, self.caller_item[name]] = numbers[name]
        features_NF[np.isinf(features_NF)] = np.nan
        return features_NF

    def _node_rows(self, rows_N: Int64, live: LiveCandidates | None) -> Float32:
        """float32[N, D]: the leaves' node rows of items."""
        if self._rows_ND is None:
            raise BundleCorrupt("no node rows were asked for")
        trained = _trained(rows_N, len(self._leaf_of_item), live)
        rows_ND = np.asarray(self._rows_ND[self._leaf_of_item[trained]], np.float32)
        if live is not None:
            live_positions, live_rows = live.node_rows(rows_N)
            rows_ND[live_positions] = live_rows
        return rows_ND


def _attribute(name: str, column_I: Float32, rows_N: Int64, live: LiveCandidates | None) -> Float32:
    """float32[N]: a column's present numbers, also of live items."""
    numbers_N: Float32 = column_I[_trained(rows_N, len(column_I), live)]
    if live is not None:
        live_positions, live_numbers = live.numbers(name.removeprefix("attribute."), rows_N)
        numbers_N[live_positions] = live_numbers
    return numbers_N


def _trained(rows_N: Int64, items: int, live: LiveCandidates | None) -> Int64:
    """The item rows, with 0, which is trained, instead of live items."""
    return rows_N if live is None else np.where(rows_N < items, rows_N, 0)


@np.errstate(over="ignore")
def numeric_column(bundle: Bundle, column: str) -> Float32:
    """float32[I]: a column of numbers or booleans, NaN for null, infinite where no float32 holds it. Raises BundleCorrupt."""
    items = bundle.items
    if column not in items.fields:
        raise BundleCorrupt(f"{bundle.path}: the ranker wants the column {column!r}, the items have {', '.join(items.fields)}")
    values = items.column(column)
    if not is_numeric(values.type):
        raise BundleCorrupt(f"{bundle.path}: the ranker wants numbers from the column {column!r}, which is of type {values.type}")
    if pt.is_boolean(values.type):
        values = values.cast(pa.uint8())
    return np.asarray(values.cast(pa.float64(), safe=False).to_numpy(), np.float32)  # unsafe: integers beyond 2^53 are rounded


def is_numeric(kind: pa.DataType) -> bool:
    """Whether a column of this type can be a feature."""
    return bool(pt.is_integer(kind) or pt.is_floating(kind) or pt.is_boolean(kind) or pt.is_decimal(kind))


def _norms(rows_ND: Float32) -> Float32:
    """float32[N]: the length of each row."""
    norm_N: Float32 = np.sqrt(np.einsum("nd,nd->n", rows_ND, rows_ND))
    return norm_N


def _cosines(rows_ND: Float32, norm_N: Float32, history_TD: Float32) -> dict[str, Float32]:
    """Cosines of rows of length `norm_N` with the rows of a history, the newest last. A row of zeros has a cosine of 0."""
    length = len(history_TD)
    unit_TD = history_TD / np.maximum(_norms(history_TD), MIN_NORM)[:, None]
    cosine_NT = rows_ND @ unit_TD.T / np.maximum(norm_N, MIN_NORM)[:, None]
    weight_T = np.exp2(-np.arange(length - 1, -1, -1, dtype=np.float32) / HALF_LIFE)
    top = min(3, length)
    return {
        "history.best": cosine_NT.max(1),
        "history.top3": np.partition(cosine_NT, length - top, axis=1)[:, length - top :].sum(1) / np.float32(top),
        "history.mean": cosine_NT.mean(1),
        "history.recent": cosine_NT @ (weight_T / weight_T.sum()),
        "history.last": cosine_NT[:, -1],
    }
