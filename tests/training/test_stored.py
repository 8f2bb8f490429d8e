"""`python -m training publish | versions | set-default`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.random_bundles import make_bundle
from espalier.errors import BundleCorrupt, BundleNotFound, InvalidConfig, StoreMissing
from espalier.tree import complete_tree
from tests.object_stores import two_versions
from tests.service.shards.cutting import cut, whole_bundle
from tests.training.commands import command
from training.stored import change_default, publish, versions


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture
def books(tmp_path: Path) -> Path:
    return two_versions(tmp_path / "made")


def test_a_model_is_published_listed_and_pinned(url: str, books: Path) -> None:
    def ran(*arguments: object) -> str:
        outcome = command(*arguments, "--store", url)
        assert outcome.status == 0, outcome.err
        return outcome.out

    ran("publish", "--model", books / "1", "--default")
    ran("publish", "--model", books / "2")
    assert ran("versions") == "books: versions 1, 2; version 1 serves\n"
    ran("set-default", "--model", "books", "--version", 2, "--beside", 1)
    assert json.loads(ran("versions", "--json")) == [{"model": "books", "versions": [1, 2], "default": 2, "beside": [1]}]
    ran("set-default")
    assert ran("versions", "--model", "books") == "books: versions 1, 2; the highest, version 2, serves\n"


def test_an_error_is_one_line(books: Path) -> None:
    error = command("publish", "--model", books / "1", "--store", "s3://me:secret@bucket").err
    assert error.startswith("error: the store's URL: expected no keys")
    assert "secret" not in error.replace("AWS_SECRET_ACCESS_KEY", "")
    assert error.count("\n") == 1


def test_what_is_no_bundle_is_refused_and_makes_no_store(url: str, tmp_path: Path, books: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(books / "1" / "manifest.json", tmp_path / "elsewhere")
    (books / "2" / "tree.safetensors").unlink()
    for folder, message in (
        (tmp_path / "nothing", "no bundle and no folder of shards"),
        (tmp_path / "elsewhere", "expected models/NAME/VERSION"),
        (books / "2", r"tree\.safetensors: missing"),
    ):
        with pytest.raises(BundleNotFound, match=message):
            publish(folder, None, url, default=False, again=False)
    with pytest.raises(InvalidConfig, match="--version"):
        publish(books / "1", 1, url, default=False, again=False)
    with pytest.raises(InvalidConfig, match="--beside"):
        change_default(url, "books", None, [1])
    assert not (tmp_path / "store").exists()


def test_all_shards_are_published_together(url: str, tmp_path: Path) -> None:
    shards = cut(whole_bundle(tmp_path), tmp_path / "books-shards", 3)
    done = publish(tmp_path / "books-shards", None, url, default=False, again=False)
    assert [(found.name, found.version) for found in done] == [("0", 1), ("1", 1), ("2", 1)]
    assert [row["model"] for row in versions(url, None)] == ["0", "1", "2"]
    change_default(url, None, 1, [])
    assert [row["default"] for row in versions(url, None)] == [1, 1, 1]
    with pytest.raises(InvalidConfig, match="--default"):
        publish(tmp_path / "books-shards", None, url, default=True, again=False)
    shutil.rmtree(shards[1].path)
    with pytest.raises(BundleNotFound, match="it has not all shards"):
        publish(tmp_path / "books-shards", None, url, default=False, again=False)


def test_a_layout_with_a_damaged_shard_is_not_published_at_all(url: str, tmp_path: Path) -> None:
    shards = cut(whole_bundle(tmp_path), tmp_path / "books-shards", 2)
    file = shards[1].path / "items.arrow"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(BundleCorrupt, match="its SHA-256 is not the manifest's"):
        publish(tmp_path / "books-shards", None, url, default=False, again=False)
    assert versions(url, None) == []


def test_publishing_needs_no_torch(url: str, books: Path) -> None:
    """A machine that only moves models has neither a trainer nor time for one."""
    program = (
        "import sys; from pathlib import Path; from training.stored import publish\n"
        f"publish(Path({str(books / '1')!r}), None, {url!r}, default=False, again=False); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
    assert [row["versions"] for row in versions(url, None)] == [[1]]


@pytest.mark.parametrize("name", ["../../books", "books/1", "Books", ""])
def test_a_name_that_no_model_has_is_said(url: str, books: Path, name: str) -> None:
    publish(books / "1", None, url, default=False, again=False)
    for asked in (lambda: versions(url, name), lambda: change_default(url, name, 1, ()), lambda: change_default(url, name, None, ())):
        with pytest.raises(InvalidConfig, match="--model"):
            asked()


def test_the_default_of_all_models_is_changed_where_all_have_the_version(url: str, books: Path, tmp_path: Path) -> None:
    for version in ("1", "2"):
        publish(books / version, None, url, default=False, again=False)
    films = make_bundle(tmp_path / "made", np.random.default_rng(0), complete_tree(np.arange(32), 2), name="films", version=1)
    publish(films.path, None, url, default=False, again=False)
    with pytest.raises(StoreMissing, match="no version 2 of 'films'; there: 1"):
        change_default(url, None, 2, ())
    assert [row["default"] for row in versions(url, None)] == [None, None]
