"""Vectors of items by the items that they follow: the start of a transformer's rows, since both depend on the order of lists.

    A[a, b] = ln(1 + after[a, b] · Σ after / (out_a · in_b))         after of `cooccurrence.py`, near items counting most
    A ≈ U Σ Vᵀ,   e_b = Σ^½ v_b                                      out_a = Σ_b after[a, b],  in_b = (Σ_a after[a, b] + 5)^¾ · (Σ after)^¼

A is the mutual information of an item and one before it, as word2vec's skip-gram factorises it (Levy & Goldberg 2014), with the exponent
of Levy, Goldberg & Dagan (2015) for rare items. Embeddings of users' events (`trees/embeddings.py`) ignore the order. Also, two readers
that start from different vectors err on different queries.

Legend: I items, D width.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_array
from sklearn.utils.extmath import randomized_svd

from espalier.arrays import Float32, Int64

from ..data.interactions import Interactions
from ..neighbours.cooccurrence import count_pairs, lists_of
from ..neighbours.fit import fading

NEAR, WINDOW = 0.85, 20
"""The decay of the weight for each position between two items, and how many positions count."""
DAMPING, EXPONENT = 5.0, 0.75
"""Damping of an item's sum: few lists give little information about it."""
MOST_PAIRS = 1 << 24
"""Most pairs of items; their counts take some 60 bytes each, a gigabyte."""
ITERATIONS = 7


def followers(interactions: Interactions, users: Int64, width: int, seed: int) -> Float32:
    """float32[I, D = width, or I where that is less]: e of each item; zero for items that follow nothing in the lists of `users`."""
    items = interactions.item_count
    counts = count_pairs(lists_of(interactions, users), fading(NEAR, WINDOW), most_pairs=MOST_PAIRS)
    after = csr_array((counts.after_N.astype(np.float64), counts.item_N, counts.offset_I1), shape=(items, items))
    has_after_N = after.data > 0
    if not has_after_N.any():
        return np.zeros((items, min(width, items)), np.float32)
    row_N, total = np.repeat(np.arange(items), np.diff(after.indptr)), float(after.data.sum())
    out_I = np.bincount(row_N, after.data, minlength=items)
    in_I = np.bincount(after.indices, after.data, minlength=items)
    chance_N = out_I[row_N[has_after_N]] * (in_I[after.indices[has_after_N]] + DAMPING) ** EXPONENT * total ** (1 - EXPONENT)
    values_N = np.log1p(after.data[has_after_N] * total / chance_N).astype(np.float32)  # the products run in float32, too
    information = csr_array((values_N, (row_N[has_after_N], after.indices[has_after_N])), shape=after.shape)
    _, strength_D, item_DI = randomized_svd(information, min(width, items), n_iter=ITERATIONS, random_state=seed)
    vectors_ID = np.ascontiguousarray((np.sqrt(strength_D)[:, None] * item_DI).T, np.float32)
    vectors_ID[in_I == 0] = 0  # exactly 0, without rounding
    return vectors_ID
