"""What is known of where a live item belongs: queries that led to it, items like it, its text, its fields.

Knows bodies of operations and query kinds. Does not know what is made of the evidence (placer.py).

Legend: E events.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.errors import BundleCorrupt, EspalierError, InvalidQuery
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
from espalier.text.sparse_rows import SparseRows

Int64 = NDArray[np.int64]
STRINGS, INTEGERS, NUMBERS = frozenset({str}), frozenset({int}), frozenset({int, float})
"""Types of the entries of lists."""
OWN_WEIGHTS = "own_weights"
"""In the manifest's `data`: what a word of each of the columns says by which items are found."""
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class Evidence:
    """The evidence of one item.

    events  E queries that led to it; histories hold a known item at least
    like    item rows
    own     its text as a query, None where it has none that says anything
    fields  None where none were given
    words   its text as what is searched for, where the model finds items by their words
    count   events that the item has had; None: nobody says
    """

    events: QueryBatch
    like: Int64
    own: QueryBatch | None
    fields: Mapping[str, Any] | None
    words: SparseRows | None = None
    count: int | None = None

    @staticmethod
    def of_all(bundle: Bundle, bodies: Sequence[ItemBody], known: Items, takes_fields: bool) -> list[Evidence | EspalierError]:
        """What each body says; the error of `of` in the place of one that cannot be read."""
        events = _features_of_all(bundle.manifest.query, bodies)
        found: list[Evidence | EspalierError] = []
        for i, body in enumerate(bodies):
            try:
                found.append(Evidence.of(bundle, body, known, takes_fields, None if events is None else events[i]))
            except EspalierError as error:
                found.append(error)
        return found

    @staticmethod
    def of(bundle: Bundle, body: ItemBody, known: Items, takes_fields: bool, events: QueryBatch | None = None) -> Evidence:
        """What a body says.

        known         resolves ids
        takes_fields  whether fields are evidence, too
        events        the body's, where they have been read
        Raises InvalidQuery, naming the part, where something is not what the model takes, or all of it says nothing.
        """
        kind = bundle.manifest.query
        events = _that_say(_events(bundle, body.events, known) if events is None else events)
        rows = known.rows_of(list(body.like)) if body.like else np.empty(0, np.int64)
        like = rows[rows >= 0]
        text = _text_of_fields(bundle, body.fields) if body.text is None and takes_fields else body.text
        own = encode_texts(kind, bundle.vectoriser, [text]) if isinstance(kind, TextKind) and text is not None else None
        if own is not None and not len(own.features.indices):
            own = None
        fields_say = takes_fields and bool(body.fields) and not isinstance(kind, TextKind)  # of texts they are in `own`
        if not len(events) and not len(like) and own is None and not fields_say:
            raise _nothing(body, kind, takes_fields)
        words = bundle.vectoriser.documents([text]) if own is not None and text is not None and finds_by_words(bundle) else None
        return Evidence(events, like, own, body.fields, words, body.count)


def finds_by_words(bundle: Bundle) -> bool:
    """Whether the items of a bundle are found by words of their own columns, of which its scorers are made."""
    return bool(own_columns(bundle))


def own_columns(bundle: Bundle) -> tuple[str, ...]:
    """Those columns, as far as the item table has them."""
    return tuple(own_weights(bundle))


def own_weights(bundle: Bundle) -> dict[str, float]:
    """What a word of each of them says."""
    names = (bundle.manifest.training.get("data") or {}).get("own_texts") or ()
    weights = bundle.manifest.data.get(OWN_WEIGHTS) or ()
    if len(weights) != len(names) or not all(isinstance(weight, float) and 0 < weight < math.inf for weight in weights):
        expected = f"{len(names)} numbers above 0, as many as own_texts"
        raise BundleCorrupt(f"{bundle.path}: data.{OWN_WEIGHTS} of the manifest is {weights!r}, expected {expected}")
    return {name: weight for name, weight in zip(names, weights, strict=True) if name in bundle.items.fields}


