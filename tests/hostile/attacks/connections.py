"""Connections themselves: silent, idle, half-closed, and opened and reset as fast as it goes."""

from __future__ import annotations

import contextlib
import resource
import time

from tests.hostile.attacks.target import SLACK_S, STALL_S, Seen, Target, tally
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
    return _let_go(target, wires, target.limits.head_timeout_s, f"{len(wires)} silent connections")


def idle_connections(target: Target) -> Seen:
    """As many that ask once and then keep their connection."""
    wires = target.connect_many(_affordable(SILENT))
    for wire in wires:
        wire.push(LIVEZ)
    return _let_go(target, wires, max(target.limits.keep_alive_s, target.limits.head_timeout_s), f"{len(wires)} idle connections")


def _let_go(target: Target, wires: list[Wire], within_s: float, what: str) -> Seen:
    """Those in the kernel's queue are accepted, and so ended, after the first ones: the time-out runs anew."""
    target.hold(wires, within_s + SLACK_S)
    open_ones = [wire for wire in wires if not wire.given_up()]
    rounds = 1
    while open_ones and rounds < 4 and not target.stop.is_set():
        target.hold(open_ones, within_s + STALL_S)
        open_ones = [wire for wire in open_ones if not wire.given_up()]
        rounds += 1
    outcome = _asked(target)
    return Seen(not open_ones and outcome == "200", f"{len(open_ones)} of {what} still open; /livez afterwards: {outcome}")


def _asked(target: Target) -> str:
    try:
        wire = target.connect()
    except OSError as error:
        return str(error)
    wire.send(LIVEZ)
    return wire.outcome(5)


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
    whole = post(target.retrieval())
    cuts = (0, 1, 30, len(whole) // 2, len(whole))
    give_up, count = time.monotonic() + target.spell_s, 0
    while time.monotonic() < give_up and not target.stop.is_set():
        with contextlib.suppress(OSError):
            wire = Wire(target.port)
            wire.push(whole[: cuts[count % len(cuts)]])
            wire.reset()
            count += 1
    outcome = _asked(target)
    return Seen(outcome == "200" and count > 100, f"{count} connections reset; /livez afterwards: {tally([outcome])}")
