"""`espalier shard`: whole layouts of verified shards, from a bundle or from the shards of one."""

from __future__ import annotations

import itertools
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.testing import assert_array_equal

from benchmarks.random_bundles import make_bundle, random_memory, random_queries, random_tree
from espalier import bundle_files
from espalier.bundle import Bundle, find_versions
from espalier.bundle_writer import with_parts
from espalier.checks.golden import HISTORY_ROWS, STATES, golden_queries, verify_golden
from espalier.checks.heldout import read_heldout
from espalier.engines import open_engine
from espalier.engines.reference import ReferenceEngine
from espalier.engines.stages import GivenQueries
from espalier.errors import BundleCorrupt, BundleExists, BundleNotFound, InvalidConfig, InvalidInput
from espalier.model import open_model
from espalier.queries import QueryBatch
from espalier.search import SearchParams
from espalier.shards import cut
from espalier.shards.cut import Cut
from espalier.text.sparse_rows import SparseRows
from tests.espalier.drawn_bundles import drawn_bundle
from tests.training.commands import command as command_line
from training.golden import golden_answers
from training.inspect import inspect
from training.shard import command
from training.shard.command import shard
from training.shard.join import is_folder_of_shards, shards_in

NUMBER = itertools.count()
KINDS = ("product memory", "history sequence", "vector", "linear", "forest float16")


def made(folder: Path, kind: str, seed: int = 0) -> Bundle:
    """A bundle with golden queries and a held-out one."""
    rng, name, parts = np.random.default_rng(seed), f"m{next(NUMBER)}", kind.split()
    if parts[0] in ("linear", "forest"):
        shape: dict[str, Any] = {"branching_height": (4, 3), "ragged": True, "empty_share": 0.2, "gamma": 1.0, "own": "log_activation"}
        shape |= {"kind": "linear", "trees": 1} if kind == "linear" else {"kind": "linear tail", "trees": 3}
        bundle = drawn_bundle(folder, rng, shape | {"dtype": "float16" if "float16" in parts else "float32"}, integer=False)
    else:
        tree = random_tree(rng, 3, 4, empty_share=0.2)
        memory = random_memory(rng, tree.item_count, 3, integer=False) if "memory" in parts else None
        first: Any = parts[0]
        encoder: Any = "sequence" if "sequence" in parts else "levels"
        bundle = make_bundle(folder, rng, tree, first, 0.5, integer=False, name=name, memory=memory, encoder=encoder)
    queries = random_queries(rng, bundle, 6)
    params = SearchParams(np.array([1, 2, 3, 5, 8, 99]), np.full(6, 4))
    return with_parts(
        bundle, folder / name / "7", {}, {"golden.parquet": golden_answers(bundle, queries, written(bundle, queries), params)}
    )


def written(bundle: Bundle, queries: QueryBatch) -> pa.Array:
    """Queries as clients write them."""
    if isinstance(queries.rows, SparseRows):
        rows = queries.features
        spans = [slice(*rows.indptr[b : b + 2]) for b in range(len(queries))]
        entries = [{"indices": rows.indices[own].tolist(), "values": rows.values[own].tolist()} for own in spans]
        return pa.array(entries, pa.struct({"indices": pa.list_(pa.int64()), "values": pa.list_(pa.float32())}))
    if bundle.manifest.query.kind == "history":
        return pa.array([bundle.items.ids_of(row[row >= 0]) for row in queries.array.astype(np.int64)], pa.list_(pa.string()))
    return pa.array(list(queries.array), pa.list_(pa.float32()))


def files_of(bundle: Bundle) -> dict[str, Any]:
    return dict(bundle.manifest.files)


@pytest.mark.parametrize("kind", KINDS)
def test_shards_hold_all_items_and_answer_the_golden_queries_of_the_bundle(tmp_path: Path, kind: str) -> None:
    bundle = made(tmp_path, kind)
    shards = shard(bundle.path, 3, tmp_path / "shards")
    assert [found.path for found in shards] == [tmp_path / "shards" / str(index) / "7" for index in range(3)]
    assert find_versions(tmp_path / "shards") == {"0": (7,), "1": (7,), "2": (7,)}
    assert [path.name for path in (tmp_path / "shards").iterdir() if path.name.startswith(".")] == []
    items = [ids for found in shards for ids in found.items.ids_of(np.arange(len(found.items)))]
    assert sorted(items) == sorted(bundle.items.ids_of(np.arange(len(bundle.items))))
    names = {"reference", open_engine(bundle).name} | ({"onnx-cpu"} if kind not in ("linear", "forest float16") else set())
    for found in shards:
        opened = Bundle.open(found.path)
        assert len(read_heldout(opened).queries) == 0
        for name in names:
            assert verify_golden(opened, open_engine(opened, engine=name)) == 1
        table = opened.golden()
        assert table.column(bundle.manifest.query.kind) == bundle.golden().column(bundle.manifest.query.kind)
        assert table.column("beam_size") == bundle.golden().column("beam_size")
        if kind == "product memory":
            whole, queries = golden_queries(bundle, bundle.golden()), golden_queries(found, table)
            assert isinstance(queries, GivenQueries)
            assert_array_equal(queries.array, whole.array)
            assert_array_equal(queries.states_BLS, ReferenceEngine(bundle).states(whole))