def joined_text(values: Sequence[object]) -> str:
    """An item's text: the values of its columns, joined by spaces; those that are missing are left out."""
    return " ".join(" ".join(map(str, value)) if isinstance(value, list) else str(value) for value in values if value is not None)


def _text_of_fields(bundle: Bundle, fields: Mapping[str, Any] | None) -> str | None:
    """What those columns say, None where there are none."""
    return None if not fields else joined_text([fields.get(name) for name in own_columns(bundle)]) or None


def _nothing(body: ItemBody, kind: Kind, takes_fields: bool) -> InvalidQuery:
    """Which part says nothing, and what would."""
    useful = ["events", "like", *(["text"] if isinstance(kind, TextKind) else []), *(["fields"] if takes_fields else [])]
    more = " and that is not all 0" if isinstance(kind, VectorKind | FeaturesKind) else ""
    for name, value in (("events", body.events), ("like", body.like), ("text", body.text)):
        if value and name in useful:
            known = f"something that the model knows{more if name == 'events' else ''}"
            return InvalidQuery(name, value, f"{known}, to place the item by")
    unread = "; this model reads no text" if body.text is not None and "text" not in useful else ""
    return InvalidQuery(", ".join(useful), None, f"at least one of them, to place the item by{unread}")


def _events(bundle: Bundle, events: Sequence[object], known: Items) -> QueryBatch:
    """The events as queries; those that hold nothing that the model knows are left out."""
    kind = bundle.manifest.query
    if not events:
        return blank_queries(kind, 0)
    if isinstance(kind, HistoryKind):
        rows = [known.rows_of(_list_of("events", i, event, STRINGS, "a list of item ids, oldest first")) for i, event in enumerate(events)]
        return pad_histories(kind, [row for row in rows if (row >= 0).any()])
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
    """The events of each body, read together, which takes half as long; None where one is wrong, or they are of another kind."""
    if not isinstance(kind, FeaturesKind):
        return None
    try:
        rows = encode_features(kind, [_features(i, event) for body in bodies for i, event in enumerate(body.events)]).features
    except InvalidQuery:  # alone it says which
        return None
    ends = np.cumsum([0, *(len(body.events) for body in bodies)]).tolist()
    return [QueryBatch(kind, rows.between(begin, end)) for begin, end in pairwise(ends)]


def _that_say(batch: QueryBatch) -> QueryBatch:
    """Without queries of no feature, and of zeros alone. Raises InvalidQuery where the sum of features is too large."""
    if isinstance(batch.kind, HistoryKind) or not len(batch):
        return batch
    if isinstance(batch.kind, VectorKind):
        return batch.take(np.flatnonzero(batch.array.any(axis=1)))
    total = float(np.abs(batch.features.values.astype(np.float64)).sum())
    if total > LARGEST:
        raise InvalidQuery("events", total, "smaller numbers: their sum must be a 32-bit number")
    told = np.append(0, np.cumsum(batch.features.values != 0))
    says_B = np.diff(told[batch.features.indptr]) > 0
    return batch if says_B.all() else batch.take(np.flatnonzero(says_B))


def _list_of(name: str, place: int, value: object, kinds: frozenset[type], expected: str) -> list[Any]:
    if not isinstance(value, list | tuple) or not kinds.issuperset(map(type, value)):  # of JSON, so no subclasses
        raise InvalidQuery(f"{name}[{place}]", value, expected)
    return list(value)


def _features(place: int, event: object) -> tuple[list[int], list[float]]:
    if not isinstance(event, Mapping) or event.keys() != {"indices", "values"}:
        raise InvalidQuery(f"events[{place}]", event, "an object of the lists indices and values")
    indices = _list_of(f"events[{place}].indices", 0, event["indices"], INTEGERS, "a list of feature numbers")
    return indices, _list_of(f"events[{place}].values", 0, event["values"], NUMBERS, "a list of numbers")


def _text(place: int, event: object) -> str:
    if not isinstance(event, str):
        raise InvalidQuery(f"events[{place}]", event, "a text")
    return event
