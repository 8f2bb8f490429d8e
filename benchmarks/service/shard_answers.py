"""A router's answers under load: statuses, times, coverage, and whether an answer mixes two versions.

Knows requests and answers. Does not know the fleet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from benchmarks.service.serving import retrievals
from benchmarks.service.shard_fleet import SHIFT
from espalier.arrays import Float64
from loadtest import cell
from loadtest.loops import Address, Answered, each_once, percentiles_ms, statuses
from loadtest.queries import Query
from loadtest.target import Target

M, TIMEOUT_MS = 50, 1000
SCORES = 10
"""Scores of an answer that are compared to tell its version."""
SURE = 0.999
"""Scores above this are too close to 1 to tell a version."""


@dataclass(frozen=True)
class SeenAnswer:
    """One answer. items: its coverage."""

    number: int
    began: float
    ended: float
    version: int
    items: float
    scores: tuple[float, ...]


@dataclass(frozen=True)
class Load:
    answered: list[Answered]

    @property
    def seen(self) -> list[SeenAnswer]:
        answers = []
        for response in self.answered:
            if response.status == 200:
                version, items, scores = orjson.loads(response.body)
                ended = response.began + response.seconds
                answers.append(SeenAnswer(response.number, response.began, ended, version, items, tuple(scores)))
        return answers

    def figures(self) -> dict[str, Any]:
        good_responses = [response for response in self.answered if response.status == 200]
        p50, p99, p999, most = percentiles_ms(good_responses, (50, 99, 99.9, 100))
        items = [response.items for response in self.seen]
        return {
            "requests": len(self.answered),
            "failed": len(self.answered) - len(good_responses),
            "statuses": statuses(self.answered),
            "p50_ms": round(p50, 3),
            "p99_ms": round(p99, 3),
            "p999_ms": round(p999, 3),
            "max_ms": round(most, 3),
            "least_coverage": min(items, default=math.nan),
            "not_covered": sum(value < 1 for value in items),
        }


def recall(address: Address, name: str, queries: Sequence[Query]) -> float:
    """Mean share of the relevant items that are among M, in percent. Raises RuntimeError if queries are refused repeatedly."""
    recall_row = cell.recall_over_http(cell.Load(Target(*address), name, 1, queries, 0.0), requests_of(name, queries), M)
    if recall_row["recall"] is None:
        raise RuntimeError(f"{recall_row['recall_unanswered']} queries were refused, expected answers")
    return 100 * float(recall_row["recall"])


def all_answered(address: Address, requests: Sequence[bytes]) -> Load:
    """The answers to all requests, summarised. Raises RuntimeError if one is refused."""
    load = Load(each_once(address, requests, 1, keep=summarised))
    if len(load.seen) < len(requests):
        raise RuntimeError(f"queries were answered {statuses(load.answered)}, expected 200")
    return load


def requests_of(name: str, queries: Sequence[Query]) -> list[bytes]:
    return retrievals(queries, {"model": name, "m": M, "timeout_ms": TIMEOUT_MS})


def summarised(body: bytes) -> bytes:
    """Version, coverage and some scores of an answer."""
    answer = orjson.loads(body)
    scores = [item["score"] for item in answer["results"][0]["items"][:SCORES]]
    return orjson.dumps([answer["version"], answer["coverage"]["items"], scores])


def is_mixed(answer: SeenAnswer, first: Mapping[int, tuple[float, ...]], requests: int) -> bool:
    """Whether an answer has scores of another version than it says.

    first  the scores of version 1, by number of the request
    """
    first_scores, scores = np.array(first[answer.number % requests]), np.array(answer.scores)
    if len(first_scores) != len(scores):
        return True
    tells_version = (first_scores > 1 - SURE) & (first_scores < SURE) & (scores < SURE)
    shift = log_odds(scores[tells_version]) - log_odds(first_scores[tells_version])
    return bool(np.any(np.abs(shift - SHIFT * (answer.version - 1)) > SHIFT / 5))


def went_back(seen: Sequence[SeenAnswer]) -> int:
    """How many answers have a lower version than an answer that had ended before they began."""
    by_end = sorted(seen, key=lambda answer: answer.ended)
    highest, position, count = 0, 0, 0
    for answer in sorted(seen, key=lambda answer: answer.began):
        while position < len(by_end) and by_end[position].ended < answer.began:
            highest = max(highest, by_end[position].version)
            position += 1
        count += answer.version < highest
    return count


def log_odds(scores: Float64) -> Float64:
    return np.asarray(np.log(scores) - np.log1p(-scores))
