"""How long one thread may keep the interpreter from another: as short as whoever wants it shortest."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from service.models.loading import LOADER_SWITCH_S, OVERLOAD_SWITCH_S, USUAL_SWITCH_S, in_overload, short_switch_interval


def test_threads_take_turns_faster_in_overload_and_fastest_while_a_version_is_loaded() -> None:
    first, second = in_overload(Path("books/1")), in_overload(Path("books/2"))
    before, found = sys.getswitchinterval(), []
    try:
        for say, overloaded in ((first, True), (second, True), (first, False), (second, False), (first, True)):
            say(overloaded)
            found.append(sys.getswitchinterval())
        with short_switch_interval():
            found.append(sys.getswitchinterval())
        found.append(sys.getswitchinterval())
        first(False)
    finally:
        sys.setswitchinterval(before)
    assert found == pytest.approx([OVERLOAD_SWITCH_S] * 3 + [USUAL_SWITCH_S, OVERLOAD_SWITCH_S, LOADER_SWITCH_S, OVERLOAD_SWITCH_S])
