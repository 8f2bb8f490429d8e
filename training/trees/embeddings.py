"""Item embeddings from users' events, for the first tree: a truncated SVD of the weighted user–item matrix.

The SVD is that of Halko, Martinsson and Tropp (2011), by subspace iteration on AᵀA. By hand, because scikit-learn's holds four arrays of
float64[U + I, D + 10] besides the matrix. Here there is one of float32[I, D + 10], and one of U rows for a block of columns, which is
narrower if the array would be large. The matrix is stored without values, by users and by items, since A_ui is a factor of the user times a
factor of the item.

Legend: U training users, I items, D embedding width, N pairs of a user and an item, K columns of a block, R rows, C columns of a product.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_array

from espalier.arrays import Array, Float32, Float64, Int32, Int64
from espalier.compiled_code import compiled
from espalier.errors import InvalidConfig

from ..data.interactions import Interactions
from ..data.user_item_matrix import items_of

OVERSAMPLED = 10
"""Columns that the iteration has in addition to the requested ones, which it then finds more exactly."""
ITERATIONS = 8
"""Products with AᵀA; scikit-learn's default makes as many."""
BLOCK_BYTES = 1 << 31
"""Most bytes of a product's columns. All columns at once are fastest: rows are read in random order, so a part costs as much as a row."""
ROWS = 1 << 16
"""Rows that are rotated at a time."""
LEAST_SHARE = 1e-12
"""Smaller shares of the largest eigenvalue of YᵀY are rounding, and give a column of zeros."""


class Touches(NamedTuple):
    """Distinct pairs of users and items, as rows of one side with the numbers of the other.

    offset_R1  int64[R + 1]: row r has other_N[offset[r]] … other_N[offset[r + 1] − 1]
    """

    offset_R1: Int64
    other_N: Int32

    def transposed(self, others: int) -> Touches:
        """The rows of the other side, each in the order of this side's rows."""
        shape = len(self.offset_R1) - 1, others
        columns = csr_array((np.ones(len(self.other_N), np.bool_), self.other_N, self.offset_R1), shape=shape).tocsc()
        return Touches(columns.indptr.astype(np.int64), columns.indices.astype(np.int32, copy=False))


