"""Puts items at a rate, and asks each worker for each item at once, over connections to that worker.

A retrieval that is refused (429) is sent again after PAUSE_S, as clients do, and its pause counts in the time until the item is visible.
Retry-After is not followed: it is whole seconds, and one refusal would hide how soon the item is found.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from benchmarks.service.serving import JSON, connections_to, exchange
from loadtest.queries import Query
from loadtest.writes import WRITTEN

THREADS = 12
PATIENCE_S = 2.0
"""How long a worker is asked again for an item that it does not know."""
PAUSE_S = 0.05
"""Between two retrievals for an item: about the mean of the first random pause of `espalier_client`."""

Event = list[str] | list[float] | dict[int, float] | str


class Item(NamedTuple):
    """An item to put: its id, its evidence as a client takes it, and as the service takes it."""

    id: str
    event: Any
    query: dict[str, Any]


def items_of(queries: Sequence[Query], prefix: str, count: int, seed: int) -> list[Item]:
    """Items with queries as their evidence; of a history only a random part, so that few items have the same."""
    rng = np.random.default_rng(seed)
    items = []
    for n in range(count):
        query = queries[int(rng.integers(len(queries)))]
        values: Any = query.values
        if query.kind == "history":
            keeps = rng.random(len(values)) < 0.7
            values = tuple(item for item, is_kept in zip(values, keeps, strict=True) if is_kept) or values
        event = values if not isinstance(values, dict) else dict(zip(values["indices"], values["values"], strict=True))
        items.append(Item(f"{prefix}{n}", event, {query.kind: list(values) if isinstance(values, tuple) else values}))
    return items


@dataclass
class Probed:
    """The results of a run.

    visible_s, answered_s  from the request of a PUT until both workers had answered with the item, and until its own answer
    sequences              of the acknowledged items
    found_at_once          items that each worker's first answer after the acknowledgement held
    found_later            those that took more answers
    seen                   those that every worker knows, but that were never among the best
    invisible              those that a worker did not know after PATIENCE_S
    refused                retrievals that were refused (429) or late; they were sent again after a pause
    asked                  retrievals of these probes, explanations among them
    """

    visible_s: list[float] = field(default_factory=list)
    answered_s: list[float] = field(default_factory=list)
    sequences: dict[str, int] = field(default_factory=dict)
    statuses: Counter[int] = field(default_factory=Counter)
    found_at_once: int = 0
    found_later: int = 0
    seen: int = 0
    invisible: int = 0
    refused: int = 0
    asked: int = 0
    per_s: float = 0.0


def percentile_ms(seconds: Sequence[float], percent: float) -> float:
    return float(np.percentile(seconds, percent) * 1e3) if seconds else float("nan")


class Prober:
    """Each thread has a connection to every worker, and one for writes. A context manager that closes them."""

    def __init__(self, address: tuple[str, int], model: str, key: str, workers: int, m: int) -> None:
        self._address, self._model, self._m = address, model, m
        self._headers = JSON | {"Authorization": f"Bearer {key}"}
        self._readers = connections_to(address, workers, THREADS)
        self._lock = threading.Lock()

    def __enter__(self) -> Prober:
        return self

    def __exit__(self, *_: object) -> None:
        for readers in self._readers:
            for reader in readers:
                reader.close()

    def run(self, items: Sequence[Item], per_s: float) -> Probed:
        """Put the items, evenly paced, and ask for each. Blocks."""
        probed, due = Probed(), iter(enumerate(items))
        began = time.perf_counter()

        def work(readers: Sequence[http.client.HTTPConnection]) -> None:
            writer = http.client.HTTPConnection(*self._address, timeout=30)
            try:
                while True:
                    with self._lock:
                        number, item = next(due, (0, None))
                    if item is None:
                        return
                    time.sleep(max(began + number / per_s - time.perf_counter(), 0))
                    self._probe(item, writer, readers, probed)
            finally:
                writer.close()

        with ThreadPoolExecutor(len(self._readers)) as pool:
            list(pool.map(work, self._readers))  # raises what a thread raises
        probed.per_s = len(probed.sequences) / (time.perf_counter() - began)
        return probed

    def _probe(self, item: Item, writer: http.client.HTTPConnection, readers: Sequence[http.client.HTTPConnection], probed: Probed) -> None:
        values = next(iter(item.query.values()))
        sent_s = time.perf_counter()
        status, answer = exchange(writer, "PUT", f"/models/{self._model}/items/{item.id}", {"events": [values]}, self._headers)
        answered_s = time.perf_counter()
        found_first, found_s, refused, retrievals = 0, 0.0, 0, 0
        missing = []
        if status in (200, 201):
            for reader in readers:
                answers, is_found = 0, False
                while not is_found and time.perf_counter() < answered_s + PATIENCE_S:
                    if answers and not self._is_unknown(reader, item):  # known, but not among the best: asking again is no use
                        break
                    found_or_none = self._finds(reader, item)
                    retrievals += 1 + (answers > 0)
                    refused += found_or_none is None
                    answers += found_or_none is not None
                    is_found = bool(found_or_none)
                    if not is_found:
                        time.sleep(PAUSE_S)
                found_s = max(found_s, time.perf_counter() - sent_s)
                found_first += is_found and answers == 1
                if not is_found:
                    missing.append(reader)
        unknown = any(self._is_unknown(reader, item) for reader in missing)
        with self._lock:
            probed.statuses[status] += 1
            probed.refused += refused
            probed.asked += retrievals
            if status in WRITTEN:
                probed.sequences[item.id] = answer["sequence"]
                probed.answered_s.append(answered_s - sent_s)
            if status not in (200, 201):
                return
            if missing:
                probed.invisible += unknown
                probed.seen += not unknown
                return
            probed.visible_s.append(found_s)
            probed.found_at_once += found_first == len(readers)
            probed.found_later += found_first < len(readers)

    def _finds(self, reader: http.client.HTTPConnection, item: Item) -> bool | None:
        """Whether an answer holds the item; None if there was no answer."""
        status, answer = exchange(reader, "POST", "/retrieve", {"model": self._model, "queries": [item.query], "m": self._m})
        return any(entry["id"] == item.id for entry in answer["results"][0]["items"]) if status == 200 else None

    def _is_unknown(self, reader: http.client.HTTPConnection, item: Item) -> bool:
        body = {"model": self._model, "queries": [item.query], "m": self._m, "explain_items": [item.id]}
        while True:
            status, answer = exchange(reader, "POST", "/retrieve", body)
            if status == 200:
                return bool(answer["results"][0]["explain"]["items"][0]["outcome"] in ("unknown", "deleted"))
            time.sleep(PAUSE_S)


def lost_of(address: tuple[str, int], model: str, key: str, probed: Probed) -> int:
    """How many acknowledged items are missing or have another sequence than was acknowledged."""
    connection = http.client.HTTPConnection(*address, timeout=30)
    lost_items = 0
    for item, sequence in probed.sequences.items():
        status, document = exchange(connection, "GET", f"/models/{model}/items/{item}", None, {"Authorization": f"Bearer {key}"})
        lost_items += status != 200 or document["sequence"] != sequence
    connection.close()
    return lost_items
