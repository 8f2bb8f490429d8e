"""Every error that the service raises on purpose; problems.py writes them as RFC 9457 problem documents.

    EspalierError
    └── ServiceError              each class states its status
        ├── Denied                      names the role that the route needs and the reason for the refusal
        │   ├── Unauthorized      401   no key, or an unknown one
        │   └── Forbidden         403   the key's role does not allow the route
        ├── ModelNotFound         404   no such model, or the version is not loaded
        ├── ItemNotFound          404   no such item, or it was deleted
        ├── NodeNotFound          404   the tree has no such node
        ├── SlowBody              408   the body did not arrive in time
        ├── Conflict              409   the models' state does not allow the change
        │   ├── BeingChanged      409   another change of the model is under way; Retry-After says when to try again
        │   ├── IsShard           409   the model holds a part of a catalogue; its router answers
        │   └── Follows           409   this host follows another one's live catalogue, which takes the writes
        ├── UnknownMasks          409   a router names masks that this shard does not hold; it sends them again
        ├── ChangesGone           410   operations that old are not kept any more
        ├── NotServed             410   a router asks for a shard or a version that is not served here
        ├── PreconditionFailed    412   the list or the item is not the one that the client has read
        ├── BodyTooLarge          413
        ├── NotJson               415
        ├── Encoded               415   the body is compressed
        ├── InvalidRequest        422   a body with wrong values
        ├── QueueFull             429   too many queries wait already
        ├── KeyLimit              429   the key has had what it may have; Retry-After says when there is more
        ├── ClientGone            499   the client hung up; only the metrics see this
        ├── EngineFailed          500   the engine call that held the query
        ├── NotReady              503   the model is not ready, or the service is shutting down
        │   └── ShardsMissing     503   shards of the version are not there
        ├── Uncovered             503   fewer shards answered than the request needs
        ├── Busy                  503   the memory for large requests is in use
        ├── NotWritable           503   the live catalogue takes no writes now: the disk is full, or the folder is read-only
        ├── Behind                503   this worker has not yet the operations that `min_sequence` asks for
        ├── DeadlinePassed        504   the answer would have been too late
        └── CatalogueFull         507   the live catalogue has no room; deletes are still taken

After SlowBody, BodyTooLarge and Busy the connection ends, because the rest of the body is not read.
espalier.errors.InvalidInput is 422 and lists {field, value, expected}. Any other exception is 500 without internals; the log has them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

from espalier.errors import EspalierError, InvalidInput

from .keys_file import Role

DenialReason = Literal["missing", "malformed", "unknown", "expired", "role", "model", "off"]


class ServiceError(EspalierError):
    """Base of the service's own errors."""

    status: ClassVar[int] = 500
    headers: tuple[tuple[str, str], ...] = ()


class Denied(ServiceError):
    """A request was refused because of its key.

    role    role that the route needs
    reason  `missing` (no Authorization header), `malformed` (not `Bearer KEY`), `unknown` (not a key of this service), `expired`, `role`
            (the key has another role), `model` (it may not name this model), `off` (the admin routes are off)
    key     name or id of the key, None for an unknown one
    """

    def __init__(self, detail: str, role: Role, reason: DenialReason, key: str | None = None) -> None:
        super().__init__(detail)
        self.role, self.reason, self.key = role, reason, key


class Unauthorized(Denied):
    status = 401
    headers = (("WWW-Authenticate", "Bearer"),)


class Forbidden(Denied):
    status = 403


class ModelNotFound(ServiceError):
    status = 404


class ItemNotFound(ServiceError):
    status = 404


class NodeNotFound(ServiceError):
    status = 404


class SlowBody(ServiceError):
    status = 408
    headers = (("Connection", "close"),)


class Conflict(ServiceError):
    status = 409


class BeingChanged(Conflict):
    headers = (("Retry-After", "1"),)


class Follows(Conflict):
    """This host follows the live catalogue of another, which the text names."""


class IsShard(Conflict):
    """The model holds a part of a catalogue, so that its own answers would lack the rest."""


class UnknownMasks(ServiceError):
    """A shard lacks masks of a query. Their sender must send the query again with the masks of these digests, all that it had not sent."""

    status = 409

    def __init__(self, digests: Sequence[str]) -> None:
        super().__init__(digests)
        self.digests = list(digests)

    def __str__(self) -> str:
        return f"masks of a query are not known here: {', '.join(self.digests[:8])}"


class NotServed(ServiceError):
    status = 410


class ChangesGone(ServiceError):
    status = 410


class PreconditionFailed(ServiceError):
    """If-Match or If-None-Match does not fit; `etag` is the current tag, None where there is no such thing."""

    status = 412

    def __init__(self, detail: str, etag: str | None) -> None:
        super().__init__(detail)
        self.headers = (("ETag", etag),) if etag is not None else ()


class BodyTooLarge(ServiceError):
    status = 413
    headers = (("Connection", "close"),)


class NotJson(ServiceError):
    status = 415


class Encoded(ServiceError):
    status = 415
    headers = (("Accept-Encoding", "identity"),)


class InvalidRequest(ServiceError):
    status = 422

    def __init__(self, errors: Sequence[InvalidInput]) -> None:
        super().__init__(str(errors[0]))
        self.errors = errors


class QueueFull(ServiceError):
    """Too many queries, or other requests of one kind, wait already. crowds: most of them are the key's, and other keys want the engine."""

    status = 429

    def __init__(self, reason: str, retry_after_s: float, crowds: bool = False) -> None:
        super().__init__(reason)
        self.retry_after_s, self.crowds = retry_after_s, crowds
        self.headers = _retry_after(retry_after_s)


class KeyLimit(ServiceError):
    """A key has had what it may have: its client's doing, and no failure of the service. early_s: how much too early it came."""

    status = 429

    def __init__(self, reason: str, early_s: float) -> None:
        super().__init__(reason)
        self.headers = _retry_after(early_s)


def _retry_after(seconds: float) -> tuple[tuple[str, str], ...]:
    """In whole seconds."""
    return (("Retry-After", str(max(1, math.ceil(seconds)))),)


class ClientGone(ServiceError):
    status = 499


class EngineFailed(ServiceError):
    status = 500


class NotReady(ServiceError):
    status = 503
    headers = (("Retry-After", "1"),)


class ShardsMissing(NotReady):
    """Shards of a version are not there yet, or not any more; the text says which."""


class Uncovered(ServiceError):
    status = 503
    headers = (("Retry-After", "1"),)


class Busy(ServiceError):
    status = 503
    headers = (("Retry-After", "1"), ("Connection", "close"))


class NotWritable(ServiceError):
    status = 503
    headers = (("Retry-After", "1"),)


class Behind(ServiceError):
    """This worker has not yet the operations that `min_sequence` asks for; another may. committed: whether this host has them."""

    status = 503
    headers = (("Retry-After", "1"),)

    def __init__(self, detail: str, committed: bool) -> None:
        super().__init__(detail)
        self.committed = committed


class DeadlinePassed(ServiceError):
    status = 504


class CatalogueFull(ServiceError):
    status = 507
