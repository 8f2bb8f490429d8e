"""Several worker processes behind one listening socket: started, replaced when one dies, stopped together.

They are told to stop through a pipe each, not by a signal: a worker whose parent is gone reads its end, and a signal that was sent to
the whole group of processes is not taken for a second one. Knows processes; what a worker does is server.py's.
"""

from __future__ import annotations

import logging
import multiprocessing
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from service.app import create_app
from service.models.worker_progress import forget
from service.processes.server import Server
from service.settings import Settings, metrics_folder
from service.watch import logs
from service.watch.multiprocess import count_in, forget_process

log = logging.getLogger(__name__)

FAILED_STARTS = 3
"""Workers that may end one after the other before they have begun to follow the models; then the service gives up, unless others serve."""
RESTART_S, MAX_RESTART_S = 1.0, 30.0
"""At least this long between two starts in one place; twice as long after each worker that ended before it had begun, up to the second."""
KILL_AFTER_S = 10.0
"""Beyond the time that stopping may take, until a worker is killed."""


@dataclass(eq=False)
class _Worker:
    """number: its place among the workers, which whoever comes in for it takes."""

    process: BaseProcess
    pipe: Connection
    started: float
    number: int


class Supervisor:
    """Keeps `settings.workers` workers at work on a listening socket."""

    def __init__(self, settings: Settings, listening: socket.socket) -> None:
        self._listening = listening
        self._folder = Path(tempfile.mkdtemp(prefix="espalier-"))
        self._counted = metrics_folder(self._folder)
        self._counted.mkdir()
        self._settings = settings.model_copy(update={"run_folder": self._folder})
        self._spawn = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        self._signals = 0

    def run(self) -> int:
        """Serve until a signal says stop. Returns the exit code."""
        code, kill_at = 0, float("inf")
        with self._waking() as woken:
            self._workers = [self._start(number) for number in range(self._settings.workers)]
            log.info("%d workers: %s", len(self._workers), ", ".join(str(worker.process.pid) for worker in self._workers))
            while self._workers:
                living = self._living()
                dead = [worker for worker in self._workers if worker not in living]
                left_s = min([kill_at, *map(self._restart_at, dead)]) - time.monotonic()
                wait([woken, *(worker.process.sentinel for worker in living)], None if left_s == float("inf") else max(left_s, 0))
                with suppress(BlockingIOError):
                    woken.recv(64)
                if self._signals and kill_at == float("inf"):
                    kill_at = self._leave()
                if self._signals > 1 or time.monotonic() >= kill_at:
                    code = self._kill() or code
                code = self._replace_dead() or code
        shutil.rmtree(self._folder, ignore_errors=True)
        return code

    def _living(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.process.is_alive()]

    def _start(self, number: int, restarted: bool = False) -> _Worker:
        ours, theirs = self._spawn.Pipe()
        process = self._spawn.Process(target=work, args=(self._settings, self._listening, theirs, number, restarted), name="worker")
        process.start()
        theirs.close()
        return _Worker(process, ours, time.monotonic(), number)

    def _restart_at(self, worker: _Worker) -> float:
        """When another one may take a dead worker's place."""
        return worker.started + min(RESTART_S * 2.0 ** min(self._failed_starts, 10), MAX_RESTART_S)

    def _has_begun(self, worker: _Worker) -> bool:
        """Whether a worker got as far as following the models."""
        return (self._folder / f"{worker.process.pid}.lock").exists()

    def _replace_dead(self) -> int:
        """Start others in their place, unless the service stops. Gives an exit code when it gives up."""
        for worker in self._workers[:]:
            if worker.process.is_alive():
                continue
            if not self._signals and time.monotonic() < self._restart_at(worker):
                continue
            pid, began = worker.process.pid, self._has_begun(worker)
            self._workers.remove(worker)
            worker.pipe.close()
            if pid is not None:
                forget_process(pid, self._counted)
                forget(self._folder, pid)
            if self._signals:
                continue
            self._failed_starts = 0 if began else self._failed_starts + 1
            if self._failed_starts >= FAILED_STARTS and not any(map(self._has_begun, self._living())):
                log.error("%d workers ended before they had begun; the service gives up", self._failed_starts)
                self._signals = 1
                return 1
            log.error("worker %s ended with exit code %s; another one takes its place", pid, worker.process.exitcode)
            self._workers.append(self._start(worker.number, restarted=True))
        return 0

    def _leave(self) -> float:
        """Tell all workers to stop. Gives the time to kill those that have not. While the parent listens, nobody is refused."""
        self._listening.close()
        log.info("stopping %d workers", len(self._workers))
        for worker in self._living():
            try:
                worker.pipe.send("leave")
            except OSError:
                log.debug("worker %s has gone already", worker.process.pid)
        return time.monotonic() + self._settings.drain_delay_s + 2 * self._settings.drain_s + KILL_AFTER_S

    def _kill(self) -> int:
        """Stop what still runs. Gives an exit code where something did."""
        living = self._living()
        for worker in living:
            log.warning("worker %s is stopped at once", worker.process.pid)
            worker.process.kill()
            worker.process.join()
        return 1 if living else 0

    @contextmanager
    def _waking(self) -> Iterator[socket.socket]:
        """Count signals, each of which makes a socket readable."""
        woken, waker = socket.socketpair()
        woken.setblocking(False)
        waker.setblocking(False)
        before = {sig: signal.signal(sig, self._count) for sig in (signal.SIGTERM, signal.SIGINT)}
        former = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        try:
            yield woken
        finally:
            signal.set_wakeup_fd(former)
            for sig, handler in before.items():
                signal.signal(sig, handler)
            woken.close()
            waker.close()

    def _count(self, *_: object) -> None:
        self._signals += 1


def work(settings: Settings, listening: socket.socket, pipe: Connection, number: int, restarted: bool) -> None:
    """One worker process: serves until the other end of the pipe says so, or is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the server takes it: Ctrl-C reaches the parent as well
    logs.configure(settings.log_level, settings.log_format)
    if settings.run_folder is not None:
        count_in(metrics_folder(settings.run_folder))
    app = create_app(settings)
    app.state.service.metrics.begin(number, restarted)
    server = Server(app, settings, alone=False)

    def obey() -> None:
        try:
            pipe.recv()
        except (EOFError, OSError):
            log.warning("the parent process is gone")
        server.leave()

    threading.Thread(target=obey, name="obey", daemon=True).start()
    server.serve_on(listening)
