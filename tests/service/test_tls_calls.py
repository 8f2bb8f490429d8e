"""The service as a client of others with TLS: a router of its shards, and a host of the one that it follows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from service.live.writer_feed import FeedFailed, WriterFeed
from service.router.config import RouterConfig
from service.router.connections import HttpTransport
from service.router.transport import ReplicaFailed
from service.tls import Certificates, calling
from service.watched_files import WatchedFiles
from tests.certificates import Authority
from tests.service.listening import Listening, listening
from tests.service.test_tls import own
from tests.waiting import until


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def other(models: Path, authority: Authority) -> Iterator[Listening]:
    """A service of localhost, without its address in its certificate, whose clients must show one."""
    with listening(models, **own(authority.signs("service", "localhost"), tls_client_ca=authority.ca)) as running:
        yield running


@asynccontextmanager
async def transport(certificates: Certificates | None = None) -> AsyncIterator[HttpTransport]:
    made = HttpTransport(RouterConfig(connect_timeout_s=5.0), certificates)
    try:
        yield made
    finally:
        await made.close()


@pytest.mark.real_time
async def test_a_router_reaches_shards_that_want_its_certificate(other: Listening, authority: Authority) -> None:
    address = f"https://localhost:{other.address[1]}"
    async with transport(calling(authority.ca, *authority.signs("router"))) as router:
        assert await router.served_shards(address, 5) == frozenset()
    for certificates in (None, calling(authority.ca, None, None)):
        async with transport(certificates) as stranger:
            with pytest.raises(ReplicaFailed) as failed:
                await stranger.served_shards(address, 5)
            assert failed.value.reason == "connection"


@pytest.mark.real_time
async def test_the_addresses_of_a_name_have_its_certificate(other: Listening, authority: Authority) -> None:
    port = other.address[1]
    async with transport(calling(authority.ca, *authority.signs("router"))) as router:
        found = await router.addresses(f"dns+https://localhost:{port}")
        assert f"https://127.0.0.1:{port}" in found
        assert await router.served_shards(f"https://127.0.0.1:{port}", 5) == frozenset()
        router.forget(f"https://127.0.0.1:{port}")
        with pytest.raises(ReplicaFailed):  # an address that is no name's has to be in the certificate itself
            await router.served_shards(f"https://127.0.0.1:{port}", 5)


@pytest.mark.real_time
async def test_a_router_shows_its_new_certificate(other: Listening, authority: Authority, tmp_path: Path) -> None:
    """The first one is signed by nobody whom the shard knows."""
    now = 0.0
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other").signs("router")
    certificates = calling(authority.ca, *stranger)
    certificates._watched = WatchedFiles(certificates._files, lambda: now)
    address = f"https://localhost:{other.address[1]}"
    async with transport(certificates) as router:
        with pytest.raises(ReplicaFailed):
            await router.served_shards(address, 5)
        for old, new in zip(stranger, authority.signs("renewed"), strict=True):
            new.replace(old)
        now = 1.0
        assert await router.served_shards(address, 5) == frozenset()


def test_a_host_follows_a_writer_with_tls(other: Listening, authority: Authority) -> None:
    url = f"https://localhost:{other.address[1]}"
    known = calling(authority.ca, *authority.signs("follower"))
    with closing(WriterFeed(url, None, known)) as feed, pytest.raises(FeedFailed, match="answers 403: The admin routes are off"):
        feed.changes("books", 0)
    for certificates in (None, calling(authority.ca, None, None)):
        with closing(WriterFeed(url, None, certificates)) as feed, pytest.raises(FeedFailed, match="does not answer"):
            feed.changes("books", 0)
    until(lambda: other.refused("handshake") == 2)