@pytest.mark.parametrize(("kind", "before", "after"), [*((kind, 3, 2) for kind in KINDS), ("product memory", 1, 3)])
def test_shards_cut_into_another_number_are_those_that_the_bundle_is_cut_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, before: int, after: int
) -> None:
    """However few entries are looked at together."""
    bundle = made(tmp_path, kind, seed=10 * before + after)
    expected = [files_of(found) for found in shard(bundle.path, after, tmp_path / "expected")]
    monkeypatch.setattr(cut, "BLOCK", 5)
    shard(bundle.path, before, tmp_path / "before")
    assert [files_of(found) for found in shard(tmp_path / "before", after, tmp_path / "after")] == expected


def test_a_layout_that_is_there_is_not_written_again_and_one_that_is_not_whole_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, out = made(tmp_path, "vector"), tmp_path / "shards"
    put = command.put

    def killed(hidden: Path, out: Path, version: int, indices: list[int]) -> list[Bundle]:
        put(hidden, out, version, indices[:2])
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(command, "put", killed)
        with pytest.raises(KeyboardInterrupt):
            shard(bundle.path, 3, out)
    assert find_versions(out) == {"0": (7,), "1": (7,)}
    with pytest.raises(BundleNotFound, match="it has not all shards of any version"):
        shards_in(out, None)
    created = (out / "0" / "7" / "manifest.json").read_bytes()
    assert [found.path.parent.name for found in shard(bundle.path, 3, out)] == ["2"]
    assert (out / "0" / "7" / "manifest.json").read_bytes() == created
    with pytest.raises(BundleExists, match="version 7 is there already, in 3 shards"):
        shard(bundle.path, 3, out)


def test_another_layout_of_the_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    bundle, out = made(tmp_path, "vector"), tmp_path / "shards"
    shard(bundle.path, 3, out)
    for count in (2, 1):
        with pytest.raises(BundleExists, match=r"0/7: shard 0 of 3 of m\d+ .*not of the layout in \d shards .*Choose another folder"):
            shard(bundle.path, count, out)
    changed = with_parts(bundle, tmp_path / "changed" / bundle.manifest.name / "7", {"algorithm": "other"}, {})
    with pytest.raises(BundleExists, match="not of the layout"):
        shard(changed.path, 3, out)
    shutil.rmtree(out / "0" / "7")
    shutil.rmtree(out / "1" / "7")
    with pytest.raises(BundleExists, match="2/7: shard 2 of 3"):
        shard(bundle.path, 2, out)
    shard(bundle.path, 3, out)
    later = with_parts(bundle, tmp_path / bundle.manifest.name / "8", {}, {})
    shard(later.path, 2, out)
    assert find_versions(out) == {"0": (7, 8), "1": (7, 8), "2": (7,)}
    assert [found.manifest.version for found in shards_in(out, None)] == [8, 8]
    assert [found.manifest.version for found in shards_in(out, 7)] == [7, 7, 7]


def test_models_and_bundles_are_no_place_for_shards(tmp_path: Path) -> None:
    bundle, models = made(tmp_path / "made", "vector"), tmp_path / "models"
    shutil.copytree(bundle.path, models / "4" / "7")
    before = sorted(models.rglob("*"))
    for out, reason in (
        ("", "it holds the model '4'"),
        ("4", "it holds version 7 of a model"),
        ("4/7", ".*/7 is a bundle"),
        ("4/7/shards/4", ".*/7 is a bundle"),
    ):
        with pytest.raises(InvalidConfig, match=rf"--out: got .*, expected a folder for shards alone; {reason}"):
            shard(bundle.path, 2, models / out)
    assert sorted(models.rglob("*")) == before


