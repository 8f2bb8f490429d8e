"""Measures one cell of a sweep, a beam size at one m: recall, then latency with one client, at capacity, and at a rate.

Knows requests and answers. Does not know files or tables.

Legend: B queries, M results.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import orjson

from espalier.metrics import precision_recall_f
from espalier.search import NO_ITEM

from .loops import Answered, closed_loop, each_once, open_loop, percentiles_ms, request_bytes, statuses
from .queries import Query
from .target import Json, ServiceRefused, Target, problem_text, send
from .writes import WRITTEN, Writes, delete_all, mixed, put_bytes

FIRST_CLIENTS, FEW_CLIENTS, MOST_CLIENTS = 16, 4, 512
MIN_GAIN = 1.05
"""The number of clients is doubled as long as the rate of answers grows by this factor."""
RECALL_ATTEMPTS = 3
PAUSE_S = 1.0
"""Pause after refusals: as long as the service remembers an overload."""
LOAD_SHARE = 0.7
"""The open loop offers this share of a cell's capacity, unless a rate is set."""
BUSY = (0, 408, 429, 500, 502, 503, 504)
"""Statuses that depend on the moment and not on the request. They are counted; any other status than 200 ends the sweep."""


@dataclass(frozen=True)
class Load:
    """The settings that all cells of a sweep share.

    rate_per_s       of the open loop; None: LOAD_SHARE of the cell's capacity
    rounds           of each loop
    writes_per_s     of the mixed loop, which is an open loop with writes; 0 leaves it out
    writer           the service with a key for writes
    longest_history  of those that the model takes as evidence of a write
    """

    target: Target
    model: str
    version: int
    queries: Sequence[Query]
    seconds: float
    rounds: int = 1
    rate_per_s: float | None = None
    exclude_seen: bool = False
    timeout_ms: float | None = None
    seed: int = 0
    writes_per_s: float = 0.0
    writer: Target | None = None
    longest_history: int | None = None

    def body(self, query: Query, beam_size: int, m: int) -> Json:
        """A body of POST /retrieve with one query."""
        timeout = {} if self.timeout_ms is None else {"timeout_ms": self.timeout_ms}
        parameters = {"model": self.model, "version": self.version, "m": m, "beam_size": beam_size, **timeout}
        return {**parameters, "queries": [query.body(self.exclude_seen)]}


def measure(load: Load, beam_size: int, m: int, progress: Callable[[str], object] = lambda phase: None) -> Json:
    """A cell: {"beam_size", "m", "measured", "engine", "recall", …, "capacity_per_s", "loops": {"closed": {…}, "open": {…}}}; with writes
    also "writes", and "mixed" among the loops.

    progress  called with the name of each phase when it begins
    A figure of a loop is the median of its rounds, so that a stall of the machine spoils one round and not the figure.
    Raises ServiceRefused when the service is unreachable, or refuses the requests of the cell.
    """
    headers = {"Host": load.target.authority, **load.target.headers}
    path = f"{load.target.prefix}/retrieve"
    requests = [request_bytes(path, load.body(query, beam_size, m), headers) for query in load.queries]
    shuffled = [requests[i] for i in np.random.default_rng(load.seed).permutation(len(requests))]
    engine = first_answer(load, beam_size, m)
    progress("recall")
    recall = recall_over_http(load, requests, m)
    closed_loop(load.target.address, shuffled, 1, min(load.seconds / 4, 0.5))  # warm up: recall may have needed few requests
    progress("one client")
    rounds = range(load.rounds)
    closed = _median([_loop(closed_loop(load.target.address, shuffled, 1, load.seconds, without_items), None) for _ in rounds])
    progress("capacity")
    connections, capacity = _capacity(load, shuffled)
    rate = load.rate_per_s or max(LOAD_SHARE * capacity["requests_per_s"], 1.0)
    progress(f"{rate:.0f}/s")
    seeds = [load.seed + number for number in rounds]
    open_ = _median([_loop(open_loop(load.target.address, shuffled, rate, load.seconds, seed, keep=without_items), rate) for seed in seeds])
    loops, writes = {"closed": closed, "open": open_}, {}
    if load.writes_per_s:
        progress("with writes")
        loops["mixed"], writes["writes"] = _with_writes(load, shuffled, rate, seeds)
    return {
        "beam_size": beam_size,
        "m": m,
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "engine": engine,
        **recall,
        "capacity_per_s": capacity["requests_per_s"],
        "capacity_connections": connections,
        "capacity_statuses": capacity["statuses"],
        "loops": loops,
        **writes,
    }


