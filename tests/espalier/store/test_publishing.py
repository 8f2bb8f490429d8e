"""What is published is there as a whole, once, and as it was."""

from __future__ import annotations

import json
import shutil
import socket
from functools import partial
from pathlib import Path

import pytest

from espalier.bundle import Bundle
from espalier.errors import BundleCorrupt, BundleNotFound, StoreConflict, StoreDamaged, StoreError, StoreMissing, StoreUnavailable
from espalier.store import objects
from espalier.store.fetching import fetch
from espalier.store.models import blob_key, find_models, manifest_key, read_manifest, read_serving, serve_highest, serving_key, set_default
from espalier.store.objects import Objects
from espalier.store.publishing import Published, publish
from espalier.store.urls import check_url
from tests.espalier.store.conftest import in_threads


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
    assert done.sent == sum(info.size for info in manifest.files.values())
    found = read_manifest(store, "books", 1)
    assert found is not None
    assert found.content == (books / "1" / "manifest.json").read_bytes()
    assert blobs(store) == {blob_key(info.sha256) for info in manifest.files.values()}
    assert find_models(store)["books"].versions == (1,)


def test_what_the_store_has_is_not_sent_again(store: Objects, books: Path) -> None:
    publish(store, [books / "1"])
    again = publish(store, [books / "1"])
    assert again == [Published("books", 1, new=False, sent=0, there=again[0].there)]
    copied = publish(store, [books / "1"], again=True)
    assert (copied[0].sent, copied[0].there) == (again[0].there, 0)


def test_half_a_blob_is_sent_again(store: Objects, books: Path) -> None:
    info = Bundle.open(books / "1").manifest.files["items.arrow"]
    store.write(blob_key(info.sha256), iter([b"half"]), 4)
    publish(store, [books / "1"])
    found = store.read(blob_key(info.sha256), info.size)
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


def test_a_damaged_file_never_becomes_a_blob(store: Objects, books: Path) -> None:
    damage(books / "1" / "nodes.safetensors")
    with pytest.raises(BundleCorrupt, match=r"nodes.safetensors: its SHA-256 is not the manifest's"):
        publish(store, [books / "1"])
    assert find_models(store) == {}
    assert blob_key(Bundle.open(books / "1", verify=False).manifest.files["nodes.safetensors"].sha256) not in blobs(store)


def test_half_a_bundle_is_refused_before_anything_is_sent(store: Objects, books: Path) -> None:
    (books / "2" / "tree.safetensors").unlink()
    with pytest.raises(BundleNotFound, match=r"tree.safetensors: missing"):
        publish(store, [books / "1", books / "2"])
    (books / "1").rename(books / "7")
    with pytest.raises(BundleCorrupt, match="it says books version 1, expected books version 7"):
        publish(store, [books / "7"])
    assert blobs(store) == set()


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


def test_a_store_that_lets_two_create_the_same_object_is_noticed(store: Objects, books: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake of stores that know no `If-None-Match`: the other publisher's manifest came between."""

    def create(key: str, content: bytes) -> bool:
        store.write(key, iter([content + b" "]), len(content) + 1)
        return True

    monkeypatch.setattr(store, "create", create)
    with pytest.raises(StoreConflict, match="other content"):
        publish(store, [books / "1"])


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


def test_only_stored_versions_may_serve(store: Objects, books: Path) -> None:
    publish(store, [books / "1"])
    with pytest.raises(StoreMissing, match="no version 3 of 'books'; there: 1"):
        set_default(store, "books", 3)
    with pytest.raises(StoreMissing, match="no model 'films'"):
        serve_highest(store, "films")


def test_no_change_of_the_default_is_lost(store: Objects, books: Path) -> None:
    publish(store, [books / "1", books / "2"])
    in_threads([partial(set_default, store, "books", 1 + i % 2) for i in range(4)])
    serving, _ = read_serving(store, "books")
    assert serving is not None
    assert serving.generation == 4


def test_what_is_no_model_in_a_store_is_ignored(store: Objects, books: Path) -> None:
    publish(store, [books / "1"])
    content = b"{}"
    for key in (
        "models/books/01/manifest.json",
        "models/Books/1/manifest.json",
        "models/books/x/manifest.json",
        "models/films/serving.json",
    ):
        store.write(key, iter([content]), len(content))
    assert {name: found.versions for name, found in find_models(store).items()} == {"books": (1,)}


def test_a_store_with_too_much_in_it_is_refused(store: Objects, books: Path) -> None:
    publish(store, [books / "1", books / "2"])
    with pytest.raises(StoreDamaged, match="more than 1 objects"):
        find_models(store, most=1)


def test_what_a_store_says_is_checked(store: Objects, books: Path) -> None:
    for key, content, said in (
        (manifest_key("books", 1), b"[]", "schema_version"),
        (manifest_key("books", 2), (books / "1" / "manifest.json").read_bytes(), "it says books version 1, expected books version 2"),
    ):
        store.write(key, iter([content]), len(content))
        with pytest.raises(StoreDamaged, match=said):
            read_manifest(store, "books", 1 if said == "schema_version" else 2)
    wrong = b'{"generation": 1, "versions": [2], "default": 1}'
    store.write(serving_key("books"), iter([wrong]), len(wrong))
    with pytest.raises(StoreDamaged, match="default 1 is not among the versions"):
        read_serving(store, "books")


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
    with pytest.raises(StoreMissing, match="no such folder"):
        Objects(f"file://{tmp_path}/nothing")


def test_a_silent_store_is_an_error_after_its_time(s3_only: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "READ_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are taken, and never answered
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(StoreUnavailable, match="no answer in time"):
            find_models(Objects("s3://models/here"))
