"""What is published is there as a whole, once, and as it was; a version comes whole or not at all, whatever is cut, damaged or full."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import obstore
import pytest
from obstore.exceptions import BaseError

from benchmarks.random_bundles import make_bundle
from espalier.bundle import Bundle, find_versions
from espalier.errors import (
    BundleCorrupt,
    BundleNotFound,
    CacheFull,
    StoreConflict,
    StoreDamaged,
    StoreError,
    StoreMissing,
    StoreUnavailable,
)
from espalier.serving import Candidate
from espalier.store import fetching, objects
from espalier.store.fetching import BeingFetched, Progress, drop, drop_unfinished, fetch
from espalier.store.models import blob_key, find_models, manifest_key, read_manifest, read_serving, serve_highest, serving_key, set_default
from espalier.store.objects import Objects
from espalier.store.publishing import Published, publish
from espalier.store.urls import check_url
from espalier.tree import complete_tree
from tests.object_stores import CuttingProxy, two_versions


@pytest.fixture
def books(tmp_path: Path) -> Path:
    return two_versions(tmp_path / "made")


def in_threads(calls: Sequence[Callable[[], object]]) -> None:
    """All at once."""
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> None:
        start.wait()
        call()

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# -- publishing -----------------------------------------------------------------------------------------------------------


def blobs(store: Objects) -> set[str]:
    return {found.key for found in store.list("blobs", 1000)}


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_published_version_is_its_blobs_and_its_manifest(store: Objects, books: Path) -> None:
    manifest = Bundle.open(books / "1").manifest
    (done,) = publish(store, [books / "1"])
    assert done.new
    assert done.uploaded_bytes == sum(info.size for info in manifest.files.values())
    found = read_manifest(store, "books", 1)
    assert found is not None
    assert found.content == (books / "1" / "manifest.json").read_bytes()
    assert blobs(store) == {blob_key(info.sha256) for info in manifest.files.values()}
    assert find_models(store)["books"].versions == (1,)


def test_what_the_store_has_is_not_sent_again(files: Objects, books: Path) -> None:
    publish(files, [books / "1"])
    again = publish(files, [books / "1"])
    assert again == [Published("books", 1, new=False, uploaded_bytes=0, present_bytes=again[0].present_bytes)]
    copied = publish(files, [books / "1"], again=True)
    assert (copied[0].uploaded_bytes, copied[0].present_bytes) == (again[0].present_bytes, 0)


def test_half_a_blob_is_sent_again(files: Objects, books: Path) -> None:
    info = Bundle.open(books / "1").manifest.files["items.arrow"]
    files.write(blob_key(info.sha256), iter([b"half"]), 4)
    publish(files, [books / "1"])
    found = files.read(blob_key(info.sha256), info.size)
    assert found is not None
    assert found.content == (books / "1" / "items.arrow").read_bytes()


def test_large_files_go_in_parts(s3_only: Objects, books: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "PART_BYTES", 5 << 20)
    content = bytes(range(256)) * (45 << 10)
    s3_only.write("large", iter([content[i : i + 1_000_000] for i in range(0, len(content), 1_000_000)]), len(content))
    found = s3_only.read("large", len(content))
    assert found is not None
    assert found.content == content
    assert found.etag is not None
    assert found.etag.endswith('-3"')  # S3's tag of an object of three parts


@pytest.mark.parametrize("others", [b"12345678", b"1234", None])
def test_parts_that_azure_drops_do_not_matter_if_another_process_has_written_the_object(
    files: Objects, monkeypatch: pytest.MonkeyPatch, others: bytes | None
) -> None:
    """The answer is Azurite's. Azure commits the parts of the first process that is done, and forgets the others'."""
    content, put = b"12345678", obstore.put

    def put_parts(*arguments: Any, use_multipart: bool, **options: Any) -> Any:
        if not use_multipart:
            return put(*arguments, use_multipart=False, **options)
        if others is not None:
            files.create("blob", others)
        raise BaseError("400 Bad Request: <Code>InvalidBlockList</Code>")

    monkeypatch.setattr(objects, "PART_BYTES", 4)
    monkeypatch.setattr(obstore, "put", put_parts)
    with nullcontext() if others == content else pytest.raises(StoreUnavailable, match="InvalidBlockList"):
        files.write("blob", iter([content]), len(content))


def test_a_version_with_other_content_is_refused_and_nothing_of_it_is_sent(store: Objects, books: Path) -> None:
    publish(store, [books / "1"])
    before = blobs(store)
    file = books / "2" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 1}))
    shutil.rmtree(books / "1")
    (books / "2").rename(books / "1")
    with pytest.raises(StoreConflict, match="version 1 of 'books' exists with other content"):
        publish(store, [books / "1"])
    assert blobs(store) == before


def test_a_damaged_file_never_becomes_a_blob(files: Objects, books: Path) -> None:
    damage(books / "1" / "nodes.safetensors")
    with pytest.raises(BundleCorrupt, match=r"nodes.safetensors: its SHA-256 is not the manifest's"):
        publish(files, [books / "1"])
    assert find_models(files) == {}
    assert blob_key(Bundle.open(books / "1", verify=False).manifest.files["nodes.safetensors"].sha256) not in blobs(files)


def test_half_a_bundle_is_refused_before_anything_is_sent(files: Objects, books: Path) -> None:
    (books / "2" / "tree.safetensors").unlink()
    with pytest.raises(BundleNotFound, match=r"tree.safetensors: missing"):
        publish(files, [books / "1", books / "2"])
    (books / "1").rename(books / "7")
    with pytest.raises(BundleCorrupt, match="it says books version 1, expected books version 7"):
        publish(files, [books / "7"])
    assert blobs(files) == set()


def test_of_publishers_at_once_one_writes_the_version(store: Objects, books: Path, tmp_path: Path) -> None:
    """Six publish version 1 of two contents at once: those of one content succeed, one of them as the first, and all others are refused."""
    other = tmp_path / "other" / "books" / "1"
    other.parent.mkdir(parents=True)
    shutil.copytree(books / "2", other)
    (other / "manifest.json").write_text(json.dumps(json.loads((other / "manifest.json").read_text()) | {"version": 1}))
    done: list[tuple[Path, bool]] = []
    refused: list[Path] = []

    def go(folder: Path) -> None:
        try:
            done.append((folder, publish(store, [folder])[0].new))
        except StoreConflict:
            refused.append(folder)

    in_threads([partial(go, folder) for folder in (books / "1", other) * 3])
    winner = {folder for folder, _ in done}
    assert len(winner) == 1
    assert sum(new for _, new in done) == 1
    assert winner.isdisjoint(refused)
    assert len(done) + len(refused) == 6
    fetch(store, "books", 1, tmp_path / "cache")
    assert (tmp_path / "cache/books/1/manifest.json").read_bytes() == (winner.pop() / "manifest.json").read_bytes()


def test_a_store_that_lets_two_create_the_same_object_is_noticed(files: Objects, books: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake of stores that know no `If-None-Match`: the other publisher's manifest came between."""

    def create(key: str, content: bytes) -> bool:
        files.write(key, iter([content + b" "]), len(content) + 1)
        return True

    monkeypatch.setattr(files, "create", create)
    with pytest.raises(StoreConflict, match="other content"):
        publish(files, [books / "1"])


