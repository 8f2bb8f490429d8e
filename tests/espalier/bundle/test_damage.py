"""The contract of every file and message that is read: damaged in any way, it is refused by one of our errors, or read as something sound.

Whatever else a reader raises, or an answer with a row that is no item, fails a test here. What does not fit in a manifest or in arrays
whose checksums are right is refused by the name of the key or the array, before compiled code follows it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from benchmarks.random_bundles import random_queries
from espalier import stored_arrays
from espalier.arrays import Array
from espalier.bundle import GRAPH_PARTS, Bundle, parse_manifest, parts_of
from espalier.chunks import ARRAYS, MAX_CHILDREN, Chunks
from espalier.engines import open_engine
from espalier.errors import (
    BundleCorrupt,
    BundleError,
    BundleNotFound,
    EspalierError,
    UnsupportedSchema,
    spelled,
)
from espalier.live.journal import Journal
from espalier.live.operations import ItemBody
from espalier.live.rows import LiveRow
from espalier.manifest import MAX_BEAM, Calibration, Manifest
from espalier.memory import BUCKETS, MAX_ROW, MAX_VISITS, Memory
from espalier.queries import MAX_HISTORY
from espalier.search import SearchParams
from espalier.shards.messages import decode_answer, decode_query, encode_answer, encode_query
from espalier.text.blocks import TextBlock
from espalier.text.vectoriser import Vectoriser
from espalier.tree import tree_from_children
from tests.espalier.bundle.parts import MADE, read_everything, reseal
from tests.espalier.live.journals import appended
from tests.espalier.live.journals import put as put_item
from tests.espalier.second_stages import F
from tests.espalier.shards.example_messages import a_query, an_answer

OWN_PARTS: Mapping[str, tuple[str, ...]] = {
    "graphs": GRAPH_PARTS,
    "memory": ("memory.safetensors",),
    "shard": ("shard.safetensors",),
    "linear": ("chunks.safetensors",),
    "float16": ("chunks.safetensors",),
    "forest": ("tree-2.safetensors", "chunks-2.safetensors"),
    "tail": ("tail.safetensors",),
    "stacking": ("stacking.safetensors",),
}
"""Of each kind of bundle the parts that those before it lack, or have in another form."""
WRAPPING = 2**63 - 1
"""Differences of int64 that pass it begin again below 0: 1, WRAPPING, −2, 3 seems to rise all the way."""


def damages(whole: bytes, rng: np.random.Generator, count: int) -> Iterator[bytes]:
    """The bytes with some of them changed, and perhaps cut."""
    for _ in range(count):
        damaged = bytearray(whole)
        for at in rng.integers(len(whole), size=rng.integers(1, 4)):
            damaged[at] = rng.integers(256)
        yield bytes(damaged[: len(whole) if rng.random() < 0.7 else int(rng.integers(len(whole)))])


def changed_bit(whole: bytes, at: int) -> bytes:
    return whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :]


# -- files that a checksum covers -----------------------------------------------------------------------------------------


def test_every_part_is_damaged(made: dict[str, Bundle]) -> None:
    assert OWN_PARTS.keys() == MADE.keys()
    assert {part for bundle in made.values() for part in parts_of(bundle.manifest)} == {
        part for parts in OWN_PARTS.values() for part in parts
    }


@pytest.fixture(params=OWN_PARTS)
def copied(request: pytest.FixtureRequest, made: dict[str, Bundle], tmp_path: Path) -> tuple[Path, tuple[str, ...]]:
    """A bundle that may be damaged, and which of its parts to damage."""
    return Path(shutil.copytree(made[request.param].path, tmp_path / "copy")), OWN_PARTS[request.param]


def test_no_changed_cut_grown_or_missing_part_is_opened(copied: tuple[Path, tuple[str, ...]]) -> None:
    """By its checksum, or without reading it by its size."""
    rng, (path, parts) = np.random.default_rng(3), copied
    for part in parts:
        file, whole = path / part, (path / part).read_bytes()
        for at in {0, len(whole) - 1, int(rng.integers(len(whole)))}:
            file.write_bytes(changed_bit(whole, at))
            with pytest.raises(BundleCorrupt, match=f"{part}: its SHA-256"):
                Bundle.open(path)
        for damaged in (whole[:-1], b"", whole + b"\0"):
            file.write_bytes(damaged)
            for verify in (True, False):
                with pytest.raises(BundleCorrupt, match=rf"{part}: {len(damaged)} bytes, the manifest says {len(whole)}"):
                    Bundle.open(path, verify=verify)
        file.unlink()
        with pytest.raises(BundleNotFound, match=f"{part}: missing"):
            Bundle.open(path)
        file.mkdir()
        with pytest.raises(BundleNotFound, match=f"{part}: missing"):
            Bundle.open(path)
        file.rmdir()
        file.write_bytes(whole)
    Bundle.open(path)


# -- files whose checksums are right --------------------------------------------------------------------------------------


def test_nonsense_is_refused_by_the_name_of_its_part_and_random_damage_refused_or_read(copied: tuple[Path, tuple[str, ...]]) -> None:
    rng, (path, parts) = np.random.default_rng(3), copied
    for part in parts:
        whole = (path / part).read_bytes()
        for content in (b"", b"nonsense", b"\xff" * 64, b"PAR1" + bytes(40) + b"PAR1"):
            (path / part).write_bytes(content)
            reseal(path)
            with pytest.raises(BundleCorrupt, match=part):
                read_everything(Bundle.open(path))
        for damaged in damages(whole, rng, 20):
            (path / part).write_bytes(damaged)
            reseal(path)
            with suppress(BundleError):
                read_everything(Bundle.open(path))
        (path / part).write_bytes(whole)


def wrong_number(array: Array, rng: np.random.Generator) -> Any:
    if array.dtype.kind == "f":
        return rng.choice([np.nan, np.inf, -np.inf, -1, 3e38])
    neighbour = array.flat[rng.integers(array.size)]
    return rng.choice([-1, 0, 1, neighbour, neighbour + 1, WRAPPING, array.size, array.size - 1]).astype(array.dtype)


@pytest.mark.parametrize("kind", OWN_PARTS)
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_wrong_number_in_a_table_is_refused_or_searched_within_the_catalogue(
    made: dict[str, Bundle], tmp_path_factory: pytest.TempPathFactory, kind: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    path = Path(shutil.copytree(made[kind].path, tmp_path_factory.mktemp("copy") / "1"))
    part = rng.choice([name for name in OWN_PARTS[kind] if name.endswith(".safetensors")])
    arrays = {name: np.array(array) for name, array in load_file(path / part).items()}
    array = arrays[rng.choice([name for name, array in arrays.items() if array.size])]
    try:
        with np.errstate(over="ignore"):  # 3e38 in float16; sums with what wraps
            array.flat[rng.integers(array.size)] = wrong_number(array, rng)
            save_file(arrays, path / part)
            reseal(path)
            bundle = Bundle.open(path)
            read_everything(bundle)
            queries, params = random_queries(rng, bundle, 2), SearchParams.uniform(2, 4, 9)
            result = open_engine(bundle, "cpu").search(queries, params)
    except EspalierError:
        return
    for rows, count in zip(result.item_rows_BM, result.count_B, strict=True):
        assert len(set(rows[:count].tolist())) == count
        assert np.all((rows[:count] >= 0) & (rows[:count] < bundle.tree.item_count))
        assert np.all(rows[count:] == -1)


# -- what travels or is kept as bytes -------------------------------------------------------------------------------------

BLOCKS = (TextBlock(unit="word", n=1, unknown=1), TextBlock(unit="char", n=3, unknown=1))
TEXT_ARRAYS = Vectoriser.fit(["red kettle", "kettle, steel", "red table", "a table"], BLOCKS).arrays()
"""Damage is done to the text's bytes and offsets, as compiled code follows them."""
ROW = LiveRow(np.array([1.5, -2], np.float32), memory_to=(("ä", 1.25),), memory_from=(("b", 2.0),))
BODY = ItemBody({"title": "é", "n": [1.5, None]}, "text", ("b",), (["x"], ["y"]), ("u1", "u2"), 12.5)


