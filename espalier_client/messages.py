"""Requests and answers as frozen dataclasses, and their JSON.

Knows the service's documents and nothing of HTTP. Unknown fields of an answer are ignored, so that a newer service does not break an older
client; a missing field raises one of UNREADABLE, which calls.py turns into InvalidAnswer. Values are not checked here: the service knows
its limits, and says which value is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, TypedDict, TypeVar

T = TypeVar("T")

UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""Raised by reading a document that is not an answer; RecursionError where it nests too deeply."""

Document = Mapping[str, Any]
"""JSON as the service sent it; docs/openapi.json has its schemas."""
Filter = Mapping[str, Sequence[Any] | Mapping[str, Any]]
"""Column → a list of values, or {"min": …, "max": …}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One query: `history`, `vector`, `features` or `text`, as the model's query kind says; none of them is a cold user.

    `history` holds item ids, oldest first; `features` feature numbers with their values. `exclude` holds ids that must not be returned;
    `exclude_seen` excludes those of `history` too. `rank_features` and `item_features` (by item id) are numbers for the model's ranker.
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
        object.__setattr__(self, "vector", tuple(float(number) for number in self.vector))  # NumPy's numbers are not JSON's

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "history": self.history,
            "vector": self.vector,
            "exclude": self.exclude,
            "exclude_seen": self.exclude_seen,
            "rank_features": _numbers(self.rank_features),
            "item_features": {item_id: _numbers(own) for item_id, own in self.item_features.items()},
        }
        if self.features is not None:
            document["features"] = {"indices": [int(i) for i in self.features], "values": [float(v) for v in self.features.values()]}
        if self.text is not None:
            document["text"] = self.text
        given = [name for name in ("vector", "features", "text") if document.get(name) not in (None, ())]
        kinds = given or ["history"]  # which may be empty: a cold user
        return {name: value for name, value in document.items() if value or name in kinds}


class Options(TypedDict, total=False):
    """What `retrieve` takes besides the queries: the fields of `Request`."""

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
    """One request. Only `queries` is required; the rest has defaults per model.

    `m`: items wanted per query. `beam_size`: nodes kept per level, more finds more and takes longer. `filter`: only items of which
    every column matches; `exclude_filter`: none of which any does. `min_score`: leave out items of a lower score. `timeout_ms`: the
    service gives up after this long. `min_sequence`: answer only with that operation of the live catalogue in it, else raise
    Unavailable; `min_coverage`: only if shards with that share of the items answer, else raise Unavailable; `partial` "refuse": neither
    with a smaller beam nor without a shard, however near the deadline is; `live` False: the trained version alone. `fields`: columns of
    the item table to return. `rerank`: whether the model's ranker orders the best candidates anew, or how many of them. `explain`: what
    the search kept; `explain_items`: where these items
    fell out; `explain_nodes`: all nodes of the levels.
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

    def to_bytes(self) -> bytes:
        """The JSON of the request, on one line: what is not as it is by default."""
        given = {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}
        document = {name: value for name, value in given.items() if value not in ((), {})}
        if not isinstance(self.rerank, bool):
            document["rerank"] = {"depth": self.rerank}
        return to_bytes(document | {"queries": [query.to_json() for query in self.queries]})


