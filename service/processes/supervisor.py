"""Several worker processes behind the same listening sockets: their start, replacement and stop.

uvicorn's own supervisor is not used: it kills workers that do not answer a ping in 5 s, restarts a broken worker for ever, and ignores the
metrics that a dead worker leaves. Here a worker is killed if its event loop has stood still for HUNG_S. A worker stops when its pipe says
so or is closed, not by a signal. So it also stops if its parent has died, and a signal to the whole process group does not count twice.
Knows processes; server.py has the work of a worker.
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
from ctypes import c_double
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from espalier.compile import make_ready

from ..app import create_app
from ..processes.server import Server
from ..run_folder import forget, make, remove_dead
from ..settings import Settings, metrics_folder
from ..watch import logs
from ..watch.counter_files import remove_process
from ..watch.multiprocess import count_in

log = logging.getLogger(__name__)

FAILED_STARTS = 3
"""The service gives up when so many workers in a row have ended before they followed the models, unless other workers serve."""
RESTART_S, MAX_RESTART_S = 1.0, 30.0
"""Least seconds between two starts of one worker. They double with each worker that ends before it followed the models, up to
MAX_RESTART_S."""
KILL_AFTER_S = 10.0
"""A worker is killed this long after the end of the time that it may take to stop."""
HUNG_S, LOOK_S = 60.0, 5.0
"""How long a worker's event loop may stand still; it says each second that it runs. Seconds between two looks, more than that."""


@dataclass(eq=False)
class _Worker:
    """number: the worker's number; its replacement has the same number.

    beat  shared memory: when its event loop ran last, of time.monotonic(); 0 before it runs
    """

    process: BaseProcess
    pipe: Connection
    started: float
    number: int
    beat: c_double


