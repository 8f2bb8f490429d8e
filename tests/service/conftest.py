"""What the service's tests share: model folders, applications, and event loops for tests that are coroutines."""

from __future__ import annotations

import asyncio
import inspect
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.models import loading
from tests.service.fake_catalogue import ADMIN, WRITE, FakeCatalogue, FakeCatalogues
from tests.service.fake_engine import FakeEngine
from tests.service.live_running import Live, add_version, live_service
from tests.service.models.registry import Running as RunningRegistry
from tests.service.own_time import OwnTime
from tests.service.running import ITEMS, Running, run, settings_of, small_model


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "settings(**values): those of the service that the test is given")
    config.addinivalue_line("markers", "real_time: the event loop of a test that is a coroutine has the system's time")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs on the event loop of the service or registry that it is given, or on one whose time stands still."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    runners = [value.runner for value in given.values() if isinstance(value, Running | RunningRegistry)]
    if runners:
        runners[0].run(pyfuncitem.obj(**given))
    else:
        stands_still = pyfuncitem.get_closest_marker("real_time") is None
        with asyncio.Runner(loop_factory=lambda: OwnTime(stands_still)) as runner:
            runner.run(pyfuncitem.obj(**given))
    return True


@pytest.fixture(autouse=True)
def usual_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine gives threads of a low priority next to nothing, and tests wait for them."""
    monkeypatch.setattr(loading, "LOADER_NICENESS", 0)


@pytest.fixture(scope="session")
def two_versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`versions`, not to be written to."""
    folder = tmp_path_factory.mktemp("versions")
    for version in (1, 2):
        small_model(folder, version, seed=version)
    return folder


@pytest.fixture
def versions(two_versions: Path, tmp_path: Path) -> Path:
    """A models folder with `books` in the versions 1 and 2."""
    return Path(shutil.copytree(two_versions, tmp_path, dirs_exist_ok=True))


@pytest.fixture(scope="session")
def live_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version 1 of a `books` whose items come and go."""
    return add_version(tmp_path_factory.mktemp("live"), 1).path


@pytest.fixture
def running(models: Path, request: pytest.FixtureRequest) -> Iterator[Running]:
    """A service of `models` with a fake engine, and the settings of the test's marker."""
    with run(models, **settings_of(request)) as started:
        yield started


@pytest.fixture
def live(models: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Live]:
    """A service of `models` whose items come and go, with the settings of the test's marker."""
    with live_service(models, monkeypatch, **settings_of(request)) as started:
        yield started


@pytest.fixture
def catalogue() -> FakeCatalogue:
    """Of `books`."""
    return FakeCatalogue(trained=[f"item-{i}" for i in range(ITEMS)])


@pytest.fixture
def shelf(models: Path, catalogue: FakeCatalogue, request: pytest.FixtureRequest) -> Iterator[Running]:
    """A service of `models` that writes to fake catalogues, with keys and the settings of the test's marker."""
    catalogues = FakeCatalogues(books=catalogue, points=FakeCatalogue())
    with run(models, catalogues=catalogues, write_keys=(WRITE,), admin_keys=(ADMIN,), **settings_of(request)) as started:
        yield started


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """An engine alone, of 40 items."""
    fake = FakeEngine(40)
    yield fake
    fake.go.set()
