"""Requests and answers as frozen dataclasses, and their JSON.

Knows the service's documents, but not HTTP. Unknown fields of an answer are ignored, so that a newer service does not break an older
client. A missing field raises one of UNREADABLE, which calls.py converts to InvalidAnswer. Limits are not checked here: the service knows
them and says which value is wrong. Numbers of NumPy and other libraries are sent as those of Python.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, SupportsIndex, TypedDict, TypeVar

T = TypeVar("T")

UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""Errors of parsing a document that is not an answer; RecursionError if it nests too deeply."""

Document = Mapping[str, Any]
"""JSON as the service sent it; docs/openapi.json has its schemas."""
Filter = Mapping[str, Sequence[Any] | Mapping[str, Any]]
"""Column → a list of values, or {"min": …, "max": …}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One query: `history`, `vector`, `features` or `text`, by the model's query kind; a query without any is a cold user.

    `history`: item ids, oldest first. `features`: feature numbers with their values. `exclude`: ids that must not be returned;
    `exclude_seen` also excludes the ids of `history`. `rank_features` and `item_features` (by item id): numbers for the model's ranker.
    """

    history: Iterable[str] = ()
    vector: Iterable[float] = ()
    exclude: Iterable[str] = ()
    exclude_seen: bool = False
    features: Mapping[int, float] | None = None
    text: str | None = None
    rank_features: Mapping[str, float] = field(default_factory=dict)
    item_features: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        as_tuple(self, "history", "exclude")
        object.__setattr__(self, "vector", tuple(float(number) for number in self.vector))

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "history": self.history,
            "vector": self.vector,
            "exclude": self.exclude,
            "exclude_seen": self.exclude_seen,
            "rank_features": self.rank_features,
            "item_features": self.item_features,
        }
        if self.features is not None:
            document["features"] = {"indices": [int(i) for i in self.features], "values": [float(v) for v in self.features.values()]}
        if self.text is not None:
            document["text"] = self.text
        present = [name for name in ("vector", "features", "text") if document.get(name) not in (None, ())]
        kinds = present or ["history"]  # an empty history is a cold user
        return {name: value for name, value in document.items() if value or name in kinds}


class Options(TypedDict, total=False):
    """The options of `retrieve`: the fields of `Request` without the queries."""

    model: str | None
    version: int | None
    m: int | None
    beam_size: int | None
    filter: Filter | None
    exclude_filter: Filter | None
    min_score: float | None
    timeout_ms: float | None
    min_sequence: int | None
    min_coverage: float | None
    partial: Literal["allow", "refuse"]
    live: bool
    fields: Iterable[str]
    rerank: bool | int
    explain: bool
    explain_items: Iterable[str]
    explain_nodes: bool


@dataclass(frozen=True, slots=True)
class Request:
    """One request. Only `queries` is required; other fields have defaults of the model.

    `m`: items per query. `beam_size`: nodes kept per level; more nodes find more items and take longer. `filter`: only items that match in
    every column; `exclude_filter`: no items that match in any column. `min_score`: leave out items with a lower score. `timeout_ms`: the
    service gives up after this time. `min_sequence`: raise Unavailable unless the answer includes this operation of the live catalogue;
    `min_coverage`: raise Unavailable unless shards with this share of the items answer. `partial` "refuse": never shrink the beam or leave
    out a shard near the deadline. `live` False: only trained items. `fields`: columns of the item table to return. `rerank`: whether the
    model's ranker reorders the best candidates, or how many of them. `explain`: the nodes that the search kept; `explain_items`: where the
    search lost these items; `explain_nodes`: all nodes of the levels.
    """

    queries: Iterable[Query]
    model: str | None = None
    version: int | None = None
    m: int | None = None
    beam_size: int | None = None
    filter: Filter | None = None
    exclude_filter: Filter | None = None
    min_score: float | None = None
    timeout_ms: float | None = None
    min_sequence: int | None = None
    min_coverage: float | None = None
    partial: Literal["allow", "refuse"] = "allow"
    live: bool = True
    fields: Iterable[str] = ()
    rerank: bool | int = False
    explain: bool = False
    explain_items: Iterable[str] = ()
    explain_nodes: bool = False

    def __post_init__(self) -> None:
        as_tuple(self, "queries", "fields", "explain_items")
        as_integer(self, "version", "m", "beam_size", "min_sequence", *([] if isinstance(self.rerank, bool) else ["rerank"]))

    def to_bytes(self) -> bytes:
        """The JSON of the request, on one line, without fields that have their default."""
        changed = {option.name: getattr(self, option.name) for option in fields(self) if getattr(self, option.name) != option.default}
        document = {name: value for name, value in changed.items() if not isinstance(value, tuple | Mapping) or value}
        if not isinstance(self.rerank, bool):
            document["rerank"] = {"depth": self.rerank}
        return to_bytes(document | {"queries": [query.to_json() for query in self.queries]})


