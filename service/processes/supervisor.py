"""Several worker processes behind the same listening sockets: started, replaced when one dies, stopped together.

uvicorn's own supervisor is not used: it kills workers that answer no ping in 5 s, restarts a broken worker for ever, and knows nothing of
counts that a dead worker leaves. A worker stops when its pipe says so or is closed, not by a signal:
so it also stops when its parent is gone, and a signal to the whole process group does not count as a second one. Knows processes; server.py
has what a worker does.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from espalier.compile import make_ready

from ..app import create_app
from ..processes.server import Server
from ..run_folder import forget, make, remove_dead
from ..settings import Settings, metrics_folder
from ..watch import logs
from ..watch.multiprocess import count_in, forget_process

log = logging.getLogger(__name__)

FAILED_STARTS = 3
"""Workers that may end in a row before they follow the models; then the service gives up, unless others serve."""
RESTART_S, MAX_RESTART_S = 1.0, 30.0
"""Least seconds between two starts of one worker; doubled after each worker that ended before it followed the models, up to
MAX_RESTART_S."""
KILL_AFTER_S = 10.0
"""A worker is killed this long after the time that stopping may take."""


@dataclass(eq=False)
class _Worker:
    """number: which of the workers it is; its replacement has the same number."""

    process: BaseProcess
    pipe: Connection
    started: float
    number: int


class Supervisor:
    """Keeps `settings.workers` workers at work on listening sockets."""

    def __init__(self, settings: Settings, *listening: socket.socket) -> None:
        self._listening = listening
        remove_dead()
        self._folder, self._owned = make()
        self._counted = metrics_folder(self._folder)
        self._counted.mkdir()
        self._settings = settings.model_copy(update={"run_folder": self._folder})
        self._spawn = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        self._signals, self._hung_up = 0, False

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
                if self._leaving and kill_at == float("inf"):
                    kill_at = self._leave()
                if self._signals > 1 or time.monotonic() >= kill_at:
                    code = self._kill() or code
                code = self._replace_dead() or code
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._owned)
        return code

    @property
    def _leaving(self) -> bool:
        return self._signals > 0 or self._hung_up

    def _living(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.process.is_alive()]

    def _start(self, number: int, restarted: bool = False) -> _Worker:
        ours, theirs = self._spawn.Pipe()
        process = self._spawn.Process(target=work, args=(self._settings, self._listening, theirs, number, restarted), name="worker")
        process.start()
        theirs.close()
        return _Worker(process, ours, time.monotonic(), number)

    def _restart_at(self, worker: _Worker) -> float:
        """When a dead worker may be replaced."""
        return worker.started + min(RESTART_S * 2.0 ** min(self._failed_starts, 10), MAX_RESTART_S)

    def _has_begun(self, worker: _Worker) -> bool:
        """Whether a worker followed the models."""
        return (self._folder / f"{worker.process.pid}.lock").exists()

    def _replace_dead(self) -> int:
        """Replace dead workers, unless the service stops. Returns the exit code, 1 when it gives up."""
        for worker in self._workers[:]:
            if worker.process.is_alive():
                continue
            if not self._leaving and time.monotonic() < self._restart_at(worker):
                continue
            pid, began = worker.process.pid, self._has_begun(worker)
            self._workers.remove(worker)
            worker.pipe.close()
            if pid is not None:
                forget_process(pid, self._counted)
                forget(self._folder, pid)
            if self._leaving:
                continue
            self._failed_starts = 0 if began else self._failed_starts + 1
            if self._failed_starts >= FAILED_STARTS and not any(map(self._has_begun, self._living())):
                log.error("%d workers ended before they followed the models; the service gives up", self._failed_starts)
                self._signals = 1
                return 1
            log.error("worker %s ended with exit code %s and is replaced", pid, worker.process.exitcode)
            self._workers.append(self._start(worker.number, restarted=True))
        return 0

    def _leave(self) -> float:
        """Tell all workers to stop. Returns the time to kill the others. Workers accept connections until they close the sockets
        themselves."""
        for listening in self._listening:
            listening.close()
        log.info("stopping %d workers", len(self._workers))
        for worker in self._living():
            try:
                worker.pipe.send("leave")
            except OSError:
                log.debug("worker %s has gone already", worker.process.pid)
        return time.monotonic() + self._settings.drain_delay_s + 2 * self._settings.drain_s + KILL_AFTER_S

    def _kill(self) -> int:
        """Kill the workers that still run. Returns the exit code, 1 where there were any."""
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
        signals = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            signals.append(signal.SIGHUP)
        before = {sig: signal.signal(sig, self._count) for sig in signals}
        former = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        try:
            yield woken
        finally:
            signal.set_wakeup_fd(former)
            for sig, handler in before.items():
                signal.signal(sig, handler)
            woken.close()
            waker.close()

    def _count(self, sig: int, _: object) -> None:
        """SIGHUP stops, and is never a second signal (server.py)."""
        if sig == signal.SIGHUP:
            self._hung_up = True
        else:
            self._signals += 1


def work(settings: Settings, listening: Sequence[socket.socket], pipe: Connection, number: int, restarted: bool) -> None:
    """One worker process: serves until the other end of the pipe says so, or is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the server handles it: Ctrl-C reaches the parent as well
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # so does the end of a terminal
    logs.configure(settings.log_level, settings.log_format)
    if settings.run_folder is not None:
        count_in(metrics_folder(settings.run_folder))
    make_ready()
    app = create_app(settings)
    app.state.service.metrics.begin(number, restarted)
    server = Server(app, settings, alone=False)

    def stop_when_told() -> None:
        try:
            pipe.recv()
        except (EOFError, OSError):
            log.warning("the parent process is gone")
        server.leave()

    threading.Thread(target=stop_when_told, name="stop", daemon=True).start()
    server.serve_on(*listening)
