"""Certificates for a service behind https, from files that are read again when they change.

Knows PEM files and contexts of Python's ssl. Does not know requests.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("espalier_client")

LOOK_S = 1.0
"""Seconds between two looks at the files."""


class Certificates:
    """For the clients' argument of this name; several may share it.

    `ca`: PEM file of the CAs that sign the service's certificate; None: the system's. `certificate` and `key`: PEM files of what the client
    shows, where the service wants that (mTLS). `clock`: seconds, for the looks.

    Files that change are read again within a second and hold for new connections. If they are wrong then, those of before stay in use, and
    the log says so. A CA that is taken out of the file is trusted until the program ends.

    Raises OSError where the files cannot be used, ValueError for one of `certificate` and `key` alone.
    """

    def __init__(
        self,
        *,
        ca: str | os.PathLike[str] | None = None,
        certificate: str | os.PathLike[str] | None = None,
        key: str | os.PathLike[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if (certificate is None) != (key is None):
            raise ValueError("certificate and key: got one of them, expected both or neither")
        self._ca, self._pair = ca, None if certificate is None or key is None else (certificate, key)
        self._files = [Path(file) for file in (ca, certificate, key) if file is not None]
        self._clock, self._lock = clock, threading.Lock()
        self._seen = self._signatures()
        self._next_look = clock() + LOOK_S
        self.context = ssl.create_default_context() if ca is None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._load(self.context)

    def look(self) -> None:
        """Read the files again where they have changed. From any thread."""
        with self._lock:
            if self._clock() < self._next_look:
                return
            self._next_look = self._clock() + LOOK_S
            seen = self._signatures()
            if seen == self._seen:
                return
            self._seen = seen  # what is wrong is said once
            try:
                self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))  # first where nothing can be half done
                self._load(self.context)  # httpx holds it
            except OSError as error:
                log.error("certificates have changed, and those of before stay in use: %s", error)

    def _load(self, context: ssl.SSLContext) -> None:
        if self._ca is not None:
            context.load_verify_locations(self._ca)
        if self._pair is not None:
            context.load_cert_chain(*self._pair, password="")  # a key with a password is refused, and not asked for at a terminal

    def _signatures(self) -> list[tuple[int, ...] | None]:
        return [_signature(file) for file in self._files]


def _signature(file: Path) -> tuple[int, ...] | None:
    """Of a file, or of what a link points to; None where there is none."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
