"""The JSON of POST /retrieve: pydantic validates requests by these classes; the documentation describes answers by them.

Validation is strict: "5" and true are not integers, NaN and infinity are not numbers, unknown fields are errors.
request.py checks what depends on the model: query kind, limits, fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field
from pydantic.config import JsonDict

Ids = Annotated[list[str], FailFast()]
Number = Annotated[float, Field(allow_inf_nan=False)]

MAX_QUERIES = 4096
"""More queries than this are refused before they are looked at, whatever the settings say."""
EXAMPLE: JsonDict = {
    "model": "debian-depends",
    "queries": [{"history": ["libc6", "libgtk-3-0"], "exclude_seen": True}],
    "m": 5,
    "fields": ["title", "section"],
}


class StrictBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Features(StrictBody):
    """A sparse vector: feature numbers, each once, and a value for each."""

    indices: Annotated[list[int], FailFast()]
    values: Annotated[list[Number], FailFast()]


class Query(StrictBody):
    """One query: `history`, `vector`, `features` or `text`, as the model's query kind says."""

    history: Ids = Field(default_factory=list, description="Item ids, oldest first. Unknown ids are skipped; empty is a cold user.")
    vector: Annotated[list[Number], FailFast()] = Field(default_factory=list, description="A dense vector of the model's width.")
    features: Features | None = Field(None, description="A sparse vector: numbers of the model's features with their values.")
    text: str = Field("", description="Words to search for. Those that the model does not know are skipped.")
    exclude: Ids = Field(default_factory=list, description="Item ids that must not be returned.")
    exclude_seen: bool = Field(False, description="Whether the items of `history` must not be returned.")
    rank_features: dict[str, Number] = Field(
        default_factory=dict, description="Numbers that the model's ranker takes with a query, by name; one that is left out is missing."
    )
    item_features: dict[str, dict[str, Number]] = Field(
        default_factory=dict, description="Item id → numbers that the model's ranker takes for an item, by name."
    )

    @property
    def excluded(self) -> frozenset[str]:
        """Ids that must not be returned."""
        return frozenset(self.exclude).union(self.history if self.exclude_seen else ())


class Rerank(StrictBody):
    """How to re-rank."""

    depth: int | None = Field(
        None, ge=1, description="How many of the best candidates are re-ranked; the default is the model's. Should exceed m."
    )


def _rerank(value: object) -> object:
    if isinstance(value, bool):
        return Rerank(depth=None) if value else None
    if value is not None and not isinstance(value, dict | Rerank):
        raise ValueError('true, false or {"depth": …}')
    return value


_CONDITIONS: JsonDict = {
    "additionalProperties": {
        "anyOf": [
            {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}]}},
            {
                "type": "object",
                "properties": {"min": {"type": "number"}, "max": {"type": "number"}},
                "additionalProperties": False,
                "minProperties": 1,
            },
        ]
    },
    "examples": [{"section": ["games", "math"]}, {"price": {"min": 5, "max": 20}}],
}
"""The conditions of a filter. Their types depend on the model's columns, so espalier.masks.filters checks them."""


