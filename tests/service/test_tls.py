"""TLS on the service's address, and where the service is a client of others: certificates, which change while it runs."""

from __future__ import annotations

import gc
import logging
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import pytest

from service.__main__ import main
from service.app import create_app
from service.healthcheck import main as healthcheck
from service.http.connection import Connection
from service.live.writer_feed import FeedFailed, WriterFeed
from service.processes.server import Server
from service.router.config import RouterConfig
from service.router.connections import HttpTransport
from service.router.transport import ReplicaFailed
from service.settings import Settings
from service.tls import Certificates, calling, certificates_of_service
from service.watched_files import LOOK_S
from tests.certificates import Authority, Pair
from tests.service.listening import Listening, get, listening, post, retrieval
from tests.waiting import until


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def own(pair: Pair, **more: Any) -> dict[str, Any]:
    """The settings of a service that shows a certificate."""
    return {"tls_certificate": pair.certificate, "tls_key": pair.key} | more


def client(authority: Authority, shown: Pair | None = None) -> ssl.SSLContext:
    """What a client trusts and shows."""
    return calling(authority.ca, *(shown or (None, None))).current()


@pytest.fixture
def secured(models: Path, authority: Authority) -> Iterator[Listening]:
    with listening(models, **own(authority.signs("service"))) as running:
        yield running


def name_of(wire: Any) -> str:
    """The name in the certificate of the other side, by its serial number."""
    return str(wire.raw.getpeercert()["serialNumber"])


# -- requests -------------------------------------------------------------------------------------------------------------


def test_requests_and_their_bodies_are_answered_over_one_connection(secured: Listening, authority: Authority) -> None:
    with secured.connected(tls=client(authority)) as wire:
        assert isinstance(wire.raw, ssl.SSLSocket)
        assert wire.raw.version() in ("TLSv1.2", "TLSv1.3")
        for _ in range(3):
            answer = wire.ask(retrieval())
            assert answer.status == 200, answer.body
            assert answer.document["results"][0]["items"]
        large = {"queries": [{"history": ["item-1"] * 900}] * 60}
        assert wire.ask(retrieval(**large)).status == 200


