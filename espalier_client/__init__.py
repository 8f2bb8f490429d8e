"""A small typed client of the retrieval service. It needs httpx, httpcore below it, and nothing else; docs/client.md shows its use."""

from espalier_client.client import AsyncClient, Client
from espalier_client.errors import (
    ClientError,
    Conflict,
    ConnectionFailed,
    DeadlineExceeded,
    InvalidAnswer,
    InvalidRequest,
    NotAllowed,
    NotFound,
    Overloaded,
    RequestFailed,
    ServiceFailed,
    TimedOut,
    Unavailable,
    WrongValue,
)
from espalier_client.messages import Answer, Completion, Item, Model, Query, Readiness, Removal, Request, Result, Timing, Version
from espalier_client.retry import Retry

__all__ = [
    "Answer",
    "AsyncClient",
    "Client",
    "ClientError",
    "Completion",
    "Conflict",
    "ConnectionFailed",
    "DeadlineExceeded",
    "InvalidAnswer",
    "InvalidRequest",
    "Item",
    "Model",
    "NotAllowed",
    "NotFound",
    "Overloaded",
    "Query",
    "Readiness",
    "Removal",
    "Request",
    "RequestFailed",
    "Result",
    "Retry",
    "ServiceFailed",
    "TimedOut",
    "Timing",
    "Unavailable",
    "Version",
    "WrongValue",
]
