"""Clients that put and delete items of a service that is being killed, and what they must find of it afterwards.

Each client has ids of its own, so that it knows what every one of them must be. It repeats an operation that was not answered until it is,
as a caller does. Every put carries a token of its own in the field `title`, by which the journal and answers are compared with what was
acknowledged. Knows HTTP and the journal. Does not know who kills (live_chaos.py).
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from espalier.live.journal import Journal
from espalier.live.operations import Operation

KEY = "a-key-that-only-writes"
TIMEOUT_S = 30.0
RETRY_S = 0.05
"""Between two attempts of an operation."""
EVENTS = (1, 4)
"""Fewest and most histories that an item is put with."""
FILTERED = 500
"""Items that one retrieval is asked for by their titles."""


@dataclass(frozen=True)
class Acknowledged:
    """An operation that was answered 2xx. token: None for a delete."""

    sequence: int
    id: str
    token: str | None


@dataclass
class Client:
    """One client. Its ids begin with its name.

    port      of the service
    model     its name
    histories ids of trained items that users had together, of which events are made
    expected  id → token of its last acknowledged operation, None: deleted
    doubtful  ids whose last operation was not answered before the end
    """

    name: str
    port: int
    model: str
    histories: Sequence[Sequence[str]]
    acknowledged: list[Acknowledged] = field(default_factory=list)
    expected: dict[str, str | None] = field(default_factory=dict)
    doubtful: set[str] = field(default_factory=set)
    refused: list[str] = field(default_factory=list)
    repeated: int = 0
    full: int = 0
    _stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Write until `stop`."""
        rng, number = random.Random(self.name), 0
        while not self._stopped.is_set():
            number += 1
            here = [item for item, token in self.expected.items() if token is not None]
            kind = rng.choices(("insert", "update", "delete", "return"), (5, 3, 1, 1))[0]
            gone = [item for item, token in self.expected.items() if token is None]
            token = f"{self.name}-{number}"
            if kind == "delete" and here:
                self._finish("DELETE", rng.choice(here), None, None)
            elif kind == "update" and here:
                self._finish("PUT", rng.choice(here), token, self.body(rng, token, rng.random() < 0.5))
            else:
                item = rng.choice(gone) if kind == "return" and gone else f"{self.name}/{number}"
                self._finish("PUT", item, token, self.body(rng, token, True))

    def stop(self) -> None:
        self._stopped.set()

    def body(self, rng: random.Random, token: str, has_events: bool) -> dict[str, Any]:
        """A put of an item, with or without evidence."""
        said: dict[str, Any] = {"fields": {"title": token, "section": "games"}}
        if has_events:
            history = rng.choice(self.histories)
            said["events"] = [rng.sample(history, rng.randint(1, len(history))) for _ in range(rng.randint(*EVENTS))]
        return said

    def _finish(self, method: str, item: str, token: str | None, body: dict[str, Any] | None) -> None:
        """Repeat an operation until it is answered."""
        while True:
            status, answer = request(self.port, method, f"/models/{self.model}/items/{quote(item, safe='')}", body)
            if status in (200, 201, 202):
                self.acknowledged.append(Acknowledged(int(answer["sequence"]), item, token))
                self.expected[item] = token
                return
            if status == 507:  # the nodes where it belongs are full: as it should be, and nothing was changed
                self.full += 1
                return
            if 400 <= status < 500 and status not in (408, 429, 499):
                self.refused.append(f"{method} {item}: {status} {answer}")
                return
            if self._stopped.is_set():
                self.doubtful.add(item)
                return
            self.repeated += 1
            time.sleep(RETRY_S)


@dataclass(frozen=True)
class Judgement:
    """What was found of the acknowledged operations.

    lost   not in the journal as they were; or items that are not what their last operation says, by GET or by retrieval
    twice  sequences given to two operations, and operations that were applied twice
    """

    acknowledged: int
    lost: int
    twice: int
    notes: list[str]


def judge(port: int, model: str, file: Path, clients: Sequence[Client], asks: int) -> Judgement:
    """Compare the journal and a service that runs with what was acknowledged. asks: how often each item is asked for, so that all workers
    are."""
    acknowledged = [operation for client in clients for operation in client.acknowledged]
    operations = {operation.sequence: operation for operation in all_of(Journal(file, "read"))}
    notes = [f"not in the journal: {operation}" for operation in acknowledged if not _is(operations.get(operation.sequence), operation)]
    expected = {item: token for client in clients for item, token in client.expected.items() if item not in client.doubtful}
    for _ in range(asks):
        notes += [*_wrong_by_get(port, model, expected), *_wrong_by_retrieval(port, expected)]
    twice = _twice(operations.values(), acknowledged)
    lost = len({note.rpartition(":")[2] for note in notes})
    return Judgement(len(acknowledged), lost, len(twice), (notes + twice)[:20])


