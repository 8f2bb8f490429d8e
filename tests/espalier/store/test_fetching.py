"""A version comes as a whole or not at all, whatever is cut, damaged or full."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from benchmarks.random_bundles import make_bundle
from espalier.bundle import Bundle, find_versions
from espalier.errors import CacheFull, StoreConflict, StoreDamaged, StoreMissing, StoreUnavailable
from espalier.store import fetching
from espalier.store.fetching import BeingFetched, Progress, drop, drop_unfinished, fetch
from espalier.store.models import blob_key
from espalier.store.objects import Objects
from espalier.store.publishing import publish
from espalier.tree import complete_tree
from tests.espalier.store.conftest import in_threads
from tests.object_stores import CuttingProxy

RANGE = 1 << 16


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A version whose node rows are a megabyte, which come in ranges of 64 KiB."""
    monkeypatch.setattr(fetching, "RANGE_BYTES", RANGE)
    rng = np.random.default_rng(1)
    return make_bundle(tmp_path / "made", rng, complete_tree(rng.permutation(512), 2), name="large", width=256, integer=False).path


class Cut(Exception):
    """A download ends here, as if its process had."""


def cut_after(count: int) -> Callable[[Progress, int], None]:
    def check(progress: Progress, _: int) -> None:
        if progress.came >= count:
            raise Cut

    return check


def blob_of(store: Objects, folder: Path, part: str) -> Path:
    """The file of a blob in a file:// store."""
    digest = Bundle.open(folder, verify=False).manifest.files[part].sha256
    return Path(urlsplit(store.url).path) / blob_key(digest)


@pytest.fixture
def folder_store(tmp_path: Path) -> Objects:
    return Objects(f"file://{tmp_path}/store", create=True)


def test_a_fetched_version_is_the_published_one(store: Objects, large: Path, cache: Path) -> None:
    publish(store, [large])
    seen: list[Progress] = []
    came = fetch(store, "large", 1, cache, lambda progress, _: seen.append(progress))
    assert Bundle.open(cache / "large" / "1").manifest == Bundle.open(large).manifest
    for file in large.iterdir():
        assert (cache / "large" / "1" / file.name).read_bytes() == file.read_bytes()
    assert came == seen[-1].came == seen[-1].size
    assert len(seen) > 10
    assert fetch(store, "large", 1, cache) == 0


def test_a_cut_download_is_not_visible_and_goes_on_where_it_was(store: Objects, large: Path, cache: Path) -> None:
    publish(store, [large])
    size = sum(file.stat().st_size for file in large.iterdir() if file.name != "manifest.json")
    with pytest.raises(Cut):
        fetch(store, "large", 1, cache, cut_after(500_000))
    assert find_versions(cache) == {}
    assert not (cache / "large" / "1").exists()
    drop_unfinished(cache / "large", keep={1})
    assert size - 500_000 - RANGE <= fetch(store, "large", 1, cache) <= size - 500_000
    Bundle.open(cache / "large" / "1")


def test_leftovers_of_downloads_that_nobody_wants_go(folder_store: Objects, large: Path, cache: Path) -> None:
    publish(folder_store, [large])
    with pytest.raises(Cut):
        fetch(folder_store, "large", 1, cache, cut_after(300_000))
    assert (cache / "large" / ".fetch-1").is_dir()
    drop_unfinished(cache / "large", keep={2})
    assert not (cache / "large" / ".fetch-1").exists()


def test_what_came_before_a_cut_is_hashed_again(folder_store: Objects, large: Path, cache: Path) -> None:
    publish(folder_store, [large])
    with pytest.raises(Cut):
        fetch(folder_store, "large", 1, cache, cut_after(500_000))
    part = cache / "large" / ".fetch-1" / "nodes.safetensors"
    begun = part.stat().st_size
    assert begun
    content = bytearray(part.read_bytes())
    content[5] ^= 1
    part.write_bytes(content)
    fetch(folder_store, "large", 1, cache)
    Bundle.open(cache / "large" / "1")


def test_a_part_that_is_too_long_begins_anew(folder_store: Objects, books: Path, cache: Path) -> None:
    publish(folder_store, [books / "1"])
    begun = cache / "books" / ".fetch-1"
    begun.mkdir(parents=True)
    (begun / "items.arrow").write_bytes(bytes(1 << 20))
    (begun / "left-over").write_bytes(b"of another manifest")
    fetch(folder_store, "books", 1, cache)
    Bundle.open(cache / "books" / "1")
    assert not (cache / "books" / "1" / "left-over").exists()


