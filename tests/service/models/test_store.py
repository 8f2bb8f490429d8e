"""A service whose models come from a store: it serves what the store says, and what it has while the store is gone."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from espalier.bundle import Bundle, find_versions, parse_manifest
from espalier.checks.golden import verify_golden
from espalier.errors import CacheFull
from espalier.search import Engine
from espalier.store import fetching
from espalier.store.fetching import FETCH, fetch
from espalier.store.models import StoredModel, blob_key, find_models, manifest_key, serve_highest, serving_key, set_default
from espalier.store.objects import Objects
from espalier.store.publishing import publish
from service.errors import Conflict, NotReady
from service.models import loading, store_mirror
from tests.service.models.registry import Running, add_version, run
from tests.service.running import small_model, total
from tests.service.shards.cutting import cut, whole_bundle
from tests.waiting import until

POLL_S = 0.05


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of minutes take no time."""
    for name, seconds in (("TICK_S", 0.02), ("MAX_BACKOFF_S", 0.1), ("RETRY_S", 0.05), ("MAX_RETRY_S", 0.1), ("LINGER_S", 0.0)):
        monkeypatch.setattr(store_mirror, name, seconds)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def following(store: Objects, models: Path, cache: Path) -> Iterator[Running]:
    """A service that has version 1 of `books` from the store."""
    publish(store, [models / "books" / "1"])
    with follow(store, cache) as running:
        ready(running)
        yield running


def follow(store: Objects, cache: Path, **settings: Any) -> AbstractContextManager[Running]:
    return run(cache, store=store.url, **{"store_poll_s": POLL_S} | settings)


def ready(running: Running) -> None:
    until(lambda: not running.registry.not_ready(), lambda: str(running.registry.not_ready()))


def metric(running: Running, name: str, **labels: str) -> float:
    return total(running.metrics, name, **labels) or 0.0


def waits_because(running: Running, reason: str, model: str = "books") -> bool:
    """Whether a version of a model does not come, and why."""
    wait = running.registry.waits_for(model)
    return wait is not None and reason in str(wait.reason)


def serves(running: Running, version: int) -> bool:
    entry = running.registry.entries.get("books")
    return entry is not None and entry.loaded is not None and entry.loaded.version == version


def folder_of(store: Objects) -> Path:
    return Path(store.url.removeprefix("file://"))


def published_anew(store: Objects, models: Path, name: str = "books", version: int = 2) -> tuple[Path, Path]:
    """The folder of a version of other content, which is published, and the file of its node rows in the store."""
    made = small_model(models, version, name, seed=2)
    publish(store, [made.path])
    return made.path, folder_of(store) / blob_key(made.manifest.files["nodes.safetensors"].sha256)


def came_from_another(store: Objects, models: Path, folder: Path, cache: Path) -> Objects:
    """The store from which version 1 in the cache came, while `store` has another version 1."""
    publish(store, [models / "books" / "1"])
    other = Objects(f"file://{folder}/other", create=True)
    published_anew(other, folder / "trained", version=1)
    fetch(other, "books", 1, cache)
    return other


def test_versions_come_from_the_store_and_the_store_says_what_serves(following: Running, store: Objects, models: Path) -> None:
    assert following.served() == 1
    until(lambda: following.registry.waits_for("books") is None)
    assert metric(following, "espalier_store_bytes_total") == sum(
        file.stat().st_size for file in (following.models / "books" / "1").iterdir() if file.name != "manifest.json"
    )
    publish(store, [add_version(models, 2)])
    until(lambda: following.served() == 2)
    publish(store, [add_version(models, 3)])
    until(lambda: following.served() == 3)
    set_default(store, "books", 1, beside=[2])
    until(lambda: following.served() == 1)
    until(lambda: following.states().get(2) == "ready")
    assert following.served(2) == 2
    serve_highest(store, "books")
    until(lambda: following.served() == 3)
    assert not (following.models / "books" / "serving.json").exists()


