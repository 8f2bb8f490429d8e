"""Arrays of bundles whose checksums are right: what does not fit is refused by the name of the array, before compiled code follows it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from espalier import memory as memory_module
from espalier import shard_parts
from espalier.bundle import Bundle
from espalier.chunks import ARRAYS, MAX_CHILDREN, Chunks
from espalier.errors import BundleCorrupt
from espalier.memory import MAX_ROW, MAX_VISITS, Memory
from espalier.packed_chunks import unpacked
from espalier.tree import tree_from_children
from tests.espalier.bundle.parts import read_everything, reseal
from tests.espalier.test_tail import F

Arrays = dict[str, NDArray[Any]]
WRAPPING = 2**63 - 1
"""Differences of int64 that pass it begin again below 0: 1, WRAPPING, −2, 3 seems to rise all the way."""


def put(name: str, place: int | slice, value: Any) -> Callable[[Arrays], Arrays]:
    """Another value at a place of an array."""

    def change(arrays: Arrays) -> Arrays:
        arrays[name][place] = value
        return arrays

    return change


def swap(name: str, to: Callable[[NDArray[Any]], Any]) -> Callable[[Arrays], Arrays]:
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
        (put("offset", 0, 1), "offset: expected to rise from 0"),
        (put("offset", 2, -1), "offset: expected to rise from 0"),
        (put("offset", 2, 2**62), "offset: expected to rise from 0"),
        (put("offset", -1, 2), "offset: expected to rise from 0"),
        (put("item", 0, -1), "item: expected item rows"),
        (put("item", 3, 10_000), "item: expected item rows"),
        (swap("item", lambda item: item[::-1]), "item: expected ascending"),
        (put("value", 1, -1), "value: expected finite"),
        (put("value", 0, np.nan), "value: expected finite"),
        (put("value", 1, np.inf), "value: expected finite"),
        (put("value", 1, 3e38), "value: sums of weight"),
        (put("weight", 0, -1), "weight: expected at least one"),
        (put("weight", 0, np.inf), "weight: expected at least one"),
        (new("weight", ONES), "3 weights and"),
        (new("value", ONES), r"value: float32\[3\]"),
        (new("offset", np.zeros(3, np.int64)), r"offset: int64\[3\]"),
        (new("item", np.zeros(3, np.int64)), "3 entries"),
        (new("more", ONES), "arrays"),
        (new("weight", np.array(1, np.float32)), r"weight: float32\[\], expected one dimension"),
    ],
    ("shard", "shard.safetensors"): [
        (lambda arrays: {"items": arrays["items"]}, r"arrays \['items'\], expected"),
        (lambda arrays: {**arrays, "nodes-2": arrays["nodes"]}, "arrays .*nodes-2"),
        (swap("items", lambda items: items.astype(np.int32)), "items: int32"),
        (swap("items", lambda items: np.stack([items] * 2)), r"items: int64\[2, .*expected int64"),
        (swap("items", lambda items: items[1:]), "items: int64.*expected int64"),
        (swap("items", lambda items: items[::-1]), "items: expected ascending"),
        (put("nodes", 5, 8), "nodes: expected ascending"),
        (swap("items", lambda items: items - 1), "items: from -1"),
        (swap("items", lambda items: items + 2), "items: from .* expected numbers from 0 to"),
        (swap("nodes", lambda nodes: nodes + 1), "nodes: begins with node 1, expected the root"),
        (swap("nodes", lambda nodes: nodes + 2 * (nodes > 0)), "nodes: from .* expected numbers from 0 to"),
    ],
    ("linear", "chunks.safetensors"): [
        (put("chunk_row", slice(1, 3), [WRAPPING, -2]), "chunk_row has .* never decrease"),
        (put("row_entry", slice(1, 3), [WRAPPING, -2]), "row_entry has .* never decrease"),
        (put("entry_weight", 7, np.nan), "must be finite"),
        (put("entry_weight", 7, np.inf), "must be finite"),
        (put("entry_weight", 7, -np.inf), "must be finite"),
        (put("bias", 7, np.nan), "must be finite"),
        (put("bias", 7, -np.inf), "must be finite"),
        (swap("chunk_row", lambda row: row[:-1]), "chunk_row has"),
        (swap("row_entry", lambda entry: entry + 1), "row_entry has"),
        (swap("bias", lambda bias: bias[:-1]), "biases, expected"),
        (swap("bias", lambda bias: bias.astype(np.float16)), "bias is float16"),
        (swap("row_feature", lambda feature: np.full_like(feature, 20)), "outside 0 … 19"),
        (swap("row_feature", np.zeros_like), "not strictly ascending within a node"),
        (swap("entry_child", lambda child: np.full_like(child, 7)), "children that a node does not have"),
    ],
    ("float16", "chunks.safetensors"): [
        (swap("row_gap", lambda gap: np.full_like(gap, 20)), "row_gap leads to feature numbers outside 0 … 19"),
        (swap("row_count", lambda count: np.full_like(count, 100)), "row_entry has"),
        (swap("row_count", lambda count: -count.astype(np.int32)), "numbers below 0"),
        (swap("entry_child", lambda child: np.full_like(child, 200)), "numbers of children that a node does not have"),
        (swap("entry_weight", lambda weight: np.full_like(weight, np.inf)), "must be finite"),
        (swap("chunk_row", lambda row: row[::-1]), "chunk_row of .* does not rise"),
        (swap("row_gap", lambda gap: gap.astype(np.float32)), r"row_gap is float32\[\d+\], expected one-dimensional uint8 or"),
        (lambda arrays: {**arrays, "row_feature": arrays["row_gap"]}, "expected .*row_gap"),
    ],
    ("tail", "tail.safetensors"): [
        (drop("value"), r"arrays \['feature', 'row_begin'\]"),
        (swap("value", lambda value: value.astype(np.int64)), r"value is int64.*expected one-dimensional float32"),
        (put("row_begin", slice(1, 3), [3, 2]), "never decrease"),
        (swap("feature", lambda feature: feature[:-1]), "never decrease"),
        (put("feature", -1, F), f"outside 0 … {F - 1}"),
        (swap("feature", lambda feature: feature[::-1]), "not strictly ascending within a row"),
        (swap("value", lambda value: value + (np.arange(len(value)) == 0)), "rows must have the length 1"),
        (put("value", 0, np.nan), "rows must have the length 1"),
    ],
    ("stacking", "stacking.safetensors"): [
        (drop("mean"), "arrays"),
        (swap("label", lambda label: label + 1000), "label has numbers outside"),
        (swap("label_value", np.zeros_like), "label_value has numbers outside"),
        (put("label_value", 0, 2), "label_value has numbers outside"),
        (swap("posting_value", lambda value: value * np.float16(np.nan)), "not finite"),
        (swap("posting_begin", lambda begin: begin[::-1]), "never decrease"),
        (swap("posting_point", lambda point: point[::-1]), "not strictly ascending"),
        (swap("log_count", lambda count: count[1:]), "log_count has"),
        (swap("log_weight", lambda weight: weight + 2), "log_weight of at most 0"),
        (swap("weight_1", lambda weight: weight[1:]), "weight_1"),
        (swap("weight_2", np.ravel), "two dimensions"),
        (put("bias_3", 0, np.inf), "bias_3"),
        (swap("beside_begin", lambda begin: begin[:-1]), "beside_begin has"),
        (swap("label_begin", lambda begin: begin[:0]), "-1 points"),
        (swap("posting_begin", lambda begin: begin[:0]), "posting_begin has"),
        (swap("posting_begin", lambda begin: np.where(begin > 0, np.int64(WRAPPING), 0)), "never decrease"),
        (swap("posting_value", lambda value: value.astype(np.float32)), "posting_value is float32"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "part", "number"), [(*place, number) for place, cases in CASES.items() for number in range(len(cases))])
def test_arrays_that_do_not_fit_are_refused_with_the_reason(
    made: dict[str, Bundle], tmp_path: Path, kind: str, part: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of a few numbers, whose ends some of the damage is at."""
    monkeypatch.setattr(memory_module, "BLOCK", 7)
    monkeypatch.setattr(shard_parts, "BLOCK", 1 + number % 3)
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


