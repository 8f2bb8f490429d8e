"""A candidate on trial: which requests it answers in place of the default version, and shadow requests, which it answers a second time.

A hash of model name, candidate and user is compared with the share. A user therefore gets the same version from every worker and host as
long as the trial lasts, and a larger share only adds users. Another candidate is tried on other users.

No client sees the answer to a shadow request. Metrics count the items that both answers share and the engine time of both. If too many run,
or queries wait for the default version, a request is left out and counted. Knows requests and answers, not which of them are shadowed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from hashlib import blake2b

import orjson

from espalier.errors import InvalidInput
from espalier.serving import Candidate

from ..batching.priority import Priority
from ..models.loading import LoadedModel
from ..retrieval.request import CheckedRequest, check, input_values
from ..retrieval.retrieve import INLINE_VALUES, Retrieved, retrieve
from ..settings import Settings

log = logging.getLogger(__name__)

MAX_RUNNING = 16
"""Most shadow requests of one worker at a time."""
MAX_VALUES = 4096
"""Most values of an answer that is compared."""
USER, GROUP = "Espalier-User", "Espalier-Group"
"""Headers: the user, who gets the same version each time, and a group of users, which may be one that gets the candidate."""


def is_tried(candidate: Candidate, model: str, key: str | None, user: bytes | None, group: bytes | None) -> bool:
    """Whether the candidate answers a request that names no version. Without a user, chance decides for each request.

    key  the name of the request's API key
    """
    if key is not None and key in candidate.keys:
        return True
    if group is not None and group.decode("latin-1") in candidate.groups:
        return True
    if not candidate.share:
        return False
    return (random.random() if user is None else hash_fraction(model, candidate.version, user)) < candidate.share


def hash_fraction(model: str, candidate: int, user: bytes) -> float:
    """A user's hash in a trial, uniform over [0, 1)."""
    digest = blake2b(b"%b\0%d\0%b" % (model.encode(), candidate, user), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) / (1 << 53)


class Shadows:
    """The shadow requests of one worker. Only its event loop uses them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, checked: CheckedRequest, default_answer: Retrieved, candidate: LoadedModel) -> None:
        """Start a task in which the candidate answers a request that the default version has answered."""
        is_large = checked.answer_values > MAX_VALUES or input_values(checked.request) > INLINE_VALUES
        if len(self._running) >= MAX_RUNNING or is_large or checked.model.batcher.depth:
            candidate.metrics.shadow("left_out")
            return
        task = asyncio.create_task(self._compare(checked, default_answer, candidate))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _compare(self, checked: CheckedRequest, default_answer: Retrieved, candidate: LoadedModel) -> None:
        """Let the candidate answer the request with the m of the default version, and compare both answers."""
        began, request = time.perf_counter(), checked.request.model_copy(update={"m": checked.m})
        try:
            candidate_request = check(request, candidate, self._settings)
            deadline = began + candidate_request.timeout_ms / 1e3
            candidate_answer = await retrieve(candidate_request, self._settings, began, deadline, Priority.BACKGROUND)
        except InvalidInput:  # the candidate has other limits or fields
            candidate.metrics.shadow("left_out")
            return
        except Exception as error:  # an error of the candidate fails no request
            log.debug("%s version %d: no second answer: %s", candidate.name, candidate.version, error)
            candidate.metrics.shadow("failed")
            return
        queries, overlap = len(request.queries), _overlap(default_answer.body, candidate_answer.body)
        candidate.metrics.compared(overlap, default_answer.engine_s / queries, candidate_answer.engine_s / queries)


def _overlap(default_body: bytes, candidate_body: bytes) -> float:
    """The items that two answers to the same queries share, divided by the items of the longer answer; the mean over queries."""
    shares = []
    for results in zip(orjson.loads(default_body)["results"], orjson.loads(candidate_body)["results"], strict=True):
        default_ids, candidate_ids = ({item["id"] for item in result["items"]} for result in results)
        longer = max(len(default_ids), len(candidate_ids))
        shares.append(len(default_ids & candidate_ids) / longer if longer else 1.0)
    return sum(shares) / len(shares)
