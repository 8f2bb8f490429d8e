"""A bundle of histories with a memory, and its two shards. No test changes them."""

from __future__ import annotations

import pytest

from espalier.bundle import Bundle
from tests.service.shards.cutting import cut, whole_bundle


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return whole_bundle(tmp_path_factory.mktemp("whole"), "product memory")


@pytest.fixture(scope="session")
def shards(whole: Bundle, tmp_path_factory: pytest.TempPathFactory) -> list[Bundle]:
    return cut(whole, tmp_path_factory.mktemp("shards") / "books-shards")