def test_shards_of_which_one_is_missing_or_another_ones_are_not_joined(tmp_path: Path) -> None:
    bundle, out = made(tmp_path, "vector"), tmp_path / "shards"
    shard(bundle.path, 3, out)
    shutil.copytree(out / "1" / "7", tmp_path / "kept")
    shutil.rmtree(out / "1" / "7")
    with pytest.raises(BundleNotFound, match="it has not all shards of version 7; cut the bundle itself"):
        shard(out, 2, tmp_path / "other", version=7)
    shutil.copytree(out / "2" / "7", out / "1" / "7")
    with pytest.raises(BundleCorrupt, match=r"1/7: not shard 1 of 3 of"):
        shard(out, 2, tmp_path / "other")
    with pytest.raises(InvalidConfig, match="--version: got 7, expected none"):
        shard(bundle.path, 2, tmp_path / "other", version=7)
    assert find_versions(tmp_path / "other") == {}


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        (STATES, [[1.0]], "row 0 of states: expected 16 finite numbers"),
        (STATES, [[np.nan] * (4 * 4)], "row 0 of states: expected 16 finite"),
        (STATES, [None], "row 0 of states: expected 16 finite"),
        (STATES, None, "states"),
        (HISTORY_ROWS, [[10_000]], "history_rows has item row 10000"),
        (HISTORY_ROWS, None, "history_rows"),
    ],
)
def test_golden_queries_of_a_shard_that_cannot_be_searched_are_refused(
    tmp_path: Path, column: str, value: list[Any] | None, reason: str
) -> None:
    bundle = made(tmp_path, "product memory")
    (only,) = shard(bundle.path, 1, tmp_path / "shards")
    table = only.golden().slice(0, 1)
    at, field = table.column_names.index(column), table.schema.field(column)
    table = table.remove_column(at)
    if value is not None:
        table = table.append_column(field, pa.array(value, field.type))
    with pytest.raises(BundleCorrupt, match=reason):
        verify_golden(only, ReferenceEngine(only), table)


def test_node_rows_are_written_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard's rows are never in memory at once, let alone those of all shards."""
    monkeypatch.setattr(bundle_files, "BLOCK_BYTES", 1 << 16)
    rng = np.random.default_rng(0)
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 3, 8, ragged=False), "vector", width=2048)
    rows = bundle.stored_rows.nbytes
    cut = Cut(bundle, 2)
    tracemalloc.start()
    try:
        cut.write(tmp_path / "shards" / "0" / "1", 0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert rows > 4_500_000
    assert peak < rows / 4


def test_a_run_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, write = made(tmp_path, "vector"), Cut.write
    with pytest.raises(InvalidConfig, match="shards: got 4000, expected 1 to "):
        shard(bundle.path, 4000, tmp_path / "shards")
    with pytest.raises(BundleNotFound):
        shard(tmp_path / "nothing", 2, tmp_path / "shards")
    (tmp_path / "file").touch()
    with pytest.raises(InvalidConfig, match="--out"):
        shard(bundle.path, 2, tmp_path / "file")

    def fail(self: Cut, path: Path, index: int) -> Bundle:
        if index == 1:
            raise OSError("no room")
        return write(self, path, index)

    monkeypatch.setattr(Cut, "write", fail)
    with pytest.raises(OSError, match="no room"):
        shard(bundle.path, 2, tmp_path / "shards")
    assert not (tmp_path / "shards").exists()


def test_commands_say_what_was_written_which_part_a_shard_is_and_what_is_to_be_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bundle, out = made(tmp_path, "vector"), tmp_path / "shards"
    with caplog.at_level("INFO"):
        assert command_line("shard", "--model", bundle.path, "--shards", 2, "--out", out).status == 0
    assert "wrote 2 shards to" in caplog.text
    first, second = (Bundle.open(out / str(index) / "7") for index in (0, 1))
    assert second.manifest.command == f"espalier shard --model {bundle.path} --shards 2 --out {out}"
    assert f"\nshard 1 of 2 of {bundle.manifest.name} version 7 (" in inspect(second)
    assert f"), of {bundle.tree.item_count} items\n" in inspect(first)
    assert "shard" not in inspect(bundle)
    for given in (["evaluate"], ["evaluate", "--data", "log.csv"], ["evaluate", "--unseen"], ["fit-ranker", "--out", tmp_path / "2"]):
        refused = command_line(*given, "--model", second.path)
        assert refused.status == 1
        assert f"shard 1 of 2', expected the whole bundle, {bundle.manifest.name} version 7; " in refused.err
    with pytest.raises(InvalidInput, match="shard 1 of 2', expected the whole bundle"):
        open_model(second.path)
    assert is_folder_of_shards(out)
    shutil.copytree(out, bundle.path.parent, dirs_exist_ok=True)
    assert not is_folder_of_shards(bundle.path.parent), "shards among the versions of a model"
