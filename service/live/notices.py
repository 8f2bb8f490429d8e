"""Notices between the workers of one service: each learns within milliseconds what another has committed or applied.

Each worker has a datagram socket `<pid>.sock` in the run folder, and a file with the last operation that it has applied, for each model
that it serves (a page of run_folder.py). A datagram announces progress or a commit. A receiver reads the files, and after a commit the
journal. A worker with a `<pid>.lock` but without a file counts as behind.
All workers also read them every POLL_S, because commands or another service may write to the journals, too; so a lost datagram only
delays. Nobody waits for dead workers. A single process has no socket. Knows sequence numbers by model. Does not know journals.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from ..run_folder import Page, living, names, read_page

log = logging.getLogger(__name__)

POLL_S = 0.25
"""Longest time until a commit without a datagram is seen."""
RECHECK_S = 0.02
"""Longest time until progress without a datagram is seen, while a write waits for it."""
DATAGRAM_BYTES = 1 << 12
"""Longer than any datagram."""
UNSEEN, UNKNOWN = 0, -1
"""Stand for a process id if workers cannot be seen, and for the progress of a worker whose file cannot be read."""
ENDING = "live"
NOBODY: Mapping[int, int] = {}


@dataclass
class Notices:
    """This worker's end. All methods may be called from any thread.

    folder  the run folder; None: this process alone
    pid     this worker's process
    """

    folder: Path | None = None
    pid: int = field(default_factory=os.getpid)
    _looks: dict[str, Callable[[], None]] = field(default_factory=dict)
    _applied: dict[str, int] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _socket: socket.socket | None = None
    _sender: socket.socket | None = None
    _page: Page | None = None
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen from now on. To be called before any model is loaded."""
        if self.folder is not None:
            path = self.folder / f"{self.pid}.sock"
            self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._sender.setblocking(False)
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                self._socket.bind(str(path))
            except OSError as error:  # the path is too long, or the disk is full
                log.warning("%s: %s; commits of other workers are seen after up to %g s", path.name, error, POLL_S)
                self._socket.close()
                self._socket = None
            with self._changed:
                self._write()
        self._thread = threading.Thread(target=self._listen, name="live-notices", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop listening, and have other workers no longer wait for this one."""
        self._stopped.set()
        if self._thread is not None:
            if self.folder is not None:
                self._send(b"", f"{self.folder}/{self.pid}.sock")
            self._thread.join()
        with self._changed:
            self._applied.clear()
            self._write()
            if self._page is not None:
                self._page.close()
            self._page = None
        for connection in (self._socket, self._sender):
            if connection is not None:
                connection.close()
        self._socket = self._sender = None

    def subscribe(self, model: str, look: Callable[[], None]) -> None:
        """Call `look` on the listening thread whenever another process may have committed to a model. It must be quick."""
        self._looks = self._looks | {model: look}

    def committed(self, model: str) -> None:
        """Announce a commit to a model's journal to the other workers."""
        self._send_to_others(b"committed %b" % model.encode())

    def applied(self, model: str, sequence: int | None) -> None:
        """Publish the last operation that this worker has applied; None: it does not serve the model.

        A worker that begins to serve a model first publishes that, then catches up with the journal, and only then answers. So a writer
        that did not see it in time has committed before it caught up.
        """
        with self._changed:
            if self._applied.get(model) == sequence:
                return
            if sequence is None:
                self._applied.pop(model, None)
            else:
                self._applied[model] = sequence
            self._write()
            self._changed.notify_all()
        self._send_to_others(b"applied")

    def wait_applied(self, model: str, sequence: int, timeout_s: float, given_up: Mapping[int, int] = NOBODY) -> dict[int, int]:
        """Wait until all living workers that serve a model have applied an operation. Returns those still behind, with their progress.

        If the run folder is gone or cannot be read, UNSEEN stands for the other workers.

        given_up  workers that are not waited for while they have this progress
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                behind = {pid: reached for pid, reached in self._others(model).items() if reached < sequence}
                if model in self._applied and self._applied[model] < sequence:
                    behind[self.pid] = self._applied[model]
                behind = self._alive(behind)
                left_s = deadline - time.monotonic()
                if behind.items() <= given_up.items() or left_s <= 0:
                    return behind
                if not self._changed.wait(min(left_s, RECHECK_S)) and left_s > RECHECK_S:
                    self.committed(model)  # a datagram may have been lost in a full queue

    def _listen(self) -> None:
        look_at = time.monotonic() + POLL_S
        while not self._stopped.is_set():
            notice = b""
            left_s = look_at - time.monotonic()
            if left_s <= 0:
                look_at = time.monotonic() + POLL_S
                for model in self._looks:
                    self._look(model)
            elif self._socket is None:
                self._stopped.wait(left_s)
            else:
                try:
                    self._socket.settimeout(left_s)
                    notice = self._socket.recv(DATAGRAM_BYTES)
                except TimeoutError:
                    pass
                except OSError as error:
                    log.warning("the socket of notices failed: %s; commits of other workers are seen after up to %g s", error, POLL_S)
                    self._socket = None
                    continue
            with self._changed:
                self._changed.notify_all()
            _, is_commit, model_name = notice.partition(b" ")
            if is_commit:
                self._look(model_name.decode(errors="replace"))

    def _look(self, model: str) -> None:
        look = self._looks.get(model)
        if look is not None and not self._stopped.is_set():
            try:
                look()
            except Exception:  # one model must not end the notices of the others
                log.exception("%s: a look at its journal failed", model)

    def _send_to_others(self, notice: bytes) -> None:
        if self.folder is None:
            return
        with suppress(OSError):  # they look every POLL_S
            for name in names(self.folder, ".sock"):
                if name != f"{self.pid}.sock":
                    self._send(notice, f"{self.folder}/{name}")

    def _send(self, notice: bytes, to: str) -> None:
        if self._sender is not None:
            with suppress(OSError):  # the receiver has ended, or its queue is full, and then it will look anyway
                self._sender.sendto(notice, to)

    def _write(self) -> None:
        """Write this worker's progress to its file. Holds the lock."""
        if self.folder is None:
            return
        try:
            if self._page is None:
                self._page = Page(self.folder, self.pid, ENDING)
            self._page.write(orjson.dumps(self._applied))
        except OSError as error:
            log.error("the run folder %s cannot be written to (%s): writes to live catalogues wait for this worker", self.folder, error)

    def _others(self, model: str) -> dict[int, int]:
        """The progress of the other workers that serve a model, dead ones too. Holds the lock."""
        if self.folder is None:
            return {}
        try:
            files = [name.partition(".") for name in os.listdir(self.folder)]
        except OSError:
            return {UNSEEN: UNKNOWN}
        progress: dict[int, int] = {}
        for pid in {int(stem) for stem, _, ending in files if stem.isdecimal() and ending in (ENDING, "lock")} - {self.pid}:
            try:
                sequence = orjson.loads(read_page(self.folder, pid, ENDING)).get(model)
            except (OSError, ValueError):
                sequence = UNKNOWN
            if sequence is not None:
                progress[pid] = sequence
        return progress

    def _alive(self, progress: dict[int, int]) -> dict[int, int]:
        """The progress of the living workers; of all, if the run folder cannot be read. Holds the lock."""
        if self.folder is None or not progress:
            return progress
        try:
            alive = {*living(self.folder), self.pid, UNSEEN}
        except OSError:
            return progress
        return {pid: reached for pid, reached in progress.items() if pid in alive}
