"""Servers with other wire formats than the service's, for `benchmarks.wire_formats`: msgpack over HTTP/1.1, and gRPC.

A prototype replaces two steps of the service: parsing a body, and writing an answer. Checks, encoding, queue, engine and metrics stay the
service's. A prototype lacks, to its advantage: errors in its format, excluded ids that are not in the catalogue, and over gRPC also keys,
limits of bodies and request ids.

Knows formats. Does not know clients.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from functools import cache, partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import orjson
import uvloop

from benchmarks.service.service_overhead import TrivialEngine
from espalier.compile import make_ready
from espalier.masks.filters import Filter
from service.__main__ import listen
from service.app import create_app
from service.batching.request_parts import Answer
from service.errors import QueueFull
from service.http import retrieve_route
from service.http.memory_budget import Reservation
from service.http.middleware import RequestInfo
from service.http.retrieve_route import RetrievalRoute
from service.live.views import View
from service.models import loading
from service.models.loading import EngineSource, LoadedModel
from service.processes.server import Server
from service.retrieval import retrieve
from service.retrieval.request import CheckedRequest, EncodedRequest
from service.retrieval.schemas import RetrieveRequest
from service.retrieval.second_stage import Candidates
from service.settings import Settings

CASES = ("json", "json-columns", "msgpack", "msgpack-columns", "grpc")
NEEDED = ("grpc", "google.protobuf", "msgpack")
METHOD = "/espalier.Retrieval/Retrieve"
STAGES = ("queue", "encode", "search", "serialise")

STRING, INT32, FLOAT, BOOL, MESSAGE = 9, 5, 2, 8, 11
"""Types of a FieldDescriptorProto."""
FIELDS: dict[str, list[tuple[str, int | str, bool]]] = {  # message → its fields: name, type or message, whether repeated
    "Query": [("history", STRING, True)],
    "Request": [("model", STRING, False), ("queries", "Query", True), ("m", INT32, False)],
    "Result": [
        *(("ids", STRING, True), ("scores", FLOAT, True), ("complete", BOOL, False)),
        *(("beam_size", INT32, False), ("degraded", BOOL, False), ("unknown", STRING, True)),
    ],
    "Timing": [
        *((f"{stage}_ms", FLOAT, False) for stage in (*STAGES, "rerank", "total")),
        *(("ms_per_query", FLOAT, False), ("batch", INT32, False)),
    ],
    "Answer": [
        *(("model", STRING, False), ("version", INT32, False), ("engine", STRING, False)),
        *(("results", "Result", True), ("timing", "Timing", False)),
    ],
}


@cache
def messages() -> Any:
    """The classes of FIELDS, by name. Made at run time, so that no compiler is needed."""
    descriptors, factory = import_module("google.protobuf.descriptor_pb2"), import_module("google.protobuf.message_factory")
    file = descriptors.FileDescriptorProto(name="retrieval.proto", package="espalier", syntax="proto3")
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        for number, (field, kind, repeated) in enumerate(fields, 1):
            types = {"type": MESSAGE, "type_name": f".espalier.{kind}"} if isinstance(kind, str) else {"type": kind}
            message.field.add(name=field, number=number, label=3 if repeated else 1, **types)
    pool = import_module("google.protobuf.descriptor_pool").DescriptorPool()
    pool.Add(file)
    return SimpleNamespace(**{name: factory.GetMessageClass(pool.FindMessageTypeByName(f"espalier.{name}")) for name in FIELDS})


def serve(case: str, trivial: bool, port: int, grpc_port: int, core: int) -> None:
    """Serve a case on one core until a signal: over HTTP, and over gRPC if that is the case.

    trivial  use an engine that answers constants
    """
    os.sched_setaffinity(0, {core})
    listening = listen("127.0.0.1", port)
    make_ready()
    settings = Settings()
    with ExitStack() as patched:
        if trivial:  # its answers do not match the golden queries
            patched.enter_context(patch.object(loading, "verify_golden", lambda *_: 1.0))
        if case != "json":
            formats: dict[str, Any] = {"results_json": partial(results_of, case), "_document": partial(answer_of, case)}
            patched.enter_context(patch.multiple(retrieve, **formats))
        if case.startswith("msgpack"):
            patched.enter_context(patch.multiple(retrieve_route, JSON_TYPES=("application/msgpack",), validate=unpacked))
        app = create_app(settings, EngineSource(lambda *_: TrivialEngine()) if trivial else None)
        server = Server(app, settings)
        if case == "grpc":
            uvloop.run(serve_grpc(server, RetrievalRoute(app.state.service), listening, grpc_port))
        else:
            server.serve_on(listening)


async def serve_grpc(server: Server, route: RetrievalRoute, listening: Any, port: int) -> None:
    """Serve the service's routes, for /readyz, and the gRPC method in one event loop."""
    grpc = import_module("grpc")
    grpc_server = import_module("grpc.aio").server()
    handler = grpc.unary_unary_rpc_method_handler(partial(answer_call, route))  # without serialisers: bytes
    service, name = METHOD[1:].split("/")
    grpc_server.add_registered_method_handlers(service, {name: handler})
    grpc_server.add_insecure_port(f"127.0.0.1:{port}")
    await grpc_server.start()
    await server.serve(sockets=[listening])
    await grpc_server.stop(None)