def all_of(journal: Journal) -> list[Operation]:
    """All operations of a journal."""
    found: list[Operation] = []
    while page := journal.since(found[-1].sequence if found else 0, 1000):
        found += page
    return found


def _is(stored: Operation | None, operation: Acknowledged) -> bool:
    return stored is not None and (stored.id, token_of(stored)) == (operation.id, operation.token)


def token_of(operation: Operation) -> str | None:
    """The token of a put; None of a delete."""
    return None if operation.kind == "delete" else str((operation.body.fields or {}).get("title"))


def _twice(operations: Iterable[Operation], acknowledged: Sequence[Acknowledged]) -> list[str]:
    given: dict[int, set[tuple[str, str | None]]] = {}
    for done in acknowledged:
        given.setdefault(done.sequence, set()).add((done.id, done.token))
    found = [f"sequence {sequence} of {sorted(map(str, several))}" for sequence, several in given.items() if len(several) > 1]
    puts, last = Counter[str](), dict[str, str]()
    for operation in operations:
        if operation.kind == "put":
            puts[f"{operation.id} {token_of(operation)}"] += 1
        elif last.get(operation.id) == "delete":
            found.append(f"{operation.id} deleted twice")
        last[operation.id] = operation.kind
    return found + [f"{put} applied {count} times" for put, count in puts.items() if count > 1]


def _wrong_by_get(port: int, model: str, expected: dict[str, str | None]) -> list[str]:
    wrong = []
    for item, token in expected.items():
        status, answer = request(port, "GET", f"/models/{model}/items/{quote(item, safe='')}")
        found = answer["fields"]["title"] if status == 200 else None
        if (status, found) != ((404, None) if token is None else (200, token)):
            wrong.append(f"GET says {status} {found} of {token}:{item}")
    return wrong


def _wrong_by_retrieval(port: int, expected: dict[str, str | None]) -> list[str]:
    """Items that a filter on their titles does not find, or finds though they were deleted."""
    wrong, pairs = [], sorted(expected.items())
    for begin in range(0, len(pairs), FILTERED):
        some = pairs[begin : begin + FILTERED]
        titles = [token or "none" for _, token in some]
        query = {"queries": [{"history": []}], "m": 1000, "beam_size": 1000, "filter": {"title": titles}, "fields": ["title"]}
        status, answer = request(port, "POST", "/retrieve", query)
        items = answer["results"][0]["items"] if status == 200 else []
        found = {entry["id"]: entry["fields"]["title"] for entry in items}
        wrong += [f"retrieval ({status}) has {found.get(item)}, not {token}:{item}" for item, token in some if found.get(item) != token]
    return wrong


def found_by_evidence(port: int, file: Path, expected: dict[str, str | None], most: int = 200) -> float:
    """Share of items that are among 50 for the first of the histories that they were put with last."""
    journal, hits, asked = Journal(file, "read"), 0, 0
    for item in [item for item, token in expected.items() if token is not None][:most]:
        stored = journal.latest(item)
        if stored is None or not stored.body.events:
            continue
        status, answer = request(port, "POST", "/retrieve", {"queries": [{"history": stored.body.events[0]}], "m": 50})
        asked += 1
        hits += status == 200 and any(entry["id"] == item for entry in answer["results"][0]["items"])
    return hits / max(asked, 1)


def request(
    port: int, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S
) -> tuple[int, Any]:
    """Status and JSON, of lines a list, on a connection of its own; status 0 where there was no whole answer. body: JSON, or bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        given = (
            {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {KEY}"} if "/items/" in path else {}) | dict(headers or {})
        )
        connection.request(method, path, body if body is None or isinstance(body, bytes) else json.dumps(body), given)
        answer = connection.getresponse()
        content, kind = answer.read(), str(answer.headers["content-type"])
        if "ndjson" in kind:
            return answer.status, [json.loads(line) for line in content.splitlines()]
        return answer.status, json.loads(content) if "json" in kind else content.decode()
    except (OSError, http.client.HTTPException, ValueError):
        return 0, None
    finally:
        connection.close()