def test_an_answer_that_comes_before_its_body_is_whole(models: Path, authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    settings = own(authority.signs("service"), max_body_bytes=1000)
    with listening(models, **settings) as running, running.connected(tls=client(authority)) as wire:
        wire.send(post("/retrieve", b"x" * 500_000))
        assert wire.reply().status == 413
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_request_may_come_with_the_end_of_the_handshake(secured: Listening, authority: Authority) -> None:
    """As TLS 1.3 lets a client do."""
    into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    with secured.connected() as wire:
        tls = client(authority).wrap_bio(into, out, server_hostname="localhost")
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                wire.send(out.read())
                into.write(wire.raw.recv(1 << 16))
        tls.write(get("/livez"))
        wire.send(out.read())  # the last message of the handshake, and the request
        into.write(wire.raw.recv(1 << 16))
        answer = b""
        while b"alive" not in answer:
            try:
                answer += tls.read()
            except ssl.SSLWantReadError:
                into.write(wire.raw.recv(1 << 16))
        assert answer.startswith(b"HTTP/1.1 200 ")


def test_a_client_that_reads_slowly_gets_all_of_an_answer_that_ends_the_connection(
    models: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    end = Connection._end_tls

    def counted(connection: Connection) -> None:
        looked.append(connection.unsent)
        end(connection)

    monkeypatch.setattr(Connection, "_end_tls", counted)
    monkeypatch.setattr("service.http.connection.CLOSE_S", 0.05)
    monkeypatch.setattr("service.__main__.BUFFER_BYTES", 4096)
    with listening(models, **own(authority.signs("service"))) as running, running.connected(4096, client(authority)) as wire:
        wire.send(get("/openapi.json", "Connection: close"))
        until(lambda: len(looked) > 2)
        assert looked[2] > 0
        assert wire.reply().document["openapi"]
        assert wire.ended()


def test_a_client_that_takes_nothing_is_cut_off(models: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """One answer is enough, and its sender waits meanwhile."""
    paused: list[tuple[int, bool]] = []
    pause = Connection.pause_writing

    def noted(connection: Connection) -> None:
        pause(connection)
        paused.append((connection.unsent, connection.flow.write_paused))

    monkeypatch.setattr(Connection, "pause_writing", noted)
    monkeypatch.setattr("service.__main__.BUFFER_BYTES", 4096)
    settings = own(authority.signs("service"), write_timeout_s=0.2)
    with listening(models, **settings) as running, running.connected(4096, client(authority)) as wire:
        assert wire.ask(get("/livez")).status == 200
        wire.send(get("/openapi.json"))
        until(lambda: paused and not running.server._connections.open)
        unsent, sender_waits = paused[0]
        assert unsent > 65536
        assert sender_waits
        assert running.refused("not_read") == 1
        assert wire.ended()


def test_a_client_that_reads_again_gets_more_answers(models: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.__main__.BUFFER_BYTES", 4096)
    with listening(models, **own(authority.signs("service"))) as running, running.connected(4096, client(authority)) as wire:
        assert wire.ask(get("/livez")).status == 200
        wire.send(get("/static-offline-docs/swagger-ui-bundle.js") + get("/openapi.json") + get("/livez"))
        (connection,) = running.server._connections.open
        assert isinstance(connection, Connection)
        until(lambda: connection.flow.write_paused)
        assert len(wire.reply().body) > 1 << 20
        assert wire.reply().document["openapi"]
        assert wire.reply().document == {"alive": True}
        assert not connection.flow.write_paused


def test_an_idle_connection_does_not_hold_up_the_end(models: Path, authority: Authority) -> None:
    with listening(models, **own(authority.signs("service"), drain_s=15)) as running, running.connected(tls=client(authority)) as wire:
        assert wire.ask(get("/livez")).status == 200
        running.server.leave()
        until(lambda: not running.server._connections.open, "the connection has ended, although its client said nothing", 5)


def test_a_handshake_that_never_ends_does_not_hold_up_the_end_either(models: Path, authority: Authority) -> None:
    with listening(models, **own(authority.signs("service"), drain_s=60, head_timeout_s=60)) as running, running.connected() as wire:
        until(lambda: len(running.server.server_state.connections) == 1)
        running.server.leave()
        assert wire.ended()


# -- what is no TLS -------------------------------------------------------------------------------------------------------


def test_bytes_without_tls_end_the_connection_and_nothing_is_logged(secured: Listening, caplog: pytest.LogCaptureFixture) -> None:
    with secured.connected() as wire:
        wire.send(get("/livez"))
        assert wire.ended()
    until(lambda: secured.refused("handshake") == 1 and not secured.server._connections.open)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_clients_that_reset_at_any_moment_leave_nothing(secured: Listening, caplog: pytest.LogCaptureFixture) -> None:
    hello = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost").do_handshake()
    begun = hello.read()
    for i in range(200):
        with secured.connected() as wire:
            wire.send(begun[: (i % 5) * len(begun) // 4])
            wire.raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until(lambda: not secured.server._connections.open and not secured.server.server_state.connections)
    gc.collect()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_handshake_has_the_time_of_a_head(models: Path, authority: Authority) -> None:
    with listening(models, **own(authority.signs("service"), head_timeout_s=0.2)) as running, running.connected() as wire:
        assert wire.ended()
        until(lambda: running.refused("handshake") == 1)


def test_silent_handshakes_count_as_connections_and_make_room(models: Path, authority: Authority) -> None:
    with listening(models, **own(authority.signs("service"), max_connections=4)) as running:
        silent = [socket.create_connection(running.address) for _ in range(4)]
        try:
            until(lambda: len(running.server._connections.open) == 4, "handshakes are counted")
            until(lambda: running.ask(get("/livez"), client(authority)).status == 200)
            until(lambda: running.ask(get("/models"), client(authority)).status == 200, "the silent ones made room")
            assert running.refused("crowded_out") >= 1
        finally:
            for each in silent:
                each.close()


# -- clients that must show a certificate ---------------------------------------------------------------------------------


def test_a_client_must_show_a_certificate_that_the_ca_has_signed(models: Path, authority: Authority, tmp_path: Path) -> None:
    known, other = authority.signs("known"), Authority(tmp_path, "other").signs("stranger")
    with listening(models, **own(authority.signs("service"), tls_client_ca=authority.ca)) as running:
        assert running.ask(retrieval(), client(authority, known)).status == 200
        for shown in (None, other):
            with pytest.raises((ssl.SSLError, ConnectionError, EOFError)):
                running.ask(retrieval(), client(authority, shown))
        until(lambda: running.refused("handshake") == 2)
        assert running.ask(retrieval(), client(authority, known)).status == 200


def test_a_revoked_certificate_is_refused_once_the_file_of_the_ca_has_the_list(models: Path, authority: Authority, tmp_path: Path) -> None:
    stays, revoked, clients_ca = authority.signs("stays"), authority.signs("revoked"), tmp_path / "clients.pem"
    clients_ca.write_bytes(authority.ca.read_bytes())
    with listening(models, **own(authority.signs("service"), tls_client_ca=clients_ca)) as running:
        assert running.ask(get("/livez"), client(authority, revoked)).status == 200
        clients_ca.write_bytes(authority.ca.read_bytes() + authority.revokes(revoked))

        def is_refused() -> bool:
            try:
                return running.ask(get("/livez"), client(authority, revoked)).status != 200
            except (ssl.SSLError, ConnectionError, EOFError):
                return True

        until(is_refused)
        assert running.ask(get("/livez"), client(authority, stays)).status == 200


# -- files that change ----------------------------------------------------------------------------------------------------


def test_a_new_certificate_is_shown_to_new_connections_and_the_others_stay(secured: Listening, authority: Authority) -> None:
    with secured.connected(tls=client(authority)) as wire:
        before = name_of(wire)
        authority.signs("service")

        def renewed() -> bool:
            with secured.connected(tls=client(authority)) as other:
                assert other.ask(get("/livez")).status == 200
                return name_of(other) != before

        until(renewed)
        assert wire.ask(retrieval()).status == 200
        assert name_of(wire) == before


def test_wrong_files_keep_the_certificate_of_before_and_are_logged_once(
    secured: Listening, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "service.watched_files")
    (tmp_path / "service.pem").write_text((tmp_path / "service.pem").read_text()[:100])

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if "stay in use" in record.getMessage()]

    until(said)
    for _ in range(3):
        assert secured.ask(get("/livez"), client(authority)).status == 200
    assert len(said()) == 1
    assert "service.pem" in said()[0]
    authority.signs("service")
    until(lambda: any("certificates have changed: " in record.getMessage() for record in caplog.records))
    assert secured.ask(get("/livez"), client(authority)).status == 200


def test_a_certificate_that_could_not_be_read_is_read_once_it_can_be(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    certificates = certificates_of_service(*authority.signs("service"), None)
    certificates._clock, certificates._next_look = (lambda: now), LOOK_S
    before = certificates.current()
    authority.signs("service")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *_: (_ for _ in ()).throw(OSError(24, "Too many open files")))
        for seconds in (1.0, 2.0):
            now = seconds
            assert certificates.current() is before
    assert [record.levelname for record in caplog.records] == ["ERROR"]  # it is said once
    now = 3.0
    assert certificates.current() is not before


def test_files_that_were_never_right_are_an_error_that_names_them(authority: Authority, tmp_path: Path) -> None:
    pair, other = authority.signs("service"), authority.signs("other")
    (tmp_path / "empty.pem").touch()
    for made, name in (
        (certificates_of_service(tmp_path / "none.pem", pair.key, None), "none.pem: No such file"),
        (certificates_of_service(pair.certificate, other.key, None), "other.key"),
        (certificates_of_service(*pair, tmp_path / "empty.pem"), "empty.pem"),
        (calling(tmp_path / "empty.pem", None, None), "empty.pem"),
        (calling(None, pair.certificate, other.key), "service.pem"),
    ):
        with pytest.raises(OSError, match=name):
            made.current()


# -- settings -------------------------------------------------------------------------------------------------------------


def test_a_process_with_wrong_files_ends_before_it_loads_models(models: Path, authority: Authority) -> None:
    pair = authority.signs("service")
    settings = Settings(models=models, **own(pair))
    pair.certificate.write_text("damaged after the settings were checked")
    with pytest.raises(OSError, match="no certificate with its key"):
        Server(create_app(settings), settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"TLS_CERTIFICATE": "service.pem"}, "both of ESPALIER_TLS_CERTIFICATE and ESPALIER_TLS_KEY"),
        ({"TLS_KEY": "service.key"}, "both of ESPALIER_TLS_CERTIFICATE and ESPALIER_TLS_KEY"),
        ({"TLS_CLIENT_CA": "ca.pem"}, "beside ESPALIER_TLS_CLIENT_CA"),
        ({"TLS_CERTIFICATE": "service.pem", "TLS_KEY": "ca.pem"}, "no certificate with its key"),
        ({"TLS_CA": "service.key"}, "no certificates in PEM"),
        ({"TLS_CLIENT_KEY": "service.key"}, "both of ESPALIER_TLS_CLIENT_CERTIFICATE and ESPALIER_TLS_CLIENT_KEY"),
        ({"TLS_CLIENTS_CA": "ca.pem"}, "no such setting, so it would protect nothing"),
        ({"ADMIN_ADRESS": "127.0.0.1:1"}, "no such setting, so it would protect nothing"),
        ({"ADMIN_ADDRESS": "127.0.0.1"}, "an address and its port"),
        ({"ADMIN_ADDRESS": "http://127.0.0.1:1"}, "an address and its port"),
    ],
)
def test_settings_that_would_not_protect_are_refused(
    authority: Authority,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    settings: dict[str, str],
    said: str,
) -> None:
    authority.signs("service")
    for name, value in settings.items():
        monkeypatch.setenv(f"ESPALIER_{name}", str(tmp_path / value) if name.startswith("TLS") else value)
    assert main([]) == 1
    assert said in capsys.readouterr().err


# -- the healthcheck ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protected", [None, "tls", "mtls"])
def test_the_healthcheck_knows_how_the_service_is(
    models: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch, protected: str | None
) -> None:
    settings = {} if protected is None else own(authority.signs("service"))
    if protected == "mtls":
        settings["tls_client_ca"] = authority.ca
    with listening(models, **settings) as running:
        for name, value in settings.items():
            monkeypatch.setenv(f"ESPALIER_{name.upper()}", str(value))
        monkeypatch.setenv("ESPALIER_PORT", str(running.address[1]))
        assert healthcheck([]) == 0
        running.app.state.service.registry.leaving = True
        assert healthcheck([]) == 1
        assert healthcheck(["/livez"]) == 0
    assert healthcheck([]) == 1


# -- the service as a client: a router of its shards, and a host of the one that it follows --------------------------------


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
async def test_a_router_asks_no_shard_whose_certificate_is_revoked(models: Path, authority: Authority, tmp_path: Path) -> None:
    shard, ca = authority.signs("service"), tmp_path / "listed.pem"
    with listening(models, **own(shard)) as running:
        address = f"https://localhost:{running.address[1]}"
        ca.write_bytes(authority.ca.read_bytes() + authority.revokes(authority.signs("another")))
        async with transport(calling(ca, None, None)) as router:
            assert await router.served_shards(address, 5) == frozenset()
        ca.write_bytes(authority.ca.read_bytes() + authority.revokes(shard))
        async with transport(calling(ca, None, None)) as router:
            with pytest.raises(ReplicaFailed, match="revoked"):
                await router.served_shards(address, 5)


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
async def test_an_address_that_another_name_has_now_has_that_ones_certificate(
    other: Listening, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a shard is started anew on the address of another one, before the other's name forgets it."""
    port, hosts = other.address[1], {"former.test": "127.0.0.1", "localhost": "127.0.0.2"}

    async def getaddrinfo(_: Any, host: str, port: int, **options: Any) -> list[Any]:
        return socket.getaddrinfo(hosts.get(host, host), port, socket.AF_INET, **options)

    monkeypatch.setattr("asyncio.base_events.BaseEventLoop.getaddrinfo", getaddrinfo)
    async with transport(calling(authority.ca, *authority.signs("router"))) as router:
        await router.addresses(f"dns+https://localhost:{port}")
        (address,) = await router.addresses(f"dns+https://former.test:{port}")
        with pytest.raises(ReplicaFailed):
            await router.served_shards(address, 5)
        del hosts["localhost"]
        for host in ("localhost", "former.test"):
            assert await router.addresses(f"dns+https://{host}:{port}") == [address]
        assert await router.served_shards(address, 5) == frozenset()


@pytest.mark.real_time
async def test_a_router_shows_its_new_certificate(other: Listening, authority: Authority, tmp_path: Path) -> None:
    """The first one is signed by nobody whom the shard knows."""
    now = 0.0
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other").signs("router")
    certificates = calling(authority.ca, *stranger)
    certificates._clock, certificates._next_look = (lambda: now), LOOK_S
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
