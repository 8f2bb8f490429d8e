"""What the environment says of a service: wrong values and unknown names are refused or logged before it starts."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from service.__main__ import listen, main
from service.errors import Denied, Forbidden, Unauthorized
from service.http.api_keys import Access, Keys
from service.router.__main__ import main as route
from service.settings import Settings, unknown_settings, warn_of_unknown_settings


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str) -> str:
    """What a service says that cannot start with this variable."""
    monkeypatch.setenv(name, value)
    assert main([]) == 1
    return capsys.readouterr().err


def test_an_empty_models_folder_and_a_taken_port_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], models: Path
) -> None:
    assert "no model there" in refused(monkeypatch, capsys, "ESPALIER_MODELS", str(tmp_path / "nothing"))
    monkeypatch.setenv("ESPALIER_MODELS", str(models))
    with listen("127.0.0.1", 0) as taken:
        assert main(["--port", str(taken.getsockname()[1])]) == 1
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err


def test_the_longest_times_a_service_link_and_connections_without_delay_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    for value, port in (("tcp://10.96.0.7:8000", 8000), ("9000", 9000)):
        monkeypatch.setenv("ESPALIER_PORT", value)
        assert Settings().port == port
    for name, most in {"DRAIN_S": 86400, "TIMEOUT_MS": 3600000, "MAX_TIMEOUT_MS": 3600000, "THREADS": 1024, "WORKERS": 1024}.items():
        monkeypatch.setenv(f"ESPALIER_{name}", str(most))
        assert getattr(Settings(max_timeout_ms=3600000), name.lower()) == most
    assert Settings(follow="https://host/shop/").follow == "https://host/shop"  # an address may have a path


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        *((name, value, "a finite number") for name in ("DRAIN_S", "DRAIN_DELAY_S", "POLL_S", "TIMEOUT_MS") for value in ("inf", "nan")),
        ("DRAIN_S", "1e30", "less than or equal to 86400"),
        ("LOAD_TIMEOUT_S", "86401", "less than or equal to 86400"),
        ("TIMEOUT_MS", "3600001", "less than or equal to 3600000"),
        ("WIDEN", "inf", "less than or equal to 1000000"),
        ("MAX_TIMEOUT_MS", "999", "at least ESPALIER_TIMEOUT_MS, 1000"),
        ("TIMEOUT_MS", "60001", "at least ESPALIER_TIMEOUT_MS, 60001"),
        ("THREADS", "many", "a valid integer"),
        ("THREADS", "9" * 20, "less than or equal to 1024"),
        ("WORKERS", "100000", "less than or equal to 1024"),
        ("ENGINE", "abc", "one of triton, onnx-cuda"),
        ("HOST", "a\udcff", "an address or the name of a host"),
        ("STORE", "s3://a b", "s3://NAME/PATH"),
        *(
            ("CORS_ORIGINS", origins, "* or a web origin without a path")
            for origins in ("https://a.b/", '["https://a.b"]', "https://a.b,c.d")
        ),
        *(("FOLLOW", url, "the address of a service") for url in ("host:8000", "ftp://host", "http://", "/path", "http://host/?a=b")),
        ("FOLLOW", "http://me:secret@host", "the address of a service"),
    ],
)
def test_a_wrong_setting_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str, expected: str
) -> None:
    said = refused(monkeypatch, capsys, f"ESPALIER_{name}", value)
    about = "MAX_TIMEOUT_MS" if expected.startswith("at least ESPALIER") else name
    assert re.fullmatch(rf"ESPALIER_{about}: got .+, expected {re.escape(expected)}.*\n", said)


# -- secrets --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "said", "unsaid"),
    [
        ("ESPALIER_ADMIN_KEYS", "admin-key-00000001,too-short-key", "16", ["too-short-key", "admin-key-00000001"]),
        ("ESPALIER_STORE", "s3://me:secret@bucket/path", "ESPALIER_STORE: got a URL, expected no keys", ["secret@"]),
    ],
)
def test_a_wrong_secret_is_refused_without_being_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str, said: str, unsaid: list[str]
) -> None:
    found = refused(monkeypatch, capsys, name, value)
    assert name in found
    assert said in found
    assert not [secret for secret in unsaid if secret in found]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("ESPALIER_RETRIEVE_KEY", "the nearest is ESPALIER_RETRIEVE_KEYS"),
        ("ESPALIER_RETREIVE_KESY", "the nearest is ESPALIER_RETRIEVE_KEYS"),
        ("espalier_admin_key", "the nearest is ESPALIER_ADMIN_KEYS"),
        ("ESPALIER_WAREHOUSE_KEYRING_FOLDER", "`espalier serve --help` lists all settings"),
    ],
)
def test_keys_under_a_name_that_is_no_setting_end_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, nearest: str
) -> None:
    said = refused(monkeypatch, capsys, name, "a-secret-of-sixteen-characters")
    assert said == f"{name}: no such setting, so it would protect nothing; {nearest}\n"


# -- names that are no settings -------------------------------------------------------------------------------------------


def test_a_variable_that_is_no_setting_is_logged_with_the_nearest_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as wrong:
        for name, value in (("MODLES", "elsewhere"), ("COLOUR_OF_THE_SKY", "blue"), ("KEY", "a-key-of-clients-of-this-service")):
            wrong.setenv(f"ESPALIER_{name}", value)
        warn_of_unknown_settings(Settings())
    assert sorted(caplog.messages) == [
        "ESPALIER_COLOUR_OF_THE_SKY is no setting and has no effect; `espalier serve --help` lists all settings",
        "ESPALIER_KEY is no setting and has no effect; `espalier serve --help` lists all settings",
        "ESPALIER_MODLES is no setting and has no effect; the nearest is ESPALIER_MODELS",
    ]
    caplog.clear()
    monkeypatch.setenv("ESPALIER_KEY", "a-key-of-clients-of-this-service")  # which a client of a service with keys has
    warn_of_unknown_settings(Settings(retrieve_keys=(SecretStr("a-key-of-sixteen-characters"),)))
    assert caplog.messages == []


def test_the_start_logs_variables_that_are_no_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ESPALIER_MODELS", str(tmp_path))
    monkeypatch.setenv("ESPALIER_MODLES", "elsewhere")
    for start, arguments in ((main, []), (route, ["--shards", "http://127.0.0.1:9"])):
        assert start(arguments) == 1  # there is no model
        assert "WARNING service.settings: ESPALIER_MODLES is no setting" in capfd.readouterr().err


def test_what_kubernetes_and_the_compose_file_set_is_not_taken_for_settings() -> None:
    links = {"ESPALIER_PORT": "tcp://10.96.0.7:8000", "ESPALIER_ROUTER_PORT": "tcp://10.96.0.8:8000", "ESPALIER_SERVICE_HOST": "10.96.0.7"}
    links |= {"ESPALIER_SERVICE_PORT": "8000", "ESPALIER_SHARD_0_SERVICE_PORT_HTTP": "8000"}
    links |= {"ESPALIER_PORT_8000_TCP": "tcp://10.96.0.7:8000"}
    links |= {f"ESPALIER_ADMIN_KEY_PORT_8000_TCP_{part}": "x" for part in ("PROTO", "PORT", "ADDR")}
    assert unknown_settings(links | {"ESPALIER_SHARD_STORE": "s3://a", "ESPALIER_NOTHING": "", "PATH": "/bin"}) == {}
    assert unknown_settings({"ESPALIER_ROUTER_PORT": "8000"}) == {"ESPALIER_ROUTER_PORT": None}


# -- API keys and their roles. tests/service/test_contract.py asks each route ---------------------------------------------


RETRIEVE, WRITE, ADMIN, NAMED = "retrieve-0123456789", "write-0123456789", "admin-0123456789", "admin-key-of-alice"
INTERNAL = "internal-0123456789"
RETRIEVE_ID, ADMIN_ID = "0e9c038e", "2e7be159"
"""The first hex digits of a key's SHA-256: printf %s KEY | sha256sum."""