def test_a_manifest_that_the_store_drops_is_not_said_to_have_other_content(
    files: Objects, books: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake of S3 while another process deletes the manifest: it answers 409 and writes nothing."""
    with monkeypatch.context() as patch:
        patch.setattr(files, "create", lambda key, content: False)
        with pytest.raises(StoreConflict, match=r"1/manifest\.json: not written, .*publish again"):
            publish(files, [books / "1"])
    assert publish(files, [books / "1"])[0].new


def test_the_default_is_set_and_rolled_back_and_given_up(store: Objects, books: Path) -> None:
    publish(store, [books / "1", books / "2"])
    assert read_serving(store, "books") == (None, None)
    set_default(store, "books", 2)
    set_default(store, "books", 1, beside=[2])
    serving, etag = read_serving(store, "books")
    assert serving is not None
    assert (serving.generation, serving.versions, serving.default) == (2, (1, 2), 1)
    assert find_models(store)["books"].etag == etag is not None
    serve_highest(store, "books")
    assert read_serving(store, "books") == (None, None)


def test_only_stored_versions_may_serve(files: Objects, books: Path) -> None:
    publish(files, [books / "1"])
    with pytest.raises(StoreMissing, match="no version 3 of 'books'; there: 1"):
        set_default(files, "books", 3)
    with pytest.raises(StoreMissing, match="no version 4"):
        set_default(files, "books", 1, candidate=Candidate(version=4, share=0.1))
    with pytest.raises(StoreMissing, match="no model 'films'"):
        serve_highest(files, "films")


def test_no_change_of_the_default_is_lost(store: Objects, books: Path) -> None:
    publish(store, [books / "1", books / "2"])
    in_threads([partial(set_default, store, "books", 1 + i % 2) for i in range(4)])
    serving, _ = read_serving(store, "books")
    assert serving is not None
    assert serving.generation == 4


def test_what_is_no_model_in_a_store_is_ignored(files: Objects, books: Path) -> None:
    publish(files, [books / "1"])
    content = b"{}"
    for key in (
        "models/books/01/manifest.json",
        "models/Books/1/manifest.json",
        "models/books/x/manifest.json",
        "models/films/serving.json",
    ):
        files.write(key, iter([content]), len(content))
    assert {name: found.versions for name, found in find_models(files).items()} == {"books": (1,)}


def test_a_store_with_too_much_in_it_is_refused(store: Objects, books: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(store, [books / "1", books / "2"])
    monkeypatch.setattr("espalier.store.models.MAX_LISTED", 1)
    with pytest.raises(StoreDamaged, match="more than 1 objects"):
        find_models(store)


def test_what_a_store_says_is_checked(files: Objects, books: Path) -> None:
    for key, content, said in (
        (manifest_key("books", 1), b"[]", "schema_version"),
        (manifest_key("books", 2), (books / "1" / "manifest.json").read_bytes(), "it says books version 1, expected books version 2"),
    ):
        files.write(key, iter([content]), len(content))
        with pytest.raises(StoreDamaged, match=said):
            read_manifest(files, "books", 1 if said == "schema_version" else 2)
    wrong = b'{"generation": 1, "versions": [2], "default": 1}'
    files.write(serving_key("books"), iter([wrong]), len(wrong))
    with pytest.raises(StoreDamaged, match="default 1 is not among the versions"):
        read_serving(files, "books")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://key:secret@bucket/path", "no keys"),
        ("s3://bucket/path?secret=1", "no keys"),
        ("ftp://bucket", "expected s3://BUCKET/PATH"),
        ("s3:///path", "name of the bucket"),
        ("file://relative/path", "absolute path"),
        ("file:///", "absolute path"),
        ("s3://bucket/../path", "without `.`"),
        ("s3://bucket/%2e%2e/path", "without `.`"),
        ("s3://a b", "a name of letters"),
        ("gs://a b", "a name of letters"),
        ("s3://bucket:99999999/path", "no port"),
        ("s3://[bucket", "expected s3://BUCKET/PATH"),
        ("s3://bucket/\udcff", "expected s3://BUCKET/PATH"),
        ("s3://bucket/%ff", "expected s3://BUCKET/PATH"),
        ("s3://bucket/a//b", "without empty parts"),
        ("s3://bucket/a%00", "control characters"),
        ("s3://buc\nket/a", "control characters"),
    ],
)
def test_a_malformed_url_is_refused_without_showing_its_secrets(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        check_url(url)
    assert "secret" not in str(refused.value).replace("AWS_SECRET_ACCESS_KEY", "")


def test_errors_name_the_store_and_no_secret(s3_only: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreMissing, match=r"s3://no-such-bucket: 404 Not Found \(NoSuchBucket\)"):
        find_models(Objects("s3://no-such-bucket"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(StoreError, match="s3://models/here/models: Connection refused") as refused:
        find_models(Objects("s3://models/here"))
    assert "not-shown" not in str(refused.value)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", f"{tmp_path}/nothing.json")
    with pytest.raises(StoreUnavailable, match=r"gs://models: .* service account file from .*nothing\.json: No such file"):
        Objects("gs://models")
    with pytest.raises(StoreMissing, match="no such folder"):
        Objects(f"file://{tmp_path}/nothing")


def test_a_silent_store_is_an_error_after_its_time(s3_only: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "READ_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are taken, and never answered
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(StoreUnavailable, match="no answer in time"):
            find_models(Objects("s3://models/here"))


# -- fetching -------------------------------------------------------------------------------------------------------------


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
        if progress.bytes_on_disk >= count:
            raise Cut

    return check


def blob_of(store: Objects, folder: Path, part: str) -> Path:
    """The file of a blob in a file:// store."""
    digest = Bundle.open(folder, verify=False).manifest.files[part].sha256
    return Path(urlsplit(store.url).path) / blob_key(digest)


def test_a_fetched_version_is_the_published_one(store: Objects, large: Path, cache: Path) -> None:
    publish(store, [large])
    seen: list[Progress] = []
    came = fetch(store, "large", 1, cache, lambda progress, _: seen.append(progress))
    assert Bundle.open(cache / "large" / "1").manifest == Bundle.open(large).manifest
    for file in large.iterdir():
        assert (cache / "large" / "1" / file.name).read_bytes() == file.read_bytes()
    assert came == seen[-1].bytes_on_disk == seen[-1].size
    assert len(seen) > 10
    assert fetch(store, "large", 1, cache) == 0


def test_a_cut_download_is_not_visible_and_goes_on_where_it_was(store: Objects, large: Path, cache: Path) -> None:
    """Unless nobody wants it: then what has come of it goes."""
    publish(store, [large])
    size = sum(file.stat().st_size for file in large.iterdir() if file.name != "manifest.json")
    with pytest.raises(Cut):
        fetch(store, "large", 1, cache, cut_after(500_000))
    assert find_versions(cache) == {}
    assert not (cache / "large" / "1").exists()
    drop_unfinished(cache / "large", keep={2})
    assert not (cache / "large" / ".fetch-1").exists()
    with pytest.raises(Cut):
        fetch(store, "large", 1, cache, cut_after(500_000))
    drop_unfinished(cache / "large", keep={1})
    assert size - 500_000 - RANGE <= fetch(store, "large", 1, cache) <= size - 500_000
    Bundle.open(cache / "large" / "1")


def test_what_came_before_a_cut_is_hashed_again(files: Objects, large: Path, cache: Path) -> None:
    publish(files, [large])
    with pytest.raises(Cut):
        fetch(files, "large", 1, cache, cut_after(500_000))
    part = cache / "large" / ".fetch-1" / "nodes.safetensors"
    begun = part.stat().st_size
    assert begun
    content = bytearray(part.read_bytes())
    content[5] ^= 1
    part.write_bytes(content)
    fetch(files, "large", 1, cache)
    Bundle.open(cache / "large" / "1")


def test_a_part_that_is_too_long_begins_anew(files: Objects, books: Path, cache: Path) -> None:
    publish(files, [books / "1"])
    begun = cache / "books" / ".fetch-1"
    begun.mkdir(parents=True)
    (begun / "items.arrow").write_bytes(bytes(1 << 20))
    (begun / "left-over").write_bytes(b"of another manifest")
    fetch(files, "books", 1, cache)
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


def test_a_damaged_blob_is_refused_and_removed(files: Objects, large: Path, cache: Path) -> None:
    publish(files, [large])
    blob = blob_of(files, large, "nodes.safetensors")
    content = bytearray(blob.read_bytes())
    content[len(content) // 2] ^= 1
    blob.write_bytes(content)
    with pytest.raises(StoreDamaged, match=rf"{blob.name}: damaged: its SHA-256 is not the one"):
        fetch(files, "large", 1, cache)
    assert not (cache / "large" / ".fetch-1" / "nodes.safetensors").exists()
    assert find_versions(cache) == {}
    publish(files, [large])
    with pytest.raises(StoreDamaged):
        fetch(files, "large", 1, cache)
    publish(files, [large], again=True)
    fetch(files, "large", 1, cache)
    Bundle.open(cache / "large" / "1")


def test_a_blob_of_another_size_is_refused_before_it_is_downloaded(files: Objects, large: Path, cache: Path) -> None:
    publish(files, [large])
    blob = blob_of(files, large, "nodes.safetensors")
    blob.write_bytes(blob.read_bytes()[:-1])
    with pytest.raises(StoreDamaged, match="bytes, the manifest says"):
        fetch(files, "large", 1, cache)
    blob.unlink()
    with pytest.raises(StoreMissing, match=r"missing, although a manifest lists it"):
        fetch(files, "large", 1, cache)


def test_a_version_that_is_not_there_is_said(files: Objects, books: Path, cache: Path) -> None:
    publish(files, [books / "1"])
    with pytest.raises(StoreMissing, match="no version 3 of 'books'"):
        fetch(files, "books", 3, cache)


def test_what_is_no_version_is_not_replaced(files: Objects, books: Path, cache: Path) -> None:
    publish(files, [books / "1"])
    (cache / "books" / "1").mkdir(parents=True)
    with pytest.raises(StoreConflict, match=r"there without a manifest.json; remove it"):
        fetch(files, "books", 1, cache)
    assert not (cache / "books" / ".fetch-1").exists()


@pytest.mark.parametrize("part", ["../escaped", "/tmp/escaped", "a/b", "..", "manifest.json"])
def test_names_of_files_cannot_leave_the_folder(files: Objects, books: Path, cache: Path, part: str) -> None:
    file = books / "1" / "manifest.json"
    text = file.read_text().replace('"heldout.parquet"', f'"{part}"')
    assert part in text
    files.write("models/books/1/manifest.json", iter([text.encode()]), len(text))
    with pytest.raises(StoreDamaged):
        fetch(files, "books", 1, cache)
    assert not (cache / "books").exists()


def test_more_than_the_disk_has_is_refused_before_the_download(files: Objects, books: Path, cache: Path) -> None:
    text = (books / "1" / "manifest.json").read_text()
    size = str((books / "1" / "nodes.safetensors").stat().st_size)
    text = text.replace(f'"size": {size}', '"size": 4000000000000000')
    files.write("models/books/1/manifest.json", iter([text.encode()]), len(text))
    with pytest.raises(CacheFull, match=r"needs 40000000000\d+ more bytes, and 16777216 to spare"):
        fetch(files, "books", 1, cache)
    assert not (cache / "books" / ".fetch-1").exists()


def test_a_disk_that_fills_up_is_a_clean_error(files: Objects, large: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(files, [large])

    def full(progress: Progress, _: int) -> None:
        if progress.bytes_on_disk > 300_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CacheFull, match=r"no room for version 1 of \d+ bytes \(No space left on device\)"):
        fetch(files, "large", 1, cache, full)
    assert os.listdir(cache / "large") == [".fetch.lock"]


def test_two_processes_do_not_download_the_same_version_at_once(files: Objects, large: Path, cache: Path) -> None:
    publish(files, [large])
    (cache / "large").mkdir(parents=True)
    with (cache / "large" / ".fetch.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(BeingFetched, match="another process downloads"):
            fetch(files, "large", 1, cache)
    assert fetch(files, "large", 1, cache) > 0


def test_of_many_at_once_one_downloads(files: Objects, large: Path, cache: Path) -> None:
    publish(files, [large])
    came: list[int] = []

    def go() -> None:
        while True:
            try:
                came.append(fetch(files, "large", 1, cache))
                return
            except BeingFetched:
                continue

    in_threads([go] * 4)
    assert sorted(count > 0 for count in came) == [False, False, False, True]
    Bundle.open(cache / "large" / "1")


def test_only_what_came_from_a_store_is_dropped(files: Objects, books: Path, cache: Path) -> None:
    publish(files, [books / "1", books / "2"])
    fetch(files, "books", 1, cache)
    shutil.copytree(books / "2", cache / "books" / "2")  # made here
    assert drop(cache / "books", 1)
    assert not drop(cache / "books", 2)
    assert find_versions(cache) == {"books": (2,)}
    assert sorted(os.listdir(cache / "books")) == [".fetch.lock", "2"]
