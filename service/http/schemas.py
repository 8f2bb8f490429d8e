"""The JSON of all routes but POST /retrieve: admin requests are validated by these classes, answers are documented by them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from espalier.manifest import RankerInfo, SearchDefaults, StackingInfo, TailInfo, TreeInfo
from espalier.queries import QueryKind
from service.retrieval.schemas import Ids, StrictBody


class Version(BaseModel):
    """A version in the models folder, or still in memory."""

    version: int
    state: Literal["loading", "ready", "draining", "failed", "available"]
    engine: str | None = Field(description="The engine that searches it, where it is ready.")
    reason: str | None = Field(description="Why it failed, or another remark.")


class LiveCatalogue(BaseModel):
    """The live catalogue of a model, as this worker sees it."""

    sequence: int = Field(description="The last committed operation that this worker has applied to all its versions.")
    applied: int = Field(description="The operation up to which the default version's answers hold everything.")
    items: int = Field(description="Items that were put since training, and not deleted.")
    tombstones: int = Field(description="Trained items that were deleted.")
    capacity: int = Field(description="Most live items.")
    reason: str | None = Field(description="Why it takes no writes now; null where it does.")


class StoreWait(BaseModel):
    """A version that should come from the store."""

    version: int
    came: int = Field(description="Bytes of it that are here.")
    size: int = Field(description="Bytes of it in all; 0 while unknown.")
    reason: str | None = Field(description="Why it does not come; null while it does.")
    damaged: bool = Field(description="Whether the store's copy is wrong or not there: no start waits for that.")


class Model(BaseModel):
    """A model of the models folder."""

    name: str
    state: Literal["loading", "ready", "failed"]
    reason: str | None = Field(description="Why it failed, or what is wrong although it serves.")
    version: int = Field(description="The version that answers where a request names none.")
    versions: list[Version] = Field(description="All versions, ascending.")
    engine: str | None = None
    algorithm: str | None = None
    query: QueryKind | None = None
    search: SearchDefaults | None = Field(None, description="Defaults and limits of beam_size and m.")
    max_queries: int = Field(description="Most queries in one request.")
    tree: TreeInfo | None = Field(None, description="The only tree, or a forest's first.")
    trees: int | None = Field(None, description="How many trees the model has.")
    tail: TailInfo | None = Field(None, description="What else enters the scores of a forest, where the model has it.")
    stacking: StackingInfo | None = Field(None, description="What orders the best candidates anew, where the model has it.")
    ranker: RankerInfo | None = Field(None, description="The second stage, where the model has one.")
    fields: list[str] | None = Field(None, description="Columns of the item table.")
    metrics: dict[str, Any] | None = Field(None, description="Measured at training.")
    live: LiveCatalogue | None = None
    store: StoreWait | None = Field(None, description="What it waits for, where models come from a store; null where nothing is missing.")


class Models(BaseModel):
    models: list[Model]
    keys: list[Literal["admin", "retrieve", "write"]] = Field(description="Roles that have keys; none on a service that is open to all.")


class VersionRequest(StrictBody):
    version: int = Field(ge=1, description="A version in the models folder.")


class LoadRequest(VersionRequest):
    default: bool = Field(True, description="Whether requests without a version go to it once it is ready.")


class RemovedRequest(StrictBody):
    ids: Ids = Field(description="All standing exclusions of the model, in place of the former ones.")


Behind = Annotated[list[int], Field(description="Process ids of the workers that do not answer by this list yet; without any, 200.")]


class Removed(BaseModel):
    removed: int = Field(description="Items that are excluded now.")
    unknown: list[str] = Field(description="Ids that the default version's catalogue does not have; they are kept.")
    behind: Behind
    etag: str = Field(description="Entity tag of the list, as in the header ETag, which a proxy may change; for If-Match.")


class RemovedId(BaseModel):
    """The state of one item after the request."""

    id: str
    removed: bool = Field(description="Whether it is excluded now.")
    changed: bool = Field(description="Whether the request changed that.")
    known: bool = Field(description="Whether the default version's catalogue has it; an id that it lacks is kept.")
    total: int = Field(description="Ids that are on the model's list now.")
    behind: Behind
    etag: str = Field(description="Entity tag of the list, as in the header ETag, which a proxy may change; for If-Match.")


class RemovedIds(BaseModel):
    ids: list[str]
    etag: str = Field(description="Entity tag of the list, as in the header ETag, which a proxy may change; for If-Match.")


class Completion(BaseModel):
    id: str
    title: str | None


class Completions(BaseModel):
    items: list[Completion]


class WrongValue(BaseModel):
    field: str = Field(examples=["queries[0].history[3]"])
    value: str
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
    reasons: list[str] = Field(description="What is missing, one line per model.")