def keys(
    retrieve: tuple[str, ...] = (RETRIEVE,), admin: tuple[str, ...] = (ADMIN, f"alice:{NAMED}"), write: tuple[str, ...] = (WRITE,)
) -> Keys:
    of_roles = {"retrieve_keys": retrieve, "admin_keys": admin, "write_keys": write, "internal_keys": (f"router:{INTERNAL}",)}
    return Keys(Settings.model_validate(of_roles))


def named(keys: Keys, access: Access, authorization: bytes) -> str | None:
    found = keys.check(access, authorization)
    return None if found is None else found.name


def bearer(key: str) -> bytes:
    return f"Bearer {key}".encode()


def test_a_key_opens_what_its_roles_allow_and_is_told_by_its_name_or_its_hash() -> None:
    assert named(keys(), "retrieve", bearer(RETRIEVE)) == RETRIEVE_ID
    assert named(keys(), "retrieve", bearer(ADMIN)) == ADMIN_ID
    assert named(keys(), "retrieve", b"bearer  " + ADMIN.encode() + b" ") == ADMIN_ID
    for access in ("retrieve", "write", "admin"):
        assert named(keys(), access, bearer(NAMED)) == "alice"
    assert named(keys(), "internal", bearer(INTERNAL)) == "router"
    assert keys().roles == ["admin", "write", "retrieve", "internal"]
    assert keys(write=()).roles == ["admin", "retrieve", "internal"]
    with pytest.raises(Denied):
        keys().check("admin", bearer(f"alice:{NAMED}"))  # the name is no part of it
    with pytest.raises(Forbidden, match="This key may write; this route needs a retrieval key"):
        keys().check("retrieve", bearer(WRITE))
    with pytest.raises(Unauthorized, match="Expected one header"):
        keys().check("retrieve", b"Bearer ")
    both = keys(write=(RETRIEVE,))
    assert named(both, "retrieve", bearer(RETRIEVE)) == named(both, "write", bearer(RETRIEVE)) == RETRIEVE_ID
    Settings(admin_keys=(SecretStr(f"alice:{NAMED}"),))
    with pytest.raises(ValidationError, match="at least 16 characters"):
        Settings(admin_keys=(SecretStr("alice-of-the-long-name:short"),))