@pytest.mark.parametrize("name", ["another", "books"])
def test_the_default_is_followed_while_a_version_is_downloaded(
    following: Running, store: Objects, models: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    publish(store, [add_version(models, 2)])
    until(lambda: following.served() == 2)
    may_end, read_range = threading.Event(), Objects.read_range

    def read_slowly(objects: Objects, key: str, begin: int, end: int) -> memoryview:
        may_end.wait(0.1)
        return read_range(objects, key, begin, end)

    monkeypatch.setattr(fetching, "RANGE_BYTES", 16)
    monkeypatch.setattr(Objects, "read_range", read_slowly)
    published_anew(store, models, name, version=3)
    began = cache / name / f"{FETCH}3"
    until(lambda: began.exists() and any(began.iterdir()), "the download has begun")
    set_default(store, "books", 1)
    until(lambda: following.served() == 1)
    assert not (cache / name / "3").exists()
    may_end.set()
    serve_highest(store, "books")
    until((cache / name / "3").exists)


def test_a_changed_default_waits_for_no_other_download_when_a_third_one_changes(
    following: Running, store: Objects, models: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published_anew(store, models, "calm", version=1)
    until((cache / "calm" / "1").exists)
    may_end, read_range, downloads = threading.Event(), Objects.read_range, list[str]()

    def read_slowly(objects: Objects, key: str, begin: int, end: int) -> memoryview:
        may_end.wait(0.1)
        return read_range(objects, key, begin, end)

    def noted_fetch(objects: Objects, name: str, *others: Any) -> int:
        downloads.append(name)
        return fetch(objects, name, *others)

    monkeypatch.setattr(fetching, "RANGE_BYTES", 16)
    monkeypatch.setattr(Objects, "read_range", read_slowly)
    monkeypatch.setattr(store_mirror, "fetch", noted_fetch)
    published_anew(store, models, "another", version=1)
    until(lambda: downloads[-1:] == ["another"])
    published_anew(store, models, version=2)
    set_default(store, "books", 2)
    until(lambda: downloads[-1] == "books")
    count = len(downloads)
    set_default(store, "calm", 1)
    until(lambda: len(downloads) > count)
    assert downloads[count] == "books"
    may_end.set()
    until((cache / "another" / "1").exists)


def test_a_download_lists_a_store_that_answers_slowly_no_oftener_than_it_should(
    following: Running, store: Objects, models: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists, read_range, pause = list[tuple[float, float]](), Objects.read_range, threading.Event()

    def list_slowly(objects: Objects) -> dict[str, StoredModel]:
        began = time.monotonic()
        pause.wait(2 * POLL_S)
        found = find_models(objects)
        if objects.url == store.url:  # another test's service looks
            lists.append((began, time.monotonic()))
        return found

    def read_slowly(objects: Objects, key: str, begin: int, end: int) -> memoryview:
        pause.wait(POLL_S / 20)
        return read_range(objects, key, begin, end)

    monkeypatch.setattr(fetching, "RANGE_BYTES", 64)
    monkeypatch.setattr(Objects, "read_range", read_slowly)
    monkeypatch.setattr(store_mirror, "find_models", list_slowly)
    published_anew(store, models)
    until(lambda: following.served() == 2)
    assert len(lists) > 2
    assert all(began - ended > 0.8 * POLL_S for (_, ended), (began, _) in pairwise(lists))


def test_an_admin_of_one_host_cannot_leave_the_store(following: Running) -> None:
    changes = following.registry.changes
    for change in (changes.load, changes.unload):
        with pytest.raises(Conflict, match="set-default --store URL --model books --version N"):
            following.run(change("books", 1))


def test_it_waits_for_a_store_that_is_not_there_yet(store: Objects, models: Path, cache: Path) -> None:
    publish(store, [models / "books" / "1"])
    folder = folder_of(store)
    folder.rename(folder.with_name("elsewhere"))
    with follow(store, cache) as running:
        until(lambda: running.registry.not_ready() == ["waiting for the store: the store: no such folder"])
        with pytest.raises(NotReady, match="No model has come from the store yet"):
            running.registry.choose(None, None)
        folder.with_name("elsewhere").rename(folder)
        until(lambda: not running.registry.not_ready())
        assert running.registry.choose(None, None).version == 1


def test_it_serves_what_it_has_while_the_store_is_gone_and_catches_up(store: Objects, models: Path, cache: Path) -> None:
    publish(store, [models / "books" / "1"])
    fetch(store, "books", 1, cache)
    folder, elsewhere = folder_of(store), cache.with_name("elsewhere")
    folder.rename(elsewhere)
    with follow(store, cache) as running:
        ready(running)
        assert running.served() == 1
        elsewhere.rename(folder)
        publish(store, [add_version(models, 2)])
        until(lambda: running.served() == 2)
        folder.rename(elsewhere)
        folder.write_text("no folder")
        until(lambda: metric(running, "espalier_store_silent_seconds") > 0)
        assert running.registry.not_ready() == []
        assert running.served() == 2
        folder.unlink()
        elsewhere.rename(folder)
        publish(store, [add_version(models, 3)])
        until(lambda: running.served() == 3)
        assert metric(running, "espalier_store_silent_seconds") == 0


def test_a_start_waits_for_all_models_of_the_store(store: Objects, models: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(store, [models / "books" / "1", add_version(models, 1, name="films")])
    go_on = threading.Event()

    def fetch_late(store: Objects, name: str, version: int, models: Path, on_progress: object) -> int:
        assert name == "books" or go_on.wait(20)
        return fetch(store, name, version, models)

    monkeypatch.setattr(store_mirror, "fetch", fetch_late)
    with follow(store, cache) as running:
        until(lambda: "books" in running.registry.entries and running.registry.entry("books").state == "ready")
        until(lambda: running.registry.not_ready() == ["films version 1 comes from the store, 0.0 of 0.0 MB"])
        go_on.set()
        until(lambda: not running.registry.not_ready())
        assert running.registry.entry("films").state == "ready"
        publish(store, [add_version(models, 1, name="songs")])
        until(lambda: "songs" in running.registry.entries)
        assert not any("songs" in line for line in running.registry.not_ready())  # no start waits for it


def test_a_start_waits_for_no_model_that_is_damaged_in_the_store(store: Objects, models: Path, cache: Path) -> None:
    publish(store, [models / "books" / "1"])
    published_anew(store, models, "films", 1)[1].write_bytes(b"damaged")
    with follow(store, cache) as running:
        ready(running)
        assert running.served() == 1
        until(lambda: "films" not in running.registry.entries and waits_because(running, "7 bytes", "films"))


def test_what_is_left_of_a_model_that_the_store_has_no_more_is_deleted(store: Objects, models: Path, cache: Path) -> None:
    publish(store, [models / "books" / "1"])
    (cache / "films" / f"{FETCH}1").mkdir(parents=True)
    with follow(store, cache) as running:
        ready(running)
        assert not (cache / "films" / f"{FETCH}1").exists()


def test_a_damaged_version_is_said_and_the_next_lower_serves(
    store: Objects, models: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish(store, [models / "books" / "1"])
    second, blob = published_anew(store, models)
    good = blob.read_bytes()
    blob.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with follow(store, cache) as running:
        ready(running)
        assert running.served() == 1
        until(lambda: waits_because(running, "damaged"))
        until(lambda: "books version 2 does not come from the store" in caplog.text, "the log says so")
        assert "books version 1 does not come" not in caplog.text
        assert metric(running, "espalier_store_failures_total", reason="damaged") >= 1
        publish(store, [second], again=True)
        until(lambda: running.served() == 2)
        until(lambda: running.registry.waits_for("books") is None)


def test_a_damaged_version_is_not_downloaded_again_and_again(
    store: Objects, models: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_mirror, "RETRY_S", 60.0)
    publish(store, [models / "books" / "1"])
    published_anew(store, models)[1].write_bytes(b"damaged")
    looks: list[str] = []

    def look(store: Objects) -> dict[str, StoredModel]:
        looks.append(store.url)
        return find_models(store)

    with follow(store, cache) as running:
        until(lambda: metric(running, "espalier_store_failures_total", reason="damaged") == 1)
        monkeypatch.setattr(store_mirror, "find_models", look)
        until(lambda: len(looks) > 5)
        assert metric(running, "espalier_store_failures_total", reason="damaged") == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"generation": 2, "versions": [9], "default": 1}', "default 1 is not among"),
        ('{"generation": 1, "versions": [7], "default": 7}', "the store: no version 7 of 'books'"),
    ],
    ids=["malformed", "a version that is not there"],
)
def test_a_wrong_serving_json_changes_nothing_and_is_said(following: Running, store: Objects, text: str, reason: str) -> None:
    set_default(store, "books", 1)
    until(lambda: (following.models / "books" / "serving.json").exists())
    before = (following.models / "books" / "serving.json").read_text()
    written = folder_of(store) / "written"
    written.write_text(text)
    written.rename(folder_of(store) / serving_key("books"))  # as a whole
    until(lambda: waits_because(following, reason))
    assert following.served() == 1
    assert (following.models / "books" / "serving.json").read_text() == before
    assert (metric(following, "espalier_store_failures_total", reason="damaged") > 0) == ("among" in reason)


def test_versions_that_nobody_needs_are_deleted_but_for_the_highest(store: Objects, models: Path, cache: Path) -> None:
    publish(store, [models / "books" / "1", add_version(models, 2)])
    fetch(store, "books", 1, cache)
    shutil.copytree(models / "books" / "1", cache / "books" / "9999")  # made here, and no version of the store
    manifest = cache / "books" / "9999" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 9999'))
    set_default(store, "books", 1)
    with follow(store, cache, store_keep=1) as running:
        until(lambda: running.states().get(1) == "ready")
        publish(store, [add_version(models, 3)])
        set_default(store, "books", 3, beside=[1])
        until(lambda: running.served() == 3)
        set_default(store, "books", 2, beside=[1])
        until(lambda: running.served() == 2)
        assert running.served(1) == 1  # it serves, however old
        set_default(store, "books", 3)
        until(lambda: find_versions(cache)["books"] == (3, 9999))
        until(lambda: running.served() == 3)


def test_a_version_that_serves_is_not_deleted_for_a_pause_after_it_was_marked(
    store: Objects, models: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed_s, looks, dropped, clean = [0.0], 0, list[int](), store_mirror.StoreMirror._clean

    def cleaned(self: store_mirror.StoreMirror, name: str, needed: set[int]) -> None:
        nonlocal looks
        passed_s[0] = 0.0
        clean(self, name, needed)
        looks += 1

    monkeypatch.setattr(store_mirror, "time", SimpleNamespace(time=lambda: time.time() + passed_s[0], monotonic=time.monotonic))
    monkeypatch.setattr(store_mirror, "drop_unfinished", lambda *_: passed_s.__setitem__(0, 3600.0))
    monkeypatch.setattr(store_mirror, "drop", lambda _, version: dropped.append(version))
    monkeypatch.setattr(store_mirror.StoreMirror, "_clean", cleaned)
    publish(store, [models / "books" / "1", add_version(models, 2)])
    set_default(store, "books", 2, beside=[1])
    with follow(store, cache, store_keep=1) as running:
        ready(running)
        before = looks
        until(lambda: looks > before + 2)
    assert not dropped


def test_old_versions_make_room_for_a_new_one(store: Objects, models: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in (1, 2, 3):
        publish(store, [models / "books" / "1" if version == 1 else add_version(models, version)])
    for version in (1, 2):
        fetch(store, "books", version, cache)
    size = sum(file.stat().st_size for file in (cache / "books" / "1").iterdir())

    def usage(_: Path) -> SimpleNamespace:
        """A disk with room for two versions and a half."""
        return SimpleNamespace(free=fetching.SPARE_BYTES + 5 * size // 2 - sum(file.stat().st_size for file in cache.glob("books/*/*")))

    monkeypatch.setattr(fetching, "shutil", SimpleNamespace(disk_usage=usage, rmtree=shutil.rmtree))
    with follow(store, cache, store_keep=1) as running:
        until(lambda: running.served() == 3, lambda: str(running.registry.waits_for("books")))
        assert metric(running, "espalier_store_failures_total", reason="disk_full") >= 1
        assert 1 not in find_versions(cache)["books"]


def test_a_host_without_a_version_takes_one_that_fits(store: Objects, models: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(store, [models / "books" / "1"])
    publish(store, [add_version(models, 2)])

    def fetch_one(store: Objects, name: str, version: int, *more: Any) -> int:
        if version == 2:
            raise CacheFull("no room for version 2")
        return fetch(store, name, version, *more)

    monkeypatch.setattr(store_mirror, "fetch", fetch_one)
    with follow(store, cache) as running:
        until(partial(serves, running, 1))
        until(lambda: waits_because(running, "no room for version 2"))


def test_of_two_processes_one_follows_the_store_and_the_other_takes_over(
    store: Objects, models: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    publish(store, [models / "books" / "1"])
    size = sum(file.stat().st_size for file in (models / "books" / "1").iterdir() if file.name != "manifest.json")
    with follow(store, cache) as one, follow(store, cache) as other:
        both = one, other
        for running in both:
            until(partial(serves, running, 1))
        bytes_of = {metric(running, "espalier_store_bytes_total"): running for running in both}
        assert sorted(bytes_of) == [0, size]
        publish(store, [add_version(models, 2)])
        for running in both:
            until(partial(serves, running, 2))
        assert sum("models follow the store" in message for message in caplog.messages) == 1
        bytes_of[size].run(bytes_of[size].registry.drain(10))
        publish(store, [add_version(models, 3)])
        until(partial(serves, bytes_of[0], 3))


def test_a_folder_that_cannot_be_written_to_is_said(store: Objects, models: Path, cache: Path) -> None:
    publish(store, [models / "books" / "1"])
    cache.mkdir()
    (cache / "books").write_text("no folder")
    with follow(store, cache) as running:
        until(lambda: "Not a directory" in " ".join(running.registry.not_ready()), lambda: str(running.registry.not_ready()))
        assert str(cache) not in " ".join(running.registry.not_ready())
        os.unlink(cache / "books")
        until(lambda: not running.registry.not_ready())


def test_a_shard_has_the_two_highest_versions_and_no_other_shard(store: Objects, tmp_path: Path, cache: Path) -> None:
    for version in (1, 2, 3):
        shards = cut(whole_bundle(tmp_path / "whole", version=version, seed=version), tmp_path / "cut")
        publish(store, [shard.path for shard in shards])
    of_a_third = cache / "2" / f"{FETCH}1"
    of_a_third.mkdir(parents=True)
    with run(cache, store=store.url, store_poll_s=POLL_S, shard=1) as running:
        ready(running)
        until(lambda: {*running.registry.entry("1").ready} == {2, 3})
        assert find_versions(cache) == {"1": (2, 3)}
        with run(cache, store=store.url, store_poll_s=POLL_S, shard=0) as other:  # on the same host, with the same folder
            ready(other)
            until(lambda: {*other.registry.entry("0").ready} == {2, 3})
    assert of_a_third.is_dir()


def test_a_version_of_another_store_is_replaced_while_it_serves(
    store: Objects, models: Path, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = came_from_another(store, models, tmp_path, cache)
    stored = (folder_of(store) / manifest_key("books", 1)).read_bytes()

    def serves_as(content: bytes) -> bool:
        return [loaded.bundle.manifest for loaded in running.books.ready.values()] == [parse_manifest(content, "")]

    with follow(store, cache) as running:
        until(partial(serves_as, stored))
        assert (cache / "books" / "1" / "manifest.json").read_bytes() == stored
        assert running.served() == 1
        assert "books version 1 on this host is another one than the store's" in caplog.text
        shutil.rmtree(folder_of(store) / "models" / "books" / "1")
        shutil.copytree(folder_of(other), folder_of(store), dirs_exist_ok=True)  # the number is published again
        until(partial(serves_as, (folder_of(other) / manifest_key("books", 1)).read_bytes()))


def test_after_a_replacement_that_does_not_load_the_next_one_is_tried(
    store: Objects, models: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, [models / "books" / "1"])
    others = [Objects(f"file://{tmp_path}/{name}", create=True) for name in ("bad", "good")]
    made = [small_model(tmp_path / f"trained-{seed}", 1, "books", seed=seed) for seed in (2, 3)]
    for other, bundle in zip(others, made, strict=True):
        publish(other, [bundle.path])
    bad, good = (bundle.manifest.fingerprint for bundle in made)
    tried: list[int] = []

    def verify(bundle: Bundle, engine: Engine) -> float:
        tried.append(bundle.manifest.fingerprint)
        if tried[-1] == bad:
            raise RuntimeError("golden queries differ")
        return verify_golden(bundle, engine)

    monkeypatch.setattr(loading, "verify_golden", verify)
    with follow(store, cache) as running:
        ready(running)
        for other, fingerprint in zip(others, (bad, good), strict=True):
            shutil.copytree(folder_of(other), folder_of(store), dirs_exist_ok=True)
            until(partial(tried.__contains__, fingerprint))
        until(lambda: running.books.ready[1].bundle.manifest.fingerprint == good)
    assert tried.count(bad) == 1


def test_a_version_that_was_being_replaced_at_a_kill_is_put_back(store: Objects, models: Path, cache: Path) -> None:
    publish(store, [models / "books" / "1"])
    fetch(store, "books", 1, cache)
    (cache / "books" / "1").rename(cache / "books" / f"{FETCH}1.replaced")
    (cache / "books" / f"{FETCH}1").mkdir()
    folder_of(store).rename(folder_of(store).with_name("away"))
    with follow(store, cache) as running:
        until(lambda: running.served() == 1)


def test_a_version_whose_replacement_cannot_be_put_in_place_stays(
    store: Objects, models: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    came_from_another(store, models, tmp_path, cache)
    before, rename = (cache / "books" / "1" / "manifest.json").read_bytes(), Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name == f"{FETCH}1":
            raise OSError("input/output error")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(OSError, match="input/output"):
            fetch(store, "books", 1, cache)
    assert (cache / "books" / "1" / "manifest.json").read_bytes() == before
    fetch(store, "books", 1, cache)
    assert (cache / "books" / "1" / "manifest.json").read_bytes() == (models / "books" / "1" / "manifest.json").read_bytes()


def test_a_version_that_was_made_here_is_not_replaced(store: Objects, models: Path, cache: Path, tmp_path: Path) -> None:
    publish(store, [models / "books" / "1"])
    made = small_model(cache, 1, "books", seed=2).path / "manifest.json"
    before = made.read_bytes()
    with follow(store, cache) as running:
        until(lambda: waits_because(running, "books/1: there with another content than the store's; remove it"))
        assert running.served() == 1
    assert made.read_bytes() == before


def test_a_version_that_is_deleted_in_the_store_serves_no_more(
    following: Running, store: Objects, models: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish(store, [add_version(models, 2)])
    until(lambda: following.served() == 2)
    manifest = folder_of(store) / manifest_key("books", 2)
    manifest.unlink()
    until(lambda: following.served() == 1)
    until(lambda: find_versions(cache)["books"] == (1,))
    until(lambda: "books version 2 is deleted here, because the store has it no more" in caplog.text)
    shutil.rmtree(folder_of(store) / "models" / "books")
    until(lambda: "books goes on serving, although the store has no version of it any more" in caplog.text)
    assert following.served() == 1


@pytest.mark.parametrize("versions", [(2, 3), (1, 2, 3)])
def test_a_shard_that_is_deleted_in_the_store_serves_no_more(
    store: Objects, tmp_path: Path, cache: Path, versions: tuple[int, ...]
) -> None:
    for version in versions:
        whole = whole_bundle(tmp_path / "whole", version=version, seed=version)
        publish(store, [shard.path for shard in cut(whole, tmp_path / "cut")])
    with run(cache, store=store.url, store_poll_s=POLL_S, poll_s=0.05, shard=1) as running:
        ready(running)
        until(lambda: {*running.registry.entry("1").ready} == {2, 3})
        (folder_of(store) / manifest_key("1", 3)).unlink()
        until(lambda: {*running.registry.entry("1").ready} == {*versions} - {3})
        assert running.registry.entry("1").version == 2
        until(lambda: metric(running, "espalier_reload_total", model="1", outcome="unloaded") == 1)
        assert running.registry.entry("1").reasons == {}


def test_a_pinned_version_that_is_deleted_in_the_store_serves_on_and_later_pins_are_followed(
    following: Running, store: Objects, models: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    set_default(store, "books", 1)
    until(lambda: (cache / "books" / "serving.json").exists())
    (folder_of(store) / manifest_key("books", 1)).rename(folder_of(store) / "gone")
    publish(store, [add_version(models, 2)])
    until(lambda: "books version 1 does not come from the store" in caplog.text)
    assert following.served() == 1
    serving = folder_of(store) / serving_key("books")
    serving.write_text('{"generation": 9, "versions": [1, 2], "default": 2}')
    until(lambda: following.served() == 2)
    until(lambda: waits_because(following, "no version 1 of 'books'"))