def vectorised(data: bytes) -> object:
    """Texts by arrays of which the n-grams' offsets are these bytes."""
    arrays = TEXT_ARRAYS | {"text_from": np.frombuffer(data[: len(data) // 8 * 8], np.int64)}
    return Vectoriser.from_arrays(BLOCKS, arrays).transform(["red kettle", ""])


FORMATS: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
    "query": (encode_query(a_query()), decode_query),
    "answer": (encode_answer(an_answer()), decode_answer),
    "live row": (ROW.to_bytes(), LiveRow.from_bytes),
    "body of an operation": (BODY.to_bytes(), ItemBody.from_bytes),
    "offsets of n-grams": (TEXT_ARRAYS["text_from"].tobytes(), vectorised),
    "manifest": (b'{"format": "espalier-bundle", "schema_version": 1, "name": "a"}', lambda data: parse_manifest(data, "manifest.json")),
}


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60)
@given(data=st.data())
def test_bytes_with_some_changed_are_refused_or_read(name: str, data: st.DataObject) -> None:
    whole, read = FORMATS[name]
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with suppress(EspalierError):
        read(bytes(damaged))


@pytest.mark.parametrize("name", ["query", "answer", "live row", "body of an operation", "offsets of n-grams"])
def test_bytes_that_are_cut_or_grown_are_refused(name: str) -> None:
    whole, read = FORMATS[name]
    for end in [*range(0, len(whole), 7), len(whole) - 1]:
        with pytest.raises(EspalierError):
            read(whole[:end])
    if name != "offsets of n-grams":  # of which the reader takes whole numbers alone
        with pytest.raises(EspalierError):
            read(whole + b"\0")


def test_a_damaged_journal_is_refused_or_read_in_order(tmp_path: Path) -> None:
    file, rng = tmp_path / "live.db", np.random.default_rng(4)
    journal = Journal(file)
    appended(journal, [put_item(f"i{number}", number) for number in range(30)], version=1)
    journal.close()
    whole = file.read_bytes()
    for damaged in damages(whole, rng, 40):
        file.write_bytes(damaged)
        journal = Journal(file)
        try:
            sequences = [operation.sequence for operation in journal.since(0, 99)]
            journal.placements(1, sequences)
        except EspalierError:
            continue
        finally:
            file.with_name("live.db-wal").unlink(missing_ok=True)
            file.with_name("live.db-shm").unlink(missing_ok=True)
        assert sequences == sorted(set(sequences))


# -- the manifest -------------------------------------------------------------------------------------------------------


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
        ("graphs", "scorer/form", {"kind": "mlp", "layers": []}, r"form\.mlp\.layers: .*earlier state .* train the model again"),
        ("graphs", "scorer/state_levels", 5, "expected 1, or 4, the tree's levels, got 5"),
        ("graphs", "tree/levels", 1, r"tree\.levels: "),
        ("graphs", "files/query.onnx/sha256", "0", "files"),
        ("graphs", "search/beam_size", 0, r"search\.beam_size: "),
        ("graphs", "search/beam_size", MAX_BEAM + 1, r"search\.beam_size: .*at most 16777216"),
        ("graphs", "search/m", MAX_BEAM + 1, r"search\.m: .*at most 16777216"),
        ("graphs", "search/max_beam_size", MAX_BEAM + 1, r"search\.max_beam_size: .*at most 16777216"),
        ("graphs", "memory", {}, "memory"),
        ("graphs", "unknown", 1, "unknown: "),
        ("graphs", "ranking/calibration", calibration([[0, 0]]), "knots: .*at least 2"),
        ("graphs", "ranking/calibration", calibration([[0, 0], [0, 1]]), "knots: .*ascending"),
        ("graphs", "ranking/calibration", calibration([[0, 1], [1, 1]]), "knots: .*ascending"),
        ("graphs", "ranking/calibration", calibration([[0, 0], [1, float("inf")]]), "knots: .*finite"),
        ("graphs", "ranking/calibration", calibration([[0, 0], [1, 1e39]]), "knots: .*finite"),
        ("graphs", "ranking/calibration", calibration([*SIXTEEN, [16, 16]]), "knots: .*at most 16"),
        ("memory", "query", {"kind": "vector", "width": 4}, "a memory cannot serve vector queries"),
        ("memory", "query", {"kind": "history", "length": 3}, "a memory of 4 items, histories have 3"),
        ("memory", "memory/weight", 0, r"memory\.weight: "),
        ("memory", "memory/weight", 1e-38, r"memory\.weight: "),
        ("memory", "memory/search", "second_source", r"memory\.search: "),
        ("shard", "shard/index", 2, "index: expected 0 to 1, got 2"),
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
        ("search/max_beam_size", MAX_BEAM),
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
        with pytest.raises(BundleCorrupt, match=rf"manifest\.json: {key} is missing"):
            parsed(original, key, ABSENT)


@pytest.mark.parametrize("schema", [0, 2, "1", None, [1], True, 1.0])
def test_another_schema_version_is_refused(original: Bundle, schema: object) -> None:
    found = re.escape(
        f'format "espalier-bundle" with schema_version {spelled(schema)}; expected format "espalier-bundle" with schema_version 1. '
    )
    with pytest.raises(UnsupportedSchema, match=found + ".*: train or import the model again"):
        parsed(original, "schema_version", schema)


def test_a_manifest_without_the_formats_name_is_refused(original: Bundle) -> None:
    for content in (changed(original, "format", ABSENT), b"[]", b"3", b"null", b"{}"):
        with pytest.raises(UnsupportedSchema, match=r'format null with schema_version (1|null); expected format "espalier-bundle"'):
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


# -- arrays -------------------------------------------------------------------------------------------------------------


Arrays = dict[str, Array]


def put(name: str, place: int | slice, value: Any) -> Callable[[Arrays], Arrays]:
    """Another value at a place of an array."""

    def change(arrays: Arrays) -> Arrays:
        arrays[name][place] = value
        return arrays

    return change


def swap(name: str, to: Callable[[Array], Any]) -> Callable[[Arrays], Arrays]:
    """Another array under a name."""
    return lambda arrays: {**arrays, name: np.ascontiguousarray(to(arrays[name]))}


def new(name: str, array: Any) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {**arrays, name: array}


def drop(name: str) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {other: array for other, array in arrays.items() if other != name}


ONES = np.ones(3, np.float32)
CASES: dict[tuple[str, str], list[tuple[Callable[[Arrays], Arrays], str]]] = {
    ("graphs", "nodes.safetensors"): [
        (lambda arrays: {}, r"expected node_rows float32\[\d+, 4\], got nothing"),
        (swap("node_rows", lambda rows: rows.astype(np.float16)), r"got float16\[\d+, 4\]"),
        (swap("node_rows", lambda rows: rows[1:]), r"got float32\[\d+, 4\]"),
    ],
    ("graphs", "tree.safetensors"): [
        (lambda arrays: {"level_offset": arrays["level_offset"], "leaf_item": arrays["leaf_item"]}, "first_child"),
        (put("first_child", 1, 0), "fill exactly the next level|at least one child"),
        (swap("leaf_item", lambda item: np.where(item == item.max(), -1, item)), "not the one that the manifest describes"),
    ],
    ("memory", "memory.safetensors"): [
        (put("offset", -1, 2), "item: .* never decrease"),
        (put("item", 0, -1), "item has numbers outside"),
        (swap("item", lambda item: item[::-1]), "item is not strictly ascending"),
        (put("value", 1, -1), "value: expected finite"),
        (put("value", 0, np.nan), "value: expected finite"),
        (put("weight", 0, 3e38), "value: sums of weight"),
        (put("weight", 0, -1), "weight: expected at least one"),
        (new("weight", ONES), "weight has 3 entries"),
        (new("value", ONES), r"value is float32\[3\]"),
        (new("more", ONES), "arrays"),
    ],
    ("shard", "shard.safetensors"): [
        (lambda arrays: {"items": arrays["items"]}, r"arrays \['items'\], expected"),
        (lambda arrays: {**arrays, "nodes-2": arrays["nodes"]}, "arrays .*nodes-2"),
        (swap("items", lambda items: items.astype(np.int32)), "items is int32"),
        (swap("items", lambda items: items[1:]), "items has .* entries, expected"),
        (put("nodes", 5, 8), "nodes is not strictly ascending"),
        (swap("items", lambda items: items - 1), "items has numbers outside"),
        (swap("nodes", lambda nodes: nodes + 1), "nodes begins with node 1, expected the root"),
        (swap("nodes", lambda nodes: nodes + 2 * (nodes > 0)), "nodes has numbers outside"),
    ],
    ("linear", "chunks.safetensors"): [
        (put("chunk_row", slice(1, 3), [WRAPPING, -2]), "row_feature: .* never decrease"),
        (put("entry_weight", 7, np.nan), "must be finite"),
        (put("bias", 7, np.nan), "must be finite"),
        (swap("row_entry", lambda entry: entry + 1), "entry_child: .* never decrease"),
        (swap("bias", lambda bias: bias[:-1]), "bias has"),
        (swap("row_feature", lambda feature: np.full_like(feature, 20)), "outside 0 … 19"),
        (swap("row_feature", np.zeros_like), "row_feature is not strictly ascending"),
        (swap("entry_child", lambda child: child + 3), "children that a node does not have"),
        (swap("entry_child", np.zeros_like), "entry_child is not strictly ascending within a row"),  # engines would disagree on its weight
    ],
    ("float16", "chunks.safetensors"): [
        (swap("row_gap", lambda gap: np.full_like(gap, 20)), "row_gap leads to feature numbers outside 0 … 19"),
        (swap("row_count", lambda count: np.full_like(count, 100)), "entry_child: .* never decrease"),
        (swap("row_count", lambda count: -count.astype(np.int32)), "numbers below 0"),
        (swap("chunk_row", lambda row: row[::-1]), "chunk_row does not rise"),
        (swap("row_gap", lambda gap: gap.astype(np.float32)), r"row_gap is float32\[\d+\], expected one-dimensional uint8 or"),
        (lambda arrays: {**arrays, "row_feature": arrays["row_gap"]}, "expected .*row_gap"),
    ],
    ("tail", "tail.safetensors"): [
        (drop("value"), r"arrays \['feature', 'row_begin'\]"),
        (put("row_begin", slice(1, 3), [3, 2]), "never decrease"),
        (swap("feature", lambda feature: feature[:-1]), "feature has"),
        (put("feature", -1, F), f"outside 0 … {F - 1}"),
        (swap("feature", lambda feature: feature[::-1]), "not strictly ascending within a row"),
        (put("value", 0, np.nan), "rows must have the length 1"),
    ],
    ("stacking", "stacking.safetensors"): [
        (drop("mean"), "arrays"),
        (swap("label", lambda label: label + 1000), "label has numbers outside"),
        (put("label_value", 0, 2), "label_value has numbers outside"),
        (swap("posting_value", lambda value: value * np.float16(np.nan)), "not finite"),
        (swap("posting_begin", lambda begin: begin[::-1]), "never decrease"),
        (swap("posting_point", lambda point: point[::-1]), "not strictly ascending"),
        (swap("log_count", lambda count: count[1:]), "log_count has"),
        (swap("log_weight", lambda weight: weight + 2), "log_weight of at most 0"),
        (swap("weight_1", lambda weight: weight[1:]), "weight_1"),
        (swap("weight_2", np.ravel), "two dimensions"),
        (put("bias_3", 0, np.inf), "bias_3"),
        (swap("label_begin", lambda begin: begin[:0]), "-1 points"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "part", "number"), [(*place, number) for place, cases in CASES.items() for number in range(len(cases))])
def test_arrays_that_do_not_fit_are_refused_with_the_reason(
    made: dict[str, Bundle], tmp_path: Path, kind: str, part: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of a few numbers, whose ends some of the damage is at."""
    monkeypatch.setattr(stored_arrays, "BLOCK", 7)
    change, said = CASES[kind, part][number]
    path = Path(shutil.copytree(made[kind].path, tmp_path / "1"))
    arrays = change({name: np.array(array) for name, array in load_file(path / part).items()})
    save_file(arrays, path / part)
    reseal(path)
    with pytest.raises(BundleCorrupt, match=f"{part}: .*{said}"):
        read_everything(Bundle.open(path))


@pytest.mark.parametrize("part", ["tree.safetensors", "nodes.safetensors", "items.arrow"])
def test_a_part_of_another_model_does_not_fit(copy: Path, other: Bundle, part: str) -> None:
    shutil.copy(other.path / part, copy / part)
    with pytest.raises(BundleCorrupt, match=part):
        Bundle.open(copy)
    reseal(copy)
    with pytest.raises(BundleCorrupt, match=part):
        read_everything(Bundle.open(copy))


def test_weights_beside_another_tree_of_a_forest_do_not_fit(made: dict[str, Bundle], tmp_path: Path) -> None:
    path = Path(shutil.copytree(made["forest"].path, tmp_path / "1"))
    shutil.copy(path / "chunks.safetensors", path / "chunks-2.safetensors")
    reseal(path)
    with pytest.raises(BundleCorrupt, match=r"chunks-2\.safetensors: "):
        _ = Bundle.open(path).trees


# -- linear scorers -------------------------------------------------------------------------------------------------------


def test_a_node_of_more_children_than_chunks_can_number_is_refused() -> None:
    """A row with entries for 2^16 of its children would be taken for one without an entry."""
    for children in (MAX_CHILDREN, MAX_CHILDREN + 1):
        tree = tree_from_children([[children]], np.arange(children))
        arrays: dict[str, Any] = {name: np.zeros(0, dtype) for name, dtype in ARRAYS.items()}
        arrays |= {"chunk_row": np.zeros(2, np.int64), "row_entry": np.zeros(1, np.int64), "bias": np.zeros(tree.node_count, np.float32)}
        if children == MAX_CHILDREN:
            Chunks(**arrays, width=4).check(tree)
            continue
        with pytest.raises(BundleCorrupt, match="a node of 65537 children, at most 65536 can be numbered"):
            Chunks(**arrays, width=4).check(tree)


# -- limits of a memory ---------------------------------------------------------------------------------------------------


def one_row(entries: int = 1, places: int = 1, weight: float = 1.0, key_weight: float = 1.0, repeat: float = 0.0) -> Memory:
    """A memory of MAX_ROW + 1 items, of which the first has all entries."""
    offset = np.full(MAX_ROW + 2, entries)
    offset[0] = 0
    values, weights = np.ones(entries, np.float16), np.full(places, weight, np.float32)
    repeats = np.full(BUCKETS, repeat, np.float32)
    return Memory(offset, np.arange(entries, dtype=np.int32), values, weights, key_weight, repeats)


LARGEST, PLACES = float(np.finfo(np.float32).max) / 2, MAX_VISITS // MAX_ROW


@pytest.mark.parametrize(
    ("within", "beyond", "said"),
    [
        ({"entries": MAX_ROW}, {"entries": MAX_ROW + 1}, f"{MAX_ROW + 1} entries of an item"),
        (
            {"entries": MAX_ROW, "places": PLACES},
            {"entries": MAX_ROW, "places": PLACES + 1},
            f"{PLACES + 1} places over rows of up to {MAX_ROW} entries, at most {MAX_VISITS} together",
        ),
        ({"weight": 0.99 * LARGEST, "key_weight": 1e-30}, {"weight": 1.01 * LARGEST, "key_weight": 1e-30}, "sums of weight"),
        ({"weight": 0.99 * LARGEST}, {"weight": 1.01 * LARGEST}, "value: sums of weight · value reach"),
        ({"repeat": 0.99 * LARGEST / MAX_HISTORY}, {"repeat": 1.01 * LARGEST / MAX_HISTORY}, "value: sums of weight · value reach"),
        (
            {"weight": 0.99 * LARGEST / 1e30, "key_weight": 1e30},
            {"weight": 1.01 * LARGEST / 1e30, "key_weight": 1e30},
            "value: key_weight · sums of weight · value reach",
        ),
    ],
)
def test_a_memory_has_limits(within: dict[str, Any], beyond: dict[str, Any], said: str) -> None:
    """Entries of a row, entries that one query adds up, the largest of mem, with an item that fills a history, and of its part of a key."""
    one_row(**within).check(MAX_ROW + 1)
    with pytest.raises(BundleCorrupt, match=said):
        one_row(**beyond).check(MAX_ROW + 1)
