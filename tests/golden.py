"""Golden queries of histories, for bundles that tests make by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from espalier.arrays import Int64
from espalier.bundle import Bundle
from espalier.queries import HistoryKind, pad_histories
from espalier.search import SearchParams
from training.golden import golden_answers


def golden_of_histories(bundle: Bundle, histories: Sequence[Int64], beams: Sequence[int], ms: Sequence[int]) -> pa.Table:
    """The golden table of histories of item rows."""
    kind = bundle.manifest.query
    assert isinstance(kind, HistoryKind)
    ids = pa.array([bundle.items.ids_of(history) for history in histories], pa.list_(pa.string()))
    params = SearchParams(np.asarray(beams, np.int64), np.asarray(ms, np.int64))
    return golden_answers(bundle, pad_histories(kind, histories), ids, params)
