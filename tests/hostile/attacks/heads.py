"""Heads without end, and heads that drip."""

from __future__ import annotations

from tests.hostile.attacks.target import SLACK_S, STALL_S, Seen, Target, drip, flood, judged

MOST = 400 << 20
"""Bytes of a head that is offered."""
TAKEN = 16 << 20
"""A service that stops reading has taken no more than this; what is beyond its own limit lies in the kernel's buffers."""
BLOCK = b"x" * (1 << 20)


GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"


def endless_header(target: Target) -> Seen:
    """It should be refused, before TAKEN bytes, in an answer that a client can read."""
    wire = target.connect()
    wire.send(GET + b"X-Long: ")
    (sent,) = flood(target, [wire], BLOCK, MOST)
    outcome = wire.outcome(5)
    ended = wire.ends(SLACK_S)
    return judged([outcome], {"431"}, f"after {sent / 1e6:.1f} MB, connection {'ended' if ended else 'open'}: ", sent < TAKEN and ended)


def dripping_heads(target: Target) -> Seen:
    """A hundred heads of which a byte comes four times a second."""
    wires = target.send_many(100, GET + b"X-Slow: ")
    drip(target, wires, b"x", 0.25, target.limits.head_timeout_s + SLACK_S)
    outcomes = [wire.outcome(0) for wire in wires]
    return judged(outcomes, {"408"}, held=all(wire.ends(STALL_S) for wire in wires))
