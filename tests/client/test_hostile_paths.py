"""Hostile servers on the way: proxies, handshakes and certificates."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from espalier_client import (
    ConnectionFailed,
    Query,
    Readiness,
    Retry,
)
from tests.client.rude_server import KINDS, READY, Connection, Server, answer, behaving, call, response, saying


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
def test_each_address_of_a_name_is_tried(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with behaving(saying(response(READY))) as server:
        port = int(server.address.rpartition(":")[2])
        real = socket.getaddrinfo

        def getaddrinfo(host: Any, *arguments: Any, **rest: Any) -> Any:
            if host not in ("two.test", b"two.test"):
                return real(host, *arguments, **rest)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in ("127.0.0.2", "127.0.0.1")]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        assert call(kind, f"http://two.test:{port}", "ready") == Readiness(True, ())


@KINDS
def test_a_name_without_an_address_is_a_failed_connection(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def getaddrinfo(name: Any, *arguments: Any, **rest: Any) -> Any:
        if name in ("nobody.invalid", b"nobody.invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(name, *arguments, **rest)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with pytest.raises(ConnectionFailed) as raised:
        call(kind, "http://nobody.invalid", "ready", retry=Retry(retries=0))
    assert raised.value.sent is False


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
def test_large_requests_and_answers_go_through_tls(kind: str, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    content = json.dumps(answer(*(f"{n}-".ljust(1000, "x") for n in range(2000)))).encode()
    with behaving(over_tls(certificate, saying(response(content)))) as server:
        got = call(kind, server.address.replace("http:", "https:"), "retrieve", [Query(text="x" * 3_000_000)])
        assert len(got.results[0].items) == 2000
        assert server.requests[0].endswith(b"x" * 1000 + b'"}]}')


@KINDS
def test_a_certificate_that_nobody_vouches_for_is_a_failed_connection(
    kind: str, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with behaving(over_tls(certificate, saying(response(READY)))) as server:
        with pytest.raises(ConnectionFailed, match="CERTIFICATE_VERIFY_FAILED"):
            call(kind, server.address.replace("http:", "https:"), "ready", retry=Retry(retries=0))
        assert server.requests == []
