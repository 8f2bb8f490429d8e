"""W3C trace context and OpenTelemetry spans. The only importer of opentelemetry, which is an extra.

A request's spans are made after its answer, from the measured seconds of its stages, so that tracing costs nothing while a client waits.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from espalier.errors import EspalierError

_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
STAGES = ("encode", "queue", "search", "rerank", "serialise")
"""In chronological order."""


class TracingUnavailable(EspalierError):
    """The extra is not installed."""


def trace_id(traceparent: bytes | None) -> str | None:
    """The trace id in a request's `traceparent` header."""
    match = _TRACEPARENT.fullmatch(traceparent or b"")
    return match[1].decode() if match else None


class Tracer:
    """Sends spans to an OTLP endpoint (HTTP), in the background. Raises TracingUnavailable without the extra `otel`."""

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise TracingUnavailable(f"ESPALIER_OTLP_ENDPOINT is set, but the extra `otel` is not installed ({error})") from error
        self._trace = trace
        self._provider = TracerProvider(resource=Resource.create({"service.name": "espalier"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("espalier")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, name: str, traceparent: bytes | None, seconds: float, status: int, model: str, stages_ms: Mapping[str, float]) -> None:
        """Record a span of an answered request, with a child span for each stage. The stages follow each other and end with the request."""
        end = time.time_ns()
        carrier = {"traceparent": traceparent.decode("latin-1")} if traceparent else {}
        attributes: dict[str, str | int] = {"http.request.method": "POST", "http.response.status_code": status}
        if model:
            attributes["espalier.model"] = model
        stages_ns = {stage: int(stages_ms[stage] * 1e6) for stage in STAGES if stage in stages_ms}
        stage_end = end - sum(stages_ns.values())
        began = min(end - int(seconds * 1e9), stage_end)  # rounding must not let a stage begin before its request
        span = self._tracer.start_span(name, self._propagator.extract(carrier), self._trace.SpanKind.SERVER, attributes, start_time=began)
        context = self._trace.set_span_in_context(span)
        for stage, duration_ns in stages_ns.items():
            stage_begin, stage_end = stage_end, stage_end + duration_ns
            self._tracer.start_span(stage, context, start_time=stage_begin).end(stage_end)
        if status >= 500:
            span.set_status(self._trace.StatusCode.ERROR)
        span.end(end)

    def close(self) -> None:
        self._provider.shutdown()
