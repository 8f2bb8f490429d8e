"""One browser and one service on the sample for all tests of the console."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from tests import ROOT
from tests.console.browsing import PATIENCE_MS, Watched, visit
from tests.console.strange_model import strange_model
from tests.service.processes import Service, service

RETRIEVE_KEY, WRITE_KEY, ADMIN_KEY = "console-retrieve-key-1", "console-write-key-1", "console-admin-key-1"
OPEN = {"ESPALIER_ADMIN_KEYS": "", "ESPALIER_PROBE_PER_S": "5"}
GUARDED = {"ESPALIER_RETRIEVE_KEYS": RETRIEVE_KEY, "ESPALIER_WRITE_KEYS": WRITE_KEY, "ESPALIER_ADMIN_KEYS": ADMIN_KEY}


ARGUMENTS = (
    "--no-sandbox",  # which root in a container does not have
    "--disable-dev-shm-usage",  # /dev/shm may be small there
    "--js-flags=--expose-gc",  # heaps are compared after a collection
    "--enable-precise-memory-info",
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Debian's Chromium without a window."""
    expect.set_options(timeout=PATIENCE_MS)
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder with the sample and two versions of `strange`, which a service may write to."""
    folder = tmp_path_factory.mktemp("console") / "models"
    shutil.copytree(ROOT / "models" / "debian-depends" / "1", folder / "debian-depends" / "1")
    strange_model(folder, versions=2)
    return folder


@pytest.fixture(scope="session")
def console(sample: Path, browser: Browser) -> Iterator[Service]:
    """The service on the sample as a newcomer has it: without keys, so that nobody may write. With a probe. Not to be stopped."""
    with service(sample, 1, **OPEN) as running:
        yield running


@pytest.fixture(scope="session")
def guarded(sample: Path, tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Service]:
    """A service with keys of all roles on the sample and on two versions of `strange`, of which it serves the second."""
    folder = tmp_path_factory.mktemp("guarded") / "models"
    shutil.copytree(sample, folder, ignore=shutil.ignore_patterns("serving.json"))
    with service(folder, 1, **GUARDED) as running:
        yield running


@pytest.fixture
def watched(console: Service, browser: Browser) -> Iterator[Watched]:
    """A wide page that has not been anywhere."""
    with visit(browser, f"http://127.0.0.1:{console.port}") as page:
        yield page
