"""The outermost layer: request ids, body limits, metrics, logs and traces of requests, and the answers to errors.

HEAD is answered as GET on every route; the server leaves the body out. It is plain ASGI, because a layer that builds request objects would
cost more than the rest of the service. It passes requests to the framework, except those that are many or large: each of their routes is an
ASGI application of its own (`Direct`). The framework only documents these routes and answers the other methods of their paths.
"""

from __future__ import annotations

import itertools
import logging
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from espalier.errors import spelled

from ..batching.priority import BACKGROUND
from ..errors import BodyTooLarge, ClientGone, Denied, Encoded
from ..http.connection import CONNECTION
from ..keys_file import Key
from ..problems import NO_ROUTE, document_of, internal_problem, problem, send_problem
from ..settings import Settings
from ..watch.audit import Audit
from ..watch.logs import Ration
from ..watch.metrics import Metrics
from ..watch.tracing import Tracer, trace_id

log = logging.getLogger(__name__)
requests_log = logging.getLogger("service.requests")

RETRIEVE, STREAM = "/retrieve", "/retrieve/stream"
ITEMS, ITEM = "/models/{name}/items", "/models/{name}/items/{id}"
FRONTIER = "/models/{name}/frontier"
SEARCH = "/internal/search"

_MODEL_PATH = re.compile(r"/models/([^/]+)/(?:(frontier)|items(?:/(.+))?)", re.DOTALL)
_PROCESS, _COUNTER = secrets.token_hex(6).encode(), itertools.count(1)
"""Together they make ids for requests without one: unique over all processes, without a system call for each."""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
SEVERAL_KEYS = b"several"
"""Replaces the value of several Authorization headers, because a proxy before the service may have checked another one of them."""


@dataclass(slots=True)
class RequestInfo:
    """Headers of a request, and the values that its route adds for the log, the metrics and the trace.

    authorization   value of the header; SEVERAL_KEYS if there are several
    content_length  value of the header; 0 without one
    encoding        of the body, from the headers, apart from chunks; empty without one
    key             the request's API key; None if none is needed
    by_client       whether the answer is an error only because of a deadline or condition that the client chose
    priority        value of the header Espalier-Priority; None without one
    """

    KEY: ClassVar = "espalier.request_info"

    began: float
    request_id: bytes = b""
    content_type: bytes = b""
    content_length: int = 0
    encoding: bytes = b""
    authorization: bytes | None = None
    traceparent: bytes | None = None
    priority: bytes | None = None
    user: bytes | None = None
    group: bytes | None = None
    key: Key | None = None
    model: str = ""
    by_client: bool = False
    version: int | None = None
    queries: int | None = None
    m: int | None = None
    beam_size: int | None = None
    stages_ms: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(headers: Iterable[tuple[bytes, bytes]]) -> RequestInfo:
        """The information of a request that begins now."""
        info = RequestInfo(time.perf_counter())
        for name, value in headers:
            match name:
                case b"content-type":
                    info.content_type = value
                case b"content-length" if value.isdigit():
                    info.content_length = int(value[:19])
                case b"authorization":
                    info.authorization = value if info.authorization is None else SEVERAL_KEYS
                case b"content-encoding" | b"transfer-encoding" if (encoding := value.strip().lower()) != b"chunked":
                    info.encoding += encoding
                case b"x-request-id" if _REQUEST_ID.fullmatch(value):
                    info.request_id = value
                case b"traceparent":
                    info.traceparent = value
                case b"espalier-priority":
                    info.priority = value
                case b"espalier-user":
                    info.user = value or None
                case b"espalier-group":
                    info.group = value
        info.request_id = info.request_id or b"%s%08x" % (_PROCESS, next(_COUNTER))
        return info

    @property
    def key_name(self) -> str | None:
        return None if self.key is None else self.key.name


class Direct(NamedTuple):
    """An application.

    route           the route's name in logs
    streams         whether its body may have any size, because it is read in parts
    max_body_bytes  largest body; None: that of all routes
    """

    application: ASGIApp
    route: str
    streams: bool = False
    max_body_bytes: int | None = None


DirectRoutes = Mapping[tuple[str, str], Direct]
"""The applications by (method, route)."""


def find_direct(routes: DirectRoutes, scope: Scope) -> Direct | None:
    """The application of a request; None: the framework. Sets `path_params` to the `name` and the `id` in the path."""
    path: str = scope["path"]
    if path.startswith("/models/"):
        matched_path = _MODEL_PATH.fullmatch(path)
        if matched_path is None:
            return None
        name, frontier, item_id = matched_path.groups()
        path = FRONTIER if frontier else ITEMS if item_id is None else ITEM
        scope["path_params"] = {"name": name, "id": item_id}
    return routes.get((scope["method"], path))


