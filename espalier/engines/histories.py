"""Histories of a call with live items in them: which items they know, and by which rows these count.

A deleted live id is unknown, as are all live ids to frozen queries: histories are aligned anew without them. A deleted trained item counts
as it was trained.

Legend: B queries, T history, R handles.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.errors import InvalidQuery
from espalier.live.overlay import Overlay
from espalier.queries import PADDING

Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]


class Histories(NamedTuple):
    """rows_BT: item rows, PADDING in front where something was unknown.

    handles_BT  the handle by whose live leaf an item counts, −1 where it counts as it was trained
    any_live    whether some are not −1
    frozen_B    None: no query is
    """

    rows_BT: Int64
    handles_BT: Int64
    any_live: bool
    frozen_B: Bool | None

    def groups(self, apart: bool) -> list[tuple[Int64, bool, bool]]:
        """Queries (int64 positions) that can be searched together, whether live rows count in their histories, whether they are frozen.

        apart  frozen ones are searched apart from those without a live row
        """
        if not self.any_live and (self.frozen_B is None or not apart):
            return [(np.arange(len(self.rows_BT)), False, False)]
        live_B = (self.handles_BT >= 0).any(axis=1)
        frozen_B = np.zeros_like(live_B) if self.frozen_B is None or not apart else self.frozen_B
        kind_B = live_B + 2 * frozen_B
        return [(np.flatnonzero(kind_B == kind), kind % 2 == 1, kind >= 2) for kind in np.unique(kind_B).tolist()]


def histories_of(overlay: Overlay, rows_BT: Int64, frozen_B: Bool | None, countable: bool) -> Histories:
    """The histories of item rows of bundle and overlay (int64[B, T], PADDING where there is none).

    countable  whether live rows can count in histories; if not, live items are unknown, and changed ones count as they were trained
    Raises InvalidQuery where one has a row that neither has.
    """
    highest = int(rows_BT.max(initial=PADDING))
    if highest >= overlay.items + overlay.handles:
        raise InvalidQuery("queries", highest, f"item rows from 0 to {overlay.items + overlay.handles - 1}, or {PADDING} as padding")
    if highest < overlay.items and not overlay.moved:
        return Histories(rows_BT, np.full_like(rows_BT, -1), False, frozen_B)
    handles_BT = overlay.handles_of(rows_BT)
    counts_BT = overlay.trees[0].of_handles(handles_BT.ravel()).reshape(handles_BT.shape) > 0
    if not countable:
        counts_BT[:] = False
    elif frozen_B is not None:
        counts_BT[frozen_B] = False
    unknown_BT = (rows_BT >= overlay.items) & ~counts_BT
    handles_BT = np.where(counts_BT, handles_BT, -1)
    rows_BT = rows_BT.copy()
    for b in np.flatnonzero(unknown_BT.any(axis=1)).tolist():
        known_T = np.flatnonzero((rows_BT[b] >= 0) & ~unknown_BT[b])
        place_T = slice(len(rows_BT[b]) - len(known_T), None)
        rows_T, handles_T = rows_BT[b, known_T], handles_BT[b, known_T]
        rows_BT[b], handles_BT[b] = PADDING, -1
        rows_BT[b, place_T], handles_BT[b, place_T] = rows_T, handles_T
    return Histories(rows_BT, handles_BT, bool(counts_BT.any()), frozen_B)
