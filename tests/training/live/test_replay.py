"""A training run places an operation that no service has placed as a service would when it loads the version."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.live.journal import Journal
from espalier.live.operations import ItemBody, Operation
from espalier.live.overlay import HANDLE, PARENT
from espalier.live.state import LiveState
from espalier.masks.filters import ItemFilters
from service.live.live_version import LiveVersion
from service.live.replay import replay
from training.live.catalogue import journal_of
from training.live.replay import replay_operations

SAMPLE = Path(__file__).parents[3] / "models" / "debian-depends" / "1"
EVENTS = (["libsdl2-2.0-0", "libgl1"],)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return Bundle.open(shutil.copytree(SAMPLE, tmp_path / "debian-depends" / "1"), verify=False)


def put_all(bundle: Bundle, *operations: Operation) -> list[Operation]:
    """The operations as another host's are copied: without placements."""
    journal = Journal(journal_of(bundle.path))
    with journal.writing() as transaction:
        stored = [transaction.append(operation) for operation in operations]
    journal.close()
    return stored


def served_state(bundle: Bundle) -> LiveState:
    """The state in a service that loads the version and its journal."""
    version = LiveVersion(bundle, open_engine(bundle, "cpu"), ItemFilters([bundle.tree], bundle.items, 1 << 20))
    journal = Journal(journal_of(bundle.path), "read")
    replay(version, journal, store=lambda _, placements: placements)
    journal.close()
    return version.state


def test_items_get_the_parents_and_the_rows_that_a_service_gives_them(bundle: Bundle) -> None:
    now = time.time()
    operations = put_all(
        bundle,
        Operation(0, "new", "put", ItemBody(events=EVENTS), at=now),
        Operation(0, "counted", "put", ItemBody(events=EVENTS, count=40), at=now),
        Operation(0, "like", "put", ItemBody(like=("libc6",)), at=now),
        Operation(0, "libc6", "put", ItemBody(events=EVENTS), at=now),  # trained: it keeps training's count of its events
        Operation(0, "libgl1", "put", ItemBody(events=EVENTS), at=1.0),  # trained, by evidence older than the version: its row stays
        Operation(0, "nowhere", "put", ItemBody(like=("nobody-knows-it",)), at=now),
    )
    ours, served = replay_operations(bundle, journal_of(bundle.path), operations, now), served_state(bundle)
    assert ours.live_leaf_of("libgl1") is None
    assert ours.live_leaf_of("nowhere") is None
    assert served.live_items == ours.live_items == 4
    (our_leaves,), (served_leaves,) = ours.overlay().trees, served.overlay().trees
    for column in (PARENT, HANDLE):
        assert_array_equal(our_leaves.column(column, our_leaves.open), served_leaves.column(column, served_leaves.open))
    assert our_leaves.rows_PD is not None
    assert served_leaves.rows_PD is not None
    assert_array_equal(our_leaves.rows_PD, served_leaves.rows_PD)
    counts = bundle.label_counts()
    assert counts is not None
    assert our_leaves.count_P is not None
    trained = our_leaves.of_handles(np.array([ours.table.handle_for("libc6")]))
    assert our_leaves.count_P[trained] == counts.counts_I[bundle.items.row_of("libc6")]
