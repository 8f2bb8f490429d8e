"""The JSON of the models, admin, console and operation routes: these classes validate admin requests and document answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from espalier.manifest import RankerInfo, SearchDefaults, StackingInfo, TailInfo, TreeInfo
from espalier.queries import QueryKind
from espalier.serving import MAX_NAMED, MAX_VERSION, Candidate

from ..keys_file import Role
from ..live.catalogue_types import CatalogueStatus
from ..models.registry_entry import VersionInfo
from ..models.store_state import StoreWait
from ..retrieval.schemas import Ids, StrictBody

Interval = Annotated[list[float], Field(min_length=2, max_length=2)]


class CandidateRequest(Candidate):
    """A version to try on some of the requests that name no version."""

    groups: Annotated[
        tuple[Annotated[str, Field(max_length=128, pattern="^[!-~]+$")], ...],
        Field(max_length=MAX_NAMED, description="Values of the header Espalier-Group of requests that it answers."),
    ] = ()


class VersionFigures(BaseModel):
    """The answers of a version since it was loaded, over all workers."""

    version: int
    answered: int
    refused: int = Field(description="429: the queue was full.")
    late: int = Field(description="504: the deadline passed.")
    failed: int
    failed_ci: Interval | None = Field(description="95 % interval of the share that failed.")
    p50_ms: float | None
    p99_ms: float | None


class ShadowFigures(BaseModel):
    """The shadow requests, and the comparison of both answers to them."""

    compared: int
    failed: int
    left_out: int = Field(
        description="Not answered by the candidate: large requests, requests while others waited or too many ran, and refused ones."
    )
    overlap: float | None = Field(description="Mean share of items that both answers share.")
    overlap_ci: Interval | None = Field(description="Its 95 % interval.")
    default_p50_ms: float | None = Field(description="Engine time of a query.")
    candidate_p50_ms: float | None


class Trial(BaseModel):
    """The candidate of a model beside its default version."""

    candidate: Candidate | None
    versions: list[VersionFigures] = Field(description="The default version, then the candidate; empty without one.")
    shadow: ShadowFigures | None


class Model(BaseModel):
    """A model of the models folder."""

    name: str
    state: Literal["loading", "ready", "failed"]
    reason: str | None = Field(description="Why it failed, or a problem although it serves.")
    version: int = Field(description="The default version, which answers requests that name none.")
    versions: list[VersionInfo] = Field(description="All versions, ascending.")
    candidate: Candidate | None = Field(None, description="The version on trial.")
    engine: str | None = None
    algorithm: str | None = None
    query: QueryKind | None = None
    search: SearchDefaults | None = Field(None, description="Defaults and limits of beam_size and m.")
    max_queries: int = Field(description="Most queries in one request.")
    tree: TreeInfo | None = Field(None, description="The only tree, or the first tree of a forest.")
    trees: int | None = Field(None, description="Number of trees.")
    tail: TailInfo | None = Field(None, description="The tail, which also enters the scores of a forest, if the model has one.")
    stacking: StackingInfo | None = Field(None, description="The stacker, which reorders the best candidates, if the model has one.")
    ranker: RankerInfo | None = Field(None, description="The re-ranker, if the model has one.")
    fields: list[str] | None = Field(None, description="Columns of the item table.")
    metrics: dict[str, Any] | None = Field(None, description="Measured at training.")
    live: CatalogueStatus | None = None
    store: StoreWait | None = Field(None, description="The version from the store that it waits for; null if none is missing.")


class Models(BaseModel):
    models: list[Model]
    keys: list[Role] = Field(description="Roles that have keys; empty on a service that is open to all.")


class VersionRequest(StrictBody):
    version: int = Field(ge=1, le=MAX_VERSION, description="A version in the models folder.")


class LoadRequest(VersionRequest):
    default: bool = Field(True, description="Whether it becomes the default version once it is ready.")


class RemovedRequest(StrictBody):
    ids: Ids = Field(description="All removed items of the model. They replace the former list.")


Behind = Annotated[list[int], Field(description="Process ids of the workers that have not applied this list yet; if none, 200.")]


class Tagged(BaseModel):
    etag: str = Field(description="Entity tag of the list, for If-Match. It is also in the header ETag, which a proxy may change.")


class Removed(Tagged):
    removed: int = Field(description="Items that are excluded now.")
    unknown: list[str] = Field(description="Ids that the default version's catalogue does not have; they are kept.")
    behind: Behind


class RemovedId(Tagged):
    """The state of one item after the request."""

    id: str
    removed: bool = Field(description="Whether it is excluded now.")
    changed: bool = Field(description="Whether the request changed that.")
    known: bool = Field(description="Whether the default version's catalogue has it. An unknown id is kept on the list.")
    total: int = Field(description="Number of ids on the model's list now.")
    behind: Behind


class RemovedIds(Tagged):
    ids: list[str]


class Completion(BaseModel):
    id: str
    title: str | None


class Completions(BaseModel):
    items: list[Completion]


class WrongValue(BaseModel):
    field: str = Field(examples=["queries[0].history[3]"])
    value: str | None = Field(None, description="As JSON, shortened. Left out if the field is missing.")
    expected: str


class Problem(BaseModel):
    """RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    errors: list[WrongValue] | None = None


