"""TLS: the certificates of the service's own addresses and of its calls to other services, read again when their files change.

Knows PEM files and contexts of Python's ssl. Does not know connections.
"""

from __future__ import annotations

import re
import ssl
from pathlib import Path

from .watched_files import FromFiles

NOUN = "certificates"


Certificates = FromFiles[ssl.SSLContext]
"""The context for the next handshake. Its `current` raises OSError, whose message names the file and shows nothing of its content."""


def certificates_of_service(certificate: Path, key: Path, client_ca: Path | None) -> Certificates:
    """The certificates of the service's own addresses. client_ca: CAs of the certificates that clients must show; None: they need none."""
    files = [file for file in (certificate, key, client_ca) if file is not None]
    return FromFiles(files, lambda: _server_context(certificate, key, client_ca), NOUN)


def calling(ca: Path | None, certificate: Path | None, key: Path | None) -> Certificates:
    """The certificates for calls to other services. ca: CAs of their certificates, None: the system's; certificate, key: shown to them."""
    files = [file for file in (ca, certificate, key) if file is not None]
    return FromFiles(files, lambda: _client_context(ca, certificate, key), NOUN)


def _server_context(certificate: Path, key: Path, client_ca: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = max(context.minimum_version, ssl.TLSVersion.TLSv1_2)
    context.set_alpn_protocols(["http/1.1"])
    _load_certificate(context, certificate, key)
    if client_ca is not None:
        _load_ca(context, client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _client_context(ca: Path | None, certificate: Path | None, key: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if ca is not None else ssl.create_default_context()
    context.minimum_version = max(context.minimum_version, ssl.TLSVersion.TLSv1_2)
    if ca is not None:
        _load_ca(context, ca)
    if certificate is not None and key is not None:
        _load_certificate(context, certificate, key)
    return context


def _load_certificate(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    _check_readable(certificate, key)
    try:
        context.load_cert_chain(certificate, key, password="")  # so that a key with a password is refused, instead of prompting for it
    except OSError as error:
        raise OSError(f"{certificate} and {key}: no certificate with its key, in PEM ({_reason(error)})") from error


def _load_ca(context: ssl.SSLContext, ca: Path) -> None:
    _check_readable(ca)
    try:
        context.load_verify_locations(ca)
    except OSError as error:
        raise OSError(f"{ca}: no certificates in PEM ({_reason(error)})") from error
    if context.cert_store_stats()["crl"]:  # OpenSSL reads revocation lists from the file, but ignores them unless told otherwise
        context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF


def _check_readable(*files: Path) -> None:
    """Raise OSError with the name of an unreadable file, which ssl's own error lacks."""
    for file in files:
        try:
            file.open("rb").close()
        except OSError as error:
            raise OSError(f"{file}: {error.strerror}") from error


def _reason(error: OSError) -> str:
    """The message of an ssl error without the source line that ssl adds."""
    return re.sub(r"^\[[^]]*\] | \(_ssl\.c:\d+\)$", "", error.strerror or str(error))
