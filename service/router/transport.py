"""How the router reaches replicas of shards: what a transport must do, and what can go wrong.

A replica has an address, whose form the transport alone knows: a URL for HTTP, the name of a deployment for Ray Serve. Knows neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Protocol

from pydantic import BaseModel, ConfigDict, FailFast, Field, TypeAdapter, ValidationError

from espalier.errors import EspalierError
from espalier.manifest import MAX_SHARDS
from espalier.shards.messages import Pin

from ..watch.logs import plain

Reason = Literal["connection", "late", "full", "not_served", "refused", "broken", "garbage", "mixed"]
"""Why a replica gave no answer.

connection  nobody listens, or the connection broke · late  no answer in time · full  it has too much to do, or is not ready
not_served  it does not serve that shard of that version · refused  it finds the question wrong · broken  another status
garbage     bytes that are no right answer · mixed  an answer of another shard or version than was asked for, or to another question
"""
MAX_LISTED = 4096
"""Most shards that one replica may say it has."""
MAX_COUNTED = 1 << 16
"""Most shards of all layouts of which one replica may say it has some: the replicas of each are counted."""


class ReplicaFailed(EspalierError):
    """A replica gave no answer. detail: may hold what it said, so control characters are escaped and the rest is cut off."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(plain(detail))
        self.reason = reason


class MasksWanted(EspalierError):
    """A shard lacks masks, by their digests, and wants their bits."""

    def __init__(self, digests: Sequence[str]) -> None:
        super().__init__(f"{len(digests)} masks wanted")
        self.digests = tuple(digests)


class Transport(Protocol):
    """Sends messages to replicas. Its coroutines run in one event loop, that of the fleet; cancelling one gives the answer up."""

    async def send(self, address: str, body: bytes, most: int, timeout_s: float, headers: Mapping[str, str]) -> bytes:
        """The body of the answer to a query (`espalier.shards.messages`).

        most     bytes that the answer may have; a longer one is garbage
        headers  of HTTP: X-Request-Id and traceparent; others may leave them out
        Raises ReplicaFailed, MasksWanted.
        """

    async def addresses(self, name: str) -> Sequence[str]:
        """The addresses of replicas that a configured one stands for now; most stand for themselves. Raises ReplicaFailed."""

    async def held(self, address: str, timeout_s: float) -> frozenset[Pin]:
        """The shards that a replica serves. Raises ReplicaFailed."""

    def forget(self, address: str) -> None:
        """Free what it holds for a replica that is no more."""

    async def close(self) -> None:
        """Free what it holds. Nothing is sent after it."""


class _Listed(BaseModel):
    """A shard that a replica says it has."""

    model_config = ConfigDict(strict=True)

    of: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
    version: Annotated[int, Field(ge=1, lt=1 << 63)]
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    index: Annotated[int, Field(ge=0)]
    count: Annotated[int, Field(ge=1, le=MAX_SHARDS)]
    ready: bool = True


class _List(BaseModel):
    """The answer to GET /internal/shards."""

    shards: Annotated[list[_Listed], FailFast(), Field(max_length=MAX_LISTED)]


def held_of(document: bytes) -> frozenset[Pin]:
    """The shards of an answer to GET /internal/shards that are ready. Raises ReplicaFailed."""
    try:
        listed = _List.model_validate_json(document).shards
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "body"
        raise ReplicaFailed("garbage", f"a list of shards was expected: {field}: {first['msg']}, got {first['input']!r:.40}") from None
    ready = (shard for shard in listed if shard.ready and shard.index < shard.count)
    pins = frozenset(Pin(shard.of, shard.version, shard.digest, shard.index, shard.count) for shard in ready)
    counted = sum(count for *_, count in {(pin.of, pin.version, pin.digest, pin.count) for pin in pins})
    if counted > MAX_COUNTED:
        raise ReplicaFailed("garbage", f"shards of layouts of {counted} shards in all, expected at most {MAX_COUNTED}")
    return pins


def answered(status: int, body: bytes) -> bytes:
    """The body of an answer of status 200. Raises ReplicaFailed, MasksWanted."""
    if status == 200:
        return body
    if status == 409:
        raise MasksWanted(_digests(body))
    reasons: Mapping[int, Reason] = {410: "not_served", 422: "refused", 429: "full", 503: "full", 504: "late"}
    detail = f"status {status}: {body[:200].decode('utf-8', 'replace')}"
    raise ReplicaFailed(reasons.get(status, "broken"), detail)


_DIGESTS = TypeAdapter(Annotated[list[str], Field(min_length=1)])


def _digests(body: bytes) -> list[str]:
    """The digests that a shard lacks. Raises ReplicaFailed."""
    try:
        return _DIGESTS.validate_json(body)
    except ValidationError:
        raise ReplicaFailed("garbage", f"digests of masks were expected: {body[:200].decode('utf-8', 'replace')}") from None
