"""A service as a target: where it is, its limits, bodies for it, and what is done on many connections to it at once."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from tests.hostile.attacks.wire import Answer, Wire, ready

SLACK_S = 4.0
"""How much later than a time-out of the service its consequence may be seen: a busy machine must not decide."""
STALL_S = 1.0
"""A connection that takes no byte for so long is not being read."""
WIDE = 500
"""A beam that finds a thousand items in a binary tree."""


class Seen(NamedTuple):
    """Whether a service did what it should under an attack, and what it did."""

    ok: bool
    told: str


@dataclass(frozen=True)
class Limits:
    """Settings of the attacked service, under the names of service/settings.py."""

    head_timeout_s: float = 3.0
    keep_alive_s: float = 3.0
    body_timeout_s: float = 3.0
    write_timeout_s: float = 4.0
    stream_idle_s: float = 4.0
    max_connections: int = 512
    max_answer_values: int = 200_000
    mask_cache_bytes: int = 64 << 20

    @property
    def write_key(self) -> str:
        return "a-write-key-that-leaked"

    def environment(self, writes: bool = False) -> dict[str, str]:
        """writes: whether the live catalogue may be written to."""
        own = {f"ESPALIER_{name.upper()}": f"{value}" for name, value in vars(self).items()}
        return own | ({"ESPALIER_WRITE_KEYS": self.write_key} if writes else {})


@dataclass
class Target:
    """Where to attack and with what.

    ids, fields  items of the catalogue, and the columns of its table, with which answers become large
    spell_s      how long an attack goes on that has no end of its own
    stop         set when the attack has to end: its time is up, or the service takes too much memory
    """

    port: int
    ids: Sequence[str]
    fields: Sequence[str]
    filter_column: str
    limits: Limits = field(default_factory=Limits)
    model: str = "debian-depends"
    spell_s: float = 6.0
    stop: threading.Event = field(default_factory=threading.Event)
    wires: list[Wire] = field(default_factory=list)

    def connect(self, receive_buffer: int | None = None) -> Wire:
        """A new connection. Raises OSError where there is none to be had."""
        wire = Wire(self.port, receive_buffer)
        self.wires.append(wire)
        return wire

    def connect_many(self, count: int, receive_buffer: int | None = None) -> list[Wire]:
        """As many of so many connections as are to be had."""
        found = []
        for _ in range(count):
            if self.stop.is_set():
                break
            with contextlib.suppress(OSError):
                found.append(self.connect(receive_buffer))
        return found

    def send_many(self, count: int, request: bytes, receive_buffer: int | None = None, within_s: float = 5.0) -> list[Wire]:
        """As many connections, with the same bytes sent on each."""
        wires = self.connect_many(count, receive_buffer)
        for wire in wires:
            if not self.stop.is_set():
                wire.send(request, within_s)
        return wires

    def ask(self, request: bytes, within_s: float = 10.0) -> Answer | None:
        """The answer to a request on a connection of its own; None where there is none."""
        wire = self.connect()
        wire.send(request)
        found = wire.answers(1, within_s)
        wire.close()
        return found[0] if found else None

    def close(self) -> None:
        """End all connections."""
        for wire in self.wires:
            wire.close()
        self.wires.clear()

    def spell(self, times: float = 1.0) -> Iterator[int]:
        """0, 1, 2 and so on, for as long as an attack lasts that has no end of its own."""
        give_up = time.monotonic() + times * self.spell_s
        for number in itertools.count():
            if self.stop.is_set() or time.monotonic() > give_up:
                return
            yield number

    def wait(self, seconds: float) -> None:
        """Hold what is held, unless told to stop."""
        self.stop.wait(seconds)

    def hold(self, wires: Sequence[Wire], seconds: float) -> None:
        """Hold connections and read nothing, until the other side has given all of them up or the time is over."""
        give_up = time.monotonic() + seconds
        while time.monotonic() < give_up and not self.stop.is_set() and not all(wire.given_up() for wire in wires):
            self.wait(0.05)

    def retrieval(self, queries: int = 1, m: int = 10, fields: Sequence[str] = (), **rest: Any) -> bytes:
        """A body of POST /retrieve."""
        histories = [{"history": [self.ids[(7 * i + j) % len(self.ids)] for j in range(3)]} for i in range(queries)]
        return orjson.dumps({"queries": histories, "m": m, "fields": list(fields), "timeout_ms": 60_000, **rest})

    def largest(self) -> bytes:
        """A body whose answer is about as large as the service permits, however it counts the columns of a row."""
        columns = len(self.fields) + 2
        queries = min(256, int(0.99 * self.limits.max_answer_values / (1000 * columns)))
        return self.retrieval(queries, 1000, self.fields, beam_size=WIDE)

    def too_large(self) -> bytes:
        """A body of a few kilobytes that asks for 256 × 1000 items with all their fields."""
        return self.retrieval(256, 1000, self.fields, beam_size=WIDE)


def flood(target: Target, wires: Sequence[Wire], block: bytes, most: int, until_answered: bool = True) -> list[int]:
    """Send `block` over and over, up to `most` bytes a connection; the bytes that each took.

    until_answered  stop on a connection when something is answered there; otherwise nothing is read
    Ends early when the target says stop, or when no connection has taken a byte for STALL_S.
    """
    view = memoryview(block)
    sent = dict.fromkeys(wires, 0)
    answered: set[Wire] = set()
    moved = time.monotonic()
    while not target.stop.is_set() and time.monotonic() - moved < STALL_S:
        going = [wire for wire in wires if not wire.ended and wire not in answered and sent[wire] < most]
        if not going:
            break
        readable, writable = ready(going if until_answered else [], going, 0.1)
        answered |= set(readable)
        for wire in writable:
            if wire not in answered and (taken := wire.push(view[sent[wire] % len(block) :])):
                sent[wire] += taken
                moved = time.monotonic()
    return [sent[wire] for wire in wires]


def drip(target: Target, wires: Sequence[Wire], piece: bytes, every_s: float, seconds: float) -> None:
    """Send a piece on every connection from time to time, until all have ended or the time is over. Reads what comes back."""
    give_up = time.monotonic() + seconds
    while not target.stop.is_set() and time.monotonic() < give_up and not all(wire.ended for wire in wires):
        for wire in wires:
            if not wire.ended:
                wire.push(piece)
                wire.pull()
        target.wait(every_s)


def judged(outcomes: Iterable[str], allowed: Iterable[str], before: str = "", held: bool = True) -> Seen:
    """Whether there are outcomes, and none but those that are allowed. held: what else must be true."""
    found, wanted = list(outcomes), set(allowed)
    ok = held and bool(found) and set(found) <= wanted
    return Seen(ok, f"{before}{tally(found)}, expected {' or '.join(sorted(wanted))}")


def tally(outcomes: Iterable[object]) -> str:
    """`2 × 408, 1 × silence`."""
    return ", ".join(f"{count} × {outcome}" for outcome, count in sorted(Counter(map(str, outcomes)).items())) or "nothing"
