"""Both clients over a stub."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.client.stub import Driver


@pytest.fixture(params=["Client", "AsyncClient"])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    if request.param == "Client":
        driver = Driver(None)
        yield driver
        driver.close()
    else:
        with asyncio.Runner() as runner:
            driver = Driver(runner)
            yield driver
            driver.close()
