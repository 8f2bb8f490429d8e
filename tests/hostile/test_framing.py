"""Messages that are no HTTP, or could be read in two ways, and limits of heads. The attack `wrong_framing` sends every wrong message."""

from __future__ import annotations

import json

import pytest

from tests.hostile.attacks import Target
from tests.hostile.attacks.framing import RIGHT, WRONG
from tests.hostile.attacks.wire import LIVEZ, Wire, parsed

pytestmark = [pytest.mark.slow, pytest.mark.hostile]


@pytest.mark.parametrize("cut", [1, 2, 7, 40])
def test_requests_arrive_in_pieces_of_any_size(target: Target, cut: int) -> None:
    data = b"".join(sent for sent, _ in RIGHT.values() if b"Connection" not in sent and b"HTTP/1.0" not in sent)
    expected = [status for sent, statuses in RIGHT.values() if b"Connection" not in sent and b"HTTP/1.0" not in sent for status in statuses]
    wire = target.connect()
    for begin in range(0, len(data), cut):
        assert wire.send(data[begin : begin + cut])
        wire.pull()
    assert [answer.status for answer in wire.answers(len(expected))] == expected


def problem(wire: Wire, status: int) -> None:
    """The connection has one answer, which is a problem document of this status and says that it closes."""
    answers = parsed(bytes(wire.held), wire.ended)
    assert [answer.status for answer in answers] == [status]
    assert answers[0].headers["content-type"] == "application/problem+json"
    assert answers[0].headers["connection"] == "close"
    assert json.loads(answers[0].body)["status"] == status


@pytest.mark.parametrize("name", ["a length and chunks", "a folded header", "an unknown method", "a negative chunk"])
def test_what_is_no_request_is_answered_with_a_problem_document(target: Target, name: str) -> None:
    wire = target.connect()
    wire.send(WRONG[name])
    wire.until(lambda: False, 10)
    assert wire.ended
    problem(wire, 400)


def test_a_head_that_is_too_long_is_answered_with_a_problem_document(target: Target) -> None:
    wire = target.connect()
    wire.send(LIVEZ.replace(b"\r\n\r\n", b"\r\nX-Long: " + b"x" * (70 << 10) + b"\r\n\r\n"))
    wire.until(lambda: False, 10)
    assert wire.ended
    problem(wire, 431)


@pytest.mark.parametrize(("length", "status"), [(60 << 10, 200), (66 << 10, 431)])
def test_a_head_may_have_64_kibibytes(target: Target, length: int, status: int) -> None:
    wire = target.connect()
    wire.send(LIVEZ.replace(b"\r\n\r\n", b"\r\nX-Long: " + b"x" * length + b"\r\n\r\n"))
    assert wire.outcome() == str(status)


@pytest.mark.parametrize(("count", "status"), [(90, 200), (110, 431)])
def test_a_head_may_have_100_headers(target: Target, count: int, status: int) -> None:
    wire = target.connect()
    wire.send(LIVEZ.replace(b"\r\n\r\n", b"\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(count)) + b"\r\n"))
    assert wire.outcome() == str(status)


def test_each_request_of_a_connection_has_its_own_limit(target: Target) -> None:
    wire = target.connect()
    long = LIVEZ.replace(b"\r\n\r\n", b"\r\nX-Long: " + b"x" * (40 << 10) + b"\r\n\r\n")
    for _ in range(5):
        wire.held.clear()
        wire.send(long)
        assert wire.outcome() == "200"


def test_a_head_that_does_not_end_is_answered_with_a_problem_document(target: Target) -> None:
    wire = target.connect()
    wire.send(LIVEZ[:-2])
    wire.until(lambda: False, 10)
    assert wire.ended
    problem(wire, 408)
