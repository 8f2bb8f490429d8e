"""Nearest item means: an item's vector is the mean of the queries that led to it; search is exact. The cheap rival of a tree over vectors.

    score(i | x) = ⟨x − c, v_i⟩ · n_i / (n_i + s) / ‖v_i‖^p,   v_i = mean of x' − c over the training queries that lead to i

c is 0 or the mean of all training vectors, n_i the number of queries that led to i, s the damping of rare items. p = 1 ranks by the cosine,
p = 0 by the inner product.

Legend: B queries, F numbers of a vector, I items, M results.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from espalier.arrays import Array, Float32, Int64
from espalier.errors import InvalidData

from ..baselines.tuned_method import bytes_of, tune
from ..data.user_item_matrix import events_of_items
from ..deep.vector_start import item_means as means_of
from ..deep.vector_start import start_of
from ..retrieval.scores import best_of_all
from ..retrieval.task import Fitted, Task
from ..retrieval.tuning import Option, Options

GRID = (
    Option("centred", (False, True), ordered=False),
    Option("power", (0.0, 0.25, 0.5, 0.75, 1.0)),
    Option("damping", (0.0, 0.5, 1.0, 2.0, 5.0, 10.0), times=2.0, most=1000.0),
)
START: Options = {"centred": True, "power": 1.0, "damping": 1.0}
VALIDATION_QUERIES = 2000
MOST_BYTES = 4 << 30
"""Most bytes of the means of all items."""


def item_means(task: Task) -> Fitted:
    """Choose c, p and s on at most VALIDATION_QUERIES validation queries.

    Raises InvalidData if the log is of histories, or if the means would take more than MOST_BYTES.
    """
    begin, deadline, lists = time.perf_counter(), task.deadline(), task.split.lists
    if lists.vectors_UF is None:
        raise InvalidData("log", "histories", "a log of vectors (data.format.format)")
    size = 4 * lists.item_count * lists.vectors_UF.shape[1]
    if size > MOST_BYTES:
        raise InvalidData("log", f"{lists.item_count} items of {lists.vectors_UF.shape[1]} numbers", f"means of at most {MOST_BYTES} bytes")
    mean_F = start_of(lists, task.split.train, 1, seed=task.seed).mean_F
    means_IF = means_of(lists, task.split.train, np.asarray, lists.vectors_UF.shape[1])
    events_I = events_of_items(lists, task.split.train)

    def fitted(options: Options) -> Fitted:
        centre_F = mean_F if options["centred"] else np.zeros_like(mean_F)
        vectors_IF = np.where(events_I[:, None] > 0, means_IF - centre_F, 0)
        length_I = np.linalg.norm(vectors_IF, axis=1)
        weight_I = events_I / np.maximum(events_I + options["damping"], 1e-9)
        weight_I /= np.where(length_I > 0, length_I, 1) ** options["power"]
        weighed_IF = np.asarray(vectors_IF * weight_I[:, None], np.float32)

        def scores(vectors: Sequence[Array]) -> Float32:
            return np.asarray((np.stack(vectors) - centre_F) @ weighed_IF.T, np.float32)

        def rank(vectors: Sequence[Array], /, m: int, exclude_seen: bool) -> Int64:
            return best_of_all(scores, len(weighed_IF), vectors, m, exclude_seen=False)  # vectors have seen nothing

        return Fitted(rank, options, bytes_of(centre_F, weighed_IF), 0.0)

    return tune(task, begin, deadline, fitted, START, GRID, VALIDATION_QUERIES)
