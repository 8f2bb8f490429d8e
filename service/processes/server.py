"""One process that listens: uvicorn's server, stopped without losing requests.

After the first signal it serves for another ESPALIER_DRAIN_DELAY_S. Meanwhile /readyz, and `Connection: close` in every answer, say that it
stops, so that load balancers choose another one. Then it stops listening and finishes the accepted requests. A second signal ends it at
once. SIGHUP never counts as a second signal: a closing terminal may send it twice, and service managers send it together with SIGTERM.

The process raises its limit of descriptors (`ulimit -n`) as far as allowed. Those that nothing else needs limit the connections.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import c_double
from functools import partial
from types import FrameType
from typing import cast

import uvicorn
from fastapi import FastAPI

from espalier.bundle import find_versions
from espalier.errors import InvalidData
from espalier.serving import Serving

from ..http.connection import Connection
from ..http.connections import MAX_HELD, RESERVE, Connections
from ..http.handshake import Handshake
from ..models.desired_state import DesiredState
from ..models.registry import Registry
from ..settings import Settings
from ..watch.metrics import Metrics
from ..watch.process_usage import open_descriptors

log = logging.getLogger(__name__)

CLOSE = (b"connection", b"close")
OWN_DESCRIPTORS, MODEL_DESCRIPTORS, VERSION_DESCRIPTORS = 48, 8, 5
"""Descriptors of a process without models (a worker had 38), of each model, and of each version."""
SPARE_DESCRIPTORS = 16
"""Descriptors in reserve for another version that is loaded, and for files that are read."""
MIN_CONNECTIONS = 16
"""The service does not start with descriptors for fewer connections."""


class Server(uvicorn.Server):
    """Serves one application.

    owns_signals  whether signals stop this process. Otherwise its parent says when to stop, because a signal may reach both
    beat          is set to time.monotonic() each second
    """

    def __init__(self, app: FastAPI, settings: Settings, owns_signals: bool = True, beat: c_double | None = None) -> None:
        self._beat = c_double() if beat is None else beat
        self._registry: Registry = app.state.service.registry
        self._metrics: Metrics = app.state.service.metrics
        self._requested, self._other_descriptors = settings.max_connections, needed_descriptors(settings)
        self._reported_limit = self._requested
        times_s = settings.head_timeout_s, settings.keep_alive_s, settings.write_timeout_s
        self._connections = Connections(self._requested, *times_s, partial(self._metrics.count, "espalier_refused_connections_total"))
        self._certificates = settings.certificates
        if self._certificates is not None:
            self._certificates.current()  # a process that cannot serve ends before it loads models
        self._make_room()
        super().__init__(
            uvicorn.Config(
                app,
                http=self._protocol(for_customers=settings.admin_address is not None),
                ws="none",
                server_header=False,
                log_config=None,
                access_log=False,
                lifespan="on",
                timeout_graceful_shutdown=math.ceil(settings.drain_s),
            )
        )
        self._delay_s, self._owns_signals = settings.drain_delay_s, owns_signals
        self._leave_at: float | None = None

    def serve_on(self, *sockets: socket.socket) -> None:
        """Serve until a signal or `leave`. sockets: of the service's address and, if there is one, of the operators' address."""
        self.run(sockets=[*sockets])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start uvicorn on the first socket, and listen on the operators' socket, too."""
        first_socket, *other_sockets = sockets or []
        await super().startup([first_socket])
        for other_socket in other_sockets:
            arguments = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
            make = partial(self._protocol(for_customers=False), **arguments)
            self.servers.append(await asyncio.get_running_loop().create_server(make, sock=other_socket, backlog=self.config.backlog))

    def _protocol(self, for_customers: bool) -> type[asyncio.Protocol]:
        """The factory of an address's connections, in the form that uvicorn takes."""
        make = partial(Connection, self._connections, for_customers)
        handshake = None if self._certificates is None else partial(Handshake, self._connections, self._certificates, make)
        return cast(type[asyncio.Protocol], handshake or make)

    def leave(self) -> None:
        """Stop after the drain delay. May be called from any thread."""
        if self._leave_at is None:
            self._registry.leaving = True
            self._leave_at = time.monotonic() + self._delay_s

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle uvicorn's signals, and SIGHUP unless it is ignored (as under nohup)."""
        handles_hangup = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
        former_handler = signal.signal(signal.SIGHUP, self.handle_exit) if handles_hangup else None
        try:
            with super().capture_signals():
                yield
        finally:
            if handles_hangup:
                signal.signal(signal.SIGHUP, former_handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop. (uvicorn would raise the signal again at the end, but a requested stop is not a failure.)"""
        self.leave()
        if self._owns_signals and sig != signal.SIGHUP:
            for handled in (signal.SIGTERM, signal.SIGINT):
                signal.signal(handled, signal.SIG_DFL)

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop. uvicorn calls it ten times a second."""
        stop = await super().on_tick(counter)
        if counter % 10 == 0:
            self._beat.value = time.monotonic()
            self._make_room()
            if self._certificates is not None:
                self._certificates.current()
            self._connections.check(asyncio.get_running_loop().time())
            self._metrics.show("espalier_connections", len(self._connections.open) + len(self._connections.held))
        if self._leave_at is None:
            return stop
        if CLOSE not in self.server_state.default_headers:
            self.server_state.default_headers = [*self.server_state.default_headers, CLOSE]
        if time.monotonic() < self._leave_at:
            return stop
        self._registry.changes.interrupt()  # else uvicorn would wait for them, and then cancel their requests
        return True

    def _make_room(self) -> None:
        """Set the limits of connections by the descriptors that are not in use for something else."""
        connections = self._connections
        used = (open_descriptors() or 0) - len(connections.open) - len(connections.held)
        other_descriptors = max(used + SPARE_DESCRIPTORS, self._other_descriptors)
        connections.limit = limit = affordable_connections(self._requested, other_descriptors)
        held_room = _raise_limit(limit + 2 * RESERVE + other_descriptors + MAX_HELD) - limit - 2 * RESERVE - other_descriptors
        connections.held_limit = min(max(held_room, 0), MAX_HELD)
        if limit < self._reported_limit:
            self._reported_limit = limit
            log.warning(
                "of the open files that the process may have (ulimit -n), %d are for other things: at most %d connections are accepted "
                "(ESPALIER_MAX_CONNECTIONS: %d)",
                other_descriptors,
                limit,
                self._requested,
            )


def needed_descriptors(settings: Settings) -> int:
    """Estimated number of descriptors, besides connections, that a process needs when all versions serve."""
    models = find_versions(settings.models)
    count = OWN_DESCRIPTORS
    for name in models:
        serving = None
        with suppress(InvalidData):
            serving = DesiredState(settings.models / name).read(Serving)
        count += MODEL_DESCRIPTORS + VERSION_DESCRIPTORS * (1 if serving is None else len(serving.versions))
    return count


def check_descriptors(settings: Settings) -> None:
    """Raise OSError if the process cannot have enough descriptors for MIN_CONNECTIONS."""
    needed = needed_descriptors(settings)
    minimum = needed + MIN_CONNECTIONS * 3 // 2
    soft = _raise_limit(minimum)
    if soft != resource.RLIM_INFINITY and soft < minimum:
        raise OSError(
            f"the process may have {soft} open files (ulimit -n), expected at least {minimum}: {needed} for the models and for itself, the "
            f"rest for {MIN_CONNECTIONS} connections; {needed + settings.max_connections + 2 * RESERVE} for ESPALIER_MAX_CONNECTIONS. "
            "Raise the limit: ulimit -n, LimitNOFILE= of systemd, --ulimit nofile= of containers"
        )


def affordable_connections(requested: int, other_descriptors: int) -> int:
    """The largest number of connections, at most `requested`, for which there are descriptors besides `other_descriptors`."""
    soft = _raise_limit(requested + 2 * RESERVE + other_descriptors)
    room = soft - other_descriptors
    if soft == resource.RLIM_INFINITY or room >= requested + 2 * RESERVE:
        return requested
    # RESERVE twice, but each at most a quarter of the connections
    return max(min(requested, room - 2 * RESERVE if room >= 6 * RESERVE else room * 2 // 3), 1)


def _raise_limit(wanted: int) -> int:
    """Raise the limit of descriptors to `wanted`, or as far as allowed. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed
