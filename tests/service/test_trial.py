"""A version on trial: which requests it answers, for how long, what is counted of it, and how a trial ends."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from math import inf
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from espalier.bundle import Bundle
from espalier.search import Engine
from espalier.serving import MAX_VERSION, Candidate
from service.batching.batcher import Batcher
from service.retrieval.trial import MAX_RUNNING, MAX_VALUES, hash_fraction, is_tried
from service.watch.trial_figures import figures
from tests.service.fake_engine import FakeEngine
from tests.service.models.registry import damage
from tests.service.own_time import settled
from tests.service.running import ITEMS, Json, Running, bearer, counted, document, problem, run, small_model
from tests.waiting import until

ADMIN = "an-admin-key-of-tests"
USERS = [f"user-{i}" for i in range(400)]


def trial(running: Running, **candidate: Any) -> Json:
    """The model as an admin sees it, once a candidate is tried."""
    return document(running.client.request("PUT", "/models/books/candidate", json=candidate, headers=bearer(ADMIN)))


def version_for(running: Running, user: str | None = None, group: str | None = None, key: str | None = None, **body: Any) -> int:
    headers = {"Espalier-User": user, "Espalier-Group": group, **({} if key is None else bearer(key))}
    given = {name: value for name, value in headers.items() if value is not None}
    answer = running.client.post("/retrieve", json={"model": "books", "queries": [{"history": []}]} | body, headers=given)
    version: int = document(answer)["version"]
    return version


@pytest.fixture
def both(versions: Path) -> Path:
    """A models folder with two versions, of which the first is the default."""
    (versions / "books" / "serving.json").write_text(json.dumps({"generation": 1, "versions": [1, 2], "default": 1}))
    return versions


# -- who gets the candidate -----------------------------------------------------------------------------------------------


def test_users_are_spread_evenly_stay_where_they_are_and_are_others_in_the_next_trial() -> None:
    places = [hash_fraction("books", 2, user.encode()) for user in USERS]
    assert min(places) >= 0
    assert max(places) < 1
    assert [sum(place < share for place in places) / len(places) for share in (0.1, 0.5)] == [
        pytest.approx(0.1, abs=0.05),
        pytest.approx(0.5, abs=0.08),
    ]
    assert places == [hash_fraction("books", 2, user.encode()) for user in USERS]
    tried = {
        share: {user for user in USERS if is_tried(Candidate(version=2, share=share), "books", None, user.encode(), None)}
        for share in (0.0, 0.1, 0.5, 1.0)
    }
    assert tried[0.0] < tried[0.1] < tried[0.5] < tried[1.0] == {*USERS}
    again = {user for user in USERS if is_tried(Candidate(version=3, share=0.1), "books", None, user.encode(), None)}
    assert again != tried[0.1]
    assert len(again & tried[0.1]) < len(tried[0.1]) / 2


def test_requests_without_a_user_are_drawn_one_by_one() -> None:
    drawn = sum(is_tried(Candidate(version=2, share=0.25), "books", None, None, None) for _ in range(4000))
    assert 800 < drawn < 1200


def test_a_share_of_the_users_gets_the_candidate_and_no_user_changes_over(both: Path) -> None:
    with run(both, admin_keys=ADMIN) as running:
        assert {version_for(running, user) for user in USERS[:40]} == {1}
        described = trial(running, version=2, share=0.3)
        assert described["candidate"] == {"version": 2, "share": 0.3, "keys": [], "groups": [], "shadow": 0.0}
        first = {user: version_for(running, user) for user in USERS[:100]}
        assert 15 < Counter(first.values())[2] < 45
        assert {user: version_for(running, user) for user in USERS[:100]} == first
        assert {version_for(running, user, version=1) for user in USERS[:40]} == {1}  # who names a version gets it
        trial(running, version=2, share=0.6)
        wider = {user: version_for(running, user) for user in USERS[:100]}
        assert all(wider[user] == 2 for user, version in first.items() if version == 2)
    with run(both, admin_keys=ADMIN) as running:  # a restart changes nothing
        assert {user: version_for(running, user) for user in USERS[:100]} == wider
        assert running.client.request("DELETE", "/models/books/candidate", headers=bearer(ADMIN)).json()["candidate"] is None
        assert {version_for(running, user) for user in USERS[:100]} == {1}
        assert {
            version["version"] for version in running.client.get("/models/books").json()["versions"] if version["state"] == "ready"
        } == {1, 2}


def test_all_lines_of_a_stream_are_of_the_user_that_its_head_names(both: Path) -> None:
    with run(both, admin_keys=ADMIN) as running:
        trial(running, version=2, share=0.5)
        lines = b'{"model": "books", "queries": [{"history": []}]}\n' * 5
        for user in USERS[:12]:
            headers = {"Content-Type": "application/x-ndjson", "Espalier-User": user}
            answer = running.client.post("/retrieve/stream", content=lines, headers=headers)
            versions = {json.loads(line)["version"] for line in answer.text.splitlines()}
            assert versions == {version_for(running, user)}
        assert {version_for(running, "") for _ in range(40)} == {1, 2}  # an empty header names nobody


def test_keys_and_groups_get_the_candidate_whoever_the_user_is(both: Path) -> None:
    keys = "shop:a-key-of-the-shop-1,app:a-key-of-the-app-01"
    with run(both, admin_keys=ADMIN, retrieve_keys=keys) as running:
        trial(running, version=2, keys=["app"], groups=["beta"])
        assert [version_for(running, "u", key=key) for key in ("a-key-of-the-shop-1", "a-key-of-the-app-01")] == [1, 2]
        assert [version_for(running, "u", group, "a-key-of-the-shop-1") for group in (None, "beta", "alpha")] == [1, 2, 1]


def test_a_group_of_two_words_that_a_file_names_gets_the_candidate(both: Path) -> None:
    """A request would be refused."""
    candidate = {"version": 2, "groups": ["two words"]}
    desired = {"generation": 1, "versions": [1, 2], "default": 1, "candidate": candidate}
    (both / "books" / "serving.json").write_text(json.dumps(desired))
    with run(both) as running:
        assert [version_for(running, "u", group) for group in ("two words", "two")] == [2, 1]


def test_what_the_candidate_does_not_take_the_default_version_answers(tmp_path: Path) -> None:
    small_model(tmp_path, 1, max_m=40)
    small_model(tmp_path, 2, max_m=10)
    (tmp_path / "books" / "serving.json").write_text(json.dumps({"generation": 1, "versions": [1, 2], "default": 1}))
    with run(tmp_path, admin_keys=ADMIN) as running:
        trial(running, version=2, share=1.0)
        assert [version_for(running, "u", m=m) for m in (4, 20)] == [2, 1]
        answer = running.client.post("/retrieve", json={"model": "books", "queries": [{"history": []}], "m": 100})
        assert answer.status_code == 422


def test_a_filter_that_the_candidate_does_not_know_is_for_the_default_version(tmp_path: Path) -> None:
    colours = {"colour": pa.array(["red", "blue"] * 16)}
    small_model(tmp_path, 1, columns=colours)
    small_model(tmp_path, 2)
    (tmp_path / "books" / "serving.json").write_text(json.dumps({"generation": 1, "versions": [1, 2], "default": 1}))
    with run(tmp_path, admin_keys=ADMIN) as running:
        trial(running, version=2, share=1.0, shadow=0.0)
        assert version_for(running) == 2
        for priority in ({}, {"Espalier-Priority": "background"}):
            asked = {"model": "books", "queries": [{"history": []}], "filter": {"colour": ["red"]}}
            assert running.client.post("/retrieve", json=asked, headers=priority).json()["version"] == 1
        body = {"model": "books", "queries": [{"history": []}], "filter": {"size": ["large"]}}
        assert running.client.post("/retrieve", json=body).status_code == 422  # neither knows it
        _, tried = running.client.get("/models/books/candidate", headers=bearer(ADMIN)).json()["versions"]
        assert (tried["answered"], tried["failed"]) == (1, 0)


# -- how a trial begins and ends ------------------------------------------------------------------------------------------


def test_a_candidate_is_loaded_first_and_promoted_by_making_it_the_default(versions: Path) -> None:
    (versions / "books" / "serving.json").write_text(json.dumps({"generation": 1, "versions": [1], "default": 1}))
    with run(versions, admin_keys=ADMIN) as running:
        trial(running, version=2, share=1.0)
        assert version_for(running, "u") == 2
        promoted = running.client.post("/models/books/default", json={"version": 2}, headers=bearer(ADMIN)).json()
        assert (promoted["version"], promoted["candidate"]) == (2, None)
        assert version_for(running, "u") == 2
        back = running.client.post("/models/books/default", json={"version": 1}, headers=bearer(ADMIN)).json()
        assert (back["version"], back["candidate"]) == (1, None)


def test_a_trial_goes_on_while_other_versions_come_and_go_and_ends_with_its_own(both: Path) -> None:
    small_model(both, 3)
    with run(both, admin_keys=ADMIN) as running:

        def changed(action: str, **body: Any) -> Json:
            return document(running.client.post(f"/models/books/{action}", json=body, headers=bearer(ADMIN)))

        trial(running, version=2, share=1.0)
        assert changed("load", version=3, default=False)["candidate"]["version"] == 2
        other = changed("default", version=3)
        assert (other["version"], other["candidate"]["version"]) == (3, 2)
        changed("default", version=1)
        assert changed("unload", version=3)["candidate"]["version"] == 2
        assert changed("unload", version=2)["candidate"] is None
        assert version_for(running, "u") == 1
    assert "candidate" not in json.loads((both / "books" / "serving.json").read_text())


WRONG: list[tuple[Json, int, str]] = [
    ({"version": 1}, 409, "Version 1 is the default"),
    ({"version": 9}, 404, "There is no version 9"),
    ({"version": MAX_VERSION + 1}, 422, "version"),
    ({"version": 2, "share": 1.5}, 422, "share"),
    ({"version": 2, "shadow": -0.1}, 422, "shadow"),
    ({"version": 2, "keys": [""]}, 422, "keys"),
    ({"version": 2, "keys": ["k"] * 1001}, 422, "keys"),
    ({"version": 2, "groups": ["two words"]}, 422, "groups"),
    ({"version": 2, "shares": 0.1}, 422, "shares"),
]


def test_a_wrong_candidate_changes_nothing(both: Path) -> None:
    before = (both / "books" / "serving.json").read_text()
    with run(both, admin_keys=ADMIN) as running:
        for body, status, said in WRONG:
            answer = running.client.request("PUT", "/models/books/candidate", json=body, headers=bearer(ADMIN))
            assert (answer.status_code, said in json.dumps(problem(answer))) == (status, True), body
            assert running.client.get("/models/books").json()["candidate"] is None
    assert (both / "books" / "serving.json").read_text() == before


def test_a_candidate_beside_a_default_that_does_not_serve_changes_nothing(versions: Path) -> None:
    file = versions / "books" / "serving.json"
    file.write_text(json.dumps({"generation": 1, "versions": [2], "default": 2}))
    damage(versions / "books" / "2")
    with run(versions, admin_keys=ADMIN) as running:
        before = file.read_text()
        refusal = running.client.request("PUT", "/models/books/candidate", json={"version": 1, "share": 0.5}, headers=bearer(ADMIN))
        assert problem(refusal)["status"] == 409
        assert "does not serve" in problem(refusal)["detail"]
        assert file.read_text() == before
        assert running.client.post("/retrieve", json={"queries": [{"history": []}]}).status_code == 503


def test_changes_of_the_candidate_are_audited(both: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with run(both, admin_keys=f"boss:{ADMIN}") as running:
        trial(running, version=2, share=0.1)
        running.client.request("DELETE", "/models/books/candidate", headers=bearer(ADMIN))
    lines = [record.__dict__["fields"] for record in caplog.records if record.name == "service.audit"]
    assert [(line["action"], line["outcome"], line["key"]) for line in lines] == [("candidate", "changed", "boss")] * 2
    assert (
        lines[0]["after"]["candidate"]
        == lines[1]["before"]["candidate"]
        == {"version": 2, "share": 0.1, "keys": [], "groups": [], "shadow": 0.0}
    )
    assert "candidate" not in lines[1]["after"]


# -- the shadow -----------------------------------------------------------------------------------------------------------


class Apart(FakeEngine):
    """Answers with other items: half of those that the default version's engine answers with, for four."""

    def search(self, *given: Any) -> Any:
        found = super().search(*given)
        found.item_rows_BM[:, 2:4] += 8
        return found


