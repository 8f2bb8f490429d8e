"""Random writes, reads and failures of a service with live items for some minutes, judged against one dictionary.

    python -m benchmarks.live_history --minutes 10 --json FILE [--seed 0]

Three workers serve two versions of a copy of the sample. Clients put, delete and read few items, so that they meet; an administrator
publishes versions, changes the default to and fro, and removes items from answers; workers are killed and stopped, and the whole service is
killed or restarted. After each round, with nothing written for a second, every worker is asked for every item of every version. What all
saw is judged (history_judge.py). The seed fixes all random choices, but not the timing of threads and processes. Knows HTTP and processes.
"""

from __future__ import annotations

import http.client
import itertools
import json
import math
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from benchmarks.report_file import SAMPLE, command_line, write_report
from benchmarks.service.history_judge import TRANSIENT, WRITTEN, Event, Logged, Violation, judged, state_of
from benchmarks.service.serving import Process, connections_to, exchange, request, settings
from benchmarks.service.shard_fleet import copied_version
from espalier.bundle import Bundle, find_versions

KEY = "a-key-of-an-administrator"
HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
WORKERS, CLIENTS = 3, 6
ROUND_S = 10.0
QUIET_S = 1.0
"""Time without writes after which all workers must agree."""
TIMEOUT_S, CHANGE_S, STOPPED_S = 15.0, 120.0, 3.0
"""Time limits of a request, and of one that changes the served versions; the longest stop of a worker, which must be shorter."""
WAIT_S = 300.0
"""Time limit for all workers to be ready."""
PAUSE_S = 0.2
"""After a request without an answer, and between two reads of the feed."""
NEW, OLD = 40, 20
"""Items that come and go, and trained ones."""
LINES = 30
SECTION = "history"
"""The section of all these items, so that one retrieval finds them."""
STEPS = {"put": 34, "delete": 10, "bulk": 6, "get": 24, "retrieve": 14, "read own": 12}
CHANGES = ("publish", "publish", "unload", "unload", "default", "default", "hide", "show", "hide", "show")
FAILURES = ("kill", "kill", "stop", "stop", "restart", "restart")
Ask = Callable[[str, str, Any, Mapping[str, str]], tuple[int, Any]]


def served_copy(folder: Path, workers: int, log: Path | None = None) -> tuple[Path, Process]:
    """A models folder with a copy of the sample in a folder, and the service over it, not started yet. log: another place for its log."""
    shutil.copytree(SAMPLE.parent, folder / "models" / SAMPLE.parent.name)
    keys = {"admin_keys": KEY, "write_keys": "a-key-that-only-writes"}  # without which writing is off
    environment = settings(folder / "models", log_level="INFO", **keys)
    return folder / "models", Process(["service", "--workers", str(workers)], environment, log or folder / "service.log")


