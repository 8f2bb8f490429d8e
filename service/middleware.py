"""The outermost layer: request id, body limit, the request metrics, and the answer when something unexpected was raised.

Plain ASGI, because a layer that builds request objects would cost more than the rest of the service.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import BodyTooLarge, internal_problem
from service.monitoring import Metrics

log = logging.getLogger(__name__)

RETRIEVE = "/retrieve"
MODEL = "espalier.model"
"""Key of the ASGI scope under which a route leaves the name of the model that it found."""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


class Edge:
    """Wraps the application.

    max_body_bytes  a larger body raises BodyTooLarge where it is read
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, metrics: Metrics) -> None:
        self.app, self.max_body_bytes, self.metrics = app, max_body_bytes, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        request_id, announced = _read_headers(scope["headers"])
        received, status = 0, 0

        async def receive_limited() -> Message:
            nonlocal received
            if announced > self.max_body_bytes:
                raise BodyTooLarge(f"The body has {announced} bytes, at most {self.max_body_bytes} are taken.")
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_body_bytes:
                raise BodyTooLarge(f"The body has more than {self.max_body_bytes} bytes.")
            return message

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        try:
            await self.app(scope, receive_limited, send_marked)
        except Exception:
            log.exception("request %s failed", request_id.decode())
            if status:  # the answer has begun; the server can only cut it off
                raise
            await internal_problem()(scope, receive, send_marked)
        finally:
            if scope["path"] == RETRIEVE and status:
                self.metrics.request(scope.get(MODEL, ""), status, time.perf_counter() - began)


def _read_headers(headers: Iterable[tuple[bytes, bytes]]) -> tuple[bytes, int]:
    """The request's id, its own where that is a sane one, and the announced length of its body."""
    request_id, announced = b"", 0
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            request_id = value
        elif name == b"content-length" and value.isdigit():
            announced = int(value[:19])
    return request_id or secrets.token_hex(8).encode(), announced