def engines(apart: Apart, default: FakeEngine) -> Any:
    def opened(bundle: Bundle) -> Engine:
        return apart if bundle.manifest.version == 2 else default

    return opened


def shadowed(running: Running) -> Json:
    found: Json = running.client.get("/models/books/candidate", headers=bearer(ADMIN)).json()["shadow"]
    return found


def test_a_shadow_answers_what_others_get_and_is_compared(both: Path) -> None:
    with run(both, engines(Apart(32), FakeEngine(32)), admin_keys=ADMIN) as running:
        trial(running, version=2, shadow=1.0)
        for _ in range(10):
            assert running.retrieve(queries=[{"history": []}], m=4)["version"] == 1
            running.runner.run(settled())
        until(lambda: shadowed(running)["compared"] == 10)
        found = shadowed(running)
        assert (found["failed"], found["left_out"]) == (0, 0)
        assert found["overlap"] == pytest.approx(0.5, abs=0.026)  # by the middle of its bucket
        assert found["overlap_ci"][0] <= found["overlap"] <= found["overlap_ci"][1]
        assert min(found["default_p50_ms"], found["candidate_p50_ms"]) > 0
        metrics = counted(running)
        assert metrics['espalier_requests_total{model="books",status="200"}'] == 10  # nobody asked for the others
        assert metrics['espalier_version_requests_total{model="books",outcome="answered",version="1"}'] == 10
        assert 'espalier_version_requests_total{model="books",outcome="answered",version="2"}' not in metrics
        trial(running, version=2, shadow=0.0)
        running.retrieve(queries=[{"history": []}], m=4)
        assert shadowed(running)["compared"] == 10