class Run:
    """A service, and the state that all threads share.

    new          items that come and go
    events, log  requests with their answers; operations of the feed
    tags         item → its last known sequence; 0: as trained, None: the item does not exist
    """

    def __init__(self, folder: Path, seed: int, workers: int = WORKERS, new: int = NEW) -> None:
        self.name, (self.models, self.victim), self._workers = SAMPLE.parent.name, served_copy(folder, workers), workers
        heldout = Bundle.open(SAMPLE, verify=False).heldout()
        self.histories = [history[-8:] for history in heldout.column("history").to_pylist() if len(history) > 1]
        self.trained = random.Random(seed).sample(sorted({item for history in self.histories for item in history}), OLD)
        self.items = [*self.trained, *(f"new/{number}" for number in range(new))]
        self.tags: dict[str, int | None] = dict.fromkeys(self.items) | dict.fromkeys(self.trained, 0)
        self.events: list[Event] = []
        self.log: list[Logged] = []
        self.kinds: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.slowest_s: dict[str, float] = {}
        self.highest = 0
        self.began, self.numbers, self.over = time.monotonic(), itertools.count(1), threading.Event()
        self.calm = threading.Event()  # the failures of the round are over
        self._seed, self._pages, self._versions = seed, 0, list[int]()
        self._hidden: list[str] = []

    def start(self) -> None:
        self.victim.start()
        self.victim.wait_until_ready()

    def ask(
        self, kind: str, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, via: Ask | None = None
    ) -> tuple[Event, Any]:
        """Send a request; its event and the answer's document. via: a connection to use instead of a new one."""
        all_headers = HEADERS | dict(headers or {})
        sent = time.monotonic() - self.began
        timeout_s = CHANGE_S if kind in CHANGES else TIMEOUT_S
        new_connection: Ask = partial(request, self.victim.port, timeout_s=timeout_s)
        status, document = (via or new_connection)(method, f"/models/{self.name}{path}" if path != "/retrieve" else path, body, all_headers)
        answered = time.monotonic() - self.began
        self.kinds[kind] += status not in (0, 503)
        self.statuses[f"{kind} {status}"] += 1
        self.slowest_s[kind] = max(self.slowest_s.get(kind, 0.0), round(answered - sent, 2))
        has_given_up = status == 0 and answered - sent >= timeout_s
        if status in (0, 503) and not has_given_up:
            self.over.wait(PAUSE_S)
        text = "" if isinstance(document, list) or status == 200 else str(document)[:200]
        return Event(kind, "", sent, math.inf if has_given_up else answered, status, outcome=text), document

    # -- clients --------------------------------------------------------------------------------------------------------

    def client(self, rng: random.Random, name: str) -> None:
        while not self.over.is_set():
            (kind,) = rng.choices(list(STEPS), list(STEPS.values()))
            item = rng.choice(self.items)
            if kind in ("put", "delete"):
                tag = self.tags[item]
                if_match = tag if tag and rng.random() < 0.2 else None
                body = self._body(rng, item, if_match) if kind == "put" else {}
                if kind == "delete" and rng.random() < 0.3:
                    body = {"source_version": next(self.numbers)}
                write = Event(kind, item, 0, 0, 0, name, body=body, if_match=if_match, if_new=if_match is None and rng.random() < 0.1)
                if self.write(write) in TRANSIENT and rng.random() < 0.5:
                    self.write(write)
            elif kind == "bulk":
                candidate_items = rng.sample(self.items, rng.randint(1, len(self.items)))
                lines = [(rng.choice(candidate_items), rng.random() < 0.8) for _ in range(rng.randint(1, LINES))]
                self.bulk([(line_item, self._body(rng, line_item) if is_put else None) for line_item, is_put in lines], name)
            elif kind == "get":
                self.get(item, name)
            else:
                self.retrieve(kind, rng.choice([None, *self._versions]), self.highest if kind == "read own" else 0, name)

    def _body(self, rng: random.Random, item: str, if_match: int | None = None) -> dict[str, Any]:
        """A put of fields and perhaps evidence, or of evidence alone if the write requires that the item exists."""
        number = next(self.numbers)
        body: dict[str, Any] = {"fields": {"title": f"t{number}", "section": SECTION}}
        needs_evidence = self.tags[item] is None and item not in self.trained
        if rng.random() < (0.95 if needs_evidence else 0.3):
            if rng.random() < 0.3:
                body["like"] = rng.sample(rng.choice(self.histories), 1)
            else:
                body["events"] = rng.sample(self.histories, rng.randint(1, 3))
                body["users"] = [f"t{number}"] * len(body["events"])
                if if_match is not None:
                    del body["fields"]
        if rng.random() < 0.3:
            body["source_version"] = max(number - rng.choice((0, 0, 50)), 0)
        if rng.random() < 0.02:
            body["valid_until"] = f"{rng.randint(2100, 2900)}-01-01T00:00:00Z"
        return body

    def write(self, draft: Event) -> int:
        headers = {} if draft.if_match is None else {"If-Match": f'"{draft.if_match}"'}
        headers |= {"If-None-Match": "*"} if draft.if_new else {}
        is_put = draft.kind == "put"
        query = "" if is_put or not draft.body else f"?source_version={draft.body['source_version']}"
        event, answer = self.ask(draft.kind, draft.kind.upper(), self._path(draft.id) + query, draft.body if is_put else None, headers)
        self._note(replace(draft, sent=event.sent, answered=event.answered, status=event.status, outcome=event.outcome), answer)
        return event.status

    def bulk(self, lines: Sequence[tuple[str, dict[str, Any] | None]], by: str) -> None:
        """Lines of an id and a body; None: a delete."""
        content = "\n".join(json.dumps({"id": item} | ({"delete": True} if body is None else body)) for item, body in lines).encode()
        event, answers = self.ask("bulk", "POST", "/items", content, {"Content-Type": "application/x-ndjson"})
        number = next(self.numbers)
        for (item, body), answer in itertools.zip_longest(lines, answers if isinstance(answers, list) else ()):
            status = answer["status"] if answer else 0 if event.status == 200 else event.status
            write = replace(event, kind="delete" if body is None else "put", id=item, status=status, by=by, body=body or {}, bulk=number)
            self._note(write, answer)

    def _note(self, event: Event, answer: Any) -> None:
        if event.status in WRITTEN:
            event = replace(event, sequence=answer["sequence"], outcome=answer["outcome"])
            self.tags[event.id] = event.sequence if event.kind == "put" else None
            self.highest = max(self.highest, event.sequence)
        self.events.append(event)

    def get(self, item: str, by: str, floor: int = 0, agreement: int = 0, via: Ask | None = None) -> None:
        event, answer = self.ask("get", "GET", self._path(item), via=via)
        state = state_of(answer) if event.status == 200 else None
        self.events.append(replace(event, id=item, by=by, floor=floor, agreement=agreement, state=state))
        if event.status in (200, 404):
            self.tags[item] = state.sequence if state else None

    def retrieve(self, kind: str, version: int | None, floor: int, by: str, agreement: int = 0, via: Ask | None = None) -> None:
        """All items, by their section."""
        count = len(self.items)
        query = {"model": self.name, "queries": [{"history": []}], "m": count, "beam_size": count, "timeout_ms": 500 * TIMEOUT_S}
        query |= {"filter": {"section": [SECTION]}, "fields": ["title"], "min_sequence": floor}
        event, answer = self.ask(kind, "POST", "/retrieve", query | ({"version": version} if version else {}), via=via)
        event = replace(event, kind="retrieve", by=f"{by} of version {version}", floor=floor, agreement=agreement)
        if event.status == 200:
            shown = {entry["id"]: entry["fields"]["title"] for entry in answer["results"][0]["items"]}
            event = replace(event, sequence=answer.get("sequence", 0), shown=shown)
        self.events.append(event)

    def _path(self, item: str) -> str:
        return f"/items/{quote(item, safe='')}"

    def follower(self) -> None:
        while not self.over.is_set():
            self.pull()
            self.over.wait(PAUSE_S)

    def pull(self) -> int:
        """Read the feed to its end, as another host does; -1 where it cannot be read."""
        while True:
            after = self.log[-1].state.sequence if self.log else 0
            event, answer = self.ask("feed", "GET", f"/changes?after={after}")
            self._pages += 1
            changes = answer["changes"] if event.status == 200 else []
            self.log += [Logged(change["id"], state_of(change), self._pages) for change in changes]
            if not changes:
                end = max(int(answer["sequence"]), after) if event.status == 200 else -1
                self.events.append(replace(event, by="follower", sequence=max(end, 0)))
                return end

    # -- the administrator, and failures --------------------------------------------------------------------------------

    def admin(self, rng: random.Random) -> None:
        """Make every change once, and again until the failures are over. Repeat a change that got no answer."""
        steps: list[str] = []
        while steps or not self.calm.is_set():
            steps = steps or rng.sample(CHANGES, len(CHANGES))
            time.sleep(rng.uniform(0, ROUND_S / len(CHANGES)))
            if (served := self.served()) and self._step(rng, steps[-1], served):
                steps.pop()

    def _step(self, rng: random.Random, step: str, served: list[int]) -> bool:
        """Whether it was answered."""
        if step == "default":
            return self._change(step, rng.choice(served[1:] or served)) not in TRANSIENT
        if step == "publish":
            return self._change(step, self.publish_copy(), "load", default=rng.random() < 0.5) not in TRANSIENT
        if step == "unload":
            if len(served) < 3:  # two are left
                self._change("publish", self.publish_copy(), "load", default=False)
                return False
            status = self._change(step, served[1])
            if status == 200 and served[1] != 1:
                shutil.rmtree(self.models / self.name / str(served[1]))
            return status not in TRANSIENT
        item = rng.choice(self._hidden if step == "show" and self._hidden else self.items)
        event, _ = self.ask(step, "PUT" if step == "hide" else "DELETE", f"/removed/{quote(item, safe='')}")
        self.events.append(replace(event, id=item, by="admin"))
        self._hidden = [*({*self._hidden} | {item} if step == "hide" else {*self._hidden} - {item})]
        return event.status not in TRANSIENT

    def served(self) -> list[int]:
        """Versions that serve, the default first."""
        event, answer = self.ask("models", "GET", "")
        if event.status == 200:
            ready = [info["version"] for info in answer["versions"] if info["state"] == "ready"]
            self._versions = sorted(ready, key=lambda version: (version != answer["version"], version))
        return self._versions if event.status == 200 else []

    def publish_copy(self) -> int:
        """The first version's bundle as the next version."""
        number, folder = max(find_versions(self.models)[self.name]) + 1, self.models / self.name
        copied_version(folder / "1", folder / f".{number}", {"version": number})
        (folder / f".{number}").rename(folder / str(number))
        return number

    def _change(self, kind: str, version: int, route: str | None = None, **more: bool) -> int:
        return self.ask(kind, "POST", f"/{route or kind}", {"version": version, **more})[0].status

    def fail(self, rng: random.Random) -> None:
        try:
            for failure in rng.sample(FAILURES, len(FAILURES)):
                time.sleep(rng.uniform(0, ROUND_S / len(FAILURES)))
                workers = self.victim.workers()
                self.kinds[failure] += failure == "restart" or bool(workers)
                if failure == "restart":
                    self.victim.kill(rng.choice((signal.SIGKILL, signal.SIGTERM)))
                    self.start()
                elif failure == "kill":
                    self.victim.kill_worker(rng)
                elif workers:
                    self.victim.stop_worker(rng, rng.uniform(0.1, STOPPED_S))
        finally:
            self.calm.set()

    # -- rounds ---------------------------------------------------------------------------------------------------------

    def round(self, number: int) -> None:
        """Run all threads for ROUND_S, and until administrator and failures are done. Raises the exceptions of threads."""
        until = time.monotonic() + ROUND_S
        self.over.clear()
        self.calm.clear()
        with ThreadPoolExecutor(CLIENTS + 3) as pool:
            rngs = [random.Random(f"{self._seed} {number} {client}") for client in range(CLIENTS + 2)]
            ending_jobs = [pool.submit(self.admin, rngs.pop()), pool.submit(self.fail, rngs.pop())]
            endless_jobs = [pool.submit(self.follower), *(pool.submit(self.client, rng, f"c{client}") for client, rng in enumerate(rngs))]
            try:
                for job in ending_jobs:
                    job.result()
                time.sleep(max(until - time.monotonic(), 0))
            finally:
                self.over.set()
        for job in endless_jobs:
            job.result()

    def agree(self, number: int) -> None:
        """Ask every worker for every item of every version. Raises RuntimeError if a worker is missing or the feed goes on."""
        connections = self._connections()
        time.sleep(QUIET_S)
        for _ in range(5):
            first, end, versions = len(self.events), self.pull(), self.served()
            for worker, connection in enumerate(connections):
                via: Ask = partial(exchange, connection)
                for version in versions:
                    self.retrieve("agree", version, end, f"worker {worker}", number, via)
                for item in self.items:
                    self.get(item, f"worker {worker}", end, number, via)
            if self.pull() == end and versions:
                break
            del self.events[first:]  # a write came late
        else:
            raise RuntimeError(f"after the feed's {end} more is written though nobody writes, or no version serves: {versions}")
        for connection in connections:
            connection.close()

    def _connections(self) -> list[http.client.HTTPConnection]:
        """A connection to each worker, once all are ready."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            with suppress(OSError, http.client.HTTPException, RuntimeError):
                (connections,) = connections_to(("127.0.0.1", self.victim.port), self._workers, 1)
                if all(exchange(connection, "GET", "/readyz")[0] == 200 for connection in connections):
                    return connections
            time.sleep(PAUSE_S)
        raise RuntimeError(f"{self._workers} workers are not ready after {WAIT_S:g} s")


def live_history(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """The whole run, in rounds until the time is over."""
    run, violations, failure, number = Run(folder, seed), list[Violation](), "", 0
    try:
        run.publish_copy()
        run.start()
        run._change("publish", 1, "load", default=False)
        run.began = time.monotonic()
        run.bulk([(item, {"fields": {"title": f"t-{item}", "section": SECTION}}) for item in run.trained], "setup")
        while not number or time.monotonic() - run.began < seconds:
            number += 1
            run.round(number)
            run.agree(number)
            violations = judged(run.events, run.log, run.trained)
            rules = Counter(violation.rule for violation in violations)
            print(
                f"{time.monotonic() - run.began:5.0f} s: {run.kinds.total()} operations, {len(run.log)} writes in the feed, {dict(rules)}"
            )
    except (RuntimeError, OSError, http.client.HTTPException, subprocess.TimeoutExpired) as error:
        failure = f"{type(error).__name__}: {error}"
    finally:
        run.victim.kill()
    took_s = time.monotonic() - run.began
    return {
        "minutes": round(took_s / 60, 2),
        "rounds": number,
        "operations": run.kinds.total(),
        "operations_per_minute": round(60 * run.kinds.total() / took_s),
        "writes": sum(run.kinds[kind] for kind in ("put", "delete", "bulk")),
        "writes_in_feed": len(run.log),
        "kinds": dict(sorted(run.kinds.items())),
        "statuses": dict(sorted(run.statuses.items())),
        "slowest_s": run.slowest_s,
        "violations": len(violations) + bool(failure),
        "rules": Counter(violation.rule for violation in violations),
        "failure": failure,
        "first": [violation._asdict() for violation in violations[:10]],
        "history": _history(run, violations[0]) if violations else [],
        "seed": seed,
    }


def _history(run: Run, violation: Violation, most: int = 50) -> list[dict[str, Any]]:
    """Requests about an item before a violation, and its operations in the feed."""
    events = [event for event in run.events if event.sent <= violation.at and (event.id == violation.id or event.shown is not None)]
    entries: list[dict[str, Any]] = []
    for event in sorted(events, key=lambda event: event.sent)[-most:]:
        entry_fields = {name: value for name, value in asdict(event).items() if value and value != math.inf and name not in ("id", "shown")}
        entry_fields |= {"state": event.state._asdict()} if event.state else {}
        entries.append(entry_fields if event.shown is None else entry_fields | {"shown": event.shown.get(violation.id)})
    return [*entries, *({"feed": entry.state._asdict()} for entry in [entry for entry in run.log if entry.id == violation.id][-most:])]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default %(default)g)")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        row = live_history(Path(name), 60 * options.minutes, options.seed)
    print(json.dumps(row, indent=1))
    write_report(options.json, {"rows": [row]})
    sys.exit(1 if row["violations"] else 0)


if __name__ == "__main__":
    main()
