"""Expected reciprocal rank and average precision, which NCE's tables have beside NDCG. A query without a relevant item counts 0.

Legend: Q queries, R rows (an item of a query).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from espalier.errors import InvalidData
from espalier.metrics import Float64, Int64, ranked_grades


def expected_reciprocal_rank(
    scores_R: NDArray[np.floating],
    grades_R: NDArray[np.floating],
    query_offset: Int64,
    max_grade: float,
) -> Float64:
    """ERR of every query: the mean of 1 / the place at which a user who reads down is satisfied (Chapelle et al. 2009; NCE §5.1).

        ERR = Σ_i R_i / i · Π_{j < i} (1 − R_j),   R_i = (2^{r_i} − 1) / 2^{max_grade}

    max_grade  the highest grade that the set's judges could give, 4 in the paper, not the highest in this query

    Arguments, result and errors as `ndcg`. (The paper prints the product over j > i.)
    """
    place_R, query_R, sorted_R = ranked_grades(scores_R, grades_R, query_offset)
    if sorted_R.max(initial=0) > max_grade:
        raise InvalidData("grades_R", float(sorted_R.max()), f"at most max_grade, {max_grade}")
    satisfied_R = (np.exp2(sorted_R) - 1) / np.exp2(max_grade)
    left_R = np.log1p(-satisfied_R)
    before_R = np.cumsum(left_R) - left_R
    reading_R = np.exp(before_R - before_R[query_offset[:-1]][query_R])
    err_Q: Float64 = np.add.reduceat(reading_R * satisfied_R / place_R, query_offset[:-1])
    return err_Q


def average_precision(scores_R: NDArray[np.floating], grades_R: NDArray[np.floating], query_offset: Int64) -> Float64:
    """AP of every query, whose mean is MAP: the mean over relevant items (grade above 0) of the precision at their place.

    Arguments, result and errors as `ndcg`.
    """
    place_R, query_R, sorted_R = ranked_grades(scores_R, grades_R, query_offset)
    hits_R = np.cumsum(sorted_R > 0)
    before_Q: Int64 = hits_R[query_offset[:-1]] - (sorted_R[query_offset[:-1]] > 0)
    precision_R = np.where(sorted_R > 0, (hits_R - before_Q[query_R]) / place_R, 0)
    relevant_Q = np.add.reduceat(sorted_R > 0, query_offset[:-1], dtype=np.int64)
    precision_Q: Float64 = np.bincount(query_R, weights=precision_R) / np.maximum(relevant_Q, 1)
    return precision_Q
