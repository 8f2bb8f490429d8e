"""Heads without end: headers, chunk extensions, trailers, and heads that drip."""

from __future__ import annotations

import sys

from tests.hostile.attacks.target import SLACK_S, STALL_S, Seen, Target, drip, flood, judged
from tests.hostile.attacks.wire import head

MOST = 400 << 20
"""Bytes of a head that is offered."""
TAKEN = 16 << 20
"""A service that stops reading has taken no more than this; what is beyond its own limit lies in the kernel's buffers."""
BLOCK = b"x" * (1 << 20)


GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"


def _endless(target: Target, start: bytes, block: bytes, most: int, statuses: set[str], taken: int = TAKEN, ends_s: float = 0) -> Seen:
    """Send a head that goes on and on. It should be refused, before `taken` bytes, in an answer that a client can read.

    ends_s  how much later than at once the connection may end
    """
    wire = target.connect()
    wire.send(start)
    (sent,) = flood(target, [wire], block, most)
    outcome = wire.outcome(5)
    ended = wire.ends(ends_s + SLACK_S)
    return judged([outcome], statuses, f"after {sent / 1e6:.1f} MB, connection {'ended' if ended else 'open'}: ", sent < taken and ended)


def endless_header(target: Target) -> Seen:
    return _endless(target, GET + b"X-Long: ", BLOCK, MOST, {"431"})


def endless_chunk_extension(target: Target) -> Seen:
    """Bytes that mean nothing inside a body. They may come for as long as a body may take."""
    return _endless(target, head(None) + b"1;x=", BLOCK, 2 * MOST, {"400", "408", "413", "431"}, taken=sys.maxsize)


def endless_trailers(target: Target) -> Seen:
    body = target.retrieval()
    start = head(None) + b"%x\r\n" % len(body) + body + b"\r\n0\r\n"
    block, statuses = b"X-Trailer: y\r\n" * 10_000, {"200", "400", "413", "431"}
    return _endless(target, start, block, MOST // 4, statuses, ends_s=target.limits.head_timeout_s)


def dripping_heads(target: Target) -> Seen:
    """A hundred heads of which a byte comes four times a second."""
    wires = target.send_many(100, GET + b"X-Slow: ")
    drip(target, wires, b"x", 0.25, target.limits.head_timeout_s + SLACK_S)
    outcomes = [wire.outcome(0) for wire in wires]
    return judged(outcomes, {"408"}, held=all(wire.ends(STALL_S) for wire in wires))