def one_node(row_feature: list[int], row_entry: list[int], entry_child: list[int], width: int) -> Chunks:
    """Weights of 1 of a root with two children."""
    return Chunks(
        np.array([0, len(row_feature)]), np.array(row_feature, np.int32), np.array(row_entry), np.array(entry_child, np.uint16),
        np.ones(len(entry_child), np.float32), np.zeros(3, np.float32), width,
    )  # fmt: skip


TWO_CHILDREN = tree_from_children([[2]], np.arange(2))


@pytest.mark.parametrize("children", [[1, 0], [1, 1]])
def test_a_row_with_a_child_twice_or_in_no_order_is_refused(children: list[int]) -> None:
    """Engines would disagree on its weight."""
    with pytest.raises(BundleCorrupt, match="entry_child is not strictly ascending within a row"):
        one_node([0, 1], [0, 2, 4], [0, 1, *children], 2).check(TWO_CHILDREN)


def test_rows_side_by_side_may_begin_with_any_child() -> None:
    one_node([0, 1, 2], [0, 2, 2, 4], [0, 1, 0, 1], 3).check(TWO_CHILDREN)


def test_features_of_a_node_are_below_the_width_and_not_there_twice() -> None:
    def two_rows(second_gap: int, width: int) -> Chunks:
        arrays = {
            "chunk_row": np.array([0, 2]), "row_gap": np.array([4, second_gap], np.uint8), "row_count": np.array([1, 1], np.uint8),
            "entry_child": np.zeros(2, np.uint8), "entry_weight": np.ones(2, np.float16), "bias": np.zeros(3, np.float32),
        }  # fmt: skip
        return unpacked(arrays, width)

    two_rows(1, width=6).check(TWO_CHILDREN)
    with pytest.raises(BundleCorrupt, match="row_gap leads to feature numbers outside 0 … 4"):
        two_rows(1, width=5)
    with pytest.raises(BundleCorrupt, match="row_feature is not strictly ascending"):
        two_rows(0, width=6).check(TWO_CHILDREN)


