"""Many requests on one connection before the first answer was read."""

from __future__ import annotations

from tests.hostile.attacks.target import SLACK_S, Seen, Target, flood
from tests.hostile.attacks.wire import LIVEZ, parsed, post, ready

CONNECTIONS = 5
MOST = 77 << 20
"""Bytes of requests that are offered on each connection."""
TAKEN = 16 << 20
"""Requests that lie in the kernel's buffers once the service has stopped reading, and what it read before."""


def pipelined_posts(target: Target) -> Seen:
    """Requests without end, whose answers nobody reads: the service should stop reading, and then give the connection up."""
    wires = target.connect_many(CONNECTIONS, receive_buffer=4096)
    sent = flood(target, wires, post(target.retrieval()) * 500, MOST, until_answered=False)
    target.hold(wires, target.limits.write_timeout_s + SLACK_S)
    ended = [wire.ends(SLACK_S) for wire in wires]
    ok = len(wires) == CONNECTIONS and max(sent, default=0) < TAKEN and all(ended)
    return Seen(ok, f"took {', '.join(f'{size / 1e6:.1f}' for size in sent)} MB unread, ended {sum(ended)} of {len(wires)} connections")


def pipelined_and_read(target: Target) -> Seen:
    """Clients that pipeline and read: they get every answer, in order, and others theirs meanwhile."""
    wires = target.connect_many(CONNECTIONS)
    block = memoryview(LIVEZ * 5000)
    sent = dict.fromkeys(wires, 0)
    statuses: list[int] = []
    for _ in target.spell():
        going = [wire for wire in wires if not wire.ended]
        readable, writable = ready(going, going, 0.1)
        for wire in writable:
            sent[wire] += wire.push(block[sent[wire] % len(block) :])
        for wire in readable:
            wire.pull()
            if len(wire.held) > 1 << 20:
                whole = wire.held.rfind(b"HTTP/1.1 ")
                statuses += [answer.status for answer in parsed(bytes(wire.held[:whole]))]
                del wire.held[:whole]
    for wire in wires:
        statuses += [answer.status for answer in parsed(bytes(wire.held))]
    ok = bool(statuses) and set(statuses) == {200}
    return Seen(ok, f"{len(statuses)} answers, statuses {sorted(set(statuses))}, {sum(sent.values()) / 1e6:.1f} MB of requests")