async def answer_call(route: RetrievalRoute, content: bytes, context: object) -> bytes:
    """Answer a request as RetrieveRoute does, but without headers."""
    began = time.perf_counter()
    info = RequestInfo(began)
    message = messages().Request.FromString(content)
    queries = [{"history": list(query.history)} for query in message.queries]
    request = RetrieveRequest.model_validate({"model": message.model or None, "queries": queries, "m": message.m or None})
    with Reservation(route.answers) as memory:
        checked = route.check(request, info)
        if not memory.take(checked.answer_values):
            raise QueueFull("Too many large answers are being made or sent.", 1)
        retrieved = await route.answer(checked, info, began)
    route.metrics.request(info.model, 200, time.perf_counter() - began, False)
    return retrieved.body


# -- in place of the service's functions of the same arguments ---------------------------------------------------------------


def unpacked(kind: type[RetrieveRequest], content: bytes) -> RetrieveRequest:
    return kind.model_validate(import_module("msgpack").unpackb(content))


def results_of(
    case: str,
    checked: CheckedRequest,
    view: View,
    conditions: Filter | None,
    encoded: EncodedRequest,
    answer: Answer,
    candidates: Candidates,
    deadline: float,
) -> list[dict[str, Any]]:
    """The results of an answer, one for each query."""
    count_B = candidates.count_B.tolist()
    ids = view.items.ids_of(np.concatenate([rows[:count] for rows, count in zip(candidates.rows_BM, count_B, strict=True)]))
    results, end = [], 0
    for b, count in enumerate(count_B):
        begin, end = end, end + count
        query_ids, scores_M = ids[begin:end], candidates.scores_BM[b, :count]
        scores = scores_M if case == "json-columns" else scores_M.tolist()
        items: dict[str, Any] = {"ids": query_ids, "scores": scores}
        if case == "msgpack":
            items = {"items": [{"id": item_id, "score": score} for item_id, score in zip(query_ids, scores, strict=True)]}
        state = {"beam_size": answer.beam_size, "degraded": answer.degraded, "unknown": encoded.unknown[b]}
        results.append({**items, "complete": bool(candidates.complete_B[b]), **state})
    return results


def answer_of(
    case: str, model: LoadedModel, view: View, results: list[dict[str, Any]], stages_s: tuple[float, ...], answer: Answer, total_s: float
) -> tuple[bytes, dict[str, float]]:
    """The whole answer, and the milliseconds of its stages."""
    stages_ms = {stage: round(seconds * 1e3, 4) for stage, seconds in zip((*STAGES, "total"), (*stages_s, total_s), strict=True)}
    timing = {f"{stage}_ms": ms for stage, ms in stages_ms.items()}
    timing |= {"rerank_ms": 0.0, "ms_per_query": round(answer.engine_s / answer.batch * 1e3, 4), "batch": answer.batch}
    document = {"model": model.name, "version": model.version, "engine": model.engine.name, "results": results, "timing": timing}
    if case == "grpc":
        body: bytes = messages().Answer(**document).SerializeToString()
    elif case == "json-columns":
        body = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    else:
        body = import_module("msgpack").packb(document, use_single_float=True)
    return body, stages_ms
