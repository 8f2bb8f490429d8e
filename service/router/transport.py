"""How the router reaches replicas of shards: what a transport must do, and what can go wrong.

A replica has an address, whose form the transport alone knows: a URL for HTTP, the name of a deployment for Ray Serve. Knows neither.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import orjson

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
MAX_CONTAINERS = 2 * MAX_LISTED
"""Most lists and objects in what it says: hundreds of thousands would take seconds to free."""
MAX_COUNTED = 1 << 16
"""Most shards of all layouts of which one replica may say it has some: the replicas of each are counted."""
_NAME, _SHA256 = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}"), re.compile("[0-9a-f]{64}")


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
        ...

    async def addresses(self, name: str) -> Sequence[str]:
        """The addresses of replicas that a configured one stands for now; most stand for themselves. Raises ReplicaFailed."""
        ...

    async def held(self, address: str, timeout_s: float) -> frozenset[Pin]:
        """The shards that a replica serves. Raises ReplicaFailed."""
        ...

    def forget(self, address: str) -> None:
        """Free what it holds for a replica that is no more."""
        ...

    async def close(self) -> None:
        """Free what it holds. Nothing is sent after it."""
        ...


def held_of(document: bytes | str) -> frozenset[Pin]:
    """The shards of an answer to GET /internal/shards that are ready. Raises ReplicaFailed.

    Written out: pydantic takes several times as long, and this holds up the searches.
    """
    text = document.encode("utf-8", "surrogatepass") if isinstance(document, str) else document
    if text.count(b"[") + text.count(b"{") > MAX_CONTAINERS:
        raise _no_list("body", f"expected at most {MAX_CONTAINERS} lists and objects")
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise _no_list("body", f"no JSON: {error}") from None
    listed = found.get("shards") if isinstance(found, dict) else None
    if not isinstance(listed, list) or len(listed) > MAX_LISTED:
        raise _no_list("shards", f"expected a list of at most {MAX_LISTED}")
    pins = [pin for place, shard in enumerate(listed) if (pin := _listed(place, shard)) is not None]
    counted = sum(count for *_, count in {(pin.of, pin.version, pin.digest, pin.count) for pin in pins})
    if counted > MAX_COUNTED:
        raise ReplicaFailed("garbage", f"shards of layouts of {counted} shards in all, expected at most {MAX_COUNTED}")
    return frozenset(pins)


def _listed(place: int, shard: Any) -> Pin | None:
    """One entry of the list; None where it is not ready. Raises ReplicaFailed."""
    if type(shard) is not dict:
        raise _no_list(f"shards.{place}", "expected an object")
    values: list[Any] = [shard.get(name) for name in ("of", "version", "digest", "index", "count")]
    (of, version, digest, index, count), ready = values, shard.get("ready", True)
    right = (
        type(of) is str and _NAME.fullmatch(of),
        type(version) is int and 1 <= version < 1 << 63,
        type(digest) is str and _SHA256.fullmatch(digest),
        type(index) is int and index >= 0,
        type(count) is int and 1 <= count <= MAX_SHARDS,
        type(ready) is bool,
    )
    if not all(right):
        names = ("of", "version", "digest", "index", "count", "ready")
        wrong = next(number for number, is_right in enumerate(right) if not is_right)
        raise _no_list(f"shards.{place}.{names[wrong]}", f"got {[*values, ready][wrong]!r:.40}")
    return Pin(of, version, digest, index, count) if ready and index < count else None


def _no_list(field: str, detail: str) -> ReplicaFailed:
    return ReplicaFailed("garbage", f"a list of shards was expected: {field}: {detail}")


def answered(status: int, body: bytes) -> bytes:
    """The body of an answer of status 200. Raises ReplicaFailed, MasksWanted."""
    if status == 200:
        return body
    if status == 409:
        raise MasksWanted(_digests(body))
    reasons: Mapping[int, Reason] = {410: "not_served", 422: "refused", 429: "full", 503: "full", 504: "late"}
    detail = f"status {status}: {body[:200].decode('utf-8', 'replace')}"
    raise ReplicaFailed(reasons.get(status, "broken"), detail)


def _digests(body: bytes) -> list[str]:
    """The JSON list of digests that a shard lacks, alone or as `digests` of a problem document. Raises ReplicaFailed."""
    found: Any
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        found = None
    digests = found.get("digests") if isinstance(found, dict) else found
    if not isinstance(digests, list) or not digests or not all(isinstance(digest, str) for digest in digests):
        raise ReplicaFailed("garbage", f"digests of masks were expected: {body[:200].decode('utf-8', 'replace')}")
    return digests
