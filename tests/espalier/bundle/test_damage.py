"""Damaged files are refused, whatever their checksums say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from espalier.bundle import GRAPH_PARTS, Bundle
from espalier.errors import (
    BundleCorrupt,
    BundleNotFound,
)
from tests.espalier.bundle.parts import read_everything, reseal


@pytest.mark.parametrize("part", GRAPH_PARTS)
def test_a_single_changed_byte_is_found(copy: Path, part: str) -> None:
    whole = (copy / part).read_bytes()
    rng = np.random.default_rng(3)
    for place in {0, len(whole) - 1, *rng.integers(len(whole), size=6).tolist()}:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(rng.integers(8))
        (copy / part).write_bytes(damaged)
        with pytest.raises(BundleCorrupt, match=f"{part}: its SHA-256"):
            Bundle.open(copy)
    (copy / part).write_bytes(whole)
    Bundle.open(copy)


@pytest.mark.parametrize("part", GRAPH_PARTS)
@pytest.mark.parametrize("verify", [True, False])
def test_a_truncated_or_grown_part_is_found_without_reading_it(copy: Path, part: str, verify: bool) -> None:
    whole = (copy / part).read_bytes()
    for damaged in (whole[:-1], whole[: len(whole) // 2], b"", whole + b"\0"):
        (copy / part).write_bytes(damaged)
        with pytest.raises(BundleCorrupt, match=rf"{part}: {len(damaged)} bytes, the manifest says {len(whole)}"):
            Bundle.open(copy, verify=verify)


@pytest.mark.parametrize("part", GRAPH_PARTS)
def test_a_missing_part_is_found(copy: Path, part: str) -> None:
    (copy / part).unlink()
    with pytest.raises(BundleNotFound, match=f"{part}: missing"):
        Bundle.open(copy)
    (copy / part).mkdir()
    with pytest.raises(BundleNotFound, match=f"{part}: missing"):
        Bundle.open(copy)


@pytest.mark.parametrize("part", GRAPH_PARTS)
def test_a_part_of_another_model_is_found(copy: Path, other: Bundle, part: str) -> None:
    shutil.copy(other.path / part, copy / part)
    with pytest.raises(BundleCorrupt, match=part):
        Bundle.open(copy)


@pytest.mark.parametrize("part", ["tree.safetensors", "nodes.safetensors", "items.arrow"])
def test_a_part_of_another_model_with_its_checksum_still_does_not_fit(copy: Path, other: Bundle, part: str) -> None:
    shutil.copy(other.path / part, copy / part)
    reseal(copy)
    with pytest.raises(BundleCorrupt, match=part):
        read_everything(Bundle.open(copy))


@pytest.mark.parametrize("part", ["tree.safetensors", "nodes.safetensors", "items.arrow", "query.onnx", "scorer.onnx"])
@pytest.mark.parametrize("content", [b"", b"nonsense", b"\xff" * 64, b"PAR1" + bytes(40) + b"PAR1"])
def test_nonsense_with_a_right_checksum_is_refused_when_read(copy: Path, part: str, content: bytes) -> None:
    (copy / part).write_bytes(content)
    reseal(copy)
    with pytest.raises(BundleCorrupt, match=part):
        read_everything(Bundle.open(copy))


def safetensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(**changed: object) -> dict[str, object]:
    return {"node_rows": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | changed}


@pytest.mark.parametrize(
    "content",
    [
        safetensors(entry(), bytes(16), length=10**6),
        safetensors(entry(), bytes(16), length=2**64 - 1),
        safetensors(b"{not json", bytes(16)),
        safetensors(b"\xff\xfe\xfd", bytes(16)),
        safetensors({"node_rows": {}}, bytes(16)),
        safetensors({"node_rows": "F32"}, bytes(16)),
        safetensors({"node_rows": [1, 2]}, bytes(16)),
        safetensors(entry(dtype="BF16"), bytes(16)),
        safetensors(entry(dtype=4), bytes(16)),
        safetensors(entry(shape=[3, 2]), bytes(16)),
        safetensors(entry(shape=[-2, -2]), bytes(16)),
        safetensors(entry(shape="22"), bytes(16)),
        safetensors(entry(data_offsets=[0, 17]), bytes(17)),
        safetensors(entry(data_offsets=[16]), bytes(16)),
        safetensors(entry(data_offsets=[-16, 0]), bytes(16)),
        safetensors(entry(data_offsets=["0", "16"]), bytes(16)),
        safetensors(entry(), bytes(15)),
        safetensors(entry(data_offsets=[10**9, 10**9 + 16]), bytes(16)),
        safetensors({}, bytes(16)),
    ],
)
@pytest.mark.parametrize("part", ["tree.safetensors", "nodes.safetensors"])
def test_a_safetensors_header_that_makes_no_sense_is_refused(copy: Path, part: str, content: bytes) -> None:
    (copy / part).write_bytes(content)
    reseal(copy)
    with pytest.raises(BundleCorrupt, match=part):
        read_everything(Bundle.open(copy))


def test_a_safetensors_shape_that_overflows_is_refused(copy: Path) -> None:
    (copy / "nodes.safetensors").write_bytes(safetensors(entry(shape=[2**32, 2**32], data_offsets=[0, 0]), bytes(16)))
    reseal(copy)
    with pytest.raises(BundleCorrupt, match=r"nodes\.safetensors"):
        read_everything(Bundle.open(copy))


@pytest.mark.parametrize("header", [[], [1], "text", 3, None])
def test_a_safetensors_header_that_is_no_object_is_refused(copy: Path, header: object) -> None:
    (copy / "nodes.safetensors").write_bytes(safetensors(header, bytes(16)))
    reseal(copy)
    with pytest.raises(BundleCorrupt, match=r"nodes\.safetensors"):
        read_everything(Bundle.open(copy))