def first_answer(load: Load, beam_size: int, m: int) -> str:
    """The engine that answers. Raises ServiceRefused when the service refuses the first request of the cell."""
    status, document = send(load.target, "POST", "/retrieve", load.body(load.queries[0], beam_size, m))
    if status not in (200, *BUSY):
        raise ServiceRefused(f"POST {load.target}/retrieve: {problem_text(status, document)}")
    return str(document.get("engine", ""))


def recall_over_http(load: Load, requests: Sequence[bytes], m: int) -> Json:
    """recall@m over all queries with relevant items. Each request is sent until it is answered, at most RECALL_ATTEMPTS times."""
    with_relevant = [i for i, query in enumerate(load.queries) if query.relevant]
    answers: dict[int, list[str]] = {}
    degraded, incomplete, unanswered = 0, 0, list(with_relevant)
    for attempt in range(RECALL_ATTEMPTS):
        if attempt and unanswered:
            time.sleep(PAUSE_S)
        attempted, unanswered = unanswered, []
        for answer in each_once(load.target.address, [requests[i] for i in attempted], 1):
            if answer.status not in (200, *BUSY):
                number = attempted[answer.number] + 1
                raise ServiceRefused(f"query {number} of {len(requests)}: {problem_text(answer.status, _problem(answer.body))}")
            if answer.status != 200:
                unanswered.append(attempted[answer.number])
                continue
            result = orjson.loads(answer.body)["results"][0]
            answers[attempted[answer.number]] = [item["id"] for item in result["items"]]
            degraded += bool(result.get("degraded"))
            incomplete += not result["complete"]
    relevant = [load.queries[i].relevant for i in sorted(answers)]
    recall = recall_at_m([answers[i] for i in sorted(answers)], relevant, m) if with_relevant and not unanswered else None
    return {
        "recall": recall,
        "recall_queries": len(answers),
        "recall_unanswered": len(unanswered),
        "recall_degraded": degraded,
        "recall_incomplete": incomplete,
    }


def _problem(body: bytes) -> Json:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = None
    return document if isinstance(document, dict) else {"detail": body[:200].decode(errors="replace")}


def _capacity(load: Load, requests: Sequence[bytes]) -> tuple[int, Json]:
    """The number of clients of a closed loop that gets the most answers per second, and that loop.

    The number is doubled as long as that helps: a few clients do not keep many workers, or a GPU, busy. If some of FIRST_CLIENTS are
    refused, FEW_CLIENTS are used instead. A later refusal ends the search.
    """
    clients = FIRST_CLIENTS
    best: tuple[int, Json] | None = None
    while True:
        rounds = [closed_loop(load.target.address, requests, clients, load.seconds / 2, without_items) for _ in range(load.rounds)]
        loop = _median([_loop(answered, None) for answered in rounds])
        if loop["statuses"].get("429"):
            time.sleep(PAUSE_S)
            if best is None and clients == FIRST_CLIENTS:
                clients = FEW_CLIENTS
                continue
            return best or (clients, loop)
        if best is not None and loop["requests_per_s"] < MIN_GAIN * best[1]["requests_per_s"]:
            return best
        best = clients, loop
        if clients in (FEW_CLIENTS, MOST_CLIENTS):
            return best
        clients *= 2


def _with_writes(load: Load, requests: Sequence[bytes], rate: float, seeds: Sequence[int]) -> tuple[Json, Json]:
    """The mixed loop: the figures of its retrievals, and those of its writes. The items that it put are deleted at the end."""
    writer, writes = load.writer or load.target, Writes(load.queries, load.longest_history)
    numbers = itertools.count()  # shared by all rounds, so that no two writes are equal

    def put(_: int) -> bytes:
        return put_bytes(writer, load.model, writes.put(next(numbers)))

    retrieval_rounds, write_rounds = [], []
    for seed in seeds:
        mix = mixed(requests, put, rate, load.writes_per_s, load.seconds)
        answered = open_loop(load.target.address, mix.requests, rate + load.writes_per_s, load.seconds, seed, keep=without_items)
        retrieval_rounds.append(_loop([answer for answer in answered if not mix.is_write[answer.number]], rate))
        write_rounds.append(_writes([answer for answer in answered if mix.is_write[answer.number]], load.writes_per_s))
    delete_all(writer, load.model, writes.ids(next(numbers)))
    return _median(retrieval_rounds), _median(write_rounds)


