"""Well-formed requests that are meant to cost: distinct filters, names and beams, the largest searches, explanations."""

from __future__ import annotations

import re
import time

from tests.hostile.attacks.target import Seen, Target, tally
from tests.hostile.attacks.wire import LIVEZ, Wire, post

REFUSED_OR_LATE = {"200", "429", "503", "504"}


def distinct_filters(target: Target) -> Seen:
    """Filters that were never seen: each makes a mask."""
    outcomes: list[str] = []
    give_up, number = time.monotonic() + target.spell_s, 0
    wire = target.connect()
    while time.monotonic() < give_up and not target.stop.is_set():
        filters = {target.filter_column: [f"value-{number}", f"other-{number}"]}
        outcomes.append(_ask(wire, post(target.retrieval(exclude_filter=filters))))
        number += 1
        if wire.ended:
            wire = target.connect()
    return Seen(bool(outcomes) and set(outcomes) <= REFUSED_OR_LATE, tally(outcomes))


def unknown_names(target: Target) -> Seen:
    """Models, paths, methods and request ids that nobody has: what the metrics hold does not grow."""
    wire = target.connect()
    before = _series(wire)
    outcomes = []
    for i in range(1500):
        if target.stop.is_set():
            break
        if wire.ended:
            wire = target.connect()
        match i % 4:
            case 0:
                request = post(target.retrieval(model=f"model-{i}"))
            case 1:
                request = f"GET /models/name-{i}/items?prefix={'p' * 100} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
            case 2:
                request = LIVEZ.replace(b"livez", b"path-%d" % i)
            case _:
                request = LIVEZ.replace(b"GET", b"PUT").replace(b"Host", b"X-Request-Id: id-%d\r\nHost" % i)
        outcomes.append(_ask(wire, request))
    if wire.ended:
        wire = target.connect()
    after = _series(wire)
    ok = set(outcomes) <= {"404", "405"} and 0 < after <= before + 50
    return Seen(ok, f"{tally(outcomes)}; {before} series of metrics before, {after} after")


def heavy_searches(target: Target) -> Seen:
    """Sixteen clients with the widest beams and most queries at once."""
    request = post(target.retrieval(256, 10, beam_size=1000))
    wires = target.connect_many(16)
    outcomes: list[str] = []
    give_up = time.monotonic() + target.spell_s
    for wire in wires:
        wire.send(request)
    while time.monotonic() < give_up and not target.stop.is_set():
        for i, wire in enumerate(wires):
            found = wire.answers(1, 0.02)
            if found or wire.ended:
                outcomes.append(str(found[0].status) if found else "closed")
                wire.held.clear()
                if wire.ended:
                    wires[i] = wire = target.connect()
                wire.send(request)
    return Seen(bool(outcomes) and set(outcomes) <= REFUSED_OR_LATE, tally(outcomes))


def explanations(target: Target) -> Seen:
    """Explained searches with every beam size: graphs of their own are built for them."""
    outcomes = []
    give_up = time.monotonic() + 2 * target.spell_s
    for beam_size in (1, 3, 9, 33, 65, 129, 257, 513, 999):
        for queries in (1, 8):
            if time.monotonic() < give_up and not target.stop.is_set():
                wire = target.connect()
                wire.send(post(target.retrieval(queries, 10, beam_size=beam_size, explain=True)))
                outcomes.append(wire.outcome(30))
                wire.close()
    return Seen(bool(outcomes) and set(outcomes) <= REFUSED_OR_LATE, tally(outcomes))


def _ask(wire: Wire, request: bytes) -> str:
    wire.held.clear()
    wire.send(request)
    return wire.outcome(10)


def _series(wire: Wire) -> int:
    """Samples in the metrics."""
    wire.held.clear()
    wire.send(LIVEZ.replace(b"livez", b"metrics"))
    found = wire.answers(1, 10)
    return len(re.findall(rb"^\w", found[0].body, re.MULTILINE)) if found else 0
