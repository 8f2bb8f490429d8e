"""Writing: whole or not at all, and found again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import espalier.bundle_writer as bundle_writer
import espalier.items as items_module
from espalier.bundle import Bundle, find_versions, is_model_name
from espalier.bundle_writer import write_bundle
from espalier.durable import flush
from espalier.errors import (
    BundleCorrupt,
    BundleExists,
    InvalidTree,
)
from espalier.items import ItemTable
from espalier.tree import tree_from_children
from tests.espalier.bundle.parts import content_of, draft_of


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_a_version_is_never_overwritten(original: Bundle, other: Bundle, tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "tiny" / "1", draft_of(original), content_of(original)).path
    before = snapshot(tmp_path)
    with pytest.raises(BundleExists, match="never overwritten"):
        write_bundle(path, draft_of(other), content_of(other))
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("obstacle", [Path.mkdir, Path.touch], ids=["folder", "file"])
def test_not_even_an_empty_folder_or_a_file_is_overwritten(original: Bundle, tmp_path: Path, obstacle: Callable[[Path], None]) -> None:
    obstacle(tmp_path / "1")
    with pytest.raises(BundleExists):
        write_bundle(tmp_path / "1", draft_of(original), content_of(original))
    assert [file.name for file in tmp_path.iterdir()] == ["1"]


def test_a_version_that_appears_meanwhile_is_not_overwritten(original: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny" / "1"

    def appear(file: Path) -> None:
        path.mkdir(exist_ok=True)
        (path / "manifest.json").write_text("theirs")
        flush(file)

    monkeypatch.setattr(bundle_writer, "flush", appear)
    with pytest.raises(BundleExists, match="appeared while"):
        write_bundle(path, draft_of(original), content_of(original))
    assert snapshot(tmp_path) == {"tiny/1/manifest.json": b"theirs"}


STEPS = {
    "tree and nodes": (bundle_writer, "write_safetensors"),
    "items": (items_module.ItemTable, "write"),
    "tables": (pq, "write_table"),
    "checksums": (bundle_writer, "sha256_of"),
    "flush": (bundle_writer, "flush"),
    "rename": (Path, "rename"),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_writer_that_fails_leaves_nothing(original: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    draft, content = draft_of(original), content_of(original)

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(*STEPS[step], fail)
    with pytest.raises(KeyboardInterrupt):
        write_bundle(tmp_path / "tiny" / "1", draft, content)
    assert list((tmp_path / "tiny").iterdir()) == []
    assert find_versions(tmp_path) == {}


@pytest.mark.parametrize("step", STEPS)
def test_what_a_killed_writer_leaves_is_not_listed(original: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    draft, content = draft_of(original), content_of(original)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # a killed process tidies nothing up

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(*STEPS[step], fail)
        with pytest.raises(KeyboardInterrupt):
            write_bundle(tmp_path / "tiny" / "1", draft, content)
    left = [file.name for file in (tmp_path / "tiny").iterdir()]
    assert left
    assert all(name.startswith(".") for name in left)
    assert find_versions(tmp_path) == {}
    write_bundle(tmp_path / "tiny" / "1", draft, content)
    assert find_versions(tmp_path) == {"tiny": (1,)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"node_rows_ND": np.zeros((3, 4), np.float32)}, r"node_rows: expected .*got float32\[3, 4\]"),
        ({"node_rows_ND": "float64"}, "node_rows: expected float32 or float16 .*got float64"),
        ({"items": ItemTable.build(pa.table({"id": ["only"]}))}, "items: 1 rows, the tree holds"),
    ],
)
def test_parts_that_do_not_fit_each_other_are_not_written(original: Bundle, tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    if isinstance(changed.get("node_rows_ND"), str):
        changed = {"node_rows_ND": np.array(original.node_rows_ND, changed["node_rows_ND"])}
    with pytest.raises(BundleCorrupt, match=message):
        write_bundle(tmp_path / "1", draft_of(original), content_of(original, **changed))
    assert list(tmp_path.iterdir()) == []


def test_a_tree_whose_padding_more_than_doubles_a_level_is_refused(original: Bundle, tmp_path: Path) -> None:
    def write(counts: list[int], version: int) -> None:
        tree = tree_from_children([[len(counts)], counts], np.arange(sum(counts)))
        rows, items = np.zeros((tree.node_count, 4), np.float32), ItemTable.build(pa.table({"id": [str(i) for i in range(sum(counts))]}))
        changed = content_of(original, tree=tree, node_rows_ND=rows, items=items, state_levels=tree.height + 1)
        write_bundle(tmp_path / str(version), draft_of(original), changed)

    write([4, 1, 1, 2], 1)  # padded to 16 candidates for 8 nodes: exactly twice
    with pytest.raises(InvalidTree, match=r"level 1: its largest node has 5 children, .* 20 candidates for 9 nodes"):
        write([5, 1, 1, 2], 2)
    assert [file.name for file in tmp_path.iterdir()] == ["1"]


def test_versions_are_found_and_other_names_ignored(original: Bundle, tmp_path: Path) -> None:
    def place(name: str) -> None:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "manifest.json").touch()

    for name in ("books/1", "books/12", "books/3", "games-2.0/7"):
        place(name)
    junk = ("books/01", "books/-1", "books/1.5", "books/v2", "books/２", "books/.4.tmp", "books/4 ", "Upper/1", ".hidden/1", "sp ace/1")
    for name in junk:
        place(name)
    (tmp_path / "books" / "5").mkdir()  # no manifest
    (tmp_path / "books" / "6").touch()  # a file
    (tmp_path / "README.md").touch()
    (tmp_path / "empty").mkdir()
    assert find_versions(tmp_path) == {"books": (1, 3, 12), "games-2.0": (7,)}


def test_a_models_folder_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert find_versions(tmp_path / "none") == {}


def test_there_is_no_version_zero(tmp_path: Path) -> None:
    (tmp_path / "books" / "0").mkdir(parents=True)
    (tmp_path / "books" / "0" / "manifest.json").touch()
    assert find_versions(tmp_path) == {}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "A", "é", "-a", "a" * 65, "a\n"])
def test_what_is_no_model_name(name: str) -> None:
    assert not is_model_name(name)
    assert is_model_name("a" * 64)
