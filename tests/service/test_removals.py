"""Standing exclusions as several editors change them: entity tags, conditions, single items, limits."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.errors import InvalidInput
from espalier.items import MAX_ID_BYTES
from espalier_client import AsyncClient, RemovedIds
from service.models import changes as changes_module
from service.models import removals
from service.models.desired_state import DesiredState, Removed
from service.models.removals import check_list, etag, with_id
from tests.service.running import Json, Running, bearer, document, problem, run, small_model

ADMIN = "admin-key-00000001"
LIST = "/models/books/removed"
MOST = 20
EDITORS, EACH = 4, 5


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("bundle")).path


@pytest.fixture
def folder(tmp_path: Path, bundle: Path) -> Path:
    """A models folder with `books`."""
    shutil.copytree(bundle, tmp_path / "books" / "1")
    return tmp_path


@pytest.fixture
def shelf(folder: Path) -> Iterator[Running]:
    with run(folder, admin_keys=(ADMIN,), max_removed=MOST) as running:
        yield running


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, bundle: Path) -> Iterator[Running]:
    """For tests that leave the list as it was, empty."""
    models = tmp_path_factory.mktemp("shared")
    shutil.copytree(bundle, models / "books" / "1")
    with run(models, admin_keys=(ADMIN,)) as running:
        yield running


def send(running: Running, method: str, path: str = LIST, body: Json | None = None, **headers: str) -> httpx.Response:
    """headers: with _ for -."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return running.client.request(method, path, json=body, headers=bearer(ADMIN) | named)


def listed(running: Running) -> list[str]:
    found: list[str] = send(running, "GET").json()["ids"]
    return found


def item(item_id: str) -> str:
    return f"{LIST}/{quote(item_id, safe='')}"


def on_disk(folder: Path) -> Removed:
    found = DesiredState(folder / "books").read(Removed)
    assert found is not None
    return found


# -- entity tags ----------------------------------------------------------------------------------------------------------


