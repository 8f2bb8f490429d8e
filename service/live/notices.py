"""How the workers of one service learn within milliseconds what another one has committed or applied.

Each worker has a datagram socket `<pid>.sock` in the run folder, and a file with the last operation that it answers by, for each model that
it serves (progress_pages.py). A datagram says that there is something to look at, and mostly what was committed, so that a lost one delays
and does not harm: whoever is told looks at the files, and at the journal where it was not told all, and everybody reads all of them every
POLL_S, whatever was told meanwhile: commands or another service may write to the journals, too. A dead worker is not waited for. A process
alone has no socket. Knows sequence numbers by model. Does not know journals, nor what commits say.
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

from ..live.progress_pages import UNKNOWN, OwnPage, Pages
from ..run_folder import living

log = logging.getLogger(__name__)

POLL_S = 0.25
"""Longest time until a commit is seen of which no datagram came."""
RECHECK_S = 0.02
"""Longest time until progress is seen of which no datagram came, while somebody waits for it."""
MOST_TOLD = 64
"""Commits of a model that are kept until its journal's thread takes them; of more it reads the journal."""
DATAGRAM_BYTES = 1 << 16
"""Largest datagram."""
UNSEEN = 0
"""Stands in place of a process id."""
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
    _told: dict[str, list[bytes]] = field(default_factory=dict)  # by model, what commits said; empty: somebody should read the journal
    _applied: dict[str, int] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _socket: socket.socket | None = None
    _sender: socket.socket | None = None
    _page: OwnPage | None = None
    _pages: Pages | None = None
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen from now on; before any model is loaded."""
        if self.folder is not None:
            own = self.folder / f"{self.pid}.sock"
            self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._sender.setblocking(False)
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                self._socket.bind(str(own))
            except OSError as error:  # the path is too long, or the disk is full
                log.warning("%s: %s; commits of other workers are seen after up to %g s", own.name, error, POLL_S)
                self._socket.close()
                self._socket = None
            with self._changed:
                self._pages = Pages(self.folder)
                self._write({})
        self._thread = threading.Thread(target=self._listen, name="live-notices", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Listen no more, and be waited for no more."""
        self._stopped.set()
        if self._thread is not None:
            if self.folder is not None:
                self._send(b"", f"{self.folder}/{self.pid}.sock")
            self._thread.join()
        with self._changed:
            gone = dict.fromkeys(self._applied)
            self._applied.clear()
            self._write(gone)
            for page in (self._page, self._pages):
                if page is not None:
                    page.close()
            self._page = self._pages = None
        for end in (self._socket, self._sender):
            if end is not None:
                end.close()
        self._socket = self._sender = None

    def subscribe(self, model: str, look: Callable[[], None]) -> None:
        """Call `look` on the listening thread whenever another process may have committed to a model. It must be quick."""
        self._looks = self._looks | {model: look}

    def committed(self, model: str, written: bytes = b"") -> None:
        """Tell the other workers that there is something new in a model's journal. written: what; empty: they shall read it."""
        self._see()
        self._tell(self._commit(model, written))

    def told(self, model: str) -> list[bytes]:
        """Take what commits of other workers to a model said, in the order in which they came. An empty one has not said all."""
        return self._told.pop(model, [])

    def applied(self, model: str, sequence: int | None) -> None:
        """Say by which operation this worker answers; None: it does not serve the model.

        A worker that begins to serve a model says so first, then catches up with the journal, and only then answers: a writer that did not
        see it in time has committed before it caught up.
        """
        with self._changed:
            if self._applied.get(model) == sequence:
                return
            if sequence is None:
                self._applied.pop(model, None)
            else:
                self._applied[model] = sequence
            self._write({model: sequence})
            self._changed.notify_all()
        self._tell(b"applied")

    def progress(self, model: str) -> dict[int, int]:
        """By process id, the last operation that each living worker answers by which serves the model.

        Where the run folder is gone nobody knows of the others: UNSEEN stands for them.
        """
        with self._changed:
            own = {self.pid: self._applied[model]} if model in self._applied else {}
            return own | self._alive(self._others(model))

    def wait_applied(self, model: str, sequence: int, timeout_s: float, given_up: Mapping[int, int] = NOBODY) -> dict[int, int]:
        """Wait until all living workers that serve a model answer by an operation. Those that were still behind, with their progress.

        given_up  workers that are not waited for as long as their progress is still this
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
                    self._tell(self._commit(model))  # the queue of who is behind may have been full

    def _listen(self) -> None:
        look_at = time.monotonic() + POLL_S
        while not self._stopped.is_set():
            told = b""
            left_s = look_at - time.monotonic()
            if left_s <= 0:
                look_at = time.monotonic() + POLL_S
                self._see()
                for model in self._looks:
                    self._look(model, b"")
            elif self._socket is None:
                self._stopped.wait(left_s)
            else:
                try:
                    self._socket.settimeout(left_s)
                    told = self._socket.recv(DATAGRAM_BYTES)
                except TimeoutError:
                    pass
                except OSError as error:
                    log.warning("the socket of notices failed: %s; commits of other workers are seen after up to %g s", error, POLL_S)
                    self._socket = None
                    continue
            with self._changed:
                self._changed.notify_all()
            sender, _, committed = told.partition(b" ")
            if committed:
                if self._pages is not None and sender not in [b"%d" % pid for pid in self._pages.pids]:  # it has just begun
                    self._see()
                name, _, written = committed.partition(b"\n")
                self._look(name.decode(errors="replace"), written)

    def _look(self, model: str, written: bytes) -> None:
        look = self._looks.get(model)
        if look is not None and not self._stopped.is_set():
            told = self._told.setdefault(model, [])
            told[:] = [*told, written] if len(told) < MOST_TOLD else [b""]
            try:
                look()
            except Exception:  # one model must not end the notices of the others
                log.exception("%s: a look at its journal failed", model)

    def _commit(self, model: str, written: bytes = b"") -> bytes:
        return b"%d %b\n%b" % (self.pid, model.encode(), written)

    def _see(self) -> None:
        """See which workers there are."""
        with self._changed, suppress(OSError):  # `_others` says it
            if self._pages is not None:
                self._pages.look()

    def _tell(self, notice: bytes) -> None:
        pages = self._pages
        if pages is not None:
            for pid in pages.pids:
                if pid != self.pid:
                    self._send(notice, f"{self.folder}/{pid}.sock")

    def _send(self, notice: bytes, to: str) -> None:
        if self._sender is not None:
            with suppress(OSError):  # it has ended, or its queue is full: then it will look anyway
                self._sender.sendto(notice, to)

    def _write(self, progress: Mapping[str, int | None]) -> None:
        """Some of this worker's progress. Holds the lock."""
        if self.folder is None:
            return
        try:
            if self._page is None:
                self._page = OwnPage(self.folder, self.pid)
                progress = {**self._applied, **progress}
            for model, sequence in progress.items():
                self._page.write(model, sequence)
        except OSError as error:
            log.error("the run folder %s cannot be written to (%s): writes to live catalogues wait for this worker", self.folder, error)

    def _others(self, model: str) -> dict[int, int]:
        """The progress of the other workers that serve a model, dead ones too. Holds the lock."""
        if self._pages is None:
            return {}
        try:
            self._pages.look()
        except FileNotFoundError:
            return {UNSEEN: UNKNOWN}
        found = self._pages.read(model)
        found.pop(self.pid, None)
        return found

    def _alive(self, progress: dict[int, int]) -> dict[int, int]:
        """Those of some workers that live. Holds the lock."""
        if self.folder is None or not progress:
            return progress
        alive = {*living(self.folder), self.pid, UNSEEN}
        return {pid: reached for pid, reached in progress.items() if pid in alive}
