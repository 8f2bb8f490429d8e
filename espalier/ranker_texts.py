"""The n-grams of items' texts, column by column, which a re-ranker compares with a query's.

Legend: C columns, R rows: row i · C + c is the text of item i in column c.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from espalier.arrays import Array, Int32, Int64
from espalier.stored_arrays import Dtypes, check_arrays, check_length, check_rows
from espalier.text.vectoriser import Vectoriser

STEP = 1 / 64
"""The unit of weights. The largest, 4, is that of the rarest word of eight million texts."""
ARRAYS: Dtypes = {"row_begin": np.int64, "feature": np.int32, "weight": np.uint8}


@dataclass(frozen=True, eq=False)
class RankerTexts:
    """Document rows of texts (`Vectoriser.documents`): entries row_begin[r] … row_begin[r + 1] − 1, features ascending.

    row_begin int64[R + 1] · feature int32 · weight uint8, in STEPs
    """

    row_begin: Int64
    feature: Int32
    weight: Array

    @staticmethod
    def of_texts(vectoriser: Vectoriser, batches: Iterable[Sequence[str]]) -> RankerTexts:
        """The rows of batches of texts, in their order."""
        ends, features, weights = [np.zeros(1, np.int64)], [np.empty(0, np.int32)], [np.empty(0, np.uint8)]
        for rows in map(vectoriser.documents, batches):
            ends.append(ends[-1][-1] + rows.indptr[1:])
            features.append(rows.indices)
            weights.append(np.minimum(np.rint(rows.values / STEP), np.iinfo(np.uint8).max).astype(np.uint8))
        return RankerTexts(np.concatenate(ends), np.concatenate(features), np.concatenate(weights))

    def arrays(self) -> dict[str, Array]:
        """The arrays by their names in the file."""
        return {name: getattr(self, name) for name in ARRAYS}

    @staticmethod
    def of_arrays(arrays: Mapping[str, Array], rows: int, width: int) -> RankerTexts:
        """From a file's arrays. Raises BundleCorrupt unless they are `rows` rows of features below `width`."""
        check_arrays(arrays, ARRAYS)
        texts = RankerTexts(**arrays)
        check_length("weight", texts.weight, len(texts.feature))
        check_rows("feature", texts.feature, texts.row_begin, rows, width)
        return texts
