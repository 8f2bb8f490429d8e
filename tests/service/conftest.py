"""Model folders for the tests of the service."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from espalier.checks.random_bundles import make_bundle
from espalier.tree import complete_tree
from tests.service.running import ITEMS, LIMITS


@pytest.fixture
def versions(tmp_path: Path) -> Path:
    """A models folder with `books` in the versions 1 and 2."""
    rng = np.random.default_rng(0)
    for version in (1, 2):
        make_bundle(tmp_path, rng, complete_tree(rng.permutation(ITEMS), 2), name="books", version=version, **LIMITS)
    return tmp_path
