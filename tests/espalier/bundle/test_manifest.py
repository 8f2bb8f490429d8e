"""The manifest: what it must say, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from espalier.bundle import Bundle
from espalier.errors import (
    BundleCorrupt,
    BundleNotFound,
    UnsupportedSchema,
)
from espalier.manifest import Calibration


@pytest.mark.parametrize("text", [b"", b"{", b"not json", b'{"schema_version": 1', b"\xff\xfe\x00"])
def test_a_manifest_that_is_no_json_is_refused(copy: Path, text: bytes) -> None:
    (copy / "manifest.json").write_bytes(text)
    with pytest.raises(BundleCorrupt, match=r"manifest\.json: not JSON"):
        Bundle.open(copy)


@pytest.mark.parametrize("schema", [0, 2, "1", None, [1], True, 1.0])
def test_another_schema_version_is_refused(copy: Path, schema: object) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | {"schema_version": schema}))
    found = re.escape(f"format 'espalier-bundle' with schema_version {schema!r}; expected format 'espalier-bundle' with schema_version 1. ")
    with pytest.raises(UnsupportedSchema, match=found + ".*: train or import the model again"):
        Bundle.open(copy)


@pytest.mark.parametrize("schema", [1, 2])
def test_a_manifest_from_before_the_format_had_a_name_is_refused_by_name(copy: Path, schema: int) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["format"]
    (copy / "manifest.json").write_text(json.dumps(manifest | {"schema_version": schema}))
    with pytest.raises(UnsupportedSchema, match=rf"format None with schema_version {schema}; expected format 'espalier-bundle'"):
        Bundle.open(copy)


@pytest.mark.parametrize("text", ["[]", "3", "null", "{}"])
def test_a_manifest_without_a_format_is_refused(copy: Path, text: str) -> None:
    (copy / "manifest.json").write_text(text)
    with pytest.raises(UnsupportedSchema):
        Bundle.open(copy)


def test_an_unknown_memory_or_form_of_the_scorer_is_refused(copy: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    parts: list[dict[str, Any]] = [{"memory": {}}, {"scorer": manifest["scorer"] | {"form": {"kind": "mixture"}}}]
    for part in parts:
        (copy / "manifest.json").write_text(json.dumps(manifest | part))
        with pytest.raises(BundleCorrupt, match=r"manifest\.json: (memory|scorer\.graphs\.form)"):
            Bundle.open(copy)


@pytest.mark.parametrize("key", ["name", "version", "algorithm", "created", "query", "ranking", "search", "tree", "scorer", "files"])
def test_a_missing_key_of_the_manifest_is_named(copy: Path, key: str) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest[key]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleCorrupt, match=rf"manifest\.json: {key}: .*required"):
        Bundle.open(copy)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("name",), "../evil"),
        (("version",), 0),
        (("ranking", "gamma"), 2),
        (("ranking", "own"), "softmax"),
        (("query", "kind"), "telepathy"),
        (("scorer", "dtype"), "float8"),
        (("tree", "levels"), 1),
        (("files", "query.onnx", "sha256"), "0"),
        (("search", "beam_size"), 0),
        (("unknown",), 1),
    ],
)
def test_a_wrong_value_of_the_manifest_is_named(copy: Path, place: tuple[str, ...], value: object) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    inner = manifest
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleCorrupt, match=f"manifest.json: {place[0]}"):
        Bundle.open(copy)


@pytest.mark.parametrize("levels", [2, 3, 5, 10**12])
def test_an_encoder_has_a_state_for_each_level_or_one_for_all(copy: Path, levels: int) -> None:
    """The tree of this bundle has four levels."""
    manifest = json.loads((copy / "manifest.json").read_text())
    for right in (1, manifest["tree"]["levels"]):
        manifest["scorer"]["state_levels"] = right
        (copy / "manifest.json").write_text(json.dumps(manifest))
        Bundle.open(copy)
    manifest["scorer"]["state_levels"] = levels
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleCorrupt, match=rf"scorer\.state_levels: expected 1, or 4, the tree's levels, got {levels}"):
        Bundle.open(copy)


@pytest.mark.parametrize(
    ("knots", "said"),
    [
        ([[0, 0]], "at least 2"),
        ([[0, 0], [0, 1]], "ascending"),
        ([[0, 1], [1, 1]], "ascending"),
        ([[1, 0], [0, 1]], "ascending"),
        ([[0, 0], [1, float("inf")]], "finite"),
        ([[0, 0], [float("nan"), 1]], "finite"),
        ([[0, 0], [1, 1e39]], "finite"),
        ([[0, 0], [1, 1, 2]], "at most 2"),
        ([[i, i] for i in range(17)], "at most 16"),
        ("0, 1", "valid tuple"),
    ],
)
def test_the_knots_of_a_calibration_ascend_and_are_few(copy: Path, knots: object, said: str) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["ranking"]["calibration"] = {"slope": 1, "intercept": 0, "knots": [[i, i] for i in range(16)]}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    opened = Bundle.open(copy).manifest.ranking.calibration
    assert opened == Calibration(slope=1, intercept=0, knots=tuple((i, i) for i in range(16)))
    manifest["ranking"]["calibration"]["knots"] = knots
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleCorrupt, match=rf"ranking\.calibration\.knots.*{said}"):
        Bundle.open(copy)


def test_a_calibration_without_knots_is_read(copy: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["ranking"]["calibration"] = {"slope": 2, "intercept": -1}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert Bundle.open(copy).manifest.ranking.calibration == Calibration(slope=2, intercept=-1)


def test_a_part_that_the_manifest_does_not_list_is_named(copy: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["files"]["heldout.parquet"]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleCorrupt, match=r"does not list heldout\.parquet"):
        Bundle.open(copy)


def test_a_manifest_of_absurd_size_is_not_read(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (copy / "manifest.json").open("r+b") as file:
        file.truncate(1 << 40)  # a hole: it takes no space
    monkeypatch.setattr(json, "loads", lambda *_: pytest.fail("the manifest was parsed"))
    with pytest.raises(BundleCorrupt, match=r"manifest\.json: 1099511627776 bytes, at most"):
        Bundle.open(copy)


def test_a_deeply_nested_manifest_is_refused(copy: Path) -> None:
    (copy / "manifest.json").write_bytes(b"[" * 100_000)
    with pytest.raises(BundleCorrupt):
        Bundle.open(copy)


def test_a_folder_without_a_manifest_is_no_bundle(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(BundleNotFound, match=r"manifest\.json: missing"):
            Bundle.open(path)
