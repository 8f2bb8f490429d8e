"""Well-formed requests that are meant to cost: distinct filters, names and beams, the largest searches, explanations."""

from __future__ import annotations

import re

from tests.hostile.attacks.target import Seen, Target, judged
from tests.hostile.attacks.wire import LIVEZ, post

REFUSED_OR_LATE = {"200", "429", "503", "504"}


def distinct_filters(target: Target) -> Seen:
    """Filters that were never seen: each makes a mask."""
    wire, outcomes = target.connect(), []
    for number in target.spell():
        filters = {target.filter_column: [f"value-{number}", f"other-{number}"]}
        outcomes.append(wire.ask(post(target.retrieval(exclude_filter=filters))))
        if wire.ended:
            wire = target.connect()
    return judged(outcomes, REFUSED_OR_LATE)


def unknown_names(target: Target) -> Seen:
    """Models, paths, methods and request ids that nobody has: what the metrics hold does not grow."""
    wire, outcomes, before = target.connect(), [], _series(target)
    for i in range(0, 1500, 4):
        for request in (
            post(target.retrieval(model=f"model-{i}")),
            LIVEZ.replace(b"livez", b"models/name-%d/items?prefix=%b" % (i, b"p" * 100)),
            LIVEZ.replace(b"livez", b"path-%d" % i),
            LIVEZ.replace(b"GET", b"PUT").replace(b"Host", b"X-Request-Id: id-%d\r\nHost" % i),
        ):
            if wire.ended:
                wire = target.connect()
            if not target.stop.is_set():
                outcomes.append(wire.ask(request))
    after = _series(target)
    return judged(outcomes, {"404", "405"}, f"{before} series of metrics before, {after} after; ", 0 < after <= before + 50)


def heavy_searches(target: Target) -> Seen:
    """Sixteen clients with the widest beams and most queries at once."""
    request, outcomes = post(target.retrieval(256, 10, beam_size=1000)), []
    wires = target.send_many(16, request)
    for number in target.spell():
        i = number % len(wires)
        found = wires[i].answers(1, 0.02)
        if found or wires[i].ended:
            outcomes.append(str(found[0].status) if found else "closed")
            wires[i].held.clear()
            if wires[i].ended:
                wires[i] = target.connect()
            wires[i].send(request)
    return judged(outcomes, REFUSED_OR_LATE)


def explanations(target: Target) -> Seen:
    """Explained searches with every beam size: graphs of their own are built for them."""
    outcomes = []
    beams = [(beam_size, queries) for beam_size in (1, 3, 9, 33, 65, 129, 257, 513, 999) for queries in (1, 8)]
    for (beam_size, queries), _ in zip(beams, target.spell(2), strict=False):
        found = target.ask(post(target.retrieval(queries, 10, beam_size=beam_size, explain=True)), 30)
        outcomes.append(str(found.status) if found else "silence")
    return judged(outcomes, REFUSED_OR_LATE)


def _series(target: Target) -> int:
    """Samples in the metrics."""
    found = target.ask(LIVEZ.replace(b"livez", b"metrics"))
    return len(re.findall(rb"^\w", found.body, re.MULTILINE)) if found else 0
