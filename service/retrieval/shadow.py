"""Requests that a candidate answers a second time, so that its answers can be compared with the default version's.

Nobody sees the second answer: how many items both have in common and the engine time of both are counted. Few run at a time, and only while
nobody waits for the default version; the others are left out, and counted. Knows requests and answers, not which requests are drawn.
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

MOST = 16
"""Second answers that one worker makes at a time."""
MOST_VALUES = 4096
"""Values of the largest answer that is compared."""


class Shadows:
    """Those of one worker; used from its event loop alone."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, checked: CheckedRequest, answered: Retrieved, candidate: LoadedModel) -> None:
        """Have the candidate answer a request that the default version has answered, soon."""
        is_large = checked.answer_values > MOST_VALUES or input_values(checked.request) > INLINE_VALUES
        if len(self._running) >= MOST or is_large or checked.model.batcher.depth:
            candidate.metrics.shadow("left_out")
            return
        task = asyncio.create_task(self._compare(checked, answered, candidate))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _compare(self, checked: CheckedRequest, answered: Retrieved, candidate: LoadedModel) -> None:
        """Ask for as many items as the default version did, whatever the candidate's own default is."""
        began, request = time.perf_counter(), checked.request.model_copy(update={"m": checked.m})
        try:
            again = check(request, candidate, self._settings)
            own = await retrieve(again, self._settings, began, began + again.timeout_ms / 1e3, Priority.BACKGROUND)
        except InvalidInput:  # it has other limits or fields
            candidate.metrics.shadow("left_out")
            return
        except Exception as error:  # whatever it is, it is the candidate's, and no request's
            log.debug("%s version %d: no second answer: %s", candidate.name, candidate.version, error)
            candidate.metrics.shadow("failed")
            return
        queries = len(request.queries)
        candidate.metrics.compared(_overlap(answered.body, own.body), answered.engine_s / queries, own.engine_s / queries)


def _overlap(answered: bytes, own: bytes) -> float:
    """Items that two answers to the same queries have in common, as a share of the longer one's; the mean over queries."""
    shares = []
    for one, other in zip(orjson.loads(answered)["results"], orjson.loads(own)["results"], strict=True):
        ids, others = ({item["id"] for item in found["items"]} for found in (one, other))
        shares.append(len(ids & others) / max(len(ids), len(others), 1) if ids or others else 1.0)
    return sum(shares) / len(shares)
