"""What all tests share: hypothesis's settings, and a models folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from espalier.compiled_code import when_missing
from tests import reruns, signatures
from tests.pictures import Pictures
from tests.service.running import small_model

# Triton's kernels run in its interpreter, on the CPU, so that they are tested on any machine; triton reads this when it is imported.
os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("fast", deadline=None, print_blob=True, max_examples=25)
settings.register_profile("thorough", settings.get_profile("fast"), max_examples=200)
settings.register_profile("quick", settings.get_profile("fast"), max_examples=8)
settings.load_profile("fast")


def pytest_addoption(parser: pytest.Parser) -> None:
    reruns.add_option(parser)
    parser.addoption("--record-signatures", action="store_true", help="write down with which types tests call compiled functions")


def pytest_configure(config: pytest.Config) -> None:
    signatures.configure(config)
    reruns.configure(config)


def pytest_itemcollected(item: pytest.Item) -> None:
    """What runs before a release, in an image or in a browser alone is slow, too."""
    if any(item.get_closest_marker(name) for name in ("release", "stack", "console", "hostile")):
        item.add_marker("slow")


@pytest.fixture(autouse=True)
def _policy_of_compiled_code(request: pytest.FixtureRequest) -> Iterator[None]:
    """As a service that a test starts in this process sets a policy too, it is set after the test once more."""
    when_missing(signatures.policy_of(request.node))
    yield
    when_missing(signatures.policy_of(request.node))


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> Pictures:
    """What the test draws."""
    return Pictures(monkeypatch)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder with `books`, which takes histories, and `points`, which takes vectors of width 4. Not to be written to."""
    folder = tmp_path_factory.mktemp("models")
    small_model(folder)
    small_model(folder, name="points", seed=1, kind="vector")
    return folder