def test_a_tag_is_of_one_list_and_the_bytes_of_a_list_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lists: list[list[str]] = [[], ["a"], ["ab"], ["a", "b"], ["b", "a"], ["a", "b", ""], ["", "ab"], ["ä"], ["a\x00\x00\x00\x01b"]]
    assert len({etag(one) for one in lists}) == len(lists)
    assert etag(["a", "b"]) == etag(("a", "b"))
    # JSON needs up to six times the bytes, and a file that is too large would be written and never read.
    worst = "\x01" * MAX_ID_BYTES
    ids = tuple(f"{i:08}{worst[8:]}" for i in range(removals.MAX_LIST_BYTES // MAX_ID_BYTES))
    assert check_list(ids, len(ids)) == ids
    state = DesiredState(tmp_path)
    state.write(Removed(generation=1, ids=ids))
    found = state.read(Removed)
    assert found is not None
    assert found.ids == ids
    monkeypatch.setattr(removals, "MAX_LIST_BYTES", 10)
    assert check_list(["12345", "67890"], 100) == ("12345", "67890")
    with pytest.raises(InvalidInput, match="at most 10 bytes together"):
        check_list(["12345", "67890", "1"], 100)
    with pytest.raises(InvalidInput, match="at most 10 bytes together"):
        with_id(("12345", "67890"), "1", 100)


def test_whoever_reads_or_changes_the_list_gets_its_tag(shelf: Running) -> None:
    tags = []
    for method, path, body in (
        ("GET", LIST, None),
        ("PUT", LIST, {"ids": ["item-1", "item-2"]}),
        ("GET", LIST, None),
        ("PUT", item("item-3"), None),
        ("GET", LIST, None),
        ("DELETE", item("item-3"), None),
    ):
        answer = send(shelf, method, path, body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["etag"] == answer.json()["etag"]
        tags.append(answer.headers["etag"])
    assert tags[1] == tags[2] == tags[5]
    assert tags[3] == tags[4]
    assert len(set(tags)) == 3
    head = send(shelf, "HEAD")
    assert (head.headers["etag"], head.content) == (tags[-1], b"")
    for value in (tags[-1], f"W/{tags[-1]}", f'"other", {tags[-1]}', "*"):  # who has the list already is told so
        answer = send(shelf, "GET", If_None_Match=value)
        assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", tags[-1])
    assert send(shelf, "GET", If_None_Match='"other"').json()["ids"] == ["item-1", "item-2"]


@pytest.mark.parametrize(
    ("headers", "passes"),
    [
        ({}, True),
        *(({"If_Match": value}, True) for value in ("*", "{tag}", '"other", {tag}')),
        ({"If_Match": "W/{tag}"}, False),  # a weak tag is not good enough for a change
        *(({"If_Match": value}, False) for value in ('"other"', "", "nonsense")),
        ({"If_None_Match": '"other"'}, True),
        *(({"If_None_Match": value}, False) for value in ("{tag}", "*")),
        ({"If_Match": "{tag}", "If_None_Match": "{tag}"}, False),
    ],
)
def test_every_change_keeps_to_its_conditions(shared: Running, headers: dict[str, str], passes: bool) -> None:
    for method, path, body in (("PUT", LIST, {"ids": []}), ("PUT", item("x"), None), ("DELETE", item("x"), None)):
        tag = send(shared, "GET").headers["etag"]
        answer = send(shared, method, path, body, **{name: value.replace("{tag}", tag) for name, value in headers.items()})
        assert answer.status_code == (200 if passes else 412)
        assert answer.headers["etag"] == send(shared, "GET").headers["etag"]
        assert listed(shared) == (["x"] if passes and path == item("x") and method == "PUT" else [])


# -- single items ---------------------------------------------------------------------------------------------------------


def test_an_item_is_removed_and_restored_by_its_id(shelf: Running, folder: Path) -> None:
    def change(method: str, item_id: str) -> tuple[bool, bool, bool, int]:
        told = document(send(shelf, method, item(item_id)))
        assert told["id"] == item_id
        return told["removed"], told["changed"], told["known"], told["total"]

    def best() -> list[str]:
        return [found["id"] for found in shelf.retrieve(queries=[{"history": []}], m=2)["results"][0]["items"]]

    first, second = best()
    assert change("PUT", first) == (True, True, True, 1)
    assert change("PUT", first) == (True, False, True, 1)
    assert change("PUT", "gone") == (True, True, False, 2)
    assert best()[0] == second
    assert on_disk(folder) == Removed(generation=2, ids=(first, "gone"))  # what changed nothing has written nothing
    assert change("DELETE", first) == (False, True, True, 1)
    assert change("DELETE", first) == (False, False, True, 1)
    assert listed(shelf) == ["gone"]
    assert best()[0] == first


@given(
    item_id=st.text(min_size=1, max_size=60)
    | st.sampled_from(["a/b", "/", "//x", "a%2Fb", "%", "?", "#", "\n", "a\nb\n", ".", "..", "a/../b", "ü €", "\x00"])
)
def test_any_id_can_be_removed_and_restored(shared: Running, item_id: str) -> None:
    async def with_client() -> None:
        transport = httpx.ASGITransport(shared.app)
        async with AsyncClient("http://test", api_key=ADMIN, transport=transport) as client:
            removed = await client.remove_item("books", item_id)
            assert (removed.id, removed.removed, removed.total) == (item_id, True, 1)
            assert await client.removed("books") == RemovedIds((item_id,), removed.etag)
            restored = await client.restore_item("books", item_id)
            assert (restored.id, restored.removed, restored.changed) == (item_id, False, True)
            assert (await client.removed("books")).ids == ()

    shared.client.runner.run(with_client())


def test_an_unknown_model_is_said_before_wrong_ids(shared: Running) -> None:
    unknown = LIST.replace("books", "films")
    bodies: list[dict[str, Any]] = [{"ids": ["a", ""]}, {"ids": ["a", 5]}, {"other": []}]
    for body in bodies:
        assert send(shared, "PUT", LIST, body).status_code == 422
        assert 'There is no model "films".' in problem(send(shared, "PUT", unknown, body))["detail"]
    for method in ("PUT", "DELETE"):
        assert problem(send(shared, method, f"{LIST}/%FF"))["errors"][0]["field"] == "id"  # more: test_live_routes.py
        assert send(shared, method, f"{unknown}/%FF").status_code == 404
        assert shared.client.request(method, f"{unknown}/%FF").status_code == 401


def test_the_body_of_a_single_removal_is_not_read(shelf: Running) -> None:
    answer = shelf.client.request("PUT", item("item-1"), content=b"[[[", headers=bearer(ADMIN) | {"Content-Type": "text/plain"})
    assert (answer.status_code, listed(shelf)) == (200, ["item-1"])


# -- limits ---------------------------------------------------------------------------------------------------------------


def test_a_list_has_room_for_so_many_ids_and_no_more(shelf: Running) -> None:
    def full(answer: httpx.Response) -> bool:
        return (answer.status_code, f"at most {MOST} (ESPALIER_MAX_REMOVED)" in problem(answer)["detail"]) == (422, True)

    assert full(send(shelf, "PUT", body={"ids": [f"gone-{i}" for i in range(MOST + 1)]}))
    assert send(shelf, "PUT", body={"ids": [f"gone-{i % MOST}" for i in range(MOST + 1)]}).status_code == 200
    assert full(send(shelf, "PUT", item("one-more")))
    assert send(shelf, "PUT", item("gone-3")).status_code == 200  # it is on the list
    assert len(listed(shelf)) == MOST
    assert send(shelf, "DELETE", item("gone-3")).json()["total"] == MOST - 1
    assert send(shelf, "PUT", item("one-more")).json()["total"] == MOST


def test_a_list_that_is_too_long_by_hand_can_be_made_shorter(folder: Path) -> None:
    DesiredState(folder / "books").write(Removed(generation=1, ids=tuple(f"gone-{i}" for i in range(5))))
    with run(folder, admin_keys=(ADMIN,), max_removed=3) as running:
        assert send(running, "DELETE", item("gone-0")).json()["total"] == 4
        assert send(running, "PUT", item("one-more")).status_code == 422
        assert listed(running) == [f"gone-{i}" for i in range(1, 5)]


@pytest.mark.parametrize(("ids", "field"), [(["a", ""], r"ids\[1\]"), (["x" * (MAX_ID_BYTES + 1)], r"ids\[0\]"), (["a", "b", "c"], "ids")])
def test_a_whole_list_is_checked_id_by_id(ids: list[str], field: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{field}: got"):
        check_list(ids, max_ids=2)


# -- several editors ------------------------------------------------------------------------------------------------------


def test_editors_at_the_same_time_lose_nothing(folder: Path) -> None:
    """Two services over one folder, as two workers are, with several editors each: all of what they add and nothing of what they drop."""
    DesiredState(folder / "books").write(Removed(generation=1, ids=tuple(f"old-{i}" for i in range(2 * EDITORS * EACH))))
    finished: list[int] = []

    def edit(service_number: int) -> None:
        async def editor(number: int) -> None:
            for i in range(EACH):
                for method, item_id in (("PUT", f"new-{number}-{i}"), ("DELETE", f"old-{number * EACH + i}")):
                    answer = await running.client.http.request(method, item(item_id), headers=bearer(ADMIN))
                    assert answer.status_code == 200, answer.text
                    assert answer.json()["changed"]

        async def editors() -> None:
            await asyncio.gather(*(editor(service_number * EDITORS + number) for number in range(EDITORS)))

        with run(folder, admin_keys=(ADMIN,)) as running:
            running.client.runner.run(editors())
            finished.append(service_number)

    threads = [threading.Thread(target=edit, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(finished) == [0, 1]
    assert sorted(on_disk(folder).ids) == sorted(f"new-{number}-{i}" for number in range(2 * EDITORS) for i in range(EACH))


HELD: dict[Path, int] = {}


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Somebody else's change is under way, until `release`."""
    HELD[folder] = os.open(folder / "books" / ".removed.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(HELD[folder], fcntl.LOCK_EX)
    try:
        yield
    finally:
        release(folder)


def release(folder: Path) -> None:
    if folder in HELD:
        os.close(HELD.pop(folder))


def test_a_change_waits_for_another_one_to_end_but_not_for_ever(shelf: Running, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries, plain = [], DesiredState.locked

    def on_its_third_try(disk: DesiredState, kind: type[Removed]) -> AbstractContextManager[None]:
        tries.append(disk)
        if len(tries) == 3:
            release(folder)
        return plain(disk, kind)

    with monkeypatch.context() as patch, locked(folder):
        patch.setattr(DesiredState, "locked", on_its_third_try)
        assert send(shelf, "PUT", item("item-1")).status_code == 200
    assert len(tries) == 3
    monkeypatch.setattr(changes_module, "REMOVALS_WAIT_S", 0.05)
    with locked(folder):
        for method, path, body in (("PUT", item("item-2"), None), ("PUT", LIST, {"ids": ["item-2"]})):
            answer = send(shelf, method, path, body)
            assert answer.status_code == problem(answer)["status"] == 409
            assert answer.headers["retry-after"] == "1"
    assert listed(shelf) == ["item-1"]


# -- what the file says ---------------------------------------------------------------------------------------------------


def test_a_malformed_file_is_replaced_as_a_whole_and_not_edited(shelf: Running, folder: Path) -> None:
    send(shelf, "PUT", body={"ids": ["item-1"]})
    file = folder / "books" / "removed.json"
    file.write_text('{"ids": ["item-1", "item-2"')
    tag = send(shelf, "GET").headers["etag"]
    for answer in (
        send(shelf, "PUT", item("item-3")),
        send(shelf, "DELETE", item("item-1")),
        send(shelf, "PUT", body={"ids": ["item-3"]}, If_Match=tag),
    ):
        assert (answer.status_code, "books/removed.json" in problem(answer)["detail"]) == (409, True)
        assert file.read_text() == '{"ids": ["item-1", "item-2"'
    assert send(shelf, "PUT", body={"ids": ["item-1", "item-3"]}).status_code == 200
    assert json.loads(file.read_text())["ids"] == ["item-1", "item-3"]


def test_without_a_file_what_holds_is_edited(shelf: Running, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that was away for a moment must not bring back what was removed."""
    send(shelf, "PUT", body={"ids": ["item-1"]})
    away, plain = [True], DesiredState.read

    def read(disk: DesiredState, kind: type[Removed]) -> Removed | None:
        return None if kind is Removed and away and away.pop() else plain(disk, kind)

    monkeypatch.setattr(DesiredState, "read", read)
    assert send(shelf, "PUT", item("item-2")).json()["total"] == 2
    assert away == []
    assert on_disk(folder).ids == ("item-1", "item-2")