@dataclass(frozen=True, slots=True)
class Item:
    """One retrieved item; `score` in [0, 1]; `fields`: the requested columns; `rerank_score`: the ranker's score."""

    id: str
    score: float
    fields: Mapping[str, Any] = field(default_factory=dict)
    rerank_score: float | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to one query.

    `items` are best first. `complete` is false iff fewer than min(m, eligible items) were found. `beam_size` is the one searched with;
    `degraded`: it is smaller than requested, because the deadline was near. `unknown`: ids that the catalogue does not have.
    `explain`: `Explanation` of docs/openapi.json, if requested.
    """

    items: tuple[Item, ...]
    complete: bool
    beam_size: int
    degraded: bool
    unknown: tuple[str, ...]
    explain: Document | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """The service's time by step. `ms_per_query` is the engine's time ÷ `batch`, the queries of the same engine call."""

    queue_ms: float
    encode_ms: float
    search_ms: float
    serialise_ms: float
    total_ms: float
    ms_per_query: float
    batch: int
    rerank_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Coverage:
    """Which shards answered: `items` is the share of the catalogue's items that they hold, `missing` are the numbers of the others."""

    items: float
    shards: int
    answered: int
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request; `results` in the order of its queries.

    `sequence`: the answer includes all operations of the live catalogue up to this one; None: it includes none. `coverage`: set by a
    router; None if one service holds the whole catalogue.
    """

    model: str
    version: int
    engine: str
    results: tuple[Result, ...]
    timing: Timing
    sequence: int | None = None
    coverage: Coverage | None = None


@dataclass(frozen=True, slots=True)
class Version:
    """A version of a model: `available` on disk, `loading`, `ready`, `draining` or `failed`, with the reason."""

    version: int
    state: str
    engine: str | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the service. `description` is the service's whole document; other fields are those that every client needs.

    `version`: the default version, None if there is none; `versions`: all that the service knows. `trees`: number of trees of the default
    version, None if it is not loaded; `has_tail`: whether it has a tail.
    """

    name: str
    state: str
    version: int | None
    versions: tuple[Version, ...]
    description: Mapping[str, Any]
    trees: int | None = None
    has_tail: bool = False


@dataclass(frozen=True, slots=True)
class Completion:
    id: str
    title: str | None = None


@dataclass(frozen=True, slots=True)
class Readiness:
    ready: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Removal:
    """The outcome of setting a model's removed items: the number of removed items, and the ids that the catalogue does not have.

    `etag` identifies the present list. `behind`: process ids of workers that do not use it yet.
    """

    removed: int
    unknown: tuple[str, ...]
    etag: str
    behind: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RemovedItem:
    """The outcome for one item: whether it is removed now, whether that has `changed`, and whether the catalogue has it (`known`).

    `total`: number of ids on the present list; `etag` identifies the list. `behind`: process ids of workers that do not use it yet.
    """

    id: str
    removed: bool
    changed: bool
    known: bool
    total: int
    etag: str
    behind: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RemovedIds:
    """The removed items of a model. `etag` identifies this list."""

    ids: tuple[str, ...]
    etag: str


