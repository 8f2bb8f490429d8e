"""What a request sees of live items: what explanations say of them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from espalier.checks.random_live import random_state
from espalier.live.filtered import LiveFilters
from espalier.live.fold import write_fold
from espalier.live.folded_tables import FoldedRows
from espalier.masks.filters import ItemFilters
from service.live.views import LiveView
from tests.espalier.test_tail import with_tail


@pytest.mark.parametrize("form", ["product", "gaussian"])
def test_the_tail_of_an_item_is_the_one_that_it_has_in_a_fold(tmp_path: Path, form: Literal["product", "gaussian"]) -> None:
    """Of trained items, of new ones, and of those whose row was changed; that of an item which is gone is empty."""
    rng = np.random.default_rng(3)
    bundle, _ = with_tail(tmp_path, 3, form)
    state = random_state(rng, bundle, integer=False)
    trees = [alone.tree for alone in bundle.alone]
    view = LiveView(state.table, state.overlay(), LiveFilters(trees, ItemFilters(trees, bundle.items, 1 << 20), state.table, state.touched))
    fold, rows = write_fold(tmp_path / "folded" / "2", bundle, view.overlay, state.table), FoldedRows.of(view.overlay)
    features = np.array([0, 3, 4, 9], np.int32)
    values = np.array([0.5, 1, 0.25, 2], np.float32)
    assert bundle.tail is not None
    assert fold.tail is not None
    gone = bundle.tail.part_of_row(features, values, features[:0], values[:0])
    differs = 0
    for row in range(view.overlay.items + view.overlay.handles):
        handle = int(view.overlay.handles_of(np.array([row]))[0])
        if handle >= 0 and not view.overlay.leaf_R[handle]:
            assert view.tail_part(bundle.tail, row, features, values) == gone
        elif handle >= 0 or row not in view.overlay.hidden:
            folded = int(rows.of_rows(np.array([row]))[0])
            part = view.tail_part(bundle.tail, row, features, values)
            assert part == pytest.approx(fold.tail.part(features, values, folded), abs=1e-9)
            differs += row < view.overlay.items and part != bundle.tail.part(features, values, row)
    assert differs > 0
