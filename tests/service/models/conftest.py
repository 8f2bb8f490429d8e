"""A models folder with version 1 of `books`, which a test may change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.service.running import small_model


@pytest.fixture(scope="session")
def bundle_1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version 1 of `books`."""
    return small_model(tmp_path_factory.mktemp("bundle")).path


@pytest.fixture
def models(tmp_path: Path, bundle_1: Path) -> Path:
    """A models folder with version 1 of `books`."""
    shutil.copytree(bundle_1, tmp_path / "models" / "books" / "1")
    return tmp_path / "models"
