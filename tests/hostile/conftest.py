"""A service to be attacked, with time-outs of about a second, over a small model whose answers can be made large."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.random_bundles import make_bundle
from espalier.tree import complete_tree
from tests.hostile.attacked import Attacked, attacked
from tests.hostile.attacks import Limits, Target
from tests.hostile.attacks.connections import DESCRIPTORS

ITEMS = 4096
LIMITS = Limits(
    head_timeout_s=1,
    keep_alive_s=1,
    body_timeout_s=1,
    write_timeout_s=1.5,
    stream_idle_s=1.5,
    max_connections=300,
    mask_cache_bytes=1 << 20,
)
COLUMNS = {f"column{number}": [f"A long value of column {number}, item {i:08d}" for i in range(ITEMS)] for number in range(3)}


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder with `books`: 4096 items, five columns, up to a thousand items a query."""
    folder = tmp_path_factory.mktemp("large")
    rng = np.random.default_rng(5)
    tree = complete_tree(rng.permutation(ITEMS), 2)
    make_bundle(folder, rng, tree, name="books", columns=COLUMNS, max_beam_size=1000, max_m=1000)
    return folder


@pytest.fixture(scope="module")
def service(large: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """One service for the tests of a file."""
    log = tmp_path_factory.mktemp("log") / "service.log"
    with attacked(large, log, LIMITS.environment(), descriptors=DESCRIPTORS) as running:
        yield running


@pytest.fixture
def target(service: Attacked) -> Iterator[Target]:
    """The service as a target. All connections end with the test."""
    target = books(service.port)
    yield target
    target.close()


def books(port: int, limits: Limits = LIMITS) -> Target:
    return Target(port, [f"item-{i}" for i in range(1000)], ["title", *COLUMNS], "column0", limits, "books", spell_s=2.0)