def _writes(answered: Sequence[Answered], offered_per_s: float) -> Json:
    good = [answer for answer in answered if answer.status in WRITTEN]
    p50_ms, p99_ms = percentiles_ms(good)
    return {
        "p50_ms": _number(p50_ms),
        "p99_ms": _number(p99_ms),
        "offered_per_s": offered_per_s,
        "samples": len(good),
        "failed": len(answered) - len(good),
        "statuses": statuses(answered),
    }


def recall_at_m(answers: Sequence[Sequence[str]], relevant: Sequence[Sequence[str]], m: int) -> float:
    """Mean recall@m of lists of ids: the ids are numbered for `espalier.metrics.precision_recall_f`."""
    numbers: dict[str, int] = {}
    rows_BM = np.full((len(answers), m), NO_ITEM, np.int64)
    for row, ids in zip(rows_BM, answers, strict=True):
        row[: len(ids)] = [numbers.setdefault(item, len(numbers)) for item in ids[:m]]
    relevant_rows = [np.array([numbers.setdefault(item, len(numbers)) for item in ids], np.int64) for ids in relevant]
    return float(precision_recall_f(rows_BM, relevant_rows, m)[1].mean())


def without_items(body: bytes) -> bytes:
    """An answer to one query without its items: a loop may keep hundreds of thousands of answers."""
    start = body.rfind(b'"complete":')
    return b'{"results":[{' + body[start:] if start >= 0 else body


def _loop(answered: Sequence[Answered], offered_per_s: float | None) -> Json:
    """Percentiles and rates of one loop, over its requests with status 200. Other requests are counted."""
    good = [answer for answer in answered if answer.status == 200]
    documents = [orjson.loads(answer.body) for answer in good]
    p50_ms, p95_ms, p99_ms = percentiles_ms(good, (50, 95, 99))
    duration_s = max(answer.began + answer.seconds for answer in answered) - min(answer.began for answer in answered) if answered else 0.0
    per_query = [document["timing"]["ms_per_query"] for document in documents]
    return {
        "p50_ms": _number(p50_ms),
        "p95_ms": _number(p95_ms),
        "p99_ms": _number(p99_ms),
        "requests_per_s": len(good) / duration_s if duration_s > 0 else 0.0,
        "ms_per_query": float(np.mean(per_query)) if per_query else None,
        "offered_per_s": offered_per_s,
        "samples": len(good),
        "failed": len(answered) - len(good),
        "statuses": statuses(answered),
        "degraded": sum(bool(document["results"][0].get("degraded")) for document in documents),
        "late_p99_ms": float(np.percentile([answer.late_s for answer in answered], 99) * 1e3) if answered else None,
    }


def _median(rounds: Sequence[Json]) -> Json:
    """One loop from its rounds: the median of each figure, the sum of each count, and the p99 of every round to show their spread."""
    counts: Json = {name: sum(loop[name] for loop in rounds) for name in ("samples", "failed", "degraded") if name in rounds[0]}
    by_status = sum((Counter(loop["statuses"]) for loop in rounds), Counter[str]())
    medians = {}
    for name in rounds[0].keys() - counts.keys() - {"statuses"}:
        values = [loop[name] for loop in rounds if loop[name] is not None]
        medians[name] = float(np.median(values)) if values else None
    figures: Json = {**medians, **counts, "statuses": dict(sorted(by_status.items()))}
    return {name: figures[name] for name in rounds[0]} | {"rounds_p99_ms": [loop["p99_ms"] for loop in rounds]}


def _number(value: float) -> float | None:
    return None if np.isnan(value) else value


def failed_share(loop: dict[str, Any]) -> float:
    """The share of a loop's requests without status 200."""
    total = loop["samples"] + loop["failed"]
    return float(loop["failed"] / total) if total else 1.0