class RetrieveRequest(StrictBody):
    """Only `queries` is required; the rest has defaults per model. A value over a limit is an error, never clamped."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE]})

    model: str | None = Field(None, max_length=255, description="Name of the model; may be left out where only one is served.")
    version: int | None = Field(None, ge=1, description="Version of the model; without it the default answers.")
    queries: Annotated[list[Query], FailFast()] = Field(
        min_length=1, max_length=MAX_QUERIES, description="The queries, all of the model's one kind."
    )
    m: int | None = Field(None, ge=1, description="Items to return per query; may exceed the beam size.")
    beam_size: int | None = Field(None, ge=1, description="Nodes kept per inner level: more finds more and takes longer.")
    filter: dict[str, Any] = Field(
        default_factory=dict,
        json_schema_extra=_CONDITIONS,
        description="Column → list of values or range: an item is eligible where every column has one of its values.",
    )
    exclude_filter: dict[str, Any] = Field(
        default_factory=dict,
        json_schema_extra=_CONDITIONS,
        description="Column → list of values or range: an item is not eligible where any column has one of its values.",
    )
    min_score: Number | None = Field(None, ge=0, le=1, description="Items of a lower score are left out; `complete` does not count them.")
    timeout_ms: Number | None = Field(
        None, gt=0, description="Deadline, from the head of the request on; what is later is answered 504 and never searched."
    )
    min_sequence: int | None = Field(
        None, ge=0, description="Wait, until the deadline, for the live catalogue to have this operation; 503 where it has not by then."
    )
    min_coverage: Number | None = Field(
        None, ge=0, le=1, description="Least share of the items that must be on shards which answer, else 503. Without shards it is 1."
    )
    partial: Literal["allow", "refuse"] = Field(
        "allow",
        description="What will do where the deadline leaves no time for all of it. allow: a smaller beam (`degraded`), and the shards that "
        "came (`coverage`); refuse: neither, but 504 or 503.",
    )
    live: bool = Field(True, description="Whether the live catalogue counts; false: the answer is that of the trained version alone.")
    fields: Ids = Field(default_factory=list, description="Columns of the item table to return with each item.")
    rerank: Annotated[Rerank | None, BeforeValidator(_rerank, json_schema_input_type=bool | Rerank)] = Field(
        None, description="Whether the model's ranker re-orders the best candidates: true, false, or how many of them."
    )
    explain: bool = Field(False, description="Whether to return what each level kept. Slower: the search is traced.")
    explain_items: Ids = Field(
        default_factory=list, description="Ids of items to explain: where the search dropped them; implies `explain`."
    )
    explain_nodes: bool = Field(
        False, description="Whether the explained levels name all of their nodes, with their keys; they count as values of the answer."
    )


class Item(BaseModel):
    """One retrieved item; `fields` and `rerank_score` only where the request asked for them."""

    id: str
    score: float = Field(ge=0, le=1, description="Of retrieval.")
    rerank_score: float | None = Field(None, description="Of the ranker, on a scale of its own; null past the depth.")
    fields: dict[str, Any] | None = None


class ExplainedLevel(BaseModel):
    """One level of the search. Nodes are ordered by rank, see ARCHITECTURE.md; ranks are not scores."""

    level: int
    candidates: int = Field(description="Nodes that were scored.")
    kept: int = Field(description="Nodes that were kept; on the last level the items that came back.")
    cut: float | None = Field(description="Key of the worst node that was kept: its rank, where the model has no memory.")
    dropped: float | None = Field(description="Key of the best node that was dropped; null where none was.")
    nodes: list[int] | None = Field(None, description="With `explain_nodes`: its candidates, those that were kept first, each part by key.")
    keys: list[float] | None = Field(None, description="With `explain_nodes`: the keys of `nodes`.")


class ExplainedFeature(BaseModel):
    """The contribution of one feature of the query to an item: its weights on the item's path, summed over levels, times its value.

    Forests: the mean over the trees.
    """

    feature: str = Field(description="The feature's n-gram where queries are texts, else its number.")
    contribution: float


class Source(BaseModel):
    """An item of the history that the memory links to another."""

    id: str
    part: float = Field(description="What it adds to the key.")


class ExplainedMemory(BaseModel):
    """What the model's memory adds to an item's key."""

    part: float = Field(description="λ · mem of the item.")
    items: list[Source] = Field(description="The items of the history that add most of it, at most 3, largest first.")


class ExplainedInTree(BaseModel):
    """Where a tree of a forest scored a requested item, or dropped it."""

    outcome: Literal["scored", "pruned"]
    level: int | None = Field(None, description="Level on which it was scored, or on which its ancestor was dropped.")
    rank: float | None = Field(None, description="Its rank in this tree, or its ancestor's.")
    cut: float | None = Field(None, description="Rank of the worst node that was kept where its ancestor was dropped.")


class ExplainedLive(BaseModel):
    """What the live catalogue knows of an item."""

    since: str = Field(description="When it was put first, ISO 8601.")
    sequence: int = Field(description="Of its last operation.")
    placed_by: str = Field(description="The evidence that its row comes from: `events`, `like`, `text`, `fields`, or `trained`.")


class ExplainedAncestor(BaseModel):
    """An item's ancestor on one level of the search; on the last one its leaf."""

    level: int
    node: int = Field(description="Its number; that of a live leaf is not in the tree.")
    rank: float | None = Field(description="Null where it was no candidate: its parent was dropped, or no eligible item is below it.")
    key: float | None = Field(description="What it was ordered by: its rank, where the model has no memory.")
    place: int | None = Field(description="Its place among the level's candidates by key, from 1.")
    kept: bool


