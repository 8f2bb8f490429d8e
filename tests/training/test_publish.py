"""Publishing: what is at its place was verified and measured, and what fails its checks never gets there; stores of versions."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import espalier_cli.__main__
import training.__main__
from benchmarks.random_bundles import make_bundle, random_memory, random_tree
from espalier.bundle import RANKER, Bundle
from espalier.bundle_writer import with_parts
from espalier.errors import BundleCorrupt, BundleExists, BundleNotFound, InvalidConfig, StoreMissing
from espalier.manifest import RankerInfo
from espalier.rerank.ranker import GOLDEN_SCORES
from espalier.search import Engine
from espalier.serving import MAX_VERSION, Candidate
from espalier.tree import complete_tree
from tests.golden import golden_of_histories
from tests.object_stores import two_versions
from tests.rankers import weighted_sum
from tests.service.shards.cutting import cut, whole_bundle
from tests.training.commands import command
from training.publish import publish, unanswered
from training.stored import change_default, versions
from training.stored import publish as to_store

HISTORIES = [np.array([0, 1]), np.array([2])]


def answers(bundle: Bundle) -> pa.Table:
    return golden_of_histories(bundle, HISTORIES, [4, 2], [3, 3])


def metrics(bundle: Bundle, engine: Engine) -> dict[str, Any]:
    return {"engine": engine.name}


@pytest.fixture
def source(tmp_path: Path) -> Bundle:
    """A bundle of histories with two held-out queries."""
    rng = np.random.default_rng(7)
    bundle = make_bundle(tmp_path / "source", rng, random_tree(rng, 3, 3), integer=False, name="books")
    strings = pa.list_(pa.string())
    heldout = pa.table({"history": pa.array([["item-0"], ["item-1"]], strings), "relevant": pa.array([["item-1"], []], strings)})
    parts = {"heldout.parquet": heldout, "golden.parquet": unanswered(heldout, "history")}
    return with_parts(bundle, tmp_path / "other" / "books" / "1", {}, parts)


def bare(source: Bundle) -> Callable[[Path], Bundle]:
    return lambda folder: with_parts(source, folder, {}, {})


def test_a_published_bundle_has_its_golden_answers_its_metrics_and_its_recall(source: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "models" / "shop" / "3"
    published = publish(path, bare(source), answers, metrics, [2, 5])
    assert (published.manifest.name, published.manifest.version) == ("shop", 3)
    assert published.manifest.metrics == {"golden_overlap": 1.0, "engine": "compiled-cpu"}
    assert published.golden().column("item_rows").to_pylist() == answers(source).column("item_rows").to_pylist()
    assert published.heldout().column_names == ["history", "relevant", "recall@2", "recall@5"]
    first, second = published.heldout().column("recall@5").to_pylist()
    assert 0 <= first <= 1
    assert np.isnan(second)  # nothing is relevant to it
    assert Bundle.open(path, verify=True).manifest == published.manifest
    assert [child.name for child in path.parent.iterdir()] == ["3"]


def test_a_memory_and_a_sequence_encoder_are_published_with_keys_among_the_golden_answers(source: Bundle, tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    tree = random_tree(rng, 3, 3)
    memory = random_memory(rng, tree.item_count, 3, integer=False)
    with_memory = make_bundle(tmp_path / "bare", rng, tree, integer=False, name="books", memory=memory, encoder="sequence")
    parts = {"heldout.parquet": source.heldout(), "golden.parquet": unanswered(source.heldout(), "history")}
    published = publish(
        tmp_path / "models" / "shop" / "1", lambda folder: with_parts(with_memory, folder, {}, parts), answers, metrics, [2]
    )
    assert published.manifest.memory == with_memory.manifest.memory
    assert published.graph_scorer.encoder == "sequence"
    assert published.memory is not None
    assert np.array_equal(published.memory.value, memory.value)
    golden = published.golden()
    for ranks, keys in zip(golden.column("ranks").to_pylist(), golden.column("keys").to_pylist(), strict=True):
        assert keys == sorted(keys, reverse=True)
        assert all(key >= rank for key, rank in zip(keys, ranks, strict=True))


def wrong_answers(bundle: Bundle) -> pa.Table:
    """The answers, with each item replaced by another that is not among them, and wide margins."""
    table = answers(bundle)
    rows = [[(row + 1) % len(bundle.items) for row in found] for found in table.column("item_rows").to_pylist()]
    table = table.set_column(table.column_names.index("item_rows"), "item_rows", pa.array(rows, pa.list_(pa.int64())))
    return table.set_column(table.column_names.index("margin"), "margin", pa.array([np.inf] * len(table)))


def test_a_bundle_whose_engine_fails_the_golden_queries_is_not_published(source: Bundle, tmp_path: Path) -> None:
    def broken(bundle: Bundle, engine: Engine) -> dict[str, Any]:
        raise KeyboardInterrupt

    path = tmp_path / "models" / "shop" / "3"
    with pytest.raises(KeyboardInterrupt):
        publish(path, bare(source), answers, broken, [2])
    with pytest.raises(BundleCorrupt, match="golden query 0"):
        publish(path, bare(source), wrong_answers, metrics, [2])
    assert list(path.parent.iterdir()) == []


def test_what_killed_runs_left_is_deleted_and_what_others_write_is_kept(source: Bundle, tmp_path: Path) -> None:
    shop = tmp_path / "models" / "shop"
    left, locked = shop / ".publish-left", shop / ".publish-locked"
    for folder in (left, locked):
        folder.mkdir(parents=True)
        (folder / "lock").touch()
        (folder / "chunks.safetensors").write_bytes(b"a large file")
    inside = []

    def other_run(folder: Path) -> Bundle:
        inside.extend(sorted(path.name for path in shop.glob(".publish-*")))
        publish(shop / "2", bare(source), answers)  # must not take this run's folder for one that was left
        return bare(source)(folder)

    with (locked / "lock").open("r+") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        publish(shop / "1", other_run, answers)
    assert len(inside) == 2
    assert locked.name in inside
    assert sorted(path.name for path in shop.iterdir()) == [locked.name, "1", "2"]


def test_a_ranker_is_published_with_its_scores_of_the_golden_items_and_the_figures_of_the_bare_bundle(
    source: Bundle, tmp_path: Path
) -> None:
    models, graph = tmp_path / "models" / "shop", weighted_sum({"retrieval.rank": 1.0})
    info = RankerInfo(features=("retrieval.rank",), depth=2, max_depth=3)
    first = publish(models / "1", bare(source), answers, metrics, [2])
    ranked = publish(models / "2", lambda folder: with_parts(first, folder, {"ranker": info}, {RANKER: graph}), Bundle.golden)
    assert ranked.manifest.ranker == info
    assert ranked.manifest.metrics == first.manifest.metrics
    assert ranked.heldout().column_names == first.heldout().column_names
    golden = ranked.golden()
    for scores, ranks in zip(golden.column(GOLDEN_SCORES).to_pylist(), golden.column("ranks").to_pylist(), strict=True):
        np.testing.assert_allclose(scores, ranks, rtol=1e-6)
    other = info.model_copy(update={"features": ("retrieval.rank", "retrieval.score")})  # the graph takes one feature, not two
    with pytest.raises(BundleCorrupt, match=r"ranker\.onnx"):
        publish(models / "3", lambda folder: with_parts(source, folder, {"ranker": other}, {RANKER: graph}), answers)
    assert not (models / "3").exists()


@pytest.mark.parametrize("program", [training.__main__.__file__, espalier_cli.__main__.__file__, "/usr/bin/espalier"])
def test_the_manifest_says_the_command_that_trained_it(
    source: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr("sys.argv", [program, "fit", "--config", "my shop.toml"])
    published = publish(tmp_path / "models" / "shop" / "1", bare(source), answers, metrics, [2])
    assert published.manifest.command == "espalier fit --config 'my shop.toml'"
    monkeypatch.setattr("sys.argv", ["/usr/bin/pytest", "-q"])  # another program
    again = publish(tmp_path / "models" / "shop" / "2", bare(published), answers, metrics, [3])
    assert again.manifest.command is None
    assert again.heldout().column_names == ["history", "relevant", "recall@3"], "those of the earlier model are replaced"
    with pytest.raises(BundleExists):
        publish(published.path, bare(source), answers, metrics, [2])
    assert Bundle.open(published.path, verify=True).manifest == published.manifest


# -- `espalier publish | versions | set-default` ----------------------------------------------------------------


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
    assert json.loads(ran("versions", "--json")) == [{"model": "books", "versions": [1, 2], "default": 2, "beside": [1], "candidate": None}]
    assert command("set-default", "--version", 2, "--candidate", MAX_VERSION + 1, "--store", url).status == 2
    ran("set-default")
    assert ran("versions", "--model", "books") == "books: versions 1, 2; the highest, version 2, serves\n"
    assert command("versions", "--model", "boks", "--store", url).err == f"error: {url}: no model 'boks'\n"


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
            to_store(folder, None, url, default=False, again=False)
    with pytest.raises(InvalidConfig, match="--version"):
        to_store(books / "1", 1, url, default=False, again=False)
    with pytest.raises(InvalidConfig, match="--beside"):
        change_default(url, "books", None, [1])
    for version in (None, 2):
        with pytest.raises(InvalidConfig, match="--candidate"):
            change_default(url, "books", version, [], Candidate(version=2))
    assert not (tmp_path / "store").exists()


def test_all_shards_are_published_together(url: str, tmp_path: Path) -> None:
    shards = cut(whole_bundle(tmp_path), tmp_path / "books-shards", 3)
    done = to_store(tmp_path / "books-shards", None, url, default=False, again=False)
    assert [(found.name, found.version) for found in done] == [("0", 1), ("1", 1), ("2", 1)]
    assert [row["model"] for row in versions(url, None)] == ["0", "1", "2"]
    change_default(url, None, 1, [])
    assert [row["default"] for row in versions(url, None)] == [1, 1, 1]
    with pytest.raises(InvalidConfig, match="--default"):
        to_store(tmp_path / "books-shards", None, url, default=True, again=False)
    shutil.rmtree(shards[1].path)
    with pytest.raises(BundleNotFound, match="it has not all shards"):
        to_store(tmp_path / "books-shards", None, url, default=False, again=False)


def test_a_layout_with_a_damaged_shard_is_not_published_at_all(url: str, tmp_path: Path) -> None:
    shards = cut(whole_bundle(tmp_path), tmp_path / "books-shards", 2)
    file = shards[1].path / "items.arrow"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(BundleCorrupt, match="its SHA-256 is not the manifest's"):
        to_store(tmp_path / "books-shards", None, url, default=False, again=False)
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
    to_store(books / "1", None, url, default=False, again=False)
    for asked in (lambda: versions(url, name), lambda: change_default(url, name, 1, ()), lambda: change_default(url, name, None, ())):
        with pytest.raises(InvalidConfig, match="--model"):
            asked()


def test_the_default_of_all_models_is_changed_where_all_have_the_version(url: str, books: Path, tmp_path: Path) -> None:
    for version in ("1", "2"):
        to_store(books / version, None, url, default=False, again=False)
    films = make_bundle(tmp_path / "made", np.random.default_rng(0), complete_tree(np.arange(32), 2), name="films", version=1)
    to_store(films.path, None, url, default=False, again=False)
    with pytest.raises(StoreMissing, match="no version 2 of 'films'; there: 1"):
        change_default(url, None, 2, ())
    assert [row["default"] for row in versions(url, None)] == [None, None]
