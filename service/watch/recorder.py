"""Writes the history of every model, a row a minute, and tells other workers of unknown ids.

Of several workers one is the recorder, as long as it lives: it holds a lock in the run folder. It writes each history to a file, from which
all workers answer, and from which another one goes on when it ends. Knows files and times. Does not know what the numbers mean.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ..run_folder import living
from ..watch import unknown_ids
from ..watch.history import STEP_S, History
from ..watch.totals import Sample, totals
from ..watch.unknown_ids import Blocks, UnknownIds

log = logging.getLogger(__name__)

TICK_S = 2.0
"""Between two looks at the clock; other workers see unknown ids after so long."""


class Recorder:
    """The histories of all models of a service. `tick` and `history` may be called from any thread.

    samples     the series of /metrics, all workers together
    unknown     those of this process
    run_folder  what the workers share; None where there is one worker
    """

    def __init__(
        self,
        samples: Callable[[], Iterable[Sample]],
        models: Callable[[], Sequence[str]],
        unknown: UnknownIds,
        run_folder: Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._samples, self._models, self._unknown, self._clock = samples, models, unknown, clock
        self._run_folder = run_folder
        self._folder = None if run_folder is None else run_folder / "history"
        self._lock: int | None = None
        self._histories: dict[str, History] = {}  # those of the recorder
        self._writing = threading.Lock()  # while these change or are copied
        self._next = 0.0
        self._failing = False

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            counts = self._unknown.counts() if self._folder is not None and self._unknown.changed else None
            self._unknown.changed = False
            try:
                await asyncio.to_thread(self.tick, counts)
                self._failing = False
            except Exception:  # a full disk, say: what there is stays, and is tried again
                if not self._failing:
                    log.exception("the history of the last day cannot be written")
                self._failing = self._unknown.changed = True
            await asyncio.sleep(TICK_S)

    def tick(self, counts: Blocks | None) -> None:
        """What is due now. counts: unknown ids of this process, where they have changed."""
        now = self._clock()
        if now >= self._next and self._is_elected():
            self._next = (now // STEP_S + 1) * STEP_S
            self.record(now)  # into memory first: a full disk loses no row
        if counts is not None and self._folder is not None:
            self._folder.mkdir(exist_ok=True)
            unknown_ids.write(self._folder, os.getpid(), counts)

    def record(self, now: float) -> None:
        """Add a row to every history. Raises OSError."""
        found = totals(self._samples(), self._models(), now)
        with self._writing:
            for model, numbers in found.items():
                if model not in self._histories:
                    self._histories[model] = self._stored(model)
                self._histories[model].add(numbers)
        for model in found:
            if self._folder is not None:
                path = _path(self._folder, model)
                path.with_suffix(".new").write_bytes(self._histories[model].to_json())
                path.with_suffix(".new").rename(path)
        if self._folder is not None and self._run_folder is not None:
            unknown_ids.sum_ended(self._folder, [*living(self._run_folder), os.getpid()], now)

    def history(self, model: str) -> History:
        """A model's history, with a row of now."""
        with self._writing:
            own = self._histories.get(model)
            history = self._stored(model) if own is None else own.copy()
        now = self._clock()
        history.add(totals(self._samples(), [model], now)[model])
        return history

    def unknown(self, model: str, own: Blocks) -> list[tuple[str, int]]:
        """(id, count) of the ids that were asked for most, all workers together. own: those of this process."""
        others = unknown_ids.read(self._folder, os.getpid()) if self._folder is not None else []
        return unknown_ids.most_asked(unknown_ids.summed([own, *others]), model, self._clock())

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def _is_elected(self) -> bool:
        if self._folder is None or self._lock is not None:
            return True
        self._folder.mkdir(exist_ok=True)
        descriptor = os.open(self._folder / "recorder.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._lock = descriptor
        return True

    def _stored(self, model: str) -> History:
        """What the recorder has written; empty where that is nothing."""
        if self._folder is None:
            return History()
        try:
            return History.from_json(_path(self._folder, model).read_bytes())
        except FileNotFoundError:
            return History()


def _path(folder: Path, model: str) -> Path:
    return folder / f"history_{model}.json"
