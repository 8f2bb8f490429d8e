"""Graph filter over users and items (GF-CF: Shen et al. 2021, arXiv 2108.07567): a linear filter plus an ideal low-pass filter.

    R̃ = D_U^−½ R D_I^−½,   P = R̃ᵀ R̃,   V = its first `width` eigenvectors
    score(j | history) = pop_j^−column · (Σ_{d < L} recency^d · pop_{h_d}^−row · (P + alpha · V Vᵀ)[h_d, j]),   h_0 the last item

R is the binary matrix of users and items; D_U and D_I count the items of a user and the users of an item. The published filter has
row = −column, with ½ for the low-pass part. P's diagonal is left out: it only adds history items to themselves. Polynomials of P (Turbo-CF,
ChebyCF) are between the two parts. Lists without an order have a recency of 1.

Legend: B queries, I items, W width, M results, L items of a history that count.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import numpy as np
from scipy import sparse

from espalier.arrays import Float32, Float64, Int64
from espalier.errors import InvalidData

from ..baselines.item_cf import COSINE
from ..baselines.tuned_method import bytes_of, tune
from ..data.user_item_matrix import damped_items
from ..neighbours.cooccurrence import count_pairs, lists_of
from ..neighbours.fit import fading, scored_pairs
from ..retrieval.scores import best_then_popular, by_popularity
from ..retrieval.task import Fitted, Task
from ..retrieval.tuning import Option, Options
from ..trees.embeddings import item_embeddings

GRID = (
    Option("alpha", (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)),
    Option("column", (-0.5, -0.25, 0.0, 0.25), add=0.1, least=-1.0, most=1.0),
    Option("row", (-0.25, 0.0, 0.25, 0.5), add=0.1, least=-1.0, most=1.0),
    Option("width", (32, 64, 128, 256)),
)
RECENCY = Option("recency", (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.99, 1.0))
START: Options = {"recency": 1.0, "alpha": 0.3, "column": 0.0, "row": 0.0, "width": 64}
WIDEST = 256
LONGEST, WINDOW = 1000, 2000
VALIDATION_QUERIES = 2000


def graph_filter(task: Task) -> Fitted:
    """Choose the options on at most VALIDATION_QUERIES validation queries, and fit on all training users.

    Items without training users have no score. If no item of the history has training users, no item has a score. Raises InvalidData if
    there are fewer than two users or two items.
    """
    begin, deadline = time.perf_counter(), task.deadline()
    lists, users = task.split.lists, task.split.train
    widest = min(WIDEST, len(users) - 1, lists.item_count - 1)
    if widest < 1:
        raise InvalidData("log", f"{len(users)} training users and {lists.item_count} items", "at least 2 of each")
    distinct = lists_of(lists, users, distinct=True)
    counts = count_pairs(distinct, np.ones(WINDOW), 1.0)
    cosines = scored_pairs(counts, distinct.events_I, COSINE)
    linear_II = sparse.csr_array((cosines.score_N, cosines.item_N, cosines.offset_I1), shape=(lists.item_count, lists.item_count))
    # float64: sums in float32 would depend on how many queries there are
    low_IW: Float64 = item_embeddings(lists, users, widest, seed=task.seed).astype(np.float64)
    low_IW /= np.maximum(np.linalg.norm(low_IW, axis=0), 1e-12)
    damped_I = np.maximum(distinct.events_I, 1).astype(np.float64)
    popular_I = by_popularity(distinct.events_I)

    def fitted(options: Options) -> Fitted:
        row_I, column_I = damped_I ** -options["row"], np.where(distinct.events_I > 0, damped_I ** -options["column"], np.nan)
        weight_L, used_IW = fading(options["recency"], LONGEST), low_IW[:, : min(options["width"], widest)]

        def scores(histories: Sequence[Int64]) -> Float32:
            history_BI, known_B = damped_items(histories, weight_L, row_I, np.isfinite(column_I))
            low_BI = options["alpha"] * ((history_BI @ used_IW) @ used_IW.T)
            low_BI += (history_BI @ linear_II).toarray()
            score_BI: Float32 = (low_BI * column_I).astype(np.float32)
            score_BI[~known_B] = np.nan
            return score_BI

        return Fitted(partial(best_then_popular, scores, popular_I), options, bytes_of(linear_II, used_IW, row_I, column_I, popular_I), 0.0)

    grid = GRID if lists.order == "none" else (RECENCY, *GRID)
    return tune(task, begin, deadline, fitted, START, grid, VALIDATION_QUERIES)
