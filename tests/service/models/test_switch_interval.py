"""How long one thread may keep the interpreter from another: as short as whoever wants it shortest."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.models.loading import LOADER_SWITCH_S, OVERLOAD_SWITCH_S, USUAL_SWITCH_S, in_overload, short_switch_interval


@pytest.fixture(autouse=True)
def switch_interval() -> Iterator[None]:
    """The interpreter's switch interval is as before afterwards."""
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def now() -> Any:
    return pytest.approx(sys.getswitchinterval())


def test_threads_take_turns_faster_as_long_as_any_version_is_overloaded() -> None:
    first, second = in_overload(Path("books/1")), in_overload(Path("books/2"))
    found = []
    for say, overloaded in ((first, True), (second, True), (first, False), (second, False)):
        say(overloaded)
        found.append(sys.getswitchinterval())
    assert found == pytest.approx([OVERLOAD_SWITCH_S] * 3 + [USUAL_SWITCH_S])


def test_and_fastest_while_a_version_is_loaded() -> None:
    say = in_overload(Path("books/1"))
    with short_switch_interval():
        assert now() == LOADER_SWITCH_S
        say(True)
        assert now() == LOADER_SWITCH_S
    assert now() == OVERLOAD_SWITCH_S
    say(False)
    assert now() == USUAL_SWITCH_S
