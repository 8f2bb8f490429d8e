"""Shadow requests: the candidate answers a request a second time, so that its answer can be compared with that of the default version.

No client sees the second answer. Metrics count the items that both answers share and the engine time of both. If too many run, or queries
wait for the default version, a request is left out and counted. Knows requests and answers, not which requests are drawn.
"""

from __future__ import annotations

import asyncio
import logging
import time

import orjson

from espalier.errors import InvalidInput

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
