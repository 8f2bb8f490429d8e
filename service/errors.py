"""Every error that the service raises on purpose; problems.py writes them as RFC 9457 problem documents.

    EspalierError
    └── ServiceError              each class states its status
        ├── Denied                      names the role that the route needs and the reason for the refusal
        │   ├── Unauthorized      401   no key, or an unknown one
        │   └── Forbidden         403   the key's role does not allow the route
        ├── NotFound              404   no such model, version, item or node, or it was deleted or is not loaded
        ├── SlowBody              408   the body did not arrive in time
        ├── Conflict              409   the models' state does not allow it; or another host or a router must be asked
        │   └── BeingChanged      409   another change of the model is under way; Retry-After says when to try again
        ├── UnknownMasks          409   a router names masks that this shard does not hold; it sends them again
        ├── Gone                  410   operations that are no longer kept, or a shard's version that this service does not serve
        ├── PreconditionFailed    412   the list or the item has changed since the client read it
        ├── BodyTooLarge          413
        ├── NotJson               415
        ├── Encoded               415   the body is compressed
        ├── InvalidRequest        422   a body with wrong values
        ├── QueueFull             429   too many queries wait already
        ├── KeyLimit              429   the key is over its limit; Retry-After says when to try again
        ├── ClientGone            499   the client hung up; only the metrics see this
        ├── EngineFailed          500   the engine call with the query failed
        ├── NotReady              503   the model is not ready, or the service is shutting down
        │   └── ShardsMissing     503   shards of the version are missing
        ├── Uncovered             503   fewer shards answered than the request needs
        ├── Busy                  503   the memory for large requests is in use
        ├── NotWritable           503   the live catalogue takes no writes now: the disk is full, or the folder is read-only
        ├── Behind                503   this worker does not have the operations up to `min_sequence` yet
        ├── DeadlinePassed        504   the answer would have been too late
        └── CatalogueFull         507   the live catalogue has no room; deletes are still accepted

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
    key     name or id of the key; None for an unknown one
    """

    def __init__(self, detail: str, role: Role, reason: DenialReason, key: str | None = None) -> None:
        super().__init__(detail)
        self.role, self.reason, self.key = role, reason, key


class Unauthorized(Denied):
    status = 401
    headers = (("WWW-Authenticate", "Bearer"),)


class Forbidden(Denied):
    status = 403


class NotFound(ServiceError):
    status = 404


class SlowBody(ServiceError):
    status = 408
    headers = (("Connection", "close"),)


class Conflict(ServiceError):
    status = 409


class BeingChanged(Conflict):
    headers = (("Retry-After", "1"),)


class UnknownMasks(ServiceError):
    """A shard lacks masks of a query. digests: of all masks that the router did not send; it must send the query again with them."""

    status = 409

    def __init__(self, digests: Sequence[str]) -> None:
        super().__init__(digests)
        self.digests = list(digests)

    def __str__(self) -> str:
        return f"masks of a query are not known here: {', '.join(self.digests[:8])}"


class Gone(ServiceError):
    status = 410


class PreconditionFailed(ServiceError):
    """If-Match or If-None-Match does not hold. etag: the current tag; None if there is no such list or item."""

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
    """Too many queries, or other requests of one kind, wait already. crowds: the key has queries in a queue that several keys share."""

    status = 429

    def __init__(self, reason: str, retry_after_s: float, crowds: bool = False) -> None:
        super().__init__(reason)
        self.retry_after_s, self.crowds = retry_after_s, crowds
        self.headers = _retry_after(retry_after_s)


class KeyLimit(ServiceError):
    """The key is over its limit, which is not a failure of the service. retry_after_s: seconds until it would be admitted."""

    status = 429

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.headers = _retry_after(retry_after_s)


def _retry_after(seconds: float) -> tuple[tuple[str, str], ...]:
    """The Retry-After header, in whole seconds."""
    return (("Retry-After", str(max(1, math.ceil(seconds)))),)


class ClientGone(ServiceError):
    status = 499


class EngineFailed(ServiceError):
    status = 500


class NotReady(ServiceError):
    status = 503
    headers = (("Retry-After", "1"),)


class ShardsMissing(NotReady):
    """Some shards of a version are not available; the text says which."""


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
    """This worker does not have the operations up to `min_sequence` yet; another may. committed: whether this host has committed them."""

    status = 503
    headers = (("Retry-After", "1"),)

    def __init__(self, detail: str, committed: bool) -> None:
        super().__init__(detail)
        self.committed = committed


class DeadlinePassed(ServiceError):
    status = 504


class CatalogueFull(ServiceError):
    status = 507
