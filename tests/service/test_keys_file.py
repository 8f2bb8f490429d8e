"""The file of keys: what is read and refused, when it is read again, and what its keys may do over HTTP."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import logging
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from pydantic import SecretStr, ValidationError

from service.errors import Forbidden, Unauthorized
from service.http import key_limits, stream_route
from service.http.api_keys import Keys
from service.http.key_limits import (
    MAX_HELD_S,
    MIN_HELD_S,
    REFUSALS_PER_S,
    HeldRefusals,
)
from service.keys_file import LEAST_CHARACTERS, MOST_BYTES, MOST_KEYS, MOST_LINE, Key, read_keys
from service.retrieval.schemas import RetrieveRequest
from service.settings import Settings, is_local
from service.watch.metrics import OTHER_KEYS, Metrics
from service.watched_files import LOOK_S, FromFiles
from tests.service.conversation import LINES, Conversation
from tests.service.fake_catalogue import FakeCatalogue, FakeCatalogues
from tests.service.own_time import Time, pass_time, settled, turns_until
from tests.service.running import Running, counted, run, small_model

SHOP, PARTNER, ADMIN, LONG = "shop-web-0123456789", "partner-0123456789ab", "admin-0123456789abcd", "long-0123456789abcd"
FILE = f"""
[[keys]]
name = "shop"
key = "{SHOP}"
role = "retrieve"

[[keys]]
name = "partner"
sha256 = "{hashlib.sha256(PARTNER.encode()).hexdigest()}"
role = "retrieve"
models = ["books", "not-there-yet"]
expires = 2030-01-01T00:00:00Z
rate = 2
burst = 3
cost = 0.5

