"""Item embeddings from who touched what, for the first tree: a truncated SVD of the weighted user–item matrix.

Legend: U training users, I items, D embedding width.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sklearn.decomposition import TruncatedSVD

from espalier.errors import InvalidConfig
from training.data.interactions import Interactions
from training.data.user_item_matrix import user_item_matrix

Float32 = NDArray[np.float32]


def item_embeddings(interactions: Interactions, users: NDArray[np.int64], width: int, *, seed: int) -> Float32:
    """float32[I, D]: right singular vectors times singular values of A, from the events of `users` only (pass training users).

        A_ui = 1 / sqrt(|I_u| · |U_i|) where u touched i, 0 elsewhere

    so that ⟨e_i, e_j⟩ approximates Item-CF's cosine with long lists weighted down. Items that `users` never touched get a zero row.
    The same seed gives the same embeddings. Raises InvalidConfig unless 1 ≤ width < min(U, I).
    """
    matrix = user_item_matrix(interactions, users)
    if not 1 <= width < min(matrix.shape):
        raise InvalidConfig("width", width, f"at least 1 and below {min(matrix.shape)}, the smaller of {len(users)} users and the items")
    users_of_item = np.bincount(matrix.indices, minlength=interactions.item_count)
    items_of_user = np.diff(matrix.indptr)
    matrix.data /= np.sqrt(np.repeat(items_of_user, items_of_user) * users_of_item[matrix.indices])
    svd = TruncatedSVD(width, n_iter=7, random_state=seed).fit(matrix)
    embeddings: Float32 = np.ascontiguousarray((svd.components_ * svd.singular_values_[:, None]).T, np.float32)
    embeddings[users_of_item == 0] = 0  # exactly: the SVD may leave rounding there, and `spread_unseen` looks for zeros
    return embeddings


def spread_unseen(embeddings_ID: Float32, category_of_item_I: NDArray[np.int32] | None = None, *, seed: int) -> Float32:
    """A copy in which each zero row takes the vector of a random other item: of its category where one with a vector is known, else of any.

    Items nobody touched thus end up beside items of their kind, spread over the tree as the known ones are, instead of in one clump.
    """
    rng = np.random.default_rng(seed)
    filled = embeddings_ID.copy()
    seen = np.flatnonzero(embeddings_ID.any(axis=1))
    unseen = np.flatnonzero(~embeddings_ID.any(axis=1))
    if len(seen) == 0:
        return filled
    donor = seen[rng.integers(len(seen), size=len(unseen))]
    if category_of_item_I is not None:
        by_category = seen[np.argsort(category_of_item_I[seen], kind="stable")]
        wanted = category_of_item_I[unseen]
        first = np.searchsorted(category_of_item_I[by_category], wanted, side="left")
        count = np.searchsorted(category_of_item_I[by_category], wanted, side="right") - first
        has = (wanted >= 0) & (count > 0)
        donor[has] = by_category[first[has] + rng.integers(count[has])]
    filled[unseen] = embeddings_ID[donor]
    return filled
