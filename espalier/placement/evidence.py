"""The evidence of where a live item belongs: queries that led to it, similar items, its text, its fields.

Knows bodies of operations and query kinds. Does not know how evidence is used (placer.py).

Legend: E events.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from espalier.arrays import Int64
from espalier.bundle import Bundle
from espalier.content.features import ContentFeatures
from espalier.errors import MISSING, BundleCorrupt, EspalierError, InvalidQuery
from espalier.items import Items
from espalier.live.operations import ItemBody
from espalier.queries import (
    FeaturesKind,
    HistoryKind,
    Kind,
    QueryBatch,
    TextKind,
    VectorKind,
    blank_queries,
    encode_features,
    encode_texts,
    encode_vectors,
    pad_histories,
)
from espalier.search import NO_ITEM
from espalier.text.sparse_rows import SparseRows

STRINGS, INTEGERS, NUMBERS = frozenset({str}), frozenset({int}), frozenset({int, float})
"""Allowed types of the entries of lists."""
OWN_WEIGHTS = "own_weights"
"""Key in the manifest's `data`: the weight of a word of each column of the items' own texts."""
OWN_LENGTH = "own_length"
"""Key in the manifest's `data`: the median length of the items' weighted texts; the row of a text of this length has the length 1."""
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class Evidence:
    """The evidence of one item.

    events      E queries that led to it; each history holds at least one item of the catalogue
    like        item rows
    text_query  its text as a query; None for an item without text, or whose text has no feature
    fields      None: not given, or without a feature that the content of the model knows
    document    its text as a document, if the model finds items by their words
    has_text    whether that text was sent, and is not that of its fields
    count       number of events that the item has had; None: not given
    trained_row the item's row if it was trained, else NO_ITEM
    """

    events: QueryBatch
    like: Int64
    text_query: QueryBatch | None
    fields: Mapping[str, Any] | None
    document: SparseRows | None = None
    has_text: bool = False
    count: int | None = None
    trained_row: int = NO_ITEM

    @staticmethod
    def of_all(
        bundle: Bundle, bodies: Sequence[ItemBody], catalogue: Items, takes_fields: bool, content: ContentFeatures | None = None
    ) -> list[Evidence | EspalierError]:
        """The evidence of each body, or the error that `of` raises for it."""
        events = _features_of_all(bundle.manifest.query, bodies)
        results: list[Evidence | EspalierError] = []
        for i, body in enumerate(bodies):
            try:
                results.append(Evidence.of(bundle, body, catalogue, takes_fields, None if events is None else events[i], content))
            except EspalierError as error:
                results.append(error)
        return results

    @staticmethod
    def of(
        bundle: Bundle,
        body: ItemBody,
        catalogue: Items,
        takes_fields: bool,
        events: QueryBatch | None = None,
        content: ContentFeatures | None = None,
    ) -> Evidence:
        """The evidence of a body.

        catalogue     resolves ids
        takes_fields  whether fields are evidence, too
        events        the body's events, if they have been read
        content       what the model reads of fields, if they lead to rows; fields without a known feature are no evidence
        Raises InvalidQuery, with the body's key, for a value that the model does not take, and for a body without evidence.
        """
        kind = bundle.manifest.query
        events = _informative(_events(bundle, body.events, catalogue) if events is None else events)
        rows = catalogue.rows_of(list(body.like)) if body.like else np.empty(0, np.int64)
        like = rows[rows >= 0]
        text = _text_of_fields(bundle, body.fields) if body.text is None and takes_fields else body.text
        text_query = encode_texts(kind, bundle.vectoriser, [text]) if isinstance(kind, TextKind) and text is not None else None
        if text_query is not None and not len(text_query.features.indices):
            text_query = None
        known_by_fields = content is not None and body.fields is not None and content.knows(body.fields)
        if not len(events) and not len(like) and text_query is None and not known_by_fields:
            raise no_evidence(body, kind, takes_fields)
        document = bundle.vectoriser.documents([text]) if text_query is not None and text is not None and finds_by_words(bundle) else None
        fields = body.fields if content is None or known_by_fields else None
        return Evidence(events, like, text_query, fields, document, body.text is not None, body.count)


def finds_by_words(bundle: Bundle) -> bool:
    """Whether the scorers of a bundle are made of the words of its items' own texts."""
    return bool(own_columns(bundle))


def own_columns(bundle: Bundle) -> tuple[str, ...]:
    """The columns of the items' own texts (`data.own_texts`) that the item table has."""
    return tuple(own_weights(bundle))


def own_weights(bundle: Bundle) -> dict[str, float]:
    """The weight of a word of each of these columns."""
    names = (bundle.manifest.training.get("data") or {}).get("own_texts") or ()
    weights = bundle.manifest.data.get(OWN_WEIGHTS) or ()
    if len(weights) != len(names) or not all(isinstance(weight, float) and 0 < weight < math.inf for weight in weights):
        expected = f"{len(names)} numbers above 0, as many as own_texts"
        raise BundleCorrupt(f"{bundle.path}: data.{OWN_WEIGHTS} of the manifest is {weights!r}, expected {expected}")
    return {name: weight for name, weight in zip(names, weights, strict=True) if name in bundle.items.fields}


def own_length(bundle: Bundle) -> float:
    """The length of an item's weighted text that makes a row of length 1."""
    length = bundle.manifest.data.get(OWN_LENGTH)
    if not isinstance(length, float) or not 0 < length < math.inf:
        raise BundleCorrupt(f"{bundle.path}: data.{OWN_LENGTH} of the manifest is {length!r}, expected a number above 0")
    return length