def item_embeddings(interactions: Interactions, users: Int64, width: int, *, seed: int) -> Float32:
    """float32[I, D]: right singular vectors times singular values of A, from the events of `users` only (pass training users).

        A_ui = 1 / sqrt(|I_u| · |U_i|) where u touched i, 0 elsewhere

    so that ⟨e_i, e_j⟩ approximates Item-CF's cosine with long lists weighted down. Items that `users` never touched get a zero row.
    The same seed gives the same embeddings. Raises InvalidConfig unless 1 ≤ width < min(U, I).
    """
    items = interactions.item_count
    if not 1 <= width < min(len(users), items):
        least = min(len(users), items)
        raise InvalidConfig("width", width, f"at least 1 and below {least}, the smaller of {len(users)} users and the items")
    by_user = Touches(*items_of(interactions, users))
    by_item = by_user.transposed(items)
    scales = [_inverse_root(np.diff(side.offset_R1)) for side in (by_user, by_item)]
    rng = np.random.default_rng(seed)
    columns = width + OVERSAMPLED
    size = max(1, min(columns, BLOCK_BYTES // (4 * max(len(users), items))))
    blocks = [slice(start, min(start + size, columns)) for start in range(0, columns, size)]
    y_IC = np.concatenate([rng.standard_normal((items, block.stop - block.start), np.float32) for block in blocks], axis=1)
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads) as pool:
        for iteration in range(ITERATIONS):
            for block in blocks:
                y_IK = np.ascontiguousarray(y_IC[:, block])
                z_UK = np.empty((len(users), y_IK.shape[1]), np.float32)
                _multiply(pool, threads, by_user, scales[0], scales[1], y_IK, z_UK)
                _multiply(pool, threads, by_item, scales[1], scales[0], z_UK, y_IK)
                y_IC[:, block] = y_IK
            values, rotation = _principal(y_IC)
            # Y = AᵀA Q with orthonormal Q has the singular values σ², and right singular vectors of A on its left.
            power = -0.5 if iteration < ITERATIONS - 1 else -0.25
            factor = np.power(values, power, out=np.zeros_like(values), where=values > LEAST_SHARE * values.max())
            rotation *= factor
            if iteration < ITERATIONS - 1:
                for start in range(0, items, ROWS):
                    y_IC[start : start + ROWS] = y_IC[start : start + ROWS].astype(np.float64) @ rotation
    embeddings = np.empty((items, width), np.float32)
    for start in range(0, items, ROWS):
        embeddings[start : start + ROWS] = y_IC[start : start + ROWS].astype(np.float64) @ rotation[:, :width]
    return embeddings


def _inverse_root(count: Int64) -> Float32:
    """1 / √count, and 0 for 0."""
    return (1 / np.sqrt(np.maximum(count, 1)) * (count > 0)).astype(np.float32)


def _multiply(
    pool: ThreadPoolExecutor, threads: int, side: Touches, scale_R: Float32, scale_C: Float32, x_CK: Float32, out_RK: Float32
) -> None:
    """Write the product of a scaled side with some columns to out_RK. The number of threads changes only the time."""
    cuts = np.searchsorted(side.offset_R1, np.linspace(0, side.offset_R1[-1], 4 * threads + 1)[1:-1]).tolist()

    def sum_part(first: int, last: int) -> None:
        _sum_rows(side.offset_R1, side.other_N, scale_R, scale_C, x_CK, first, last, out_RK)

    list(pool.map(sum_part, [0, *cuts], [*cuts, len(scale_R)]))


def _principal(y_IC: Float32) -> tuple[Float64, Float64]:
    """The eigenvalues of YᵀY, largest first, and its eigenvectors in columns, whose largest entries are positive."""
    gram_CC = np.zeros((y_IC.shape[1], y_IC.shape[1]))
    for start in range(0, len(y_IC), ROWS):
        y = y_IC[start : start + ROWS].astype(np.float64)
        gram_CC += y.T @ y
    values, vectors = np.linalg.eigh(gram_CC)
    vectors = vectors[:, ::-1]
    signs = np.sign(vectors[np.abs(vectors).argmax(axis=0), np.arange(len(values))])
    return values[::-1].copy(), vectors * signs


@compiled(fastmath={"contract"})
def _sum_rows(offset_R1: Array, other_N: Array, scale_R: Array, scale_C: Array, x_CK: Array, first: int, last: int, out_RK: Array) -> None:
    """out[r] = scale[r] · Σ_c scale[c] · x[c] over the others of rows first … last − 1."""
    columns = x_CK.shape[1]
    total = np.empty(columns, np.float32)
    for row in range(first, last):
        total[:] = 0
        for n in range(offset_R1[row], offset_R1[row + 1]):
            other = np.uint64(other_N[n])  # an index that may be negative takes a branch
            scale = scale_C[other]
            for k in range(columns):
                total[k] += scale * x_CK[other, k]
        for k in range(columns):
            out_RK[row, k] = scale_R[row] * total[k]


def spread_unseen(embeddings_ID: Float32, category_of_item_I: Int32 | None = None, *, seed: int) -> Float32:
    """A copy in which each zero row gets the vector of a random other item: of its category if that has one with a vector, else of any.

    So items without events are near items of their category, spread over the tree like the others, and not in one cluster.
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
        category = category_of_item_I[unseen]
        first = np.searchsorted(category_of_item_I[by_category], category, side="left")
        count = np.searchsorted(category_of_item_I[by_category], category, side="right") - first
        has_donor = (category >= 0) & (count > 0)
        donor[has_donor] = by_category[first[has_donor] + rng.integers(count[has_donor])]
    filled[unseen] = embeddings_ID[donor]
    return filled