[[keys]]
name = "ops"
key = "{ADMIN}"
role = "admin"
"""


def bearer(key: str) -> bytes:
    return f"Bearer {key}".encode()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    return path


def test_what_a_file_says(file: Path) -> None:
    shop, partner, ops = read_keys(file)
    assert shop == Key("shop", hashlib.sha256(SHOP.encode()).digest(), "retrieve")
    assert partner.models == frozenset({"books", "not-there-yet"})
    assert (partner.rate, partner.burst, partner.cost) == (2, 3, 0.5)
    assert partner.digest == hashlib.sha256(PARTNER.encode()).digest()
    assert partner.expires == datetime(2030, 1, 1, tzinfo=UTC)
    assert ops.role == "admin"
    file.write_text('[[keys]]\nname = "a"\nkey = "0123456789abcdef"\nrole = "write"\nrate = 50')
    assert read_keys(file)[0].burst == 50
    file.write_text("keys = []")
    assert read_keys(file) == ()


ONE = f'[[keys]]\nname = "a"\nrole = "retrieve"\nkey = "{SHOP}"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[keys]", "no TOML"),
        ("", "keys: expected"),
        ("keys = 3", "keys: expected"),
        ("more = 1\nkeys = []", "more: expected"),
        (ONE + "color = 'red'", r"keys\[0\]\.color: expected"),
        (ONE.replace("retrieve", "reader"), r"keys\[0\]\.role: expected 'retrieve', 'write', 'admin' or 'internal'"),
        (ONE.replace(f'key = "{SHOP}"', ""), r"keys\[0\]: expected either `key` or `sha256`"),
        (ONE + f'sha256 = "{"0" * 64}"', r"keys\[0\]: expected either `key` or `sha256`"),
        (ONE.replace(SHOP, "s" * (LEAST_CHARACTERS - 1)), r"keys\[0\]\.key: expected"),
        ('[[keys]]\nname = "a"\nrole = "admin"\nsha256 = "abc"', r"keys\[0\]\.sha256: expected"),
        (ONE.replace('"a"', '"a b"'), r"keys\[0\]\.name: expected"),
        (ONE + "rate = 0", r"keys\[0\]\.rate: got '0', expected"),
        (ONE + "burst = 2", r"keys\[0\]: expected `burst` beside a `rate` alone"),
        (ONE + "expires = 2030-01-01", r"keys\[0\]\.expires: got '2030-01-01', expected"),
        (ONE + "expires = 2030-01-01T00:00:00", r"keys\[0\]\.expires: got '2030-01-01 00:00:00', expected a time with its offset"),
        (ONE + ONE.replace(SHOP, PARTNER), r"keys\[1\]: its name is that of another one"),
        (ONE + ONE.replace('"a"', '"b"'), r"keys\[1\]: its key is that of another one"),
        (ONE + "models = ['']", r"keys\[0\]\.models\[0\]: expected"),
        ("#" * (MOST_BYTES + 1), "more than 262,144 bytes"),
        (".".join(["a"] * MOST_LINE), "a line of more than 4,096 bytes"),
        ("a = " + "[" * (MOST_LINE - 4), "no TOML"),
        (f'keys = "{SHOP}"', "keys: expected"),
        (f'[[keys]]\nKey = "{SHOP}"', r"keys\[0\]"),
        (ONE.replace('"a"', f'"{SHOP} "'), r"keys\[0\]\.name: expected"),
        (f'["{SHOP}"]\n["{SHOP}"]', r"no TOML \(at line 2, column"),
        (ONE + "rate = 1e-310", r"keys\[0\]\.rate: got '1e-310', expected"),
        ("".join(f'[[keys]]\nname="a{i}"\nrole="retrieve"\nkey="{SHOP}{i}"\n' for i in range(MOST_KEYS + 1)), "keys: expected"),
    ],
)
def test_what_is_wrong_is_named_and_no_key_is_shown(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=said) as raised:
        read_keys(path)
    assert SHOP[:8] not in str(raised.value)
    with pytest.raises(ValidationError, match="keys_file"):
        Settings(keys_file=path)


def test_a_file_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="No such file"):
        Settings(keys_file=tmp_path / "keys.toml")


def test_keys_of_a_file_stand_beside_those_of_the_environment_and_expire(file: Path) -> None:
    now = datetime(2029, 12, 31, tzinfo=UTC)
    keys = Keys(Settings(retrieve_keys=(SecretStr("env-key-0123456789"),), keys_file=file), now=lambda: now)
    assert not keys.public
    assert not keys.open
    assert keys.roles == ["admin", "retrieve"]
    names = [found.name for key in (SHOP, PARTNER, ADMIN) if (found := keys.check("retrieve", bearer(key)))]
    assert names == ["shop", "partner", "ops"]
    assert keys.check("retrieve", bearer("env-key-0123456789")) is not None
    now = datetime(2030, 1, 1, tzinfo=UTC)
    with pytest.raises(Unauthorized, match="The key has expired") as raised:
        keys.check("retrieve", bearer(PARTNER))
    assert (raised.value.reason, raised.value.key) == ("expired", "partner")
    with pytest.raises(Forbidden, match="without a write key"):
        keys.check("write", bearer(ADMIN))


def test_a_file_without_a_key_for_retrieval_opens_nothing(file: Path) -> None:
    file.write_text("keys = []")
    keys = Keys(Settings(keys_file=file))
    with pytest.raises(Unauthorized):
        keys.check("retrieve", None)
    with pytest.raises(Forbidden):
        keys.check("private", None)


def test_a_file_is_read_again_when_it_changes_and_what_is_wrong_changes_nothing(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Time()
    keys = Keys(Settings(keys_file=file), clock)
    link = file.with_name("other.toml")
    link.write_text(FILE.replace(SHOP, "shop-web-rotated-0001"))
    link.replace(file)
    assert keys.check("retrieve", bearer(SHOP)) is not None  # it is not looked at for each request
    clock.s += LOOK_S
    with caplog.at_level(logging.INFO), pytest.raises(Unauthorized):
        keys.check("retrieve", bearer(SHOP))
    assert f"keys have changed: {file}" in caplog.text
    caplog.clear()
    for wrong in (lambda: file.write_text("[[keys]"), file.unlink):
        wrong()
        for _ in range(3):
            clock.s += LOOK_S
            assert keys.check("retrieve", bearer("shop-web-rotated-0001")) is not None
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]  # each is said once
    file.write_text("keys = []")
    clock.s += LOOK_S
    with pytest.raises(Unauthorized):
        keys.check("retrieve", bearer("shop-web-rotated-0001"))


def test_a_file_that_could_not_be_read_is_read_once_it_can_be(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Time()
    keys = Keys(Settings(keys_file=file), clock)
    file.write_text("keys = []")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        for _ in range(3):
            clock.s += LOOK_S
            assert keys.check("retrieve", bearer(SHOP)) is not None
    assert [record.levelname for record in caplog.records] == ["ERROR"]  # it is said once
    clock.s += LOOK_S
    with pytest.raises(Unauthorized):
        keys.check("retrieve", bearer(SHOP))


def test_a_file_whose_permissions_change_has_changed(file: Path) -> None:
    clock = Time()
    modes = FromFiles([file], lambda: file.stat().st_mode & 0o777, "modes", clock)
    assert modes.current() != 0o640
    time.sleep(0.02)  # longer than a tick of the file system's clock
    file.chmod(0o640)
    clock.s += LOOK_S
    assert modes.current() == 0o640


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("espalier.example", False),
    ],
)
def test_what_people_did_is_shown_without_keys_where_no_other_machine_comes(host: str, local: bool) -> None:
    assert is_local(host) is local
    keys = Keys(Settings(host=host))
    assert keys.shows_all is local
    assert keys.check("internal", None) is None
    if local:
        assert keys.check("private", None) is None
    else:
        with pytest.raises(Forbidden, match="ESPALIER_OPEN=1"):
            keys.check("private", None)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """For how many seconds refusals would have been held back."""
    seconds_of_each: list[float] = []

    async def passed(_: object, seconds: float) -> None:
        seconds_of_each.append(seconds)

    monkeypatch.setattr(key_limits, "_passed", passed)
    return seconds_of_each


# -- over HTTP --------------------------------------------------------------------------------------------------------------


def test_keys_over_http(versions: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (key_limits, stream_route):
        monkeypatch.setattr(module, "MIN_HELD_S", 0.0)

    def asked(running: Running, key: str, body: dict[str, Any] | None = None) -> Any:
        body = {"queries": [{"history": []}]} | (body or {})
        return running.client.post("/retrieve", json=body, headers={"Authorization": f"Bearer {key}"})

    with run(versions, keys_file=file) as running:
        running.app.state.service.keys.limits._clock = lambda: 1000.0  # a slow machine gives no key more requests
        assert running.client.post("/retrieve", json={"queries": [{"history": []}]}).status_code == 401
        assert asked(running, SHOP).status_code == 200
        answers = [asked(running, PARTNER) for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
        assert answers[-1].headers["Retry-After"] == "1"
        assert "The key partner may send 2 requests a second" in answers[-1].json()["detail"]
        assert asked(running, SHOP).status_code == 200  # another key's limit
        text = running.client.get("/metrics").text
        assert 'espalier_key_requests_total{key="partner",outcome="limited"} 2.0' in text
        assert 'espalier_key_requests_total{key="partner",outcome="admitted"} 3.0' in text
        assert 'espalier_requests_total{model="",status="429-client"} 2.0' in text
        assert 'espalier_shed_total{model="books"} 0.0' in text
        assert running.client.get("/models", headers={"Authorization": f"Bearer {ADMIN}"}).json()["keys"] == ["admin", "retrieve"]
        file.write_text(FILE.replace('"books", ', "").replace("rate = 2\nburst = 3\n", ""))
        keys = running.app.state.service.keys
        keys._file_keys._next_look = 0.0
        refused = asked(running, PARTNER)
        assert refused.status_code == 403
        assert refused.json()["detail"] == 'This key may not use the model "books".'
        headers = {"Authorization": f"Bearer {PARTNER}"}
        for name in ("books", "nothing"):
            answer = running.client.post("/retrieve", json={"model": name, "queries": [{"history": []}]}, headers=headers)
            assert answer.status_code == 403
        assert running.client.get("/models", headers=headers).json()["models"] == []
        stream = running.client.post(
            "/retrieve/stream",
            content='{"queries": [{"history": []}]}\n',
            headers={"Authorization": f"Bearer {PARTNER}", "Content-Type": "application/x-ndjson"},
        )
        assert (stream.status_code, stream.json()["status"]) == (200, 403)
        assert 'espalier_auth_failures_total{reason="model",role="retrieve"} 4.0' in running.client.get("/metrics").text
        file.write_text(FILE.replace("rate = 2\nburst = 3", "rate = 0.01\nburst = 2"))
        keys._file_keys._next_look = 0.0
        lines = running.client.post(
            "/retrieve/stream",
            content='{"queries": [{"history": []}]}\n' * 4,
            headers=headers | {"Content-Type": "application/x-ndjson"},
        ).text.splitlines()
        assert [json.loads(line).get("status", 200) for line in lines] == [200, 200, 429, 429]


def test_engine_seconds_are_those_of_the_queries_themselves(versions: Path, file: Path) -> None:
    file.write_text(FILE.replace("rate = 2\nburst = 3\ncost = 0.5", "cost = 1.0"))
    with run(versions, keys_file=file) as running:
        keys = running.app.state.service.keys
        partner = keys.check("retrieve", bearer(PARTNER))
        headers = {"Authorization": f"Bearer {PARTNER}"}
        began, searched_s = time.monotonic(), 0.0
        for _ in range(3):
            answer = running.client.post("/retrieve", json={"queries": [{"history": []}] * 8}, headers=headers).json()
            searched_s += answer["timing"]["search_ms"] / 1e3
        spent_s = keys.limits._arrival_times(partner)[1] - began
        assert spent_s <= time.monotonic() - began + searched_s
        beyond = running.client.post("/retrieve", json={"queries": [{"history": []}], "beam_size": 10**9}, headers=headers)
        assert beyond.status_code == 422
        assert keys.limits._arrival_times(partner)[1] - began == spent_s  # what is never searched costs nothing


def test_a_refusal_is_held_back_before_the_body_is_looked_at(versions: Path, file: Path, held: list[float]) -> None:
    file.write_text(FILE.replace("rate = 2", "rate = 0.01").replace("burst = 3", "burst = 1"))
    with run(versions, keys_file=file) as running:
        headers = {"Authorization": f"Bearer {PARTNER}"}
        body: dict[str, Any] = {"queries": [{"history": []}]}
        assert running.client.post("/retrieve", json=body, headers=headers).status_code == 200
        refused = [running.client.post("/retrieve", content=b"no JSON", headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in refused] == [429, 429]
    assert [answer.headers.get("Connection") for answer in refused] == [None, None]
    assert held == pytest.approx([MIN_HELD_S, MIN_HELD_S], abs=0.1)
    assert int(refused[0].headers["Retry-After"]) >= MIN_HELD_S


def test_a_stream_over_its_limit_is_slowed_down(versions: Path, file: Path) -> None:
    file.write_text(FILE.replace("rate = 2", "rate = 0.01").replace("burst = 3", "burst = 1"))

    async def scenario() -> None:
        talk = Conversation(running, "/retrieve/stream", LINES | {"Authorization": f"Bearer {PARTNER}"})
        talk.say(*[b'{"queries": [{"history": []}]}'] * 3, more=False)
        answers = talk.answers()
        assert await talk.head() == 200
        assert "results" in await anext(answers)
        for _ in range(2):
            await settled()
            assert talk.silent
            await pass_time(MIN_HELD_S)
            assert (await anext(answers))["status"] == 429

    with run(versions, keys_file=file) as running:
        running.runner.run(scenario())


@pytest.mark.parametrize(
    ("path", "line", "role"),
    [
        ("/retrieve/stream", b'{"queries": [{"history": []}]}', "retrieve"),
        ("/models/books/items", b'{"id": "a", "events": [["item-1"]]}', "write"),
    ],
)
@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        ('key = "another-0123456789"\nrole = "ROLE"', 401, "unknown"),
        ("expires = 2020-01-01T00:00:00Z", 401, "expired"),
        ('role = "internal"', 403, "role"),
    ],
)
def test_a_key_that_is_no_longer_valid_ends_its_request_of_lines(
    versions: Path, file: Path, path: str, line: bytes, role: str, change: str, status: int, reason: str
) -> None:
    rest = FILE + f'[[keys]]\nname = "other"\nkey = "other-0123456789abcd"\nrole = "{role}"\n[[keys]]\nname = "long"\n'
    lines = {line.partition(" ")[0]: line for line in (f'key = "{LONG}"', f'role = "{role}"', *change.replace("ROLE", role).split("\n"))}
    file.write_text(rest + f'key = "{LONG}"\nrole = "{role}"\n')

    async def scenario() -> None:
        talk = Conversation(running, path, LINES | {"Authorization": f"Bearer {LONG}"})
        answers = talk.answers()
        for _ in range(2):
            talk.say(line)
            assert {"results", "outcome"} & (await anext(answers)).keys()
        file.write_text(rest + "\n".join(lines.values()))
        keys._file_keys._next_look = 0.0
        talk.say(line, line)
        assert [answer["status"] async for answer in answers] == [status]
        await talk.leave()
        await talk.task

    catalogues = FakeCatalogues(books=FakeCatalogue())
    with run(versions, keys_file=file, catalogues=catalogues) as running:
        keys = running.app.state.service.keys
        running.runner.run(scenario())
        assert counted(running)[f'espalier_auth_failures_total{{reason="{reason}",role="{role}"}}'] == 1


def test_a_stream_has_the_limits_that_its_key_has_now_and_digests_are_compared_only_after_a_change(
    versions: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_route, "MIN_HELD_S", 0.0)

    async def scenario() -> None:
        talk = Conversation(running, "/retrieve/stream", LINES | {"Authorization": f"Bearer {SHOP}"})
        answers, line = talk.answers(), b'{"queries": [{"history": []}]}'
        talk.say(*[line] * 5)
        assert [(await anext(answers)).get("status", 200) for _ in range(5)] == [200] * 5
        assert check.call_count == 1
        file.write_text(FILE.replace(f'key = "{SHOP}"', f'key = "{SHOP}"\nrate = 0.01'))
        keys._file_keys._next_look = 0.0
        talk.say(*[line] * 3, more=False)
        assert [answer.get("status", 200) async for answer in answers] == [200, 429, 429]
        assert check.call_count == 2
        await talk.leave()

    with run(versions, keys_file=file) as running:
        keys = running.app.state.service.keys
        check = Mock(wraps=keys.check)
        monkeypatch.setattr(keys, "check", check)
        running.runner.run(scenario())


def test_a_search_that_may_have_begun_costs_what_was_expected(versions: Path, file: Path) -> None:
    """Else a client whose deadline is a little too short would search for nothing."""
    file.write_text(FILE.replace("rate = 2\nburst = 3\ncost = 0.5", "cost = 0.01"))
    with run(versions, keys_file=file) as running:
        headers = {"Authorization": f"Bearer {PARTNER}"}
        body: dict[str, Any] = {"queries": [{"history": []}] * 8}
        assert running.client.post("/retrieve", json=body, headers=headers).status_code == 200  # from which the cost is known
        keys = running.app.state.service.keys
        partner = keys.check("retrieve", bearer(PARTNER))
        keys.limits._clock = lambda: 1e9
        late = running.client.post("/retrieve", json=body | {"timeout_ms": 1e-3}, headers=headers)
        assert late.status_code == 504
        assert keys.limits._arrival_times(partner)[1] > 1e9


def test_more_names_of_keys_than_a_file_may_have_are_counted_together() -> None:
    metrics = Metrics()
    for number in range(2 * MOST_KEYS + 3):
        metrics.key_request(f"k{number}", "admitted")
    text = metrics.render().decode()
    assert text.count("espalier_key_requests_total{") <= 2 * MOST_KEYS + 1
    assert f'espalier_key_requests_total{{key="{OTHER_KEYS}",outcome="admitted"}} 3.0' in text


def test_a_key_without_limits_that_crowds_others_out_is_refused_late_and_they_are_answered(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = list[int]()  # bodies of requests that there are while a refusal is held back

    async def passed(*_: object) -> None:
        held.append(sum(isinstance(one, RetrieveRequest) for one in gc.get_objects()))

    monkeypatch.setattr(key_limits, "_passed", passed)
    keys = tmp_path / "keys.toml"
    keys.write_text(FILE.replace("rate = 2\nburst = 3\ncost = 0.5", ""))
    with run(models, keys_file=keys, max_queue=3, max_batch=1, timeout_ms=60_000, max_queue_ms=60_000) as running:
        loop = running.runner.get_loop()
        engine, loaded = running.engines["books"], running.app.state.service.registry.choose("books", None)

        async def ask(key: str) -> int:
            body: dict[str, Any] = {"model": "books", "queries": [{"history": []}]}
            answer = await running.client.http.post("/retrieve", json=body, headers={"Authorization": f"Bearer {key}"})
            return answer.status_code

        async def crowd() -> tuple[list[int], list[int]]:
            assert await ask(SHOP) == 200  # from which the cost is known
            engine.go.clear()
            engine.started.clear()
            flood = [loop.create_task(ask(PARTNER)) for _ in range(2)]  # one alone would be searched for by this loop
            await turns_until(engine.started.is_set)
            flood += [loop.create_task(ask(PARTNER)) for _ in range(6)]
            await turns_until(lambda: sum(task.done() for task in flood) == 4)  # one is searched for, three wait
            assert not held  # nobody else wants the engine
            shop = [loop.create_task(ask(SHOP))]
            await turns_until(lambda: loaded.batcher.depth == 4)
            assert not held
            late = [loop.create_task(ask(PARTNER)) for _ in range(3)]
            await turns_until(lambda: all(task.done() for task in late))
            engine.go.set()
            return await asyncio.gather(*flood), await asyncio.gather(*shop, *late)

        flooded, rest = running.runner.run(crowd())
    assert sorted(flooded) == [200] * 4 + [429] * 4
    assert rest == [200, 429, 429, 429]
    assert held == [5] * 3  # those that are searched for or wait, and none of what is refused


def test_each_key_gets_so_many_refusals_a_second_and_none_waits_for_long(held: list[float]) -> None:
    async def refused() -> None:
        refusals = HeldRefusals()
        for _ in range(3000):
            await refusals.wait("flood", {"type": "http"})
        await refusals.wait("other", {"type": "http"})

    asyncio.run(refused())
    assert [held[count] - MIN_HELD_S for count in (0, 128, 256)] == pytest.approx([0, 128 / REFUSALS_PER_S, 256 / REFUSALS_PER_S], abs=0.2)
    assert max(held) == pytest.approx(MAX_HELD_S)
    assert held[-1] == pytest.approx(MIN_HELD_S)


def test_a_request_without_a_model_is_told_only_of_the_models_of_its_key(tmp_path: Path, file: Path) -> None:
    for name in ("books", "films"):
        small_model(tmp_path / "models", name=name)
    early = "early-0123456789abcd"
    file.write_text(f'{FILE}\n[[keys]]\nname = "early"\nkey = "{early}"\nrole = "retrieve"\nmodels = ["not-there-yet"]\n')
    told = {PARTNER: "one of books", SHOP: "one of books, films", early: "a model that the key may use; none is here"}
    with run(tmp_path / "models", keys_file=file) as running:
        for key, said in told.items():
            headers = {"Authorization": f"Bearer {key}"}
            refused = running.client.post("/retrieve", json={"queries": [{"history": []}]}, headers=headers)
            assert (refused.status_code, refused.json()["errors"][0]["expected"]) == (422, said)
        for key, said in ((PARTNER, " Models: books."), (early, "")):
            headers = {"Authorization": f"Bearer {key}"}
            unknown = running.client.post("/retrieve", json={"model": "not-there-yet", "queries": [{"history": []}]}, headers=headers)
            assert (unknown.status_code, unknown.json()["detail"]) == (404, f'There is no model "not-there-yet".{said}')
        for route in ("", "/items", "/facets?column=section"):
            refused = running.client.get(f"/models/not-there-yet{route}", headers={"Authorization": f"Bearer {early}"})
            assert (refused.status_code, refused.json()["detail"]) == (404, 'There is no model "not-there-yet".')