def test_a_shadow_that_fails_or_hangs_harms_nobody(both: Path) -> None:
    apart = Apart(32)
    with run(both, engines(apart, FakeEngine(32)), admin_keys=ADMIN, timeout_ms=60_000) as running:
        trial(running, version=2, shadow=1.0)
        apart.failure = RuntimeError("out of memory")
        assert running.retrieve(queries=[{"history": []}])["version"] == 1
        until(lambda: shadowed(running)["failed"] == 1)
        apart.go.clear()
        for _ in range(MAX_RUNNING + 5):
            assert running.retrieve(queries=[{"history": []}])["version"] == 1
        until(lambda: shadowed(running)["left_out"] == 5)
        large = running.retrieve(queries=[{"history": []}] * (MAX_VALUES // (2 * ITEMS) + 1), m=40)
        assert large["version"] == 1
        apart.go.set()
        until(lambda: shadowed(running)["compared"] == MAX_RUNNING)
        running.retrieve(queries=[{"history": []}] * (MAX_VALUES // (2 * ITEMS) + 1), m=40)
        until(lambda: shadowed(running)["left_out"] == 7)


def test_a_shadow_asks_for_as_many_items_and_leaves_out_what_it_does_not_take(tmp_path: Path) -> None:
    small_model(tmp_path, 1, m=6, max_m=20)
    small_model(tmp_path, 2, m=2, max_m=10)
    (tmp_path / "books" / "serving.json").write_text(json.dumps({"generation": 1, "versions": [1, 2], "default": 1}))
    apart = Apart(32)
    with run(tmp_path, engines(apart, FakeEngine(32)), admin_keys=ADMIN) as running:
        trial(running, version=2, shadow=1.0)
        running.retrieve(queries=[{"history": []}])
        until(lambda: shadowed(running)["compared"] == 1)
        assert apart.calls[-1][1].m_B.tolist() == [6]
        running.retrieve(queries=[{"history": []}], m=20)
        until(lambda: shadowed(running)["left_out"] == 1)
        assert shadowed(running)["failed"] == 0


def test_nothing_is_answered_twice_while_others_wait(both: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run(both, admin_keys=ADMIN) as running:
        trial(running, version=2, shadow=1.0)
        with monkeypatch.context() as patched:
            patched.setattr(Batcher, "depth", property(lambda batcher: 1))
            running.retrieve(queries=[{"history": []}])
        assert shadowed(running)["left_out"] == 1
        running.retrieve(queries=[{"history": []}])
        until(lambda: shadowed(running)["compared"] == 1)


# -- what is counted ------------------------------------------------------------------------------------------------------


def test_figures_are_of_both_versions_and_none_are_shown_without_a_candidate(both: Path) -> None:
    with run(both, admin_keys=ADMIN) as running:
        found = running.client.get("/models/books/candidate", headers=bearer(ADMIN)).json()
        assert found == {"candidate": None, "versions": [], "shadow": None}
        trial(running, version=2, share=0.5)
        expected = Counter(version_for(running, user) for user in USERS[:30])
        found = running.client.get("/models/books/candidate", headers=bearer(ADMIN)).json()
        assert found["candidate"]["share"] == 0.5
        assert [version["version"] for version in found["versions"]] == [1, 2]
        for version in found["versions"]:
            assert version["answered"] == expected[version["version"]]
            assert (version["refused"], version["late"], version["failed"]) == (0, 0, 0)
            assert version["failed_ci"][0] == 0 < version["failed_ci"][1] < 0.35
            assert 0 < version["p50_ms"] <= version["p99_ms"]
        running.engines["books"].failure = RuntimeError("broken")
        assert running.client.post("/retrieve", json={"model": "books", "queries": [{"history": []}], "version": 2}).status_code == 500
        assert (
            running.client.post("/retrieve", json={"model": "books", "queries": [{"history": []}], "version": 2, "m": 99}).status_code
            == 422
        )
        _, tried = running.client.get("/models/books/candidate", headers=bearer(ADMIN)).json()["versions"]
        assert (tried["answered"], tried["failed"]) == (expected[2], 1)


def test_the_last_request_of_a_version_leaves_no_series_behind(both: Path) -> None:
    with run(both, admin_keys=ADMIN, timeout_ms=60_000) as running:
        engine, http = running.engines["books"], running.client.http

        async def unloaded_while_it_searches() -> int:
            engine.go.clear()
            engine.started.clear()
            asked = asyncio.create_task(http.post("/retrieve", json={"model": "books", "version": 2, "queries": [{"history": []}]}))
            await asyncio.to_thread(engine.started.wait, 10)
            dropped = await http.post("/models/books/unload", json={"version": 2}, headers=bearer(ADMIN))
            assert dropped.status_code == 200
            engine.go.set()
            return (await asked).status_code

        assert running.runner.run(unloaded_while_it_searches()) == 200
        until(lambda: counted(running)['espalier_reload_total{model="books",outcome="unloaded"}'] == 1)
        assert not [series for series in counted(running) if 'version="2"' in series]


def test_intervals_of_shares_and_means_are_the_textbooks() -> None:
    name, labels = "espalier_version_requests_total", {"model": "books", "version": "2"}
    samples: list[tuple[str, dict[str, str], float]] = [
        (name, labels | {"outcome": "answered"}, 90.0),
        (name, labels | {"outcome": "failed"}, 10.0),
    ]
    samples += [("espalier_shadow_overlap_sum", labels, 50 * 0.53 + 50 * 0.99), ("espalier_shadow_overlap_count", labels, 100.0)]
    for bound, count in ((0.5, 0.0), (0.55, 50.0), (0.95, 50.0), (1.0, 100.0), (inf, 100.0)):
        le = "+Inf" if bound == inf else str(bound)
        samples.append(("espalier_shadow_overlap_bucket", labels | {"le": le}, count))
    found = figures(samples, "books", None, 2)
    assert found["versions"][0]["failed_ci"] == pytest.approx((0.0552, 0.1744), abs=5e-4)  # Wilson, 10 of 100
    assert found["shadow"]["overlap"] == pytest.approx(0.76)  # of the sums, and not of the buckets
    low, high = found["shadow"]["overlap_ci"]
    assert (low + high) / 2 == pytest.approx(0.76)
    assert (high - low) / 2 == pytest.approx(1.96 * 0.23 / 10, rel=0.05)


def test_an_interval_of_what_is_alike_is_not_empty() -> None:
    labels = {"model": "books", "version": "2"}
    samples: list[tuple[str, dict[str, str], float]] = [("espalier_shadow_overlap_sum", labels, 96.0)]
    samples += [
        ("espalier_shadow_overlap_bucket", labels | {"le": le}, count) for le, count in (("0.95", 0.0), ("1.0", 100.0), ("+Inf", 100.0))
    ]
    shadow = figures(samples, "books", None, 2)["shadow"]
    assert shadow["overlap"] == pytest.approx(0.96)
    assert shadow["overlap_ci"][0] < 0.96 < shadow["overlap_ci"][1]