class Edge:
    """Wraps the application.

    direct          the applications that are called instead of the framework
    audit           logs denied requests
    error_lines     rations the log lines about errors that only clients cause
    customer_paths  the paths that the customers' address answers if operators have an address of their own
    tracer          takes spans of the requests of `direct`
    """

    def __init__(
        self,
        app: ASGIApp,
        direct: DirectRoutes,
        audit: Audit,
        metrics: Metrics,
        settings: Settings,
        error_lines: Ration,
        customer_paths: re.Pattern[str],
        tracer: Tracer | None = None,
    ) -> None:
        self.app, self.direct, self.settings = app, direct, settings
        self.audit, self.metrics, self.error_lines, self.customer_paths, self.tracer = audit, metrics, error_lines, customer_paths, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        status, received = 0, 0
        info = scope[RequestInfo.KEY] = RequestInfo.of(scope["headers"])

        async def receive_limited() -> Message:
            nonlocal received
            if info.content_length > most:
                raise BodyTooLarge(f"The body has {info.content_length} bytes, at most {most} are taken.")
            message = await receive()
            received += len(message.get("body", b""))
            if received > most:
                raise BodyTooLarge(f"The body has more than {most} bytes.")
            return message

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if connection is not None and not (status == 200 and direct is not None and direct.streams):
                    connection.on_whole_answer()
                message["headers"] = [*message["headers"], (b"x-request-id", info.request_id)]
            await send(message)

        connection, direct = scope.get(CONNECTION), None
        if connection is not None and connection.for_customers and not self.customer_paths.fullmatch(scope["path"]):
            await send_problem(send_marked, problem(404, NO_ROUTE), {})
            return
        direct = find_direct(self.direct, scope)
        most = self.settings.max_body_bytes if direct is None or direct.max_body_bytes is None else direct.max_body_bytes
        try:
            if info.encoding not in (b"", b"identity"):
                encoding = info.encoding.decode("latin-1")
                raise Encoded(f"The body has the encoding {spelled(encoding)}; expected none: bodies are sent as they are.")
            if direct is not None:
                await direct.application(scope, receive if direct.streams else receive_limited, send_marked)
            else:
                await self.app(scope, receive_limited, send_marked)
        except Exception as error:
            if status and isinstance(error, ClientGone):  # the client does not read its answer; the connection has been cut off
                status = error.status
            else:
                if isinstance(error, Denied):
                    self.audit.denied(scope, info.request_id.decode(), error)
                document, headers = problem_of(error, info)
                if status:  # the answer has begun, so the server can only cut it off
                    raise
                await send_problem(send_marked, document, headers)
        finally:
            if direct is not None and status:
                self._account(scope["method"], direct.route, info, status)

    def _account(self, method: str, route: str, info: RequestInfo, status: int) -> None:
        """Count, log and trace an answered request."""
        seconds = time.perf_counter() - info.began
        if route == RETRIEVE and info.priority == BACKGROUND:
            self.metrics.count("espalier_background_requests_total", info.model, status)
        elif route == RETRIEVE:  # a stream counts its lines
            self.metrics.request(info.model, status, seconds, info.by_client)
        left_out: int | None = 0
        if self.settings.log_requests == "failed":
            left_out = None if status < 500 else self.error_lines.take() if info.by_client else 0
        if self.settings.log_requests != "none" and left_out is not None:
            fields = {
                "request_id": info.request_id.decode(),
                "trace_id": trace_id(info.traceparent),
                "path": route,
                "status": status,
                "key": info.key_name,
                "priority": "background" if info.priority == BACKGROUND else None,
                "model": info.model or None,
                "version": info.version,
                "queries": info.queries,
                "m": info.m,
                "beam_size": info.beam_size,
                "ms": round(seconds * 1e3, 3),
                **{f"{stage}_ms": ms for stage, ms in info.stages_ms.items()},
                "left_out": left_out or None,
            }
            _write(fields)
        if self.tracer is not None:
            self.tracer.record(f"{method} {route}", info.traceparent, seconds, status, info.model, info.stages_ms)


def write_left_out(left_out: int) -> None:
    """Log the number of errors that only clients caused and that had no line."""
    _write({"left_out": left_out})


def _write(fields: Mapping[str, object]) -> None:
    text = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
    requests_log.info("%s", text, extra={"fields": fields})


def problem_of(error: Exception, info: RequestInfo) -> tuple[dict[str, Any], Mapping[str, str]]:
    """(problem document, headers) for the exception that is being handled. An unexpected exception is logged."""
    answer = document_of(error)
    if answer is None:
        request_id = info.request_id.decode()
        log.exception("request %s failed", request_id, extra={"fields": {"request_id": request_id}})
    return answer or (internal_problem(), {})
