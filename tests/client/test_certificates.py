"""Both clients and a service with TLS."""

from __future__ import annotations

import asyncio
import itertools
import logging
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from espalier_client import AsyncClient, Certificates, Client, ConnectionFailed, Retry
from tests.certificates import Authority
from tests.service.listening import Listening, listening

NEVER = Retry(retries=0)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def secured(models: Path, authority: Authority) -> Iterator[Listening]:
    """A service whose clients must show a certificate."""
    pair = authority.signs("service")
    with listening(models, tls_certificate=pair.certificate, tls_key=pair.key, tls_client_ca=authority.ca) as running:
        yield running


def ready(running: Listening, certificates: Certificates | None) -> bool:
    """Whether both clients get an answer, on new connections."""

    async def asked() -> bool:
        async with AsyncClient(url, certificates=certificates, retry=NEVER) as client:
            return bool((await client.ready()).ready)

    url = f"https://localhost:{running.address[1]}"
    with Client(url, certificates=certificates, retry=NEVER) as client:
        return bool(client.ready().ready) and asyncio.run(asked())


def test_a_client_shows_its_certificate_and_knows_the_services(secured: Listening, authority: Authority) -> None:
    certificate, key = authority.signs("shop")
    assert ready(secured, Certificates(ca=authority.ca, certificate=certificate, key=str(key)))
    for strange in (None, Certificates(ca=authority.ca), Certificates(certificate=certificate, key=key)):
        with pytest.raises(ConnectionFailed):
            ready(secured, strange)


def test_new_files_hold_for_new_connections(secured: Listening, authority: Authority, tmp_path: Path) -> None:
    now = 0.0
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other")
    mine = other.signs("shop")
    certificates = Certificates(ca=other.ca, certificate=mine.certificate, key=mine.key, clock=lambda: now)
    with Client(f"https://localhost:{secured.address[1]}", certificates=certificates, retry=NEVER) as client:
        with pytest.raises(ConnectionFailed):
            client.ready()
        for old, new in zip(mine, authority.signs("renewed"), strict=True):
            new.replace(old)
        other.ca.write_bytes(authority.ca.read_bytes())
        with pytest.raises(ConnectionFailed):
            client.ready()  # within the second
        now = 1.0
        assert client.ready().ready


def test_wrong_files_keep_those_of_before_and_are_logged_once(
    secured: Listening, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    pair, seconds = authority.signs("shop"), itertools.count()
    certificates = Certificates(ca=authority.ca, certificate=pair.certificate, key=pair.key, clock=lambda: next(seconds))
    pair.key.write_text("-----BEGIN")
    for _ in range(3):
        assert ready(secured, certificates)
    assert [record.levelno for record in caplog.records if "stay in use" in record.getMessage()] == [logging.ERROR]


@pytest.mark.parametrize("given", [{"certificate": "service.pem"}, {"key": "service.key"}])
def test_a_certificate_needs_its_key(authority: Authority, tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected both or neither"):
        Certificates(**{name: tmp_path / file for name, file in given.items()})
    with pytest.raises(FileNotFoundError):
        Certificates(ca=tmp_path / "none.pem")
    with pytest.raises(ssl.SSLError):
        Certificates(ca=Path(__file__))
