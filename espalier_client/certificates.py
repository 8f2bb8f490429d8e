"""Certificates for a service behind https, from files that are read again after changes.

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

CHECK_S = 1.0
"""Seconds between two checks of the files."""


class Certificates:
    """The clients' argument `certificates`; several clients may share it.

    `ca`: PEM file of the CAs that sign the service's certificate; None: the system's CAs. `certificate` and `key`: PEM files of the
    client's certificate, if the service requires one (mTLS). `clock`: time in seconds, for tests.

    Changed files are read again within a second and apply to new connections. If a changed file is wrong, the old certificates stay in use
    and an error is logged. A CA that is removed from the file stays trusted until the program ends.

    Raises OSError if the files cannot be used, ValueError if only one of `certificate` and `key` is given.
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
        self._next_check = clock() + CHECK_S
        self.context = ssl.create_default_context() if ca is None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._load(self.context)

    def look(self) -> None:
        """Read the files again if they have changed. Any thread may call it."""
        with self._lock:
            if self._clock() < self._next_check:
                return
            self._next_check = self._clock() + CHECK_S
            signatures = self._signatures()
            if signatures == self._seen:
                return
            self._seen = signatures  # an error is logged once
            try:
                self._load(
                    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                )  # first into a new context: an error must not leave the used one half changed
                self._load(self.context)  # httpx holds it
            except OSError as error:
                log.error("certificates have changed, and those of before stay in use: %s", error)

    def _load(self, context: ssl.SSLContext) -> None:
        if self._ca is not None:
            context.load_verify_locations(self._ca)
        if self._pair is not None:
            context.load_cert_chain(*self._pair, password="")  # a key with a password is refused: no prompt at a terminal

    def _signatures(self) -> list[tuple[int, ...] | None]:
        return [_signature(file) for file in self._files]


def _signature(file: Path) -> tuple[int, ...] | None:
    """Changes when a file, or the target of a link, changes; None if there is no file."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