class Supervisor:
    """Keeps `settings.workers` workers running on listening sockets."""

    def __init__(self, settings: Settings, *sockets: socket.socket) -> None:
        self._sockets = sockets
        remove_dead()
        self._folder, self._owner_lock = make()
        self._metrics_folder = metrics_folder(self._folder)
        self._metrics_folder.mkdir()
        self._settings = settings.model_copy(update={"run_folder": self._folder})
        self._spawn = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        self._signals, self._hangup = 0, False
        self._look_at = time.monotonic()

    def run(self) -> int:
        """Serve until a signal says stop. Returns the exit code."""
        code, kill_at = 0, float("inf")
        with self._wakeup_on_signals() as wakeup_socket:
            self._workers = [self._start(number) for number in range(self._settings.workers)]
            log.info("%d workers: %s", len(self._workers), ", ".join(str(worker.process.pid) for worker in self._workers))
            while self._workers:
                living_workers = self._living_workers()
                dead = [worker for worker in self._workers if worker not in living_workers]
                timeout_s = max(min([kill_at, self._look_at, *map(self._restart_at, dead)]) - time.monotonic(), 0)
                wait([wakeup_socket, *(worker.process.sentinel for worker in living_workers)], timeout_s)
                with suppress(BlockingIOError):
                    wakeup_socket.recv(64)
                if self._leaving and kill_at == float("inf"):
                    kill_at = self._leave()
                if self._signals > 1 or time.monotonic() >= kill_at:
                    code = self._kill() or code
                self._kill_hung()
                code = self._replace_dead() or code
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._owner_lock)
        return code

    @property
    def _leaving(self) -> bool:
        return self._signals > 0 or self._hangup

    def _living_workers(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.process.is_alive()]

    def _start(self, number: int, restarted: bool = False) -> _Worker:
        our_end, their_end = self._spawn.Pipe()
        beat = self._spawn.RawValue(c_double)
        arguments = self._settings, self._sockets, their_end, beat, number, restarted
        process = self._spawn.Process(target=work, args=arguments, name="worker")
        process.start()
        their_end.close()
        return _Worker(process, our_end, time.monotonic(), number, beat)

    def _restart_at(self, worker: _Worker) -> float:
        """The time from which a dead worker may be replaced."""
        return worker.started + min(RESTART_S * 2.0 ** min(self._failed_starts, 10), MAX_RESTART_S)

    def _followed_models(self, worker: _Worker) -> bool:
        """Whether a worker got as far as following the models."""
        return (self._folder / f"{worker.process.pid}.lock").exists()

    def _replace_dead(self) -> int:
        """Replace dead workers, unless the service stops. Returns the exit code: 1 if the service gives up."""
        for worker in self._workers[:]:
            if worker.process.is_alive():
                continue
            if not self._leaving and time.monotonic() < self._restart_at(worker):
                continue
            pid, followed_models = worker.process.pid, self._followed_models(worker)
            self._workers.remove(worker)
            worker.pipe.close()
            if pid is not None:
                remove_process(self._metrics_folder, pid)
                forget(self._folder, pid)
            if self._leaving:
                continue
            self._failed_starts = 0 if followed_models else self._failed_starts + 1
            if self._failed_starts >= FAILED_STARTS and not any(map(self._followed_models, self._living_workers())):
                log.error("%d workers ended before they followed the models; the service gives up", self._failed_starts)
                self._signals = 1
                return 1
            log.error("worker %s ended with exit code %s and is replaced", pid, worker.process.exitcode)
            self._workers.append(self._start(worker.number, restarted=True))
        return 0

    def _kill_hung(self) -> None:
        """Kill the workers whose event loop stands still. If this process stood still, too, as in a paused container, they get time."""
        now = time.monotonic()
        if now < self._look_at:
            return
        was_paused, self._look_at = now > self._look_at + LOOK_S, now + LOOK_S
        for worker in () if was_paused or self._leaving else self._living_workers():
            still_s = now - worker.beat.value if worker.beat.value else 0.0
            if still_s > HUNG_S:
                log.error("worker %s has stood still for %.0f s and is killed", worker.process.pid, still_s)
                worker.process.kill()

    def _leave(self) -> float:
        """Tell all workers to stop; they accept connections until they close the sockets. Returns the time to kill those that still run."""
        for listening_socket in self._sockets:
            listening_socket.close()
        log.info("stopping %d workers", len(self._workers))
        for worker in self._living_workers():
            try:
                worker.pipe.send("leave")
            except OSError:
                log.debug("worker %s has gone already", worker.process.pid)
        return time.monotonic() + self._settings.drain_delay_s + 2 * self._settings.drain_s + KILL_AFTER_S

    def _kill(self) -> int:
        """Kill the workers that still run. Returns the exit code: 1 if there were any."""
        living_workers = self._living_workers()
        for worker in living_workers:
            log.warning("worker %s is stopped at once", worker.process.pid)
            worker.process.kill()
            worker.process.join()
        return 1 if living_workers else 0

    @contextmanager
    def _wakeup_on_signals(self) -> Iterator[socket.socket]:
        """Handle signals in the block, and yield a socket that becomes readable with each signal."""
        wakeup_socket, signal_socket = socket.socketpair()
        wakeup_socket.setblocking(False)
        signal_socket.setblocking(False)
        signals = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            signals.append(signal.SIGHUP)
        former_handlers = {sig: signal.signal(sig, self._handle_signal) for sig in signals}
        former_fd = signal.set_wakeup_fd(signal_socket.fileno(), warn_on_full_buffer=False)
        try:
            yield wakeup_socket
        finally:
            signal.set_wakeup_fd(former_fd)
            for sig, handler in former_handlers.items():
                signal.signal(sig, handler)
            wakeup_socket.close()
            signal_socket.close()

    def _handle_signal(self, sig: int, _: object) -> None:
        """Count a signal. SIGHUP stops the service, but never counts as a second signal (server.py)."""
        if sig == signal.SIGHUP:
            self._hangup = True
        else:
            self._signals += 1


def work(settings: Settings, sockets: Sequence[socket.socket], pipe: Connection, beat: c_double, number: int, restarted: bool) -> None:
    """One worker process: serves until a message comes through the pipe, or its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the server handles it, because Ctrl-C reaches the parent, too
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # likewise: the end of a terminal reaches the parent, too
    logs.configure(settings.log_level, settings.log_format)
    if settings.run_folder is not None:
        count_in(metrics_folder(settings.run_folder))
    make_ready()
    app = create_app(settings)
    app.state.service.metrics.begin(number, restarted)
    server = Server(app, settings, owns_signals=False, beat=beat)

    def stop_on_message() -> None:
        try:
            pipe.recv()
        except (EOFError, OSError):
            log.warning("the parent process is gone")
        server.leave()

    threading.Thread(target=stop_on_message, name="stop", daemon=True).start()
    server.serve_on(*sockets)
