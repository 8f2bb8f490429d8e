"""The JSON of POST /retrieve. pydantic validates requests with these classes; the documentation describes answers with them.

Validation is strict: "5" and true are not integers, NaN and infinity are not numbers, unknown fields are errors.
request.py makes the checks that depend on the model: query kind, limits, fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field
from pydantic.config import JsonDict

Ids = Annotated[list[str], FailFast()]
Number = Annotated[float, Field(allow_inf_nan=False)]

MAX_QUERIES = 4096
"""A request with more queries is refused before they are parsed, whatever the settings say."""
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
    text: str = Field("", description="Words to search for. Words that the model does not know are skipped.")
    exclude: Ids = Field(default_factory=list, description="Item ids that must not be returned.")
    exclude_seen: bool = Field(False, description="Whether the items of `history` must not be returned.")
    rank_features: dict[str, Number] = Field(
        default_factory=dict, description="Features of the query for the model's ranker, by name. A feature that is left out is missing."
    )
    item_features: dict[str, dict[str, Number]] = Field(
        default_factory=dict, description="Item id → features of the item for the model's ranker, by name."
    )

    @property
    def excluded(self) -> frozenset[str]:
        """Ids that must not be returned."""
        return frozenset(self.exclude).union(self.history if self.exclude_seen else ())


class Rerank(StrictBody):
    """How to re-rank."""

    depth: int | None = Field(None, ge=1, description="Number of best candidates to re-rank; the model has a default. It should exceed m.")


def _rerank_of_bool(value: object) -> object:
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
"""The JSON schema of a filter's conditions. Their types depend on the model's columns, so espalier.masks.filters checks them."""


class RetrieveRequest(StrictBody):
    """Only `queries` is required; the other fields have defaults, some of them set by the model. A value over a limit is an error."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE]})

    model: str | None = Field(None, max_length=255, description="Name of the model; optional if only one is served.")
    version: int | None = Field(None, ge=1, description="Version of the model; without it the default version answers.")
    queries: Annotated[list[Query], FailFast()] = Field(
        min_length=1, max_length=MAX_QUERIES, description="The queries, all of the model's one kind."
    )
    m: int | None = Field(None, ge=1, description="Items to return per query; may exceed the beam size.")
    beam_size: int | None = Field(None, ge=1, description="Nodes kept on each inner level. A larger beam finds more and takes longer.")
    filter: dict[str, Any] = Field(
        default_factory=dict,
        json_schema_extra=_CONDITIONS,
        description="Column → list of values or range. An item is eligible if it matches in every column.",
    )
    exclude_filter: dict[str, Any] = Field(
        default_factory=dict,
        json_schema_extra=_CONDITIONS,
        description="Column → list of values or range. An item is not eligible if it matches in any column.",
    )
    min_score: Number | None = Field(
        None, ge=0, le=1, description="Items with a lower score are left out. This does not change `complete`."
    )
    timeout_ms: Number | None = Field(
        None, gt=0, description="Deadline, counted from the head of the request. After it the answer is 504, and no search begins."
    )
    min_sequence: int | None = Field(
        None, ge=0, description="Wait until the live catalogue has this operation; 503 if it does not by the deadline."
    )
    min_coverage: Number | None = Field(
        None, ge=0, le=1, description="Least share of the items on shards that answer, else 503. Without shards the share is always 1."
    )
    partial: Literal["allow", "refuse"] = Field(
        "allow",
        description="What to do if the deadline is too near. allow: search with a smaller beam (`degraded`), and answer "
        "from the shards that answered (`coverage`). refuse: answer 504 or 503.",
    )
    live: bool = Field(True, description="Whether the live catalogue counts. false: the answer comes from the trained version only.")
    fields: Ids = Field(default_factory=list, description="Columns of the item table to return with each item.")
    rerank: Annotated[Rerank | None, BeforeValidator(_rerank_of_bool, json_schema_input_type=bool | Rerank)] = Field(
        None, description="Whether the model's ranker re-orders the best candidates: true, false, or the number of them."
    )
    explain: bool = Field(False, description="Whether to return the nodes that each level kept. The search is traced, which is slower.")
    explain_items: Ids = Field(
        default_factory=list, description="Ids of items to explain: the level on which the search dropped each. Implies `explain`."
    )
    explain_nodes: bool = Field(
        False, description="Whether the explained levels list all their nodes and keys. These count as values of the answer."
    )


