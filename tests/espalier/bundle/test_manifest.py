"""The manifest: what it must say, and what is refused by the name of its key."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from espalier.bundle import Bundle, parse_manifest
from espalier.errors import BundleCorrupt, BundleNotFound, UnsupportedSchema
from espalier.manifest import MOST, Calibration, Manifest

ABSENT = object()
SIXTEEN = [[i, i] for i in range(16)]


def changed(bundle: Bundle, place: str, value: object) -> bytes:
    """The manifest with another value at a place: keys, a slash between them. ABSENT: without the key."""
    manifest = json.loads((bundle.path / "manifest.json").read_text())
    *above, key = place.split("/")
    inner = manifest
    for name in above:
        inner = inner[name]
    inner[key] = value
    if value is ABSENT:
        del inner[key]
    return json.dumps(manifest).encode()


def parsed(bundle: Bundle, place: str, value: object) -> Manifest:
    return parse_manifest(changed(bundle, place, value), "manifest.json")


def calibration(knots: object) -> dict[str, Any]:
    return {"slope": 1, "intercept": 0, "knots": knots}


@pytest.mark.parametrize(
    ("kind", "place", "value", "said"),
    [
        ("graphs", "name", "../evil", "name: "),
        ("graphs", "version", 0, "version: "),
        ("graphs", "query/kind", "telepathy", "query: "),
        ("graphs", "ranking/gamma", 2, r"ranking\.gamma: "),
        ("graphs", "ranking/own", "softmax", r"ranking\.own: "),
        ("graphs", "scorer/dtype", "float8", r"scorer\.graphs\.dtype: "),
        ("graphs", "scorer/form", {"kind": "mixture"}, r"scorer\.graphs\.form: "),
        ("graphs", "scorer/state_levels", 2, "expected 1, or 4, the tree's levels, got 2"),
        ("graphs", "scorer/state_levels", 3, "expected 1, or 4, the tree's levels, got 3"),
        ("graphs", "scorer/state_levels", 5, "expected 1, or 4, the tree's levels, got 5"),
        ("graphs", "tree/levels", 1, r"tree\.levels: "),
        ("graphs", "files/query.onnx/sha256", "0", "files"),
        ("graphs", "search/beam_size", 0, r"search\.beam_size: "),
        ("graphs", "search/beam_size", MOST + 1, r"search\.beam_size: .*at most 16777216"),
        ("graphs", "search/m", MOST + 1, r"search\.m: .*at most 16777216"),
        ("graphs", "search/max_beam_size", MOST + 1, r"search\.max_beam_size: .*at most 16777216"),
        ("graphs", "search/max_m", 10**30, r"search\.max_m: .*at most 16777216"),
        ("graphs", "memory", {}, "memory"),
        ("graphs", "unknown", 1, "unknown: "),
        ("graphs", "ranking/calibration", calibration([[0, 0]]), "knots: .*at least 2"),
        ("graphs", "ranking/calibration", calibration([[0, 0], [0, 1]]), "knots: .*ascending"),
        ("graphs", "ranking/calibration", calibration([[0, 1], [1, 1]]), "knots: .*ascending"),
        ("graphs", "ranking/calibration", calibration([[1, 0], [0, 1]]), "knots: .*ascending"),
        ("graphs", "ranking/calibration", calibration([[0, 0], [1, float("inf")]]), "knots: .*finite"),
        ("graphs", "ranking/calibration", calibration([[0, 0], [float("nan"), 1]]), "knots: .*finite"),
        ("graphs", "ranking/calibration", calibration([[0, 0], [1, 1e39]]), "knots: .*finite"),
        ("graphs", "ranking/calibration", calibration([*SIXTEEN, [16, 16]]), "knots: .*at most 16"),
        ("memory", "query", {"kind": "vector", "width": 4}, "a memory cannot serve vector queries"),
        ("memory", "query", {"kind": "history", "length": 3}, "a memory of 4 items, histories have 3"),
        ("memory", "memory/weight", 0, r"memory\.weight: "),
        ("memory", "memory/weight", 1e-38, r"memory\.weight: "),
        ("memory", "memory/search", "second_source", r"memory\.search: "),
        ("shard", "shard/index", 2, "index: expected 0 to 1, got 2"),
        ("shard", "shard/index", -1, r"shard\.index: "),
        ("shard", "shard/count", 0, r"shard\.count: "),
        ("shard", "shard/count", 5000, r"shard\.count: "),
        ("shard", "shard/digest", "A" * 64, r"shard\.digest: "),
        ("shard", "shard/of", "no/name", r"shard\.of: "),
        ("shard", "shard/items", 1, "a shard of .* cannot be part of"),
        ("shard", "shard/nodes", 2, "a shard of .* cannot be part of"),
        ("shard", "live", {"through": 3}, "a shard has no live"),
        ("shard", "ranker", {"features": ["retrieval.rank"], "depth": 1, "max_depth": 1}, "a shard has no ranker"),
        ("linear", "query/width", 19, "scorers of 20 features cannot answer queries of 19"),
        ("linear", "tail", {"form": "product", "alpha": 0.5, "entries": 0}, "a tail enters the scores of a forest, got one tree"),
        ("tail", "trees", [], "a tail enters the scores of a forest, got one tree"),
        ("stacking", "ranking", {"own": "logit", "gamma": 0}, "logit"),
        ("stacking", "stacking", {"candidates": 0, "power": 1, "points": 3}, "candidates"),
        ("stacking", "stacking", {"candidates": 9, "power": 1.5, "points": 3}, "power"),
        ("tail", "stacking", {"candidates": 9, "power": 1, "points": 3}, "stacking and a tail"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(made: dict[str, Bundle], kind: str, place: str, value: object, said: str) -> None:
    with pytest.raises(BundleCorrupt, match=rf"^manifest\.json: .*{said}"):
        parsed(made[kind], place, value)


@pytest.mark.parametrize("name", ["../../../escaped", "/etc/hostname", "..", ".hidden", "a\\b", "", "x" * 65, "a\n"])
def test_a_file_of_a_bundle_lies_in_its_folder(original: Bundle, name: str) -> None:
    manifest = json.loads((original.path / "manifest.json").read_text())
    manifest["files"][name] = manifest["files"]["query.onnx"]
    with pytest.raises(BundleCorrupt, match=r"manifest\.json: files"):
        parse_manifest(json.dumps(manifest).encode(), "manifest.json")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("scorer/state_levels", 1),
        ("scorer/state_levels", 4),
        ("search/max_beam_size", MOST),
        ("ranking/calibration", calibration(SIXTEEN)),
        ("ranking/calibration", {"slope": 2, "intercept": -1}),
    ],
)
def test_values_at_their_limits_are_read(made: dict[str, Bundle], place: str, value: object) -> None:
    found = parsed(made["graphs"], place, value)
    if isinstance(value, dict):
        assert found.ranking.calibration == Calibration.model_validate(value)


def test_a_missing_key_is_named(original: Bundle) -> None:
    for key in ("name", "version", "algorithm", "created", "query", "ranking", "search", "tree", "scorer", "files"):
        with pytest.raises(BundleCorrupt, match=rf"manifest\.json: {key}: .*required"):
            parsed(original, key, ABSENT)


@pytest.mark.parametrize("schema", [0, 2, "1", None, [1], True, 1.0])
def test_another_schema_version_is_refused(original: Bundle, schema: object) -> None:
    found = re.escape(f"format 'espalier-bundle' with schema_version {schema!r}; expected format 'espalier-bundle' with schema_version 1. ")
    with pytest.raises(UnsupportedSchema, match=found + ".*: train or import the model again"):
        parsed(original, "schema_version", schema)


def test_a_manifest_without_the_formats_name_is_refused(original: Bundle) -> None:
    for content in (changed(original, "format", ABSENT), b"[]", b"3", b"null", b"{}"):
        with pytest.raises(UnsupportedSchema, match=r"format None with schema_version (1|None); expected format 'espalier-bundle'"):
            parse_manifest(content, "manifest.json")


@pytest.mark.parametrize("text", [b"", b"{", b'{"schema_version": 1', b"\xff\xfe\x00", b"[" * 100_000])
def test_a_manifest_that_is_no_json_is_refused(text: bytes) -> None:
    with pytest.raises(BundleCorrupt, match=r"manifest\.json: not JSON"):
        parse_manifest(text, "manifest.json")


def test_a_part_that_the_manifest_does_not_list_is_named(copy: Path, original: Bundle) -> None:
    (copy / "manifest.json").write_bytes(changed(original, "files/heldout.parquet", ABSENT))
    with pytest.raises(BundleCorrupt, match=r"does not list heldout\.parquet"):
        Bundle.open(copy)


def test_a_manifest_of_absurd_size_is_not_read(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (copy / "manifest.json").open("r+b") as file:
        file.truncate(1 << 40)  # a hole: it takes no space
    monkeypatch.setattr(json, "loads", lambda *_: pytest.fail("the manifest was parsed"))
    with pytest.raises(BundleCorrupt, match=r"manifest\.json: 1099511627776 bytes, at most"):
        Bundle.open(copy)


def test_a_folder_without_a_manifest_is_no_bundle(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(BundleNotFound, match=r"manifest\.json: missing"):
            Bundle.open(path)