def test_a_node_of_more_children_than_chunks_can_number_is_refused() -> None:
    """A row with entries for 2^16 of its children would be taken for one without an entry."""
    for children in (MAX_CHILDREN, MAX_CHILDREN + 1):
        tree = tree_from_children([[children]], np.arange(children))
        arrays = {name: np.zeros(0, dtype) for name, dtype in ARRAYS.items()}
        arrays |= {"chunk_row": np.zeros(2, np.int64), "row_entry": np.zeros(1, np.int64), "bias": np.zeros(tree.node_count, np.float32)}
        if children == MAX_CHILDREN:
            Chunks(**arrays, width=4).check(tree)
            continue
        with pytest.raises(BundleCorrupt, match="a node of 65537 children, at most 65536 can be numbered"):
            Chunks(**arrays, width=4).check(tree)


# -- limits of a memory ---------------------------------------------------------------------------------------------------


def one_row(entries: int, items: int, places: int = 1, value: float = 1.0, key_weight: float = 1.0) -> Memory:
    """A memory of which the first item has all entries."""
    offset = np.full(items + 1, entries)
    offset[0] = 0
    values, weights = np.full(entries, value, np.float32), np.ones(places, np.float32)
    return Memory(offset, np.arange(entries, dtype=np.int32), values, weights, key_weight)


LARGEST = float(np.finfo(np.float32).max) / 2


@pytest.mark.parametrize(
    ("within", "beyond", "items", "said"),
    [
        (one_row(MAX_ROW, MAX_ROW + 1), one_row(MAX_ROW + 1, MAX_ROW + 1), MAX_ROW + 1, f"by at most {MAX_ROW} entries an item"),
        (
            one_row(MAX_ROW, MAX_ROW, MAX_VISITS // MAX_ROW),
            one_row(MAX_ROW, MAX_ROW, MAX_VISITS // MAX_ROW + 1),
            MAX_ROW,
            f"{MAX_VISITS // MAX_ROW + 1} places over rows of up to {MAX_ROW} entries, at most {MAX_VISITS} together",
        ),
        (one_row(1, 1, value=0.99 * LARGEST, key_weight=1e-30), one_row(1, 1, value=1.01 * LARGEST, key_weight=1e-30), 1, "sums of weight"),
        (one_row(1, 1, value=0.99 * LARGEST), one_row(1, 1, value=1.01 * LARGEST), 1, "value: sums of weight · value reach"),
        (
            one_row(1, 1, value=0.99 * LARGEST / 1e30, key_weight=1e30),
            one_row(1, 1, value=1.01 * LARGEST / 1e30, key_weight=1e30),
            1,
            "value: key_weight · sums of weight · value reach",
        ),
    ],
)
def test_a_memory_has_limits(within: Memory, beyond: Memory, items: int, said: str) -> None:
    """Entries of a row, entries that one query adds up, and the largest of mem and of its part of a key."""
    within.check(items)
    with pytest.raises(BundleCorrupt, match=said):
        beyond.check(items)


# -- maps and copies ------------------------------------------------------------------------------------------------------


def test_node_rows_are_mapped_not_read(original: Bundle) -> None:
    rows = Bundle.open(original.path).stored_rows
    assert isinstance(rows.base, np.memmap)
    assert Path(str(rows.base.filename)) == original.path / "nodes.safetensors"
    assert not rows.flags.writeable
    assert not rows.flags.owndata


def test_a_shard_says_of_which_bundle_it_holds_which_items_and_nodes(made: dict[str, Bundle]) -> None:
    opened = Bundle.open(made["shard"].path)
    info = opened.manifest.shard
    assert opened.shard is not None
    assert info is not None
    assert opened.shard.items.tolist() == [2 * i for i in range(opened.tree.item_count)]
    assert [nodes.tolist() for nodes in opened.shard.nodes] == [[2 * n for n in range(opened.tree.node_count)]]
    assert (info.of, info.index, info.count) == ("whole", 0, 2)
    assert opened.manifest.history_items == 2 * opened.tree.item_count
    whole = made["graphs"]
    assert whole.shard is None
    assert whole.manifest.history_items == whole.tree.item_count
    assert '"shard"' not in (whole.path / "manifest.json").read_text()
