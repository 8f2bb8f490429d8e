"""The plan of a Locust test: its requests, its number of users, the checks of answers, and the verdict.

Knows numbers and the service's JSON. Does not know Locust, whose import changes how a process waits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from espalier.errors import MISSING, InvalidConfig

from .queries import Query, queries_of, without_seen
from .target import Json, Target, check_limit, describe, parse_url
from .writes import Put, Writes

PER_USER = 5.0
"""Most requests/s of one user. A higher rate takes more users."""
SHAPES = ("steady", "ramp", "spike", "reload")
SPIKE = 3
"""The rate of a spike, as a multiple of --rate."""

Mix = tuple[list[int], list[float]]
"""Values and their weights."""


class Request(NamedTuple):
    """A request: its name in the statistics, m, the minimal number of eligible items, and a body of POST /retrieve."""

    name: str
    m: int
    eligible: int
    body: Json


@dataclass(frozen=True)
class Plan:
    """The settings that all users of one test share.

    versions      the shape reload makes them the default in turn
    writer        the service with a key for writes
    writes        the items to put, or None; write_numbers counts them
    per_writer    writes/s of one user
    """

    target: Target
    admin: Target
    model: Json
    queries: list[Query]
    beams: Mix
    ms: Mix
    filter: Json
    filter_share: float
    exclude_seen: bool
    per_user: float
    versions: list[int]
    reload_every_s: float
    rng: random.Random
    writer: Target
    writes: Writes | None
    write_numbers: Iterator[int]
    per_writer: float

    def put(self) -> Put:
        if self.writes is None:
            raise InvalidConfig("--write-rate", 0, "a rate above 0")
        return self.writes.put(next(self.write_numbers))

    def request(self) -> Request:
        """The next request, drawn from the mixes."""
        beam, m = (self.rng.choices(*values_and_weights)[0] for values_and_weights in (self.beams, self.ms))
        query = self.rng.choice(self.queries)
        body: Json = {"model": self.model["name"], "queries": [query.body(self.exclude_seen)], "m": m, "beam_size": beam}
        items: int = self.model["tree"]["items"]
        eligible = items - len(set(query.values)) if self.exclude_seen else items
        if self.rng.random() < self.filter_share:
            return Request(f"beam {beam}, m {m}, filtered", m, 0, body | {"filter": self.filter})
        return Request(f"beam {beam}, m {m}", m, eligible, body)


def plan_of(host: str | None, options: argparse.Namespace) -> Plan:
    """The plan of a test that begins. Raises EspalierError or OSError when the test cannot run."""
    if not host:
        raise InvalidConfig("--host", MISSING, "http://HOST:PORT of the service")
    for option, value in (("--rate", options.rate), ("--seconds", options.seconds), ("--reload-every", options.reload_every)):
        if not 0 < value < math.inf:
            raise InvalidConfig(option, value, "a number above 0")
    if not 0 <= options.filter_share <= 1:
        raise InvalidConfig("--filter-share", options.filter_share, "0 to 1")
    if options.filter_share and not conditions(options.filter):
        raise InvalidConfig("--filter", options.filter, "a filter, because --filter-share is above 0")
    if not 0 <= options.write_rate < math.inf:
        raise InvalidConfig("--write-rate", options.write_rate, "a number of at least 0")
    if options.write_rate and not options.write_key:
        raise InvalidConfig("--write-key", MISSING, "a key of the role write, because --write-rate is above 0")
    target = parse_url(host, options.key or None)
    model = describe(target, options.model or None)
    beams, ms = mix(options.beam_mix), mix(options.m_mix)
    check_limit(model, "--beam-mix", beams[0], "max_beam_size")
    check_limit(model, "--m-mix", ms[0], "max_m")
    loadable = [version["version"] for version in model["versions"] if version["state"] in ("ready", "available")]
    turns = versions(options.versions) or loadable
    if options.shape == "reload" and not options.admin_key:
        raise InvalidConfig("--admin-key", MISSING, "a key of the role admin, for the shape reload")
    if options.shape == "reload" and len(turns) < 2:
        raise InvalidConfig("--versions", turns, "two versions or more, for the shape reload")
    queries = queries_of(model, Path(options.models), Path(options.queries) if options.queries else None)
    return Plan(
        target=target,
        admin=parse_url(host, options.admin_key or None),
        model=model,
        queries=without_seen(queries) if options.exclude_seen else queries,
        beams=beams,
        ms=ms,
        filter=conditions(options.filter),
        filter_share=options.filter_share,
        exclude_seen=options.exclude_seen,
        per_user=options.rate / users(options.rate),
        versions=turns,
        reload_every_s=options.reload_every,
        rng=random.Random(options.seed),
        writer=parse_url(host, options.write_key or None),
        writes=Writes(queries, model["query"].get("length")) if options.write_rate else None,
        write_numbers=itertools.count(),
        per_writer=options.write_rate / users(options.write_rate) if options.write_rate else 0.0,
    )


def users(rate: float) -> int:
    return math.ceil(rate / PER_USER)


def user_count(shape: str, steady_count: int, elapsed_share: float) -> int:
    """The number of users after a share of the test's time. steady_count: that of the shape steady."""
    if shape == "ramp":
        return max(1, math.ceil(steady_count * elapsed_share))
    if shape == "spike" and 1 / 3 <= elapsed_share < 2 / 3:
        return SPIKE * steady_count
    return steady_count