class Item(BaseModel):
    """One retrieved item. `fields` and `rerank_score` are there only if the request asked for them."""

    id: str
    score: float = Field(ge=0, le=1, description="Score of the retrieval.")
    rerank_score: float | None = Field(None, description="Score of the ranker, on a scale of its own; null for items beyond the depth.")
    fields: dict[str, Any] | None = None


class ExplainedLevel(BaseModel):
    """One level of the search. Nodes are ordered by rank, see ARCHITECTURE.md; ranks are not scores."""

    level: int
    candidates: int = Field(description="Nodes that were scored.")
    kept: int = Field(description="Nodes that were kept; on the last level, items that the search returned.")
    cut: float | None = Field(description="Key of the worst node that was kept. Without a memory, a key is a rank.")
    dropped: float | None = Field(description="Key of the best node that was dropped; null if none was.")
    nodes: list[int] | None = Field(None, description="With `explain_nodes`: kept candidates by key, then dropped candidates by key.")
    keys: list[float] | None = Field(None, description="With `explain_nodes`: the keys of `nodes`.")


class ExplainedFeature(BaseModel):
    """The contribution of one feature of the query to an item: the sum of its weights on the item's path, times its value.

    Forests: the mean over the trees.
    """

    feature: str = Field(description="The feature's n-gram if queries are texts, else its number.")
    contribution: float


class Source(BaseModel):
    """An item of the history that the memory links to another."""

    id: str
    part: float = Field(description="Its contribution to the key.")


class ExplainedMemory(BaseModel):
    """The contribution of the model's memory to an item's key."""

    part: float = Field(description="λ · mem of the item.")
    items: list[Source] = Field(description="The items of the history that contribute most, at most 3, largest first.")


class ExplainedInTree(BaseModel):
    """The outcome of a requested item in one tree of a forest."""

    outcome: Literal["scored", "pruned"]
    level: int | None = Field(None, description="Level on which the item was scored, or its ancestor was dropped.")
    rank: float | None = Field(None, description="Rank of the item, or of the dropped ancestor, in this tree.")
    cut: float | None = Field(None, description="Rank of the worst node that was kept on the level where the ancestor was dropped.")


class ExplainedLive(BaseModel):
    """The state of an item in the live catalogue."""

    since: str = Field(description="When it was first put, ISO 8601.")
    sequence: int = Field(description="Sequence of its last operation.")
    placed_by: str = Field(description="The evidence that decided its row: `events`, `like`, `text`, `fields`, or `trained`.")


class ExplainedAncestor(BaseModel):
    """An item's ancestor on one level of the search; on the last level, its leaf."""

    level: int
    node: int = Field(description="Number of the node. Numbers of live leaves are larger than those of the tree.")
    rank: float | None = Field(
        description="Null if it was no candidate: its parent was dropped, no eligible item is below it, or its shard did not answer."
    )
    key: float | None = Field(description="The key by which the level was ordered. Without a memory, it is the rank.")
    place: int | None = Field(description="Its place among the level's candidates by key, from 1.")
    kept: bool


