"""Writes the history of every model, a row a minute, and shares counts of unknown ids with other workers.

One of several workers is the recorder as long as it lives: it holds a lock in the run folder. It writes each history to a file. All workers
answer from these files, and the next recorder continues them. Knows files and times. Does not know the meaning of the numbers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from espalier.file_lock import try_lock

from ..watch import unknown_ids
from ..watch.history import STEP_S, History
from ..watch.totals import Sample, totals
from ..watch.unknown_ids import Blocks, UnknownIds

log = logging.getLogger(__name__)

TICK_S = 2.0
"""Seconds between two ticks. Other workers see unknown ids after so long."""


class Recorder:
    """The histories of all models of a service. `tick` and `history` may be called from any thread.

    samples     the series of /metrics, summed over all workers
    unknown     the unknown ids of this process
    run_folder  the folder that the workers share; None with one worker
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
        self._folder = None if run_folder is None else run_folder / "history"
        self._lock: int | None = None
        self._histories: dict[str, History] = {}  # empty if another worker is the recorder
        self._histories_lock = threading.Lock()  # held while they change or are copied
        self._next_row_at = 0.0
        self._failing = False

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            counts = self._unknown.counts() if self._folder is not None and self._unknown.changed else None
            self._unknown.changed = False
            try:
                await asyncio.to_thread(self.tick, counts)
                self._failing = False
            except Exception:  # for example, a full disk: the numbers stay in memory, and the next tick tries again
                if not self._failing:
                    log.exception("the history of the last day cannot be written")
                self._failing = self._unknown.changed = True
            await asyncio.sleep(TICK_S)

    def tick(self, counts: Blocks | None) -> None:
        """Do the work that is due. counts: the unknown ids of this process, if they have changed."""
        now = self._clock()
        if now >= self._next_row_at and self._is_elected():
            self._next_row_at = (now // STEP_S + 1) * STEP_S
            self.record(now)  # into memory first, so that a full disk loses no row
        if counts is not None and self._folder is not None:
            self._folder.mkdir(exist_ok=True)
            unknown_ids.write(self._folder, os.getpid(), counts)

    def record(self, now: float) -> None:
        """Add a row to every history. Raises OSError."""
        totals_by_model = totals(self._samples(), self._models(), now)
        with self._histories_lock:
            for model, model_totals in totals_by_model.items():
                if model not in self._histories:
                    self._histories[model] = self._read_history(model)
                self._histories[model].add(model_totals)
        for model in totals_by_model:
            if self._folder is not None:
                path = _path(self._folder, model)
                path.with_suffix(".new").write_bytes(self._histories[model].to_json())
                path.with_suffix(".new").rename(path)
        if self._folder is not None:
            unknown_ids.drop_old(self._folder, now)

    def history(self, model: str) -> History:
        """A model's history, with a row for the present."""
        with self._histories_lock:
            history = self._histories[model].copy() if model in self._histories else self._read_history(model)
        now = self._clock()
        history.add(totals(self._samples(), [model], now)[model])
        return history

    def unknown(self, model: str, counts: Blocks) -> list[tuple[str, int]]:
        """(id, count) of the most frequent unknown ids of all workers. counts: those of this process."""
        others = unknown_ids.read(self._folder, os.getpid()) if self._folder is not None else []
        return unknown_ids.most_frequent([counts, *others], model, self._clock())

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def _is_elected(self) -> bool:
        if self._folder is None or self._lock is not None:
            return True
        self._folder.mkdir(exist_ok=True)
        self._lock = try_lock(self._folder / "recorder.lock", 0o600)
        return self._lock is not None

    def _read_history(self, model: str) -> History:
        """The history that a recorder has written, or an empty one."""
        if self._folder is None:
            return History()
        try:
            return History.from_json(_path(self._folder, model).read_bytes())
        except FileNotFoundError:
            return History()


def _path(folder: Path, model: str) -> Path:
    return folder / f"history_{model}.json"
