"""TLS: the certificates of the service's own addresses and of its calls to other services, read again when their files change.

Knows files in PEM and contexts of Python's ssl. Does not know connections.
"""

from __future__ import annotations

import logging
import re
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .watched_files import WatchedFiles

log = logging.getLogger(__name__)


class CertificatesUnusable(OSError):
    """Files hold no certificates or keys that can be used. The message names the file and shows nothing of it."""


class Certificates:
    """A context over files, which is made anew when one of them changes. Of one thread.

    files  of which it is made
    build  makes it. Raises CertificatesUnusable; once there is a context, this is logged, and the context of before stays
    clock  seconds, for the looks
    """

    def __init__(self, files: Sequence[Path], build: Callable[[], ssl.SSLContext], clock: Callable[[], float] = time.monotonic) -> None:
        self._files, self._watched, self._build = files, WatchedFiles(files, clock), build
        self._context: ssl.SSLContext | None = None

    def current(self) -> ssl.SSLContext:
        """The context for another handshake. Raises CertificatesUnusable if there never was one."""
        if self._context is not None and not self._watched.have_changed():
            return self._context
        try:
            made = self._build()
        except CertificatesUnusable as error:
            if self._context is None:
                raise
            log.error("certificates have changed, and those of before stay in use: %s", error)
            return self._context
        if self._context is not None:
            log.info("certificates have changed: %s", ", ".join(map(str, self._files)))
        self._context = made
        return made


def served(certificate: Path, key: Path, client_ca: Path | None) -> Certificates:
    """Those that the service shows its clients. client_ca: who signs the certificates that clients must show; None: they need none."""
    files = [file for file in (certificate, key, client_ca) if file is not None]
    return Certificates(files, lambda: _server_context(certificate, key, client_ca))


def calling(ca: Path | None, certificate: Path | None, key: Path | None) -> Certificates:
    """Those of calls to other services. ca: who signs theirs, None: the system's; certificate and key: what is shown to them."""
    files = [file for file in (ca, certificate, key) if file is not None]
    return Certificates(files, lambda: _client_context(ca, certificate, key))


def _server_context(certificate: Path, key: Path, client_ca: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = max(context.minimum_version, ssl.TLSVersion.TLSv1_2)
    context.set_alpn_protocols(["http/1.1"])
    _show(context, certificate, key)
    if client_ca is not None:
        _trust(context, client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _client_context(ca: Path | None, certificate: Path | None, key: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if ca is not None else ssl.create_default_context()
    context.minimum_version = max(context.minimum_version, ssl.TLSVersion.TLSv1_2)
    if ca is not None:
        _trust(context, ca)
    if certificate is not None and key is not None:
        _show(context, certificate, key)
    return context


def _show(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    _check_readable(certificate, key)
    try:
        context.load_cert_chain(certificate, key, password="")  # so that a key with a password is refused, and not asked for at a terminal
    except OSError as error:
        raise CertificatesUnusable(f"{certificate} and {key}: no certificate with its key, in PEM ({_reason(error)})") from error


def _trust(context: ssl.SSLContext, ca: Path) -> None:
    _check_readable(ca)
    try:
        context.load_verify_locations(ca)
    except OSError as error:
        raise CertificatesUnusable(f"{ca}: no certificates in PEM ({_reason(error)})") from error


def _check_readable(*files: Path) -> None:
    """ssl does not say which file cannot be read."""
    for file in files:
        try:
            file.open("rb").close()
        except OSError as error:
            raise CertificatesUnusable(f"{file}: {error.strerror}") from error


def _reason(error: OSError) -> str:
    """In words, without the line of Python's source that ssl adds."""
    return re.sub(r"^\[[^]]*\] | \(_ssl\.c:\d+\)$", "", error.strerror or str(error))