class ExplainedItem(BaseModel):
    """The outcome of a requested item: its place in the answer, or the level on which the search dropped it."""

    id: str
    outcome: Literal[
        "returned", "below_min_score", "below_m", "pruned", "not_searched", "excluded", "filtered", "removed", "deleted", "unknown"
    ] = Field(
        description="`below_m`: it was a candidate, but the ranker, stacking, or the mean over a forest's trees put it below the first m. "
        "`not_searched`: its shard did not answer the router."
    )
    level: int | None = Field(None, description="Level on which the item or its ancestor was dropped.")
    rank: float | None = Field(None, description="Rank of the dropped ancestor on that level, or of the item if it was returned.")
    key: float | None = Field(None, description="Models with a memory: key of the dropped ancestor on that level, or of the item.")
    cut: float | None = Field(None, description="Key of the worst node that was kept on that level, or of the worst returned item.")
    place: int | None = Field(None, description="Place among the candidates, from 1; those up to m are in the answer.")
    retrieved_place: int | None = Field(None, description="Its place before the re-ranking.")
    rerank_score: float | None = Field(None, description="The ranker's score.")
    rank_features: dict[str, float | None] | None = Field(
        None, description="Its features as the ranker saw them; null for a missing feature."
    )
    path: list[ExplainedAncestor] | None = Field(
        None, description="Models of one tree without stacking: the item's ancestors on all levels of the search."
    )
    live: ExplainedLive | None = Field(None, description="Items that were put or changed while the service was running.")
    memory: ExplainedMemory | None = Field(None, description="Models with a memory: its contribution, and the past items behind it.")
    trees: list[ExplainedInTree] | None = Field(
        None, description="Forests and stacking: the item in each tree. The outcome is `pruned` if all trees pruned it."
    )
    tail: float | None = Field(
        None, description="Models with a tail: (1 − α) · log nearness, which is added to α times the log of the trees' mean score."
    )
    features: list[ExplainedFeature] | None = Field(
        None, description="Models of features or texts: the features that contributed most, positively or negatively, strongest first."
    )


class ExplainedTree(BaseModel):
    """The levels of the search in one tree of a forest."""

    levels: list[ExplainedLevel] = Field(description="From the first pruned level to the leaves; all scored leaves are kept.")


class Moved(BaseModel):
    """An item of the answer whose place the ranker changed."""

    id: str
    retrieved_place: int
    place: int


class Explanation(BaseModel):
    levels: list[ExplainedLevel] = Field(description="From the first pruned level to the leaves. Forests: the levels of the first tree.")
    trees: list[ExplainedTree] | None = Field(None, description="Forests and stacking: each tree, the first included.")
    items: list[ExplainedItem] = Field(description="In the order of `explain_items`.")
    moved: list[Moved] | None = Field(None, description="The items that the ranker moved, in the order of the answer.")


class Result(BaseModel):
    """The answer to one query."""

    items: list[Item] = Field(description="Best first.")
    complete: bool = Field(description="False if the search returned fewer than min(m, eligible items): the beam was too small.")
    beam_size: int = Field(description="The beam of the search.")
    degraded: bool = Field(description="Whether the beam is smaller than requested, because the deadline was near.")
    unknown: list[str] = Field(description="Ids of the query that the catalogue does not have.")
    explain: Explanation | None = None


class Timing(BaseModel):
    """Milliseconds of each stage. ms_per_query = search_ms ÷ batch, unless a request's calls overlap, as a router's do."""

    queue_ms: float = Field(description="Waiting for the engine.")
    encode_ms: float = Field(description="Turning the request into arrays.")
    search_ms: float = Field(description="Time in the engine, including the query graph.")
    rerank_ms: float = Field(description="Time in the ranker; 0 without re-ranking.")
    serialise_ms: float = Field(description="Turning item rows into this document.")
    total_ms: float
    ms_per_query: float = Field(description="Engine wall time ÷ queries in the same engine call.")
    batch: int = Field(description="Queries in the engine call, including those of other requests; summed if a request took several calls.")


class ShardCoverage(BaseModel):
    """The shards that answered all queries of the request."""

    items: float = Field(ge=0, le=1, description="Share of the catalogue's items on these shards.")
    shards: int = Field(description="Number of all shards.")
    answered: int
    missing: list[int] = Field(description="Numbers of the shards that gave no answer, from 0.")


class RetrieveResponse(BaseModel):
    """The answers, in the order of the queries."""

    model: str
    version: int
    engine: str
    sequence: int | None = Field(
        None, description="The answer reflects all operations on the live catalogue up to this one. Left out without one."
    )
    coverage: ShardCoverage | None = Field(None, description="Only in a router's answers: the shards that answered.")
    results: list[Result]
    timing: Timing