def joined_text(values: Sequence[object]) -> str:
    """An item's text: the values of its columns, joined by spaces, without missing ones."""
    return " ".join(" ".join(map(str, value)) if isinstance(value, list) else str(value) for value in values if value is not None)


def own_fields(bundle: Bundle, row: int) -> dict[str, Any]:
    """The values of these columns of a trained item."""
    return {name: bundle.items.values(name, np.array([row]))[0] for name in own_columns(bundle)}


def has_other_text(bundle: Bundle, before: Mapping[str, Any], fields: Mapping[str, Any] | None) -> bool:
    """Whether fields give an item another own text than those before, or none."""
    columns = () if fields is None else own_columns(bundle)
    return fields is not None and any(joined_text([fields.get(name)]) != joined_text([before.get(name)]) for name in columns)


def is_retitled(bundle: Bundle, before: Mapping[str, Any], fields: Mapping[str, Any] | None) -> bool:
    """Whether fields give an item another own text than those before, with a word that the model knows."""
    text = _text_of_fields(bundle, fields)
    if text is None or not has_other_text(bundle, before, fields):
        return False
    return bool(len(bundle.vectoriser.transform([text]).indices))


def _text_of_fields(bundle: Bundle, fields: Mapping[str, Any] | None) -> str | None:
    """The text of the own columns; None if there is none."""
    return None if not fields else joined_text([fields.get(name) for name in own_columns(bundle)]) or None


def no_evidence(body: ItemBody, kind: Kind, takes_fields: bool) -> InvalidQuery:
    """The error for a body without evidence: the key whose value is none, and what would be some."""
    useful = ["events", "like", *(["text"] if isinstance(kind, TextKind) else []), *(["fields"] if takes_fields else [])]
    nonzero = " and that is not all 0" if isinstance(kind, VectorKind | FeaturesKind) else ""
    for name, value in (("events", body.events), ("like", body.like), ("text", body.text), ("fields", body.fields)):
        if value and name in useful:
            expected = f"something that the model knows{nonzero if name == 'events' else ''}"
            return InvalidQuery(name, value, f"{expected}, to place the item by")
    unread = "; this model reads no text" if body.text is not None and "text" not in useful else ""
    return InvalidQuery(" or ".join(useful), MISSING, f"evidence to place the item by{unread}")


def _events(bundle: Bundle, events: Sequence[object], catalogue: Items) -> QueryBatch:
    """The events as queries, without histories of no known item."""
    kind = bundle.manifest.query
    if not events:
        return blank_queries(kind, 0)
    if isinstance(kind, HistoryKind):
        histories = [_list_of("events", i, event, STRINGS, "a list of item ids, oldest first") for i, event in enumerate(events)]
        return pad_histories(kind, [rows for rows in map(catalogue.rows_of, histories) if (rows >= 0).any()])
    try:
        if isinstance(kind, VectorKind):
            batch = encode_vectors(kind, [_list_of("events", i, event, NUMBERS, "a list of numbers") for i, event in enumerate(events)])
        elif isinstance(kind, FeaturesKind):
            batch = encode_features(kind, [_features(i, event) for i, event in enumerate(events)])
        else:
            batch = encode_texts(kind, bundle.vectoriser, [_text(i, event) for i, event in enumerate(events)])
    except InvalidQuery as error:
        raise InvalidQuery(error.field.replace("queries[", "events["), error.value, error.expected) from error
    return batch


def _features_of_all(kind: Kind, bodies: Sequence[ItemBody]) -> list[QueryBatch] | None:
    """The events of all bodies, read in one call, which takes half as long; None if one is invalid, or for other query kinds."""
    if not isinstance(kind, FeaturesKind):
        return None
    try:
        rows = encode_features(kind, [_features(i, event) for body in bodies for i, event in enumerate(body.events)]).features
    except InvalidQuery:  # reading body by body says which
        return None
    ends = np.cumsum([0, *(len(body.events) for body in bodies)]).tolist()
    return [QueryBatch(kind, rows.between(begin, end)) for begin, end in pairwise(ends)]


def _informative(batch: QueryBatch) -> QueryBatch:
    """The queries that have a nonzero feature. Raises InvalidQuery if the sum of features is too large."""
    if isinstance(batch.kind, HistoryKind) or not len(batch):
        return batch
    if isinstance(batch.kind, VectorKind):
        return batch.take(np.flatnonzero(batch.array.any(axis=1)))
    total = float(np.abs(batch.features.values.astype(np.float64)).sum())
    if total > LARGEST:
        raise InvalidQuery("events", total, "smaller numbers: their sum must be a 32-bit number")
    nonzero_before = np.append(0, np.cumsum(batch.features.values != 0))
    is_informative_B = np.diff(nonzero_before[batch.features.indptr]) > 0
    return batch if is_informative_B.all() else batch.take(np.flatnonzero(is_informative_B))


def _list_of(name: str, position: int, value: object, kinds: frozenset[type], expected: str) -> list[Any]:
    if not isinstance(value, list | tuple) or not kinds.issuperset(map(type, value)):  # values of JSON, so no subclasses
        raise InvalidQuery(f"{name}[{position}]", value, expected)
    return list(value)


def _features(position: int, event: object) -> tuple[list[int], list[float]]:
    if not isinstance(event, Mapping) or event.keys() != {"indices", "values"}:
        raise InvalidQuery(f"events[{position}]", event, "an object of the lists indices and values")
    indices = _list_of(f"events[{position}].indices", 0, event["indices"], INTEGERS, "a list of feature numbers")
    return indices, _list_of(f"events[{position}].values", 0, event["values"], NUMBERS, "a list of numbers")


def _text(position: int, event: object) -> str:
    if not isinstance(event, str):
        raise InvalidQuery(f"events[{position}]", event, "a text")
    return event
