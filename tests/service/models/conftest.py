"""A models folder with version 1 of `books`, which a test may change."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from espalier.checks.random_bundles import make_bundle
from espalier.tree import complete_tree
from tests.service.models.registry import ITEMS


@pytest.fixture(scope="session")
def bundle_1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version 1 of `books`."""
    rng = np.random.default_rng(0)
    return make_bundle(tmp_path_factory.mktemp("bundle"), rng, complete_tree(rng.permutation(ITEMS), 2), name="books").path


@pytest.fixture
def models(tmp_path: Path, bundle_1: Path) -> Path:
    """A models folder with version 1 of `books`."""
    shutil.copytree(bundle_1, tmp_path / "models" / "books" / "1")
    return tmp_path / "models"
