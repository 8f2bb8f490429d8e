"""Connections themselves: silent, idle, half-closed, and opened and reset as fast as it goes."""

from __future__ import annotations

import contextlib
import resource

from tests.hostile.attacks.target import SLACK_S, STALL_S, Seen, Target
from tests.hostile.attacks.wire import LIVEZ, Wire, post

SILENT = 1500
"""More than the attacked service may have descriptors."""
DESCRIPTORS = 1024


def _affordable(count: int) -> int:
    """So many connections, or what this process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count + 200:
        soft = min(count + 200, hard) if hard != resource.RLIM_INFINITY else count + 200
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(count, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200)


def silent_connections(target: Target) -> Seen:
    """More connections than the service has descriptors, on which nothing is said: they are ended, and then it answers as before."""
    wires = target.connect_many(_affordable(SILENT))
    return _let_go(target, wires, target.limits.head_timeout_s)


def idle_connections(target: Target) -> Seen:
    """As many that ask once and then keep their connection."""
    wires = target.connect_many(_affordable(SILENT))
    for wire in wires:
        wire.push(LIVEZ)
    return _let_go(target, wires, max(target.limits.keep_alive_s, target.limits.head_timeout_s))


def _let_go(target: Target, wires: list[Wire], within_s: float) -> Seen:
    """Those in the kernel's queue are accepted, and so ended, after the first ones: the time-out runs anew, up to three times."""
    left = wires
    for more_s in (SLACK_S, STALL_S, STALL_S, STALL_S):
        if left and not target.stop.is_set():
            target.hold(left, within_s + more_s)
            left = [wire for wire in left if not wire.given_up()]
    return _as_before(target, f"{len(left)} of {len(wires)} connections still open", not left)


def _as_before(target: Target, told: str, ok: bool) -> Seen:
    """And /livez is answered on a new connection."""
    found = target.ask(LIVEZ, 5)
    return Seen(ok and found is not None and found.status == 200, f"{told}; /livez afterwards: {found and found.status}")


def half_closed(target: Target) -> Seen:
    """Clients that close their sending half: after a whole request, inside a head and inside a body. Nobody is left waiting."""
    whole = post(target.retrieval())
    sent = [whole, whole[:40], whole[:-5], b"", LIVEZ * 3, LIVEZ[:-1]]
    wires = target.connect_many(240)
    for i, wire in enumerate(wires):
        wire.send(sent[i % len(sent)])
        wire.no_more()
    within_s = max(target.limits.head_timeout_s, target.limits.body_timeout_s) + SLACK_S
    ended = [wire.ends(within_s if i < len(sent) else STALL_S) for i, wire in enumerate(wires)]
    return Seen(bool(wires) and all(ended), f"{sum(ended)} of {len(wires)} ended within {within_s:g} s")


def churned(target: Target) -> Seen:
    """Connections that are opened and reset, at any point of a request."""
    whole, count = post(target.retrieval()), 0
    cuts = (0, 1, 30, len(whole) // 2, len(whole))
    for number in target.spell():
        with contextlib.suppress(OSError):
            wire = Wire(target.port)
            wire.push(whole[: cuts[number % len(cuts)]])
            wire.reset()
            count += 1
    return _as_before(target, f"{count} connections reset", count > 100)
