"""The wire formats that were tried beside JSON: what they say is what JSON says, and who lacks their packages is told."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.service.wire_formats import RATIOS, parser_of, ranked, request_of, summary
from benchmarks.service.wire_prototypes import messages, unpacked
from service.retrieval.schemas import RetrieveRequest

DOCUMENT = {"model": "books", "queries": [{"history": ["a", "b"]}, {"history": []}], "m": 5}


def test_a_request_of_each_format_has_the_same_content() -> None:
    pytest.importorskip("google.protobuf")
    pytest.importorskip("msgpack")
    whole, size = request_of("msgpack", DOCUMENT)
    assert unpacked(RetrieveRequest, whole[-size:]) == RetrieveRequest.model_validate(DOCUMENT)
    content, size = request_of("grpc", DOCUMENT)
    message = messages().Request.FromString(content)
    assert (len(content), message.model, message.m) == (size, "books", 5)
    assert [list(query.history) for query in message.queries] == [["a", "b"], []]


def test_answers_are_compared_by_items_and_float32_scores() -> None:
    pytest.importorskip("google.protobuf")
    expected = [("a", np.float32(0.1)), ("b", np.float32(0.05))]
    body = messages().Answer(results=[{"ids": ["a", "b"], "scores": [0.1, 0.05]}]).SerializeToString()
    assert ranked(parser_of("grpc")(body).results[0]) == expected
    assert ranked({"ids": ["a", "b"], "scores": [0.1, 0.05]}) == expected
    assert ranked({"items": [{"id": "a", "score": 0.1}, {"id": "b", "score": 0.05}]}) == expected
    assert ranked({"ids": ["b", "a"], "scores": [0.1, 0.05]}) != expected


def test_ratios_are_those_of_the_same_rounds() -> None:
    base = [dict.fromkeys(RATIOS, value) for value in (1.0, 2.0, 4.0)]
    rows = [dict.fromkeys(RATIOS, value) for value in (2.0, 2.0, 2.0)]
    found = summary(rows, base)
    assert (found["p50_ms"], found["p50_ms_ratio"], found["server_cpu_us_ratios"]) == (2.0, 1.0, [0.5, 2.0])
