"""The worker processes of one service: which of them live, and how far each has followed the desired state.

They share a run folder that their parent made. Every worker locks its `<pid>.lock` as long as it lives; the system releases the lock
however the worker ends. It writes its progress to the page `<pid>.json` (run_folder.py). Notes are for workers that start later. Without a
folder there is only this process, and nothing is written. Knows process ids and generations. Does not know models, engines or what starts
the workers.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from ..run_folder import Page, living, read_page

log = logging.getLogger(__name__)

ENDING = "json"
STARTED = ".started"
"""The note that the workers have started."""


@dataclass(frozen=True)
class WorkerProgress:
    """A worker's progress with one model: the generation of each file that it has followed, and its failure."""

    serving: int = 0
    removed: int = 0
    failed: str | None = None
    """Why the worker does not serve what serving.json says."""
    serves: bool = False
    """Whether its default version answers."""
    versions: tuple[int, ...] = ()
    """All versions that answer."""


_JSON = TypeAdapter(dict[str, WorkerProgress])


@dataclass
class Workers:
    """The progress of this worker, and of the others of the service.

    folder  the run folder; None if this process is the only one
    """

    folder: Path | None = None
    _progress: dict[str, WorkerProgress] = field(default_factory=dict)
    _lock: int | None = None
    _page: Page | None = None
    _written: bool = True
    _have_started: bool = False
    _reporting: threading.Lock = field(default_factory=threading.Lock)

    def join(self) -> None:
        """Count as living from now on."""
        if self.folder is not None and self._lock is None:
            self._lock = os.open(self.folder / f"{os.getpid()}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)  # waits, because others may be testing the lock of a worker that is new to them
            with self._reporting:
                self._write()

    def leave(self) -> None:
        """Count as ended from now on."""
        if self._lock is not None:
            os.close(self._lock)
        if self._page is not None:
            self._page.close()
        self._lock = self._page = None

    def report(self, model: str, progress: WorkerProgress) -> None:
        """Report this worker's progress with a model. If writing fails, the next report writes it, even if nothing has changed."""
        with self._reporting:
            if self._progress.get(model) == progress and self._written:
                return
            self._progress = self._progress | {model: progress}
            self._write()

    def _write(self) -> None:
        """Write the page of this worker. The caller holds the lock."""
        if self.folder is None:
            return
        before, self._written = self._written, False
        try:
            if self._page is None:
                self._page = Page(self.folder, os.getpid(), ENDING)
            self._page.write(_JSON.dump_json(self._progress))
            self._written = True
        except OSError as error:
            if before:
                log.error("the run folder %s cannot be written to (%s); admin changes wait for it", self.folder, error.strerror)

    def note(self, name: str, text: str) -> None:
        """Keep a text for workers that start later. If that fails keep none: an outdated one would be worse."""
        if self.folder is None:
            return
        file = self.folder / f"{name}.note"
        temporary = file.with_suffix(f".{os.getpid()}")
        try:
            temporary.write_text(text)
            temporary.rename(file)
        except OSError as error:
            log.warning("%s is not kept for workers that start later: %s", name, error.strerror)
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
                file.unlink(missing_ok=True)

    def noted(self, name: str) -> str | None:
        try:
            return None if self.folder is None else (self.folder / f"{name}.note").read_text()
        except OSError:
            return None

    def others_serve(self) -> bool:
        """Whether another living worker has reported progress already, so that requests need not wait for this one."""
        return any(self._others())

    def have_started(self, models: Set[str]) -> bool:
        """Whether all other living workers have served these models, or failed to, at the same time, now or before.

        At the start one worker takes connections at once. Any other takes none before it serves what the others do.
        """
        if self.folder is None or self._have_started:
            return True
        if self.noted(STARTED) is None:
            progress = [by_model.get(model, WorkerProgress()) for by_model in self._others() for model in models]
            if not all(one.serves or one.failed for one in progress):
                return False
            self.note(STARTED, "")
        self._have_started = True
        return True

    def behind(self) -> set[str]:
        """Models that another living worker serves and this one does not."""
        served = {model for by_model in self._others() for model, progress in by_model.items() if progress.serves}
        return {model for model in served if not self._progress.get(model, WorkerProgress()).serves}

    def others_have(self, model: str, version: int) -> bool:
        return any(version in by_model[model].versions for by_model in self._others() if model in by_model)

    def progress(self, model: str) -> dict[int, WorkerProgress]:
        if self.folder is None:
            return {os.getpid(): self._progress.get(model, WorkerProgress())}
        return {pid: _read(self.folder, pid).get(model, WorkerProgress()) for pid in living(self.folder)}

    def _others(self) -> list[dict[str, WorkerProgress]]:
        folder = self.folder
        return [] if folder is None else [_read(folder, pid) for pid in living(folder) if pid != os.getpid()]


def _read(folder: Path, pid: int) -> dict[str, WorkerProgress]:
    """A worker's progress by model; empty before its first report, or if it ended while it wrote."""
    try:
        return _JSON.validate_json(read_page(folder, pid, ENDING))
    except (FileNotFoundError, ValueError):
        return {}
