"""`espalier route` in a process of its own, with shards in theirs."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from pydantic import SecretStr

from espalier.errors import InvalidConfig
from service.router.__main__ import main
from service.router.config import RouterConfig, with_key_of
from service.settings import Settings
from tests.service.processes import exit_code, paused, service
from tests.service.shards.cutting import cut, whole_bundle
from tests.waiting import until

KEY = "a-key-of-the-routers-own"
REPLICAS = 'espalier_router_replicas{model="books",shard="0",version="1"}'
QUERY = {"queries": [{"history": ["item-1"]}], "m": 40, "beam_size": 64}


@pytest.mark.slow
def test_a_router_outlives_its_shards(tmp_path: Path) -> None:
    """A replica hangs, then is killed; then the only replica of the other shard is."""
    cut(whole_bundle(tmp_path / "models"), tmp_path / "shards", 2)
    with ExitStack() as ends:
        keys = {"ESPALIER_INTERNAL_KEYS": KEY}
        shards = [ends.enter_context(service(tmp_path / "shards", 1, ESPALIER_SHARD=index, **keys)) for index in ("0", "0", "1")]
        addresses = [f"http://127.0.0.1:{shard.port}" for shard in shards]
        config = tmp_path / "router.toml"
        config.write_text(f"shards = {addresses}\nkey = '{KEY}'\npoll_s = 0.2\n")
        program = "service.router", "--config", str(config)
        router = ends.enter_context(service(tmp_path / "models", 1, program, ESPALIER_TIMEOUT_MS="5000"))

        def coverage() -> float:
            status, answer = router.request("POST", "/retrieve", QUERY)
            assert status == 200, answer
            return float(answer["coverage"]["items"])

        assert [coverage() for _ in range(30)] == [1.0] * 30
        with paused(shards[0].process.pid):
            assert [coverage() for _ in range(30)] == [1.0] * 30
            until(lambda: router.metric(REPLICAS) == 1, "the router has seen that the replica hangs")
        until(lambda: router.metric(REPLICAS) == 2, "the router has seen that the replica goes on")
        os.kill(shards[1].process.pid, signal.SIGKILL)
        assert [coverage() for _ in range(30)] == [1.0] * 30
        shards[2].process.kill()
        until(lambda: coverage() < 1)
        status, problem = router.request("POST", "/retrieve", QUERY | {"min_coverage": 1})
        assert (status, problem["status"]) == (503, 503)
        assert router.metric("espalier_router_mixed_total") == 0
        router.process.terminate()
        assert exit_code(router) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "shards is missing"),
        (("--shards", "dns+ftp://shards"), "expected the address of a service"),
        (("--shards", "http://shard/\r\nX-Evil: 1"), "expected the address of a service"),
        (("--config", "wrong.toml"), "hedge"),
        (("--config", "secret.toml"), "key: got 'a key'"),
        (("--config", "header.toml"), "key: got 'a key', expected a key of ASCII"),
        (("--config", "other.toml"), "hedges: got 1, expected no such key"),
    ],
)
def test_what_is_wrong_with_its_options_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wrong.toml").write_text("shards = ['http://127.0.0.1:1']\nhedge = 2\n")
    Path("secret.toml").write_text("key = 17171717\n")
    Path("header.toml").write_text('key = "17171717\\r\\nX-Evil: 1"\n')
    Path("other.toml").write_text("hedges = 1\n")
    assert main(list(arguments)) == 1
    written = capsys.readouterr().err
    assert said in written
    assert "17171717" not in written


# -- what a router is told ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "internal_keys", "shown"),
    [
        (None, "router-2026:a-key-of-many-letters,another-key-of-letters", "a-key-of-many-letters"),
        (None, "another-key-of-letters", "another-key-of-letters"),
        ("mine", "a-key-of-many-letters", "mine"),
        (None, None, None),
    ],
)
def test_shards_are_shown_the_configured_key_or_the_first_of_the_processs_own(
    own: str | None, internal_keys: str | None, shown: str | None
) -> None:
    settings = Settings.model_validate({} if internal_keys is None else {"internal_keys": internal_keys})
    found = with_key_of(RouterConfig(key=None if own is None else SecretStr(own)), settings).key
    assert (None if found is None else found.get_secret_value()) == shown


def test_a_key_that_no_header_can_carry_is_refused() -> None:
    settings = Settings.model_validate({"internal_keys": "schlüssel:ein-langer-schlüssel"})
    with pytest.raises(InvalidConfig, match="ESPALIER_INTERNAL_KEYS: got 'a first key with other characters', expected a key of ASCII"):
        with_key_of(RouterConfig(), settings)