def read(kind: type[T], document: Any, **overrides: Any) -> T:
    """A dataclass from the document's fields of the same names. Lists become tuples, `overrides` win, missing or null ones get defaults."""
    for member in fields(kind):  # type: ignore[arg-type]  # a dataclass
        if member.name not in overrides and (document.get(member.name) is not None or member.default is member.default_factory is MISSING):
            value = document[member.name]
            overrides[member.name] = tuple(value) if isinstance(value, list) else value
    return kind(**overrides)


def answer(document: Any, queries: int | None = None) -> Answer:
    """Parse an answer. queries: expected number of results; None: unknown. Raises ValueError for another number, and one of UNREADABLE."""
    results = tuple(_result(result) for result in document["results"])
    if queries is not None and len(results) != queries:
        raise ValueError(f"{len(results)} results of {queries} queries")
    coverage = document.get("coverage")
    nested = {"timing": read(Timing, document["timing"]), "coverage": None if coverage is None else read(Coverage, coverage)}
    return read(Answer, document, results=results, **nested)


def _result(document: Any) -> Result:
    return read(Result, document, items=tuple(read(Item, item) for item in document["items"]), degraded=document.get("degraded", False))


def models(document: Any) -> tuple[Model, ...]:
    return tuple(model(entry) for entry in document["models"])


def model(document: Any) -> Model:
    versions = tuple(read(Version, entry) for entry in document["versions"])
    overrides = {"version": document.get("version"), "versions": versions, "description": document}
    return read(Model, document, **overrides, has_tail=document.get("tail") is not None)


def document(value: Any) -> Document:
    """The value, if it is a JSON object. Raises TypeError otherwise."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{type(value).__name__}, not an object")
    return value


def item_path(document: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in document["nodes"])


def completions(document: Any) -> tuple[Completion, ...]:
    return tuple(read(Completion, item) for item in document["items"])


def from_bytes(content: bytes) -> Any:
    """Parse JSON (RFC 8259): UTF-8, without NaN and infinity. Raises errors of UNREADABLE."""
    return _DECODER.decode(content.decode("utf-8"))


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


def to_bytes(document: Mapping[str, Any]) -> bytes:
    """Compact JSON without line breaks. ValueError for NaN and infinity, which JSON does not have."""
    return json.dumps(document, allow_nan=False, separators=(",", ":"), default=_number).encode()


def _number(value: Any) -> bool | int | float:
    """A number or truth value of another library as one of Python. Raises TypeError for other values, also for arrays of one number."""
    if not getattr(value, "shape", ()):
        if "bool" in str(getattr(value, "dtype", "")):
            return bool(value)
        for convert in (operator.index, float):
            with suppress(TypeError):  # some numbers have `__index__` and raise
                if hasattr(value, f"__{convert.__name__}__"):
                    return convert(value)
    raise TypeError(f"got {value!r} of the type {type(value).__name__}, expected a value of JSON")


def integer(name: str, value: SupportsIndex) -> int:
    """An integer of Python, NumPy or another library, as one of Python. Raises TypeError for other values, also for True and False."""
    if not isinstance(value, bool):
        with suppress(TypeError):
            return operator.index(value)
    raise TypeError(f"{name}: got {value!r}, expected an integer")


def as_integer(request: object, *names: str) -> None:
    """Convert these fields to Python's integers; None stays. Raises TypeError for other values."""
    for name in names:
        value = getattr(request, name)
        if value is not None:
            object.__setattr__(request, name, integer(name, value))


def as_tuple(request: object, *names: str) -> None:
    """Convert these fields to tuples. Raises TypeError for a string: it is an iterable of strings, but never meant so."""
    for name in names:
        value = getattr(request, name)
        if isinstance(value, str | bytes):
            raise TypeError(f"{name}: got {value!r}, expected a list")
        object.__setattr__(request, name, tuple(value))
