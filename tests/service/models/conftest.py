"""A models folder with version 1 of `books`, which a test may change."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from espalier.store.objects import Objects
from service.models import follower
from tests.service.models.registry import Held, Running, add_version, run
from tests.service.running import settings_of, small_model


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a service looks at from time to time it looks at often."""
    monkeypatch.setattr(follower, "TICK_S", 0.02)
    monkeypatch.setattr(follower, "SCAN_S", 0.1)


@pytest.fixture(scope="session")
def bundle_1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version 1 of `books`."""
    return small_model(tmp_path_factory.mktemp("bundle")).path


@pytest.fixture
def held() -> Held:
    """Holds engines of version 2 while they are opened."""
    return Held(2)


@pytest.fixture
def changing(models: Path, held: Held, request: pytest.FixtureRequest) -> Iterator[Running]:
    """A registry that has loaded version 1 before version 2 came, with the settings of the test's marker."""
    with run(models, held.open, **settings_of(request)) as running:
        add_version(models, 2)
        yield running


@pytest.fixture
def models(tmp_path: Path, bundle_1: Path) -> Path:
    """A models folder with version 1 of `books`."""
    shutil.copytree(bundle_1, tmp_path / "models" / "books" / "1")
    return tmp_path / "models"


@pytest.fixture
def store(tmp_path: Path) -> Objects:
    return Objects(f"file://{tmp_path}/store", create=True)