@dataclass(frozen=True, slots=True)
class Item:
    """One retrieved item; `score` in [0, 1]; `fields` holds the columns that were asked for; `rerank_score` is the ranker's."""

    id: str
    score: float
    fields: Mapping[str, Any] = field(default_factory=dict)
    rerank_score: float | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to one query.

    `items` are best first. `complete` is false iff fewer than min(m, eligible items) were found. `beam_size` is the one searched with;
    `degraded`: smaller than what was asked for, since the deadline was near. `unknown`: ids that the catalogue does not have.
    `explain`: as the service gave it (`Explanation` of docs/openapi.json), where it was asked for.
    """

    items: tuple[Item, ...]
    complete: bool
    beam_size: int
    degraded: bool
    unknown: tuple[str, ...]
    explain: Document | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the service's milliseconds went. `ms_per_query` is the engine's time ÷ `batch`, the queries of the same engine call."""

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

    `sequence`: the operation of the live catalogue up to which it holds everything, None where none counts. `coverage`: of a router's
    answer, None where one service holds the whole catalogue.
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
    """A model of the service. `description` is all that the service says of it; the rest names what every client needs.

    `version` is the default one, None where there is none; `versions` are all that the service knows. `trees`: how many the default version
    has, None where it is not loaded; `has_tail`: whether a tail enters its scores.
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
    """What setting a model's removed items did: how many are removed now, and which ids the catalogue does not have.

    `etag` names the list as it is now. `behind`: process ids of workers that do not answer by it yet.
    """

    removed: int
    unknown: tuple[str, ...]
    etag: str
    behind: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RemovedItem:
    """What became of one item: whether it is removed now, whether that has `changed`, and whether the catalogue has it (`known`).

    `total`: ids on the model's list now; `etag` names that list. `behind`: process ids of workers that do not answer by it yet.
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
    """The removed items of a model. `etag` names this very list."""

    ids: tuple[str, ...]
    etag: str


def read(kind: type[T], document: Any, **own: Any) -> T:
    """A dataclass of the document's parts of the same names, lists as tuples; `own` before them, defaults for what is missing or null."""
    for part in fields(kind):  # type: ignore[arg-type]  # a dataclass
        if part.name not in own and (document.get(part.name) is not None or part.default is part.default_factory is MISSING):
            value = document[part.name]
            own[part.name] = tuple(value) if isinstance(value, list) else value
    return kind(**own)


def answer(document: Any, queries: int | None = None) -> Answer:
    """queries: of how many a result each is wanted; None: unknown. Raises ValueError on another number, and what reading raises."""
    results = tuple(_result(one) for one in document["results"])
    if queries is not None and len(results) != queries:
        raise ValueError(f"{len(results)} results of {queries} queries")
    coverage = document.get("coverage")
    parts = {"timing": read(Timing, document["timing"]), "coverage": None if coverage is None else read(Coverage, coverage)}
    return read(Answer, document, results=results, **parts)


def _result(document: Any) -> Result:
    return read(Result, document, items=tuple(read(Item, item) for item in document["items"]), degraded=document.get("degraded", False))


def models(document: Any) -> tuple[Model, ...]:
    return tuple(model(one) for one in document["models"])


def model(document: Any) -> Model:
    versions = tuple(read(Version, one) for one in document["versions"])
    own = {"version": document.get("version"), "versions": versions, "description": document}
    return read(Model, document, **own, has_tail=document.get("tail") is not None)


def document(value: Any) -> Document:
    """Raises TypeError for what is no object of JSON."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{type(value).__name__}, not an object")
    return value


def item_path(document: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in document["nodes"])


def completions(document: Any) -> tuple[Completion, ...]:
    return tuple(read(Completion, item) for item in document["items"])


def from_bytes(content: bytes) -> Any:
    """A document of JSON (RFC 8259): UTF-8, without NaN and infinity. Raises errors of UNREADABLE."""
    return _DECODER.decode(content.decode("utf-8"))


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


def to_bytes(document: Mapping[str, Any]) -> bytes:
    """Compact JSON without line breaks. ValueError for NaN and infinity, which JSON does not have."""
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()


def _numbers(given: Mapping[str, float]) -> dict[str, float]:
    """NumPy's numbers are no JSON."""
    return {name: float(value) for name, value in given.items()}


def as_tuple(request: object, *names: str) -> None:
    """Freeze these fields. A string is an iterable of strings too, and never meant as one."""
    for name in names:
        value = getattr(request, name)
        if isinstance(value, str | bytes):
            raise TypeError(f"{name}: got {value!r}, expected a list")
        object.__setattr__(request, name, tuple(value))