def answer_problem(document: Json, m: int, eligible: int) -> str | None:
    """The problem of an answer to one query, if any: it must have min(m, eligible) items, unless it says that it is incomplete.

    eligible  minimal number of items that may be returned
    """
    results = document.get("results") or []
    if len(results) != 1:
        return f"{len(results)} results to one query"
    count, expected, complete = len(results[0]["items"]), min(m, eligible), results[0]["complete"]
    if count > m or (count < expected and complete):
        return f"{count} items, {expected} expected, complete {complete}"
    return None


def complaints(requests: int, failed: int, refused: int, reloads_failed: int, max_failed: float, max_refused: float) -> list[str]:
    """Why a test was not good enough. failed: requests with another failure than a refusal (429)."""
    texts = [] if requests else ["no request was sent"]
    if requests and failed / requests > max_failed:
        texts.append(f"{failed} of {requests} requests failed, more than --max-failed {max_failed:g}")
    if requests and refused / requests > max_refused:
        texts.append(f"{refused} of {requests} requests were refused, more than --max-refused {max_refused:g}")
    if reloads_failed:
        texts.append(f"{reloads_failed} reloads failed")
    return texts


# -- options that are text ------------------------------------------------------------------------------------------------


def mix(text: str) -> Mix:
    """ "50:1,100:8" as values and weights; a missing weight is 1. Raises InvalidConfig."""
    pairs = [pair.partition(":") for pair in text.split(",")]
    try:
        values, weights = [int(value) for value, _, _ in pairs], [float(weight or 1) for _, _, weight in pairs]
    except ValueError:
        values, weights = [], []
    if not values or min(values) < 1 or not all(0 <= weight < math.inf for weight in weights) or sum(weights) <= 0:
        raise InvalidConfig("a mix", text, "VALUE:WEIGHT, comma-separated, for example 50:1,100:8")
    return values, weights


def conditions(text: str) -> Json:
    """A filter of POST /retrieve; "" is no filter. Raises InvalidConfig."""
    try:
        document = json.loads(text) if text else {}
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise InvalidConfig("a filter", text, 'a JSON object, for example {"section": ["libs"]}')
    return document


def versions(text: str) -> list[int]:
    """ "1,2" as numbers; "" is an empty list. Raises InvalidConfig."""
    try:
        return [int(number) for number in text.split(",")] if text else []
    except ValueError:
        raise InvalidConfig("versions", text, "version numbers, comma-separated, for example 1,2") from None


def valid(parse: Callable[[str], object]) -> Callable[[str], str]:
    """A check for an option that stays text, so that the web page can show and change it: `parse` must accept the text."""

    def check(text: str) -> str:
        try:
            parse(text)
        except InvalidConfig as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return check