class ExplainedItem(BaseModel):
    """Where the search dropped a requested item, or at which place it was returned."""

    id: str
    outcome: Literal["returned", "below_min_score", "below_m", "pruned", "excluded", "filtered", "removed", "deleted", "unknown"] = Field(
        description="`below_m`: it was a candidate, and the ranker, stacking, or the mean over a forest's trees put it below the first m."
    )
    level: int | None = Field(None, description="Level on which it, or its ancestor, was dropped.")
    rank: float | None = Field(None, description="Its ancestor's rank there; its own where it was returned.")
    key: float | None = Field(None, description="Models with a memory: what it, or its ancestor, was ordered by there.")
    cut: float | None = Field(None, description="Key of the worst node that was kept there, or of the worst item that came back.")
    place: int | None = Field(None, description="Place in the answer, or below it, from 1.")
    retrieved_place: int | None = Field(None, description="Its place before the re-ranking.")
    rerank_score: float | None = Field(None, description="The ranker's score.")
    rank_features: dict[str, float | None] | None = Field(
        None, description="Its features as the ranker saw them; null where one is missing."
    )
    path: list[ExplainedAncestor] | None = Field(
        None, description="Models of one tree without stacking: the item's ancestors on all levels of the search."
    )
    live: ExplainedLive | None = Field(None, description="Of an item that was put in, or changed, while the service was running.")
    memory: ExplainedMemory | None = Field(None, description="Models with a memory: its part, and which past items spoke for the item.")
    trees: list[ExplainedInTree] | None = Field(
        None, description="Forests and stacking: the item in each tree. It is `pruned` where all pruned it."
    )
    tail: float | None = Field(
        None, description="Models with a tail: (1 − α) · log nearness, which is added to α times the log of the trees' mean score."
    )
    features: list[ExplainedFeature] | None = Field(
        None, description="Models of features or texts: the features that contributed most, for or against it, strongest first."
    )


class ExplainedTree(BaseModel):
    """What one tree of a forest kept."""

    levels: list[ExplainedLevel] = Field(description="From the first pruned level to the leaves; all leaves that it scored are kept.")


class Moved(BaseModel):
    """An item of the answer whose place the ranker changed."""

    id: str
    retrieved_place: int
    place: int


class Explanation(BaseModel):
    levels: list[ExplainedLevel] = Field(description="From the first pruned level to the leaves; of a forest those of its first tree.")
    trees: list[ExplainedTree] | None = Field(None, description="Forests and stacking: each tree, the first included.")
    items: list[ExplainedItem] = Field(description="In the order of `explain_items`.")
    moved: list[Moved] | None = Field(None, description="What the ranker moved, in the order of the answer.")


class Result(BaseModel):
    """The answer to one query."""

    items: list[Item] = Field(description="Best first.")
    complete: bool = Field(description="False iff fewer than min(m, eligible items) were found: the beam was too small.")
    beam_size: int = Field(description="The beam of the search.")
    degraded: bool = Field(description="Whether that is smaller than requested, because the deadline was near.")
    unknown: list[str] = Field(description="Ids of the query that the catalogue does not have.")
    explain: Explanation | None = None


class Timing(BaseModel):
    """Milliseconds of each stage. ms_per_query = search_ms ÷ batch."""

    queue_ms: float = Field(description="Waiting for the engine.")
    encode_ms: float = Field(description="Turning the request into arrays.")
    search_ms: float = Field(description="In the engine, query graph included.")
    rerank_ms: float = Field(description="In the ranker; 0 without re-ranking.")
    serialise_ms: float = Field(description="Turning item rows into this document.")
    total_ms: float
    ms_per_query: float = Field(description="Engine wall time ÷ queries in the same engine call.")
    batch: int = Field(description="Queries in the engine call, other requests' included; summed where a request took several calls.")


class ShardCoverage(BaseModel):
    """Which shards answered all queries of the request."""

    items: float = Field(ge=0, le=1, description="The share of the catalogue's items that they hold.")
    shards: int = Field(description="How many there are.")
    answered: int
    missing: list[int] = Field(description="Those that did not answer in time, from 0.")


class RetrieveResponse(BaseModel):
    """The answers, in the order of the queries."""

    model: str
    version: int
    engine: str
    sequence: int | None = Field(
        None, description="The operation on the live catalogue up to which the answer holds everything; left out where none counts."
    )
    coverage: ShardCoverage | None = Field(None, description="A router's answers alone: which shards they are of.")
    results: list[Result]
    timing: Timing
