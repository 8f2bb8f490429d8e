"""Slots of operations that are placed late, by a worker that does not know all slots that are taken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from espalier.bundle import Bundle
from espalier.live.rows import LiveRow, Placement
from espalier.live.state import Change, LiveState
from service.live.slots import Slots
from tests.service.live_running import add_version


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return add_version(tmp_path, 1)


def test_what_is_placed_late_has_no_slot_that_a_worker_ahead_has_given_away(bundle: Bundle) -> None:
    parent = int(bundle.tree.level(bundle.tree.height - 1)[0])
    row = LiveRow(np.zeros(bundle.graph_scorer.node_dim, np.float32))
    ahead, behind = LiveState(bundle), LiveState(bundle)
    candidates = [[(parent, row)]]
    taken = Slots(ahead).place("known", candidates)
    ahead.apply([Change(1, "known", "put", {}, taken)])
    # the last operation of "known" is a later one, so a replay does not know it yet
    late = [Slots(behind).place(f"late-{sequence}", candidates, late=sequence) for sequence in (2, 3)]
    for sequence, placements in zip((2, 3), late, strict=True):
        ahead.apply([Change(sequence, f"late-{sequence}", "put", {}, placements)])
    behind.apply([Change(2, "late-2", "put", {}, late[0]), Change(3, "late-3", "put", {}, late[1])])
    behind.apply([Change(4, "known", "put", {}, taken)])
    assert ahead.live_items == behind.live_items == 3


def test_an_item_that_is_there_keeps_its_slot(bundle: Bundle) -> None:
    parent = int(bundle.tree.level(bundle.tree.height - 1)[0])
    state = LiveState(bundle)
    row = LiveRow(np.zeros(bundle.graph_scorer.node_dim, np.float32))
    state.apply([Change(1, "new", "put", {}, (Placement(0, parent, 5, row),))])
    assert Slots(state).place("new", [[(parent, row)]], late=7)[0].slot == 5