class Readiness(BaseModel):
    ready: bool
    reasons: list[str] = Field(description="Why the service is not ready, one line per model.")


class FacetValue(BaseModel):
    value: str | int | float | bool
    count: int = Field(description="Eligible items that have it.")


class Bin(BaseModel):
    """Values from `min` to below `max`. The last bin includes `max`."""

    min: float
    max: float
    count: int


class Facets(BaseModel):
    """The values of a column with the number of eligible items that have each."""

    column: str
    values: list[FacetValue] = Field(description="The most frequent values, most items first, ties by value.")
    others: int = Field(description="Eligible items that have only values that are not listed in `values`.")
    missing: int = Field(description="Eligible items without a value: null, not finite, or an empty list.")
    eligible: int = Field(description="Items that pass the conditions on other columns.")
    distinct: int | None = Field(description="Number of distinct values; null if there are more than 131,072. Then no value is listed.")
    min: float | None = Field(None, description="The least value of a column of numbers, if not all values are listed.")
    max: float | None = Field(None, description="The largest value, likewise.")
    histogram: list[Bin] | None = Field(None, description="The number of values in each of 20 bins of equal width, likewise.")


class TypicalValue(BaseModel):
    value: str | int | float | bool
    count: int = Field(description="Items that have it, among the `looked_at` items.")
    share: float = Field(description="`count` ÷ `looked_at`.")
    lift: float = Field(description="`share` ÷ the value's share in the catalogue.")


class ItemBelow(BaseModel):
    id: str
    title: str | None
    live: bool = Field(description="Whether its leaf is live.")
    eligible: bool = Field(description="Whether a query without a filter may get it.")


class Node(BaseModel):
    """A node of a tree, its children and the items below it."""

    node: int
    level: int
    height: int = Field(description="Level of the leaves.")
    trained_nodes: int = Field(description="Number of nodes of the tree. Live leaves have numbers from this one on.")
    parent: int | None = Field(description="Null at the root.")
    path: list[int] = Field(description="Node numbers from the root to this node.")
    children: list[int] = Field(description="Node numbers, at most 4096.")
    children_items: list[int] = Field(description="Items below each of `children`.")
    child_count: int
    item_count: int = Field(description="Number of items below the node now, without deleted ones.")
    items: list[ItemBelow] = Field(description="Some of the items below, evenly spaced: first live ones, then trained ones.")
    looked_at: int = Field(description="Number of items below that `values` were counted from.")
    values: dict[str, list[TypicalValue]] = Field(description="By column: the most typical values of the items below, at most 5.")


class ItemPath(BaseModel):
    """The path of an item in a tree."""

    item: str
    nodes: list[int] = Field(description="Node numbers from the root to its leaf.")


class HeldOutQuery(BaseModel):
    """A query that the model was not trained on."""

    query: dict[str, Any] = Field(description="A query as `POST /retrieve` takes it.")
    relevant: list[str] = Field(description="Ids of the items that it should find.")
    recall: dict[str, float | None] = Field(description="m → recall@m when the version was made, with its default beam; empty if unknown.")


class HeldOutQueries(BaseModel):
    queries: list[HeldOutQuery]


class Alert(BaseModel):
    """The condition of a Prometheus alert, on this service's own numbers."""

    name: str
    firing: bool
    since: int | None = Field(description="When its condition began to hold, in seconds since 1970; null if it does not fire.")
    value: float | None = Field(description="Null if unknown.")
    threshold: float | None
    what: str = Field(description="Meaning of the value.")


class Event(BaseModel):
    at: int = Field(description="Seconds since 1970, to the minute.")
    what: str


class UnknownId(BaseModel):
    id: str = Field(description="The first 512 bytes of the id.")
    count: int = Field(description="Least number of its occurrences in queries of the last 12 to 24 hours.")


class Health(BaseModel):
    """The last 24 hours of a model."""

    model: str
    version: int | None = Field(description="The default version.")
    now: int = Field(description="Seconds since 1970.")
    since: int = Field(description="Time of the first number.")
    step_s: int = Field(description="Seconds between two numbers of a series.")
    at: list[int] = Field(description="The times of the numbers of all series.")
    recall_m: int | None = Field(description="m of the series of recall.")
    series: dict[str, list[float | None]] = Field(description="Name → a number for each time; null if unknown.")
    alerts: list[Alert]
    events: list[Event] = Field(description="Oldest first.")
    unknown_ids: list[UnknownId] = Field(description="The most frequent ids in queries that the catalogue does not have.")


class SampledQuery(BaseModel):
    at: float = Field(description="Seconds since 1970.")
    version: int
    query: dict[str, Any] = Field(description="A query as `POST /retrieve` takes it.")


class Samples(BaseModel):
    """Customers' most recent queries, newest first."""

    queries: list[SampledQuery]
    most: int = Field(description="Number of queries that are kept, over all models; 0: none.")
