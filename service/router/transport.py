"""How the router reaches replicas of shards: what a transport must do, and what can go wrong.

A replica has an address. Only the transport knows its form: a URL for HTTP, the name of a deployment for Ray Serve. Knows neither.
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

connection  nobody listens, or the connection broke · late  no answer in time · full  it is overloaded, or not ready
not_served  it does not serve that shard of that version · refused  it finds the request invalid or too large · broken  another status
garbage     bytes that are no valid answer · mixed  an answer of another shard or version, or to another request
"""
MAX_LISTED = 4096
"""Most shards that one replica may list."""
MAX_COUNTED = 1 << 16
"""Most shards in all layouts that a replica's list touches. The router counts the replicas of each of these shards."""


class ReplicaFailed(EspalierError):
    """A replica gave no answer. detail: may quote the replica, so that control characters are escaped and a long text is cut."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(plain(detail))
        self.reason = reason


class MasksWanted(EspalierError):
    """A shard has no masks with these digests and asks for their bits."""

    def __init__(self, digests: Sequence[str]) -> None:
        super().__init__(f"{len(digests)} masks wanted")
        self.digests = tuple(digests)


class Transport(Protocol):
    """Sends messages to replicas. Its coroutines run in the event loop of the fleet. Cancelling one abandons the answer."""

    async def send(self, address: str, body: bytes, max_bytes: int, timeout_s: float, headers: Mapping[str, str]) -> bytes:
        """The body of the answer to a query (`espalier.shards.messages`).

        max_bytes  of the answer; a longer one is garbage
        headers    for HTTP: X-Request-Id and traceparent; other transports may leave them out
        Raises ReplicaFailed, MasksWanted.
        """

    async def addresses(self, name: str) -> Sequence[str]:
        """The addresses of the replicas behind a configured one; usually just itself. Raises ReplicaFailed."""

    async def served_shards(self, address: str, timeout_s: float) -> frozenset[Pin]:
        """The shards that a replica serves. Raises ReplicaFailed."""

    def forget(self, address: str) -> None:
        """Free the connections of a replica that no longer exists."""

    async def close(self) -> None:
        """Free all connections. Nothing is sent after this."""


class _Listed(BaseModel):
    """A shard in a replica's list."""

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


def parse_shard_list(document: bytes) -> frozenset[Pin]:
    """The shards that are ready in an answer to GET /internal/shards. Raises ReplicaFailed."""
    try:
        listed = _List.model_validate_json(document).shards
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "body"
        raise ReplicaFailed("garbage", f"a list of shards was expected: {field}: {first['msg']}, got {first['input']!r:.40}") from None
    ready = (shard for shard in listed if shard.ready and shard.index < shard.count)
    pins = frozenset(Pin(shard.of, shard.version, shard.digest, shard.index, shard.count) for shard in ready)
    total = sum(count for *_, count in {(pin.of, pin.version, pin.digest, pin.count) for pin in pins})
    if total > MAX_COUNTED:
        raise ReplicaFailed("garbage", f"shards of layouts of {total} shards in all, expected at most {MAX_COUNTED}")
    return pins


def answer_body(status: int, body: bytes) -> bytes:
    """The body of an answer with status 200. Raises ReplicaFailed, MasksWanted."""
    if status == 200:
        return body
    if status == 409:
        raise MasksWanted(_digests(body))
    reasons: Mapping[int, Reason] = {410: "not_served", 413: "refused", 422: "refused", 429: "full", 503: "full", 504: "late"}
    detail = f"status {status}: {body[:200].decode('utf-8', 'replace')}"
    raise ReplicaFailed(reasons.get(status, "broken"), detail)


_DIGESTS = TypeAdapter(Annotated[list[str], Field(min_length=1)])


def _digests(body: bytes) -> list[str]:
    """The digests of the masks that a shard asks for. Raises ReplicaFailed."""
    try:
        return _DIGESTS.validate_json(body)
    except ValidationError:
        raise ReplicaFailed("garbage", f"digests of masks were expected: {body[:200].decode('utf-8', 'replace')}") from None