def test_connections_that_end_midway_only_delay(s3_only: Objects, large: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second large answer ends after 20 kB: each attempt brings something, and after some the version is there."""
    publish(s3_only, [large])
    parts = urlsplit(os.environ["AWS_ENDPOINT_URL"])
    proxy = CuttingProxy(str(parts.hostname), int(parts.port or 0))
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
    proxied = Objects(s3_only.url)
    proxy.cut_after, proxy.every = 20_000, 2
    tries = 0
    while not (cache / "large" / "1").exists():
        tries += 1
        assert tries < 30
        with suppress(StoreUnavailable):
            fetch(proxied, "large", 1, cache)
    proxy.close()
    assert proxy.cuts > 3
    Bundle.open(cache / "large" / "1")


def test_a_damaged_blob_is_refused_and_removed(folder_store: Objects, large: Path, cache: Path) -> None:
    publish(folder_store, [large])
    blob = blob_of(folder_store, large, "nodes.safetensors")
    content = bytearray(blob.read_bytes())
    content[len(content) // 2] ^= 1
    blob.write_bytes(content)
    with pytest.raises(StoreDamaged, match=rf"{blob.name}: damaged: its SHA-256 is not its name"):
        fetch(folder_store, "large", 1, cache)
    assert not (cache / "large" / ".fetch-1" / "nodes.safetensors").exists()
    assert find_versions(cache) == {}
    publish(folder_store, [large])
    with pytest.raises(StoreDamaged):
        fetch(folder_store, "large", 1, cache)
    publish(folder_store, [large], again=True)
    fetch(folder_store, "large", 1, cache)
    Bundle.open(cache / "large" / "1")


def test_a_blob_of_another_size_is_refused_before_it_is_downloaded(folder_store: Objects, large: Path, cache: Path) -> None:
    publish(folder_store, [large])
    blob = blob_of(folder_store, large, "nodes.safetensors")
    blob.write_bytes(blob.read_bytes()[:-1])
    with pytest.raises(StoreDamaged, match="bytes, the manifest says"):
        fetch(folder_store, "large", 1, cache)
    blob.unlink()
    with pytest.raises(StoreMissing, match=r"missing, although a manifest lists it"):
        fetch(folder_store, "large", 1, cache)


def test_a_version_that_is_not_there_is_said(store: Objects, books: Path, cache: Path) -> None:
    publish(store, [books / "1"])
    with pytest.raises(StoreMissing, match="no version 3 of 'books'"):
        fetch(store, "books", 3, cache)


def test_what_is_no_version_is_not_replaced(folder_store: Objects, books: Path, cache: Path) -> None:
    publish(folder_store, [books / "1"])
    (cache / "books" / "1").mkdir(parents=True)
    with pytest.raises(StoreConflict, match=r"there without a manifest.json; remove it"):
        fetch(folder_store, "books", 1, cache)
    assert not (cache / "books" / ".fetch-1").exists()


@pytest.mark.parametrize("part", ["../escaped", "/tmp/escaped", "a/b", "..", "manifest.json"])
def test_names_of_files_cannot_leave_the_folder(folder_store: Objects, books: Path, cache: Path, part: str) -> None:
    file = books / "1" / "manifest.json"
    text = file.read_text().replace('"heldout.parquet"', f'"{part}"')
    assert part in text
    folder_store.write("models/books/1/manifest.json", iter([text.encode()]), len(text))
    with pytest.raises(StoreDamaged):
        fetch(folder_store, "books", 1, cache)
    assert not (cache / "books").exists()


def test_more_than_the_disk_has_is_refused_before_the_download(folder_store: Objects, books: Path, cache: Path) -> None:
    text = (books / "1" / "manifest.json").read_text()
    size = str((books / "1" / "nodes.safetensors").stat().st_size)
    text = text.replace(f'"size": {size}', '"size": 4000000000000000')
    folder_store.write("models/books/1/manifest.json", iter([text.encode()]), len(text))
    with pytest.raises(CacheFull, match=r"needs 40000000000\d+ more bytes, and 16777216 to spare"):
        fetch(folder_store, "books", 1, cache)
    assert not (cache / "books" / ".fetch-1").exists()


def test_a_disk_that_fills_up_is_a_clean_error(folder_store: Objects, large: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(folder_store, [large])

    def full(progress: Progress, _: int) -> None:
        if progress.came > 300_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CacheFull, match=r"no room for version 1 of \d+ bytes \(No space left on device\)"):
        fetch(folder_store, "large", 1, cache, full)
    assert os.listdir(cache / "large") == [".fetch.lock"]


def test_two_processes_do_not_download_the_same_version_at_once(folder_store: Objects, large: Path, cache: Path) -> None:
    publish(folder_store, [large])
    (cache / "large").mkdir(parents=True)
    with (cache / "large" / ".fetch.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(BeingFetched, match="another process downloads"):
            fetch(folder_store, "large", 1, cache)
    assert fetch(folder_store, "large", 1, cache) > 0


def test_of_many_at_once_one_downloads(folder_store: Objects, large: Path, cache: Path) -> None:
    publish(folder_store, [large])
    came: list[int] = []

    def go() -> None:
        while True:
            try:
                came.append(fetch(folder_store, "large", 1, cache))
                return
            except BeingFetched:
                continue

    in_threads([go] * 4)
    assert sorted(count > 0 for count in came) == [False, False, False, True]
    Bundle.open(cache / "large" / "1")


def test_only_what_came_from_a_store_is_dropped(folder_store: Objects, books: Path, cache: Path) -> None:
    publish(folder_store, [books / "1", books / "2"])
    fetch(folder_store, "books", 1, cache)
    shutil.copytree(books / "2", cache / "books" / "2")  # made here
    assert drop(cache / "books", 1)
    assert not drop(cache / "books", 2)
    assert find_versions(cache) == {"books": (2,)}
    assert sorted(os.listdir(cache / "books")) == [".fetch.lock", "2"]
