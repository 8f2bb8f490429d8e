"""The worker processes of one service: which of them live, and how far each has followed the desired state.

They share a run folder that their parent made. In it every worker holds a lock on `<pid>.lock` as long as it lives, which the system
gives back however it ends, and keeps its progress in `<pid>.json`. Without a folder the process is alone, and nothing is written.
Knows process ids and generations. Does not know models, engines or what starts the workers.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Progress:
    """How far a worker is with one model: the generation of each file that it has followed, and what it could not do."""

    serving: int = 0
    removed: int = 0
    failed: str | None = None
    """Why the worker does not serve what serving.json says."""


@dataclass
class Workers:
    """This worker among the others.

    folder  the run folder; None: this process alone
    """

    folder: Path | None = None
    _progress: dict[str, Progress] = field(default_factory=dict)
    _lock: int | None = None
    _reporting: threading.Lock = field(default_factory=threading.Lock)

    def join(self) -> None:
        """Count as living from now on."""
        if self.folder is not None and self._lock is None:
            self._lock = os.open(self.folder / f"{os.getpid()}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def leave(self) -> None:
        """Nobody waits for this worker any more."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def report(self, model: str, progress: Progress) -> None:
        """Say how far this worker is with a model."""
        with self._reporting:
            if self._progress.get(model) == progress:
                return
            self._progress = self._progress | {model: progress}
            if self.folder is not None:
                file = self.folder / f"{os.getpid()}.json"
                temporary = file.with_suffix(".new")
                temporary.write_text(json.dumps({name: asdict(found) for name, found in self._progress.items()}))
                temporary.rename(file)

    def others_serve(self) -> bool:
        """Whether another living worker has followed something already, so that requests need not wait for this one."""
        if self.folder is None:
            return False
        return any(pid != os.getpid() and (self.folder / f"{pid}.json").exists() for pid in living(self.folder))

    def progress(self, model: str) -> dict[int, Progress]:
        """How far every living worker is with a model."""
        if self.folder is None:
            return {os.getpid(): self._progress.get(model, Progress())}
        found = {}
        for pid in living(self.folder):
            try:
                reported = json.loads((self.folder / f"{pid}.json").read_bytes())
            except FileNotFoundError:  # it has just begun
                reported = {}
            found[pid] = Progress(**reported.get(model, {}))
        return found


def living(folder: Path) -> list[int]:
    """Process ids of the workers that live."""
    return sorted(int(file.stem) for file in folder.glob("*.lock") if _is_held(file))


def _is_held(file: Path) -> bool:
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
