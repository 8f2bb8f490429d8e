"""Answers that nobody reads, or too slowly, and requests whose answers would be too large."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tests.hostile.attacks.target import SLACK_S, STALL_S, Seen, Target, judged, tally
from tests.hostile.attacks.wire import Wire, post

CONNECTIONS = 30
LINES = 40
PATIENCE_S = 15.0
"""How long clients try again that are refused for now."""
NOT_NOW = ("429", "503")
"""Refusals with which a service may hold its memory together."""
BEGUN = {"200", "closed", *NOT_NOW}


def too_large_answers(target: Target) -> Seen:
    """256 queries × 1000 items × all fields, on thirty connections that do not read: four kilobytes in, tens of megabytes out."""
    wires = target.connect_many(CONNECTIONS, receive_buffer=4096)
    statuses = insist(target, wires, post(target.too_large()))
    target.hold(wires, STALL_S)
    return judged(statuses, {"422"})


def unread_answers(target: Target) -> Seen:
    """The largest answers that are allowed, on thirty connections that do not read them: they are given up."""
    wires = target.connect_many(CONNECTIONS, receive_buffer=4096)
    statuses = insist(target, wires, post(target.largest()))
    hold_s = target.limits.write_timeout_s + 2 * SLACK_S
    target.hold(wires, hold_s)
    outcomes = [wire.outcome(SLACK_S) for wire in wires if not target.stop.is_set()]
    return judged(outcomes, {"closed", *NOT_NOW}, f"{tally(statuses)}; after {hold_s:g} s unread ", set(statuses) <= BEGUN)


def read_answers(target: Target) -> Seen:
    """The same at once, read: what is allowed is answered, or refused for now."""
    outcomes = []
    for wire in target.send_many(CONNECTIONS, post(target.largest())):
        if not target.stop.is_set():
            outcomes.append(wire.outcome(30))
            wire.held.clear()
    return judged(outcomes, {"200", *NOT_NOW}, held="200" in outcomes)


def sipped_answers(target: Target) -> Seen:
    """The same, read at a few kilobytes a second."""
    wires = target.connect_many(CONNECTIONS, receive_buffer=4096)
    statuses = insist(target, wires, post(target.largest()))
    for _ in target.spell():
        for wire in wires:
            wire.pull(1024)
        target.wait(0.2)
    read = sum(len(wire.held) for wire in wires)
    return judged(statuses, BEGUN, f"{read / 1e3:.0f} kB read of {len(wires)} answers; ", read > 0)


def insist(target: Target, wires: Sequence[Wire], request: bytes) -> list[str]:
    """Send a request on one connection after the other, again where it is refused for now. The statuses, of answers that are not read."""
    give_up, statuses = time.monotonic() + PATIENCE_S, []
    for wire in wires:
        status = "silence"
        while not target.stop.is_set() and not wire.ended:
            wire.send(request)
            status = wire.status(PATIENCE_S) or ("closed" if wire.given_up() else "silence")
            if status not in NOT_NOW or time.monotonic() > give_up:
                break
            wire.held.clear()
            wire.answers(1, STALL_S)
            wire.held.clear()
            target.wait(0.05)
        statuses.append(status)
    return statuses


def unread_streams(target: Target) -> Seen:
    """Ten streams of forty lines with the largest answers that are allowed, which nobody reads."""
    return _unread_streams(target, 10, target.largest(), {"closed"})


def too_large_stream(target: Target) -> Seen:
    """A stream of forty lines whose answers would be too large: refused line by line, it may be read to its end."""
    return _unread_streams(target, 1, target.too_large(), {"closed", "whole"})


def _unread_streams(target: Target, count: int, line: bytes, expected: set[str]) -> Seen:
    wires = target.send_many(count, post((line + b"\n") * LINES, "/retrieve/stream", "application/x-ndjson"), receive_buffer=4096)
    hold_s = target.limits.stream_idle_s + target.limits.write_timeout_s + SLACK_S
    target.hold(wires, hold_s)
    outcomes = []
    for wire in wires:
        wire.until(lambda: False, SLACK_S)
        whole = wire.held.endswith(b"\r\n0\r\n\r\n")
        outcomes.append("whole" if whole else "closed" if wire.ended else "open")
        wire.held.clear()
    return judged(outcomes, expected, f"after {hold_s:g} s unread ")
