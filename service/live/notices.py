"""How the workers of one service learn within milliseconds what another one has committed or applied.

Each worker has a datagram socket `<pid>.sock` in the run folder, and a file `<pid>.live` with the last operation that it answers by, for
each model that it serves. A datagram only says that there is something to look at, so that a lost one delays and does not harm: whoever is
told reads the journal and the files, and everybody reads all of them every POLL_S, whatever was told meanwhile: commands or another service
may write to the journals, too. A dead worker is not waited for. A process alone has no socket. Knows sequence numbers by model. Does not
know journals.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..run_folder import living, names

log = logging.getLogger(__name__)

POLL_S = 0.25
"""Longest time until a commit is seen of which no datagram came."""
RECHECK_S = 0.02
"""Longest time until progress is seen of which no datagram came, while somebody waits for it."""
ROOM = 4096
"""Bytes that a file of progress takes on the disk from the start, so that a full disk later changes nothing. It grows where needed."""
READS = 50
"""Attempts to read a file that is being written."""
UNKNOWN = -1
"""Progress of a worker whose file cannot be read."""
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
    _applied: dict[str, int] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _socket: socket.socket | None = None
    _sender: socket.socket | None = None
    _file: int | None = None
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
                self._write()
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
            self._applied.clear()
            self._write()
            if self._file is not None:
                os.close(self._file)
                self._file = None
        for end in (self._socket, self._sender):
            if end is not None:
                end.close()
        self._socket = self._sender = None

    def subscribe(self, model: str, look: Callable[[], None]) -> None:
        """Call `look` on the listening thread whenever another process may have committed to a model. It must be quick."""
        self._looks = self._looks | {model: look}

    def committed(self, model: str) -> None:
        """Tell the other workers that there is something new in a model's journal."""
        self._tell(b"c" + model.encode())

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
            self._write()
            self._changed.notify_all()
        self._tell(b"a" + model.encode())

    def progress(self, model: str) -> dict[int, int]:
        """By process id, the last operation that each living worker answers by which serves the model.

        Where the run folder is gone nobody knows of the others: UNSEEN stands for them.
        """
        folder, own = self.folder, self.pid
        found = {own: self._applied[model]} if model in self._applied else {}
        if folder is not None and not folder.exists():
            found[UNSEEN] = UNKNOWN
        elif folder is not None:
            for pid in living(folder):
                if pid != own and (sequence := self._read(pid, model)) is not None:
                    found[pid] = sequence
        return found

    def wait_applied(self, model: str, sequence: int, timeout_s: float, given_up: Mapping[int, int] = NOBODY) -> dict[int, int]:
        """Wait until all living workers that serve a model answer by an operation. Those that were still behind, with their progress.

        given_up  workers that are not waited for as long as their progress is still this
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                behind = {pid: reached for pid, reached in self.progress(model).items() if reached < sequence}
                left_s = deadline - time.monotonic()
                if behind.items() <= given_up.items() or left_s <= 0:
                    return behind
                self._changed.wait(min(left_s, RECHECK_S))

    def _listen(self) -> None:
        look_at = time.monotonic() + POLL_S
        while not self._stopped.is_set():
            told = b""
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
                    told = self._socket.recv(1024)
                except TimeoutError:
                    pass
                except OSError as error:
                    log.warning("the socket of notices failed: %s; commits of other workers are seen after up to %g s", error, POLL_S)
                    self._socket = None
                    continue
            with self._changed:
                self._changed.notify_all()
            if told[:1] == b"c":
                self._look(told[1:].decode(errors="replace"))

    def _look(self, model: str) -> None:
        look = self._looks.get(model)
        if look is not None and not self._stopped.is_set():
            try:
                look()
            except Exception:  # one model must not end the notices of the others
                log.exception("%s: a look at its journal failed", model)

    def _tell(self, notice: bytes) -> None:
        if self.folder is not None:
            for name in names(self.folder, ".sock"):
                if name != f"{self.pid}.sock":
                    self._send(notice, f"{self.folder}/{name}")

    def _send(self, notice: bytes, to: str) -> None:
        if self._sender is not None:
            with suppress(OSError):  # it has ended, or its queue is full: then it will look anyway
                self._sender.sendto(notice, to)

    def _write(self) -> None:
        """This worker's progress, over the former one. Holds the lock."""
        if self.folder is None:
            return
        content = json.dumps(self._applied).encode()
        content = b"%08x %b" % (zlib.crc32(content), content)  # a reader may see half of a write
        try:
            if self._file is None:
                file = self.folder / f"{self.pid}.live"
                self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            room = max(-(-len(content) // ROOM) * ROOM, os.fstat(self._file).st_size)
            os.pwrite(self._file, content.ljust(room), 0)
        except OSError as error:
            log.error("the run folder %s cannot be written to (%s): writes to live catalogues wait for this worker", self.folder, error)

    def _read(self, pid: int, model: str) -> int | None:
        """The progress of another worker; None where it does not serve the model."""
        if self.folder is None:
            return None
        for _ in range(READS):
            try:
                with open(f"{self.folder}/{pid}.live", "rb", buffering=0) as file:
                    check, _, content = file.read().strip().partition(b" ")
                if check == b"%08x" % zlib.crc32(content):
                    found = json.loads(content).get(model)
                    return None if found is None else int(found)
            except FileNotFoundError:  # it has just begun, or has ended
                return None
            except OSError:
                break
        return UNKNOWN
