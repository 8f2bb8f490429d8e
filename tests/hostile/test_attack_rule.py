"""The benchmark of attacks: its rule, what it reads from connections, and what it says of services that are made up."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.service import hostile
from benchmarks.service.hostile import main
from tests.hostile.attacks import Attack, Limits, Seen, Target, framing
from tests.hostile.attacks.target import judged
from tests.hostile.attacks.wire import LIVEZ, parsed
from tests.hostile.livez import Answered, liveness
from tests.hostile.measuring import Row, judge

QUIET: Row = {
    "attack": "nothing",
    "livez_ms_max": 99.0,
    "rss_mb_before": 100.0,
    "rss_mb_peak": 149.0,
    "rss_mb_after": 109.0,
    "ok": True,
    "rss_mb_bound": 150.0,
    "livez_ms_p99": 1.0,
    "livez_asked": 100,
    "livez_failed": 0,
    "livez_refused": 0,
    "descriptors_before": 20,
    "descriptors_after": 28,
    "log_kb": 0.0,
    "seconds": 1.0,
    "died": False,
    "stopped": "",
    "failed": [],
    "told": "nothing",
}


def nothing(target: Target) -> Seen:
    return Seen(True, "nothing")


PLAIN = Attack(nothing)


FILLS, BOUNDED = Attack(nothing, fills=True), Attack(nothing, bound_mb=50)


@pytest.mark.parametrize(
    ("attack", "changed", "failed"),
    [
        (PLAIN, {}, []),
        (PLAIN, {"died": True}, ["died"]),
        (PLAIN, {"stopped": "3000 MB"}, ["expected"]),
        (PLAIN, {"rss_mb_peak": 150.0}, []),
        (PLAIN, {"rss_mb_peak": 151.0}, ["peak"]),
        (PLAIN, {"rss_mb_after": 111.0}, ["after"]),
        (PLAIN, {"descriptors_after": 29}, ["descriptors"]),
        (PLAIN, {"livez_ms_max": 101.0}, ["livez"]),
        (PLAIN, {"livez_failed": 1}, ["livez unanswered"]),
        (PLAIN, {"livez_refused": 1}, ["livez unanswered"]),
        (FILLS, {"livez_refused": 5}, []),
        (FILLS, {"livez_failed": 5}, ["livez unanswered"]),
        (BOUNDED, {"rss_mb_after": 149.0}, []),
        (BOUNDED, {"rss_mb_after": 151.0}, ["after"]),
    ],
)
def test_each_part_of_the_rule_counts(attack: Attack, changed: dict[str, Any], failed: list[str]) -> None:
    """An attack on connections may have new ones refused, and what an attack may take the service may keep."""
    row: Row = QUIET | changed  # type: ignore[assignment]  # rows of a parametrised test
    assert judge(row, True, attack) == failed
    assert set(judge(row, False, attack)) == {"expected", *failed}


def test_livez_that_is_not_answered_counts_with_the_time_out() -> None:
    found = liveness([Answered(1.0), Answered(2.0), Answered(5000.0, failed=True), Answered(3.0, refused=True)])
    assert (found.max_ms, found.requests, found.failed, found.refused) == (5000.0, 4, 1, 1)


# -- the command ----------------------------------------------------------------------------------------------------------


def test_an_unknown_attack_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--attacks", "nothing,sabotage"])
    assert "--attacks: got sabotage, expected some of nothing, endless-header" in capsys.readouterr().err


@pytest.mark.parametrize(("failed", "code"), [([], 0), (["peak"], 1)])
def test_the_exit_code_says_whether_every_row_is_ok(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def made_up(attack: Attack, models: Path, log: Path) -> Row:
        asked.append(attack.name)
        own = failed if attack.name == "churned" else []
        return QUIET | {"attack": attack.name, "failed": own, "ok": not own}

    monkeypatch.setattr(hostile, "attack_sample", made_up)
    written = tmp_path / "rows.json"
    assert main(["--models", str(tmp_path), "--attacks", "churned,endless-url", "--json", str(written)]) == code
    rows = json.loads(written.read_text())["rows"]
    assert [row["attack"] for row in rows] == asked == ["churned", "endless-url"]
    assert {"attack", "livez_ms_max", "rss_mb_before", "rss_mb_peak", "rss_mb_after", "ok"} <= set(rows[0])
    assert ("NOT OK (peak)" in capsys.readouterr().out) == bool(failed)


# -- connections ----------------------------------------------------------------------------------------------------------

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


def test_answers_are_told_apart() -> None:
    chunked = b"HTTP/1.1 413 Large\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    data = b"HTTP/1.1 100 Continue\r\n\r\n" + OK + chunked + OK[:-1]
    assert [(answer.status, answer.body) for answer in parsed(data)] == [(200, b"hi"), (413, b"abc")]
    for cut in range(len(OK)):
        assert parsed(OK[:cut], ended=True) == []


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    data = b"HTTP/1.1 400 Bad\r\nConnection: close\r\n\r\nInvalid"
    assert parsed(data) == []
    assert [answer.body for answer in parsed(data, ended=True)] == [b"Invalid"]


def test_outcomes_are_counted_and_judged() -> None:
    outcomes = ["408", "closed", "408"]
    told = "2 × 408, 1 × closed, expected 408 or closed"
    assert judged(outcomes, {"closed", "408"}) == (True, told)
    assert judged(outcomes, {"closed", "408"}, "so: ", held=False) == (False, f"so: {told}")
    assert not judged(outcomes, {"408"}).ok
    assert judged([], {"408"}) == (False, "nothing, expected 408")


@contextmanager
def made_up(behaviour: Callable[[socket.socket], None]) -> Iterator[Target]:
    """A server that does this to every connection."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listening:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection = listening.accept()[0]
                    threading.Thread(target=one, args=(connection,), daemon=True).start()

        def one(connection: socket.socket) -> None:
            with suppress(OSError), connection:
                behaviour(connection)

        threading.Thread(target=serve, daemon=True).start()
        target = Target(listening.getsockname()[1], ["item-0"], [], "column", Limits(head_timeout_s=0.1, body_timeout_s=0.1))
        yield target
        target.close()
        listening.shutdown(socket.SHUT_RDWR)


def answer_all(connection: socket.socket) -> None:
    """Answer 200 to whatever looks like the end of a head, for ever."""
    while data := connection.recv(1 << 16):
        connection.sendall(OK * data.count(b"\r\n\r\n"))


def answer_once_and_close(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    connection.sendall(OK)


def test_a_server_that_takes_ambiguous_messages_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "SLACK_S", 0.1)
    message = framing.WRONG["two lengths"]
    with made_up(answer_all) as target:
        assert "the connection is open" in str(framing.wrong(target, message))
        assert "expected [200, 200]" in str(framing.right(target, LIVEZ, [200, 200]))
        assert framing.right(target, LIVEZ * 2, [200, 200]) is None
    with made_up(answer_once_and_close) as target:
        assert "answered [200]" in str(framing.wrong(target, message))
