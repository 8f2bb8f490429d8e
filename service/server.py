"""One process that listens: uvicorn's server, with a way out that loses nothing.

After the first signal it goes on serving for `delay_s`, while /readyz and every answer's `Connection: close` say that it is going, so
that a load balancer looks elsewhere. Then it stops listening and finishes what it accepted. A second signal ends it at once.
"""

from __future__ import annotations

import math
import signal
import socket
import time
from types import FrameType

import uvicorn
from fastapi import FastAPI

from service.registry import Registry
from service.settings import Settings

CLOSE = (b"connection", b"close")


class Server(uvicorn.Server):
    """Serves one application.

    alone  signals are meant for this process. Otherwise its parent says when to stop, and when to stop at once: a signal may come from
           it and, once more, from whoever signals a group of processes
    """

    def __init__(self, app: FastAPI, settings: Settings, alone: bool = True) -> None:
        graceful_s = math.ceil(settings.drain_s)
        super().__init__(uvicorn.Config(app, log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=graceful_s))
        self._registry: Registry = app.state.service.registry
        self._delay_s, self._alone = settings.drain_delay_s, alone
        self._leave_at: float | None = None

    def serve_on(self, listening: socket.socket) -> None:
        """Serve until a signal or `leave` says stop."""
        self.run(sockets=[listening])

    def leave(self) -> None:
        """Stop soon. From any thread."""
        if self._leave_at is None:
            self._registry.leaving = True
            self._leave_at = time.monotonic() + self._delay_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """What a signal does. (uvicorn would raise it again at the end; a stop that was asked for is no failure.)"""
        self.leave()
        if self._alone:
            for handled in (signal.SIGTERM, signal.SIGINT):
                signal.signal(handled, signal.SIG_DFL)

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop; asked ten times a second."""
        stop = await super().on_tick(counter)
        if self._leave_at is None:
            return stop
        if CLOSE not in self.server_state.default_headers:
            self.server_state.default_headers = [*self.server_state.default_headers, CLOSE]
        return stop or time.monotonic() >= self._leave_at
