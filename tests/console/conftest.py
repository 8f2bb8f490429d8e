"""One browser and one service on the sample for all tests of the console."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests import ROOT
from tests.console.browsing import Watched, chromium, visit
from tests.service.processes import Service, service

WRITE_KEY = "console-write-key-1"
SETTINGS = {"ESPALIER_ADMIN_KEYS": "", "ESPALIER_WRITE_KEYS": WRITE_KEY, "ESPALIER_PROBE_PER_S": "5"}


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder with the sample, which a service may write to."""
    folder = tmp_path_factory.mktemp("console") / "models"
    shutil.copytree(ROOT / "models" / "debian-depends" / "1", folder / "debian-depends" / "1")
    return folder


@pytest.fixture(scope="session")
def console(sample: Path, browser: Browser) -> Iterator[Service]:
    """The service on the sample: open to all, but for writes; with a probe. Not to be stopped."""
    with service(sample, 1, **SETTINGS) as running:
        yield running


@pytest.fixture
def watched(console: Service, browser: Browser) -> Iterator[Watched]:
    """A wide page that has not been anywhere."""
    with visit(browser, f"http://127.0.0.1:{console.port}") as page:
        yield page
