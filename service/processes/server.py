"""One process that listens: uvicorn's server, which stops without losing requests.

After the first signal it serves for ESPALIER_DRAIN_DELAY_S more, while /readyz and every answer's `Connection: close` say that it stops, so
that load balancers choose another one. Then it stops listening and finishes the accepted requests. A second signal ends it at once; SIGHUP,
which a terminal that closes may send twice, and service managers together with SIGTERM, is never a second one.

The system's limit of descriptors (`ulimit -n`) is raised as far as it may be; what no connection needs leaves room for so many connections.
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
OWN, MODEL, VERSION = 48, 8, 5
"""Descriptors of a process without a model (38 were counted in a worker), and of each model and each version."""
SPARE = 16
"""Beside those that are open: for a version that is loaded beside the others, and for files that are read."""
LEAST_CONNECTIONS = 16
"""Room for fewer is no service."""


class Server(uvicorn.Server):
    """Serves one application.

    alone  signals are meant for this process. Otherwise its parent says when to stop; a signal may reach both of them
    """

    def __init__(self, app: FastAPI, settings: Settings, alone: bool = True) -> None:
        self._registry: Registry = app.state.service.registry
        self._metrics: Metrics = app.state.service.metrics
        self._requested, self._others = settings.max_connections, needed(settings)
        self._told = self._requested
        times_s = settings.head_timeout_s, settings.keep_alive_s, settings.write_timeout_s
        self._connections = Connections(self._requested, *times_s, self._metrics.connection_refused)
        self._certificates = settings.certificates
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
        self._delay_s, self._alone = settings.drain_delay_s, alone
        self._leave_at: float | None = None

    def serve_on(self, *listening: socket.socket) -> None:
        """Serve until a signal or `leave` says stop. listening: the service's address, and that of operators where they have one."""
        self.run(sockets=[*listening])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's, and the address of operators."""
        first, *others = sockets or []
        await super().startup([first])
        for other in others:
            given = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
            make = partial(self._protocol(for_customers=False), **given)
            self.servers.append(await asyncio.get_running_loop().create_server(make, sock=other, backlog=self.config.backlog))

    def _protocol(self, for_customers: bool) -> type[asyncio.Protocol]:
        """What makes a connection of an address, as uvicorn takes it."""
        make = partial(Connection, self._connections, for_customers)
        secured = None if self._certificates is None else partial(Handshake, self._connections, self._certificates, make)
        return cast(type[asyncio.Protocol], secured or make)

    def leave(self) -> None:
        """Stop soon. From any thread."""
        if self._leave_at is None:
            self._registry.leaving = True
            self._leave_at = time.monotonic() + self._delay_s

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's signals, and SIGHUP unless it is ignored, as under nohup."""
        here = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
        before = signal.signal(signal.SIGHUP, self.handle_exit) if here else None
        try:
            with super().capture_signals():
                yield
        finally:
            if here:
                signal.signal(signal.SIGHUP, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop. (uvicorn would raise the signal again at the end, but a requested stop is not a failure.)"""
        self.leave()
        if self._alone and sig != signal.SIGHUP:
            for handled in (signal.SIGTERM, signal.SIGINT):
                signal.signal(handled, signal.SIG_DFL)

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop; called ten times a second."""
        stop = await super().on_tick(counter)
        if counter % 10 == 0:
            self._make_room()
            if self._certificates is not None:
                self._certificates.current()
            self._connections.check(asyncio.get_running_loop().time())
            self._metrics.connections(len(self._connections.open) + len(self._connections.held))
        if self._leave_at is None:
            return stop
        if CLOSE not in self.server_state.default_headers:
            self.server_state.default_headers = [*self.server_state.default_headers, CLOSE]
        return stop or time.monotonic() >= self._leave_at

    def _make_room(self) -> None:
        """Take as many connections as there are descriptors for beside those that are open for something else."""
        connections = self._connections
        others = max((open_descriptors() or 0) - len(connections.open) - len(connections.held) + SPARE, self._others)
        connections.limit = most = most_connections(self._requested, others)
        room = _raised(most + 2 * RESERVE + others + MAX_HELD) - most - 2 * RESERVE - others
        connections.held_limit = min(max(room, 0), MAX_HELD)
        if most < self._told:
            self._told = most
            log.warning(
                "of the open files that the process may have (ulimit -n), %d are for other things: at most %d connections are taken "
                "(ESPALIER_MAX_CONNECTIONS: %d)",
                others,
                most,
                self._requested,
            )


class TooFewDescriptors(OSError):
    """The system gives the process fewer descriptors than a service needs."""


def needed(settings: Settings) -> int:
    """About how many descriptors a process has open, besides connections, when everything that should serve does."""
    found = find_versions(settings.models)
    count = OWN
    for name in found:
        serving = None
        with suppress(InvalidData):
            serving = DesiredState(settings.models / name).read(Serving)
        count += MODEL + VERSION * (1 if serving is None else len(serving.versions))
    return count


def check_descriptors(settings: Settings) -> None:
    """Raise TooFewDescriptors where the process may not have enough of them to serve LEAST_CONNECTIONS."""
    own = needed(settings)
    least = own + LEAST_CONNECTIONS * 3 // 2
    soft = _raised(least)
    if soft != resource.RLIM_INFINITY and soft < least:
        raise TooFewDescriptors(
            f"the process may have {soft} open files (ulimit -n), expected at least {least}: {own} for the models and for itself, the rest "
            f"for {LEAST_CONNECTIONS} connections; {own + settings.max_connections + 2 * RESERVE} for all of ESPALIER_MAX_CONNECTIONS. "
            "Raise the limit: ulimit -n, LimitNOFILE= of systemd, --ulimit nofile= of containers"
        )


def most_connections(requested: int, others: int) -> int:
    """`requested`, or as many connections as the process has descriptors for beside `others`."""
    soft = _raised(requested + 2 * RESERVE + others)
    room = soft - others
    if soft == resource.RLIM_INFINITY or room >= requested + 2 * RESERVE:
        return requested
    # with a reserve of a quarter at most, twice
    return max(min(requested, room - 2 * RESERVE if room >= 6 * RESERVE else room * 2 // 3), 1)


def _raised(wanted: int) -> int:
    """The limit of descriptors, after it was raised to `wanted` or as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed
