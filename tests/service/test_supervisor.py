"""Which workers the supervisor takes for hung. Its clock is the test's."""

from __future__ import annotations

from ctypes import c_double
from types import SimpleNamespace
from typing import Any

import pytest

from service.processes import supervisor
from service.processes.supervisor import HUNG_S, LOOK_S, Supervisor

NOW = 1000.0


@pytest.mark.parametrize(
    ("beat", "last_look", "signals", "killed"),
    [
        (NOW - HUNG_S - 1, NOW - LOOK_S, 0, True),
        (NOW - HUNG_S + 1, NOW - LOOK_S, 0, False),
        (NOW - HUNG_S - 1, NOW - LOOK_S / 2, 0, False),  # the next look is not due yet
        (NOW - HUNG_S - 1, NOW - 3 * LOOK_S, 0, False),  # the supervisor stood still, too
        (NOW - HUNG_S - 1, NOW - LOOK_S, 1, False),  # a worker that drains says no more that it runs
        (0.0, NOW - LOOK_S, 0, False),  # it loads its modules
    ],
)
def test_a_worker_that_stands_still_is_killed(
    monkeypatch: pytest.MonkeyPatch, beat: float, last_look: float, signals: int, killed: bool
) -> None:
    kills: list[int] = []
    process = SimpleNamespace(pid=7, is_alive=lambda: True, kill=lambda: kills.append(7))
    watched: Any = object.__new__(Supervisor)
    watched._workers = [SimpleNamespace(process=process, beat=c_double(beat))]
    watched._look_at, watched._signals, watched._hangup = last_look + LOOK_S, signals, False
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: NOW))
    watched._kill_hung()
    assert bool(kills) is killed
    watched._kill_hung()
    assert len(kills) == killed, "the next look comes LOOK_S later"
