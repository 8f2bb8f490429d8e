"""What a beam finds and what it costs: held-out queries of a version searched anew, behind those of customers.

The queries see the bundle alone, without live items and removals, as at export. Knows queries and engines. Does not know HTTP.

Legend: B queries, M results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from espalier.checks.heldout import HeldOut
from espalier.metrics import precision_recall_f
from espalier.search import SearchParams
from service.errors import NotReady
from service.models.loading import LoadedModel

NORMAL_95 = 1.959964
"""Standard deviations that hold 95 % of a normal distribution on both sides of its mean."""


@dataclass(frozen=True)
class Point:
    """What one beam finds. Fields as in the JSON.

    recall        mean recall@m over the queries
    recall_ci     its 95 % interval (`interval`)
    ms_per_query  engine wall time ÷ queries, other queries of the same calls included
    default       whether it is the model's default beam
    """

    beam_size: int
    m: int
    recall: float
    recall_ci: tuple[float, float]
    ms_per_query: float
    queries: int
    default: bool


async def measure(model: LoadedModel, held_out: HeldOut, beam_size: int, m: int, serves: Callable[[], bool]) -> Point:
    """Search all of `held_out` with one beam. The search of each query waits until the engine has nothing else to do.

    serves  whether the version still does; it must not be kept for this
    Raises NotReady, EngineFailed.
    """
    batcher, batch = model.batcher, 1 if model.batcher.limits.serial else model.batcher.limits.max_batch
    recalls, engine_s = list[NDArray[np.float64]](), 0.0
    for begin in range(0, len(held_out.queries), batch):
        if not serves():
            raise NotReady(f"Version {model.version} of {model.name!r} serves no longer.")
        rows = np.arange(begin, min(begin + batch, len(held_out.queries)))
        params = replace(SearchParams.uniform(len(rows), beam_size, m), frozen_B=np.ones(len(rows), np.bool_))
        answer = await batcher.search(held_out.queries.take(rows), params, background=True)
        relevant = held_out.relevant[begin : begin + len(rows)]
        recalls.append(precision_recall_f(answer.result.item_rows_BM, relevant, m)[1])
        engine_s += answer.engine_s * len(rows) / answer.batch
    recall_B = np.concatenate(recalls)
    return Point(
        beam_size,
        m,
        round(float(recall_B.mean()), 6),
        interval(recall_B),
        round(engine_s * 1e3 / len(recall_B), 4),
        len(recall_B),
        beam_size == model.bundle.manifest.search.beam_size,
    )


def interval(recall_B: NDArray[np.float64]) -> tuple[float, float]:
    """The 95 % interval of a mean by the normal approximation, within [0, 1]; of a single query all of that."""
    if len(recall_B) < 2:
        return 0.0, 1.0
    half = NORMAL_95 * float(recall_B.std(ddof=1)) / len(recall_B) ** 0.5
    mean = float(recall_B.mean())
    return round(max(mean - half, 0.0), 6), round(min(mean + half, 1.0), 6)
