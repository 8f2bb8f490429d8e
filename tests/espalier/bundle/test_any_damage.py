"""The contract of every file and message that is read: damaged in any way, it is refused by one of our errors, or read as something sound.

Whatever else a reader raises, or an answer with a row that is no item, fails a test here.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from benchmarks.random_bundles import random_queries
from espalier.bundle import GRAPH_PARTS, Bundle, parse_manifest, parts_of
from espalier.engines import open_engine
from espalier.errors import BundleCorrupt, BundleError, BundleNotFound, EspalierError
from espalier.live.journal import Journal
from espalier.live.operations import ItemBody
from espalier.live.rows import LiveRow
from espalier.search import SearchParams
from espalier.shards.messages import decode_answer, decode_query, encode_answer, encode_query
from espalier.text.blocks import TextBlock
from espalier.text.vectoriser import Vectoriser
from tests.espalier.bundle.parts import MADE, read_everything, reseal
from tests.espalier.live.journals import appended, put
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


def test_nonsense_is_refused_by_the_name_of_its_part(copied: tuple[Path, tuple[str, ...]]) -> None:
    path, parts = copied
    for part in parts:
        whole = (path / part).read_bytes()
        for content in (b"", b"nonsense", b"\xff" * 64, b"PAR1" + bytes(40) + b"PAR1"):
            (path / part).write_bytes(content)
            reseal(path)
            with pytest.raises(BundleCorrupt, match=part):
                read_everything(Bundle.open(path))
        (path / part).write_bytes(whole)


def test_random_damage_is_refused_or_read(copied: tuple[Path, tuple[str, ...]]) -> None:
    rng, (path, parts) = np.random.default_rng(3), copied
    for part in parts:
        whole = (path / part).read_bytes()
        for damaged in damages(whole, rng, 20):
            (path / part).write_bytes(damaged)
            reseal(path)
            try:
                read_everything(Bundle.open(path))
            except BundleError:
                continue
        (path / part).write_bytes(whole)


def wrong_number(array: NDArray[Any], rng: np.random.Generator) -> Any:
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
    try:
        read(bytes(damaged))
    except EspalierError:
        return


@pytest.mark.parametrize("name", ["query", "answer", "live row", "manifest"])
@given(body=st.binary(max_size=200))
def test_garbage_is_refused(name: str, body: bytes) -> None:
    with pytest.raises(EspalierError):
        FORMATS[name][1](body)


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
    appended(journal, [put(f"i{number}", number) for number in range(30)], version=1)
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
