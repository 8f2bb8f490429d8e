"""Hostile servers on the way: proxies, handshakes and certificates."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from espalier_client import (
    ConnectionFailed,
    Readiness,
    Retry,
)
from tests.client.rude_server import KINDS, READY, Connection, Server, behaving, call, response, saying


@KINDS
def test_the_proxy_of_the_environment_is_used_where_it_is_meant(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with behaving(saying(response(READY))) as proxy, behaving(saying(response(READY))) as service:
        for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.upper(), raising=False)
        monkeypatch.setenv("HTTP_PROXY", proxy.address.replace("://", "://me:s3cret@"))
        assert call(kind, "http://service.test:81", "ready") == Readiness(True, ())
        (asked,) = proxy.requests
        assert asked.startswith(b"GET http://service.test:81/readyz HTTP/1.1\r\n")
        assert b"\r\nProxy-Authorization: Basic bWU6czNjcmV0\r\n" in asked
        for bypassed in ("127.0.0.1", "*", service.address.removeprefix("http://")):
            monkeypatch.setenv("NO_PROXY", bypassed)
            assert call(kind, service.address, "ready") == Readiness(True, ())
        assert (len(proxy.requests), len(service.requests)) == (1, 3)


@KINDS
def test_a_port_where_nobody_listens_is_a_failed_connection(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionFailed) as raised:
        call(kind, f"http://127.0.0.1:{port}", "ready", retry=Retry(retries=0))
    assert (type(raised.value), raised.value.sent) == (ConnectionFailed, False)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of 127.0.0.1 and its key, in one file."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    key = path.with_name("key.pem")
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    words += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(path)]
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    subprocess.run(words, check=True, capture_output=True)
    path.write_text(path.read_text() + key.read_text())
    return path


def over_tls(certificate: Path, behave: Callable[[Server, Connection], None]) -> Callable[[Server, Connection], None]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    def wrapped(server: Server, connection: Connection) -> None:
        with context.wrap_socket(connection.socket, server_side=True) as connection.socket:
            behave(server, connection)

    return wrapped


@KINDS
def test_requests_and_answers_go_through_tls_where_the_certificate_is_vouched_for(
    kind: str, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with behaving(over_tls(certificate, saying(response(READY)))) as server:
        address = server.address.replace("http:", "https:")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert call(kind, address, "ready") == Readiness(True, ())
        monkeypatch.delenv("SSL_CERT_FILE")
        with pytest.raises(ConnectionFailed, match="CERTIFICATE_VERIFY_FAILED"):
            call(kind, address, "ready", retry=Retry(retries=0))
        assert len(server.requests) == 1
