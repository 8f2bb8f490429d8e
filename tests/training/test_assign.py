"""Labelwise prediction: for every item the points that it is most relevant to."""

from __future__ import annotations

import errno
import gzip
import os
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from benchmarks.random_bundles import random_chunks, random_tree, sparse_rows
from espalier.arrays import Array
from espalier.bundle import Bundle
from espalier.chunks import Chunks
from espalier.engines import open_engine
from espalier.errors import InvalidConfig, InvalidData
from espalier.manifest import Ranking
from espalier.queries import QueryBatch
from espalier.search import SearchParams
from espalier.tree import Tree, complete_tree
from tests.training.commands import trained
from tests.training.points import as_xmc, random_points
from training.assign import best_points, command, labelwise
from training.assign.best_points import BestPoints
from training.assign.command import Assignment, assign
from training.assign.labelwise import Labelwise, Pairs, Retention, ScoredTree, best_of_points, best_positions, by_depth, by_share
from training.assign.point_files import PointFile
from training.data.csr import as_rows, normalised
from training.data.xmc import read_xmc
from training.trees.balanced import balanced_tree

SIGMOID = Ranking(activation="sigmoid", own="log_activation", gamma=1)
F = 9


def all_points(tree: Tree) -> Retention:
    return Retention(np.ones(tree.node_count), np.zeros(tree.height + 1), 1)


def same_items(tree: Tree, rng: np.random.Generator) -> Tree:
    """Another tree over the same items."""
    return balanced_tree(rng.permutation(tree.item_count), 3)


Scores = dict[tuple[int, int], float]
"""Item and point → score."""


def algorithm_1(tree: Tree, chunks: Chunks, points_BF: Array, most: Any, per_item: int) -> tuple[set[tuple[int, int]], Scores]:
    """Word for word as the paper has it: the pairs that are kept, and all that are scored. `most` is Retention's."""
    every, kept, found = np.arange(F, dtype=np.int32), set[tuple[int, int]](), Scores()

    def probability(node: int) -> Array:
        return np.asarray(1 / (1 + np.exp(-(points_BF @ chunks.weights_of(tree, node, every).astype(np.float64) + chunks.bias[node]))))

    def retain_top(scored: dict[int, float], number: int) -> dict[int, float]:
        return dict(sorted(scored.items(), key=lambda entry: (-entry[1], entry[0]))[:number])

    points_of = {0: dict.fromkeys(range(len(points_BF)), 1.0)}
    for level in range(tree.height):
        for node in tree.level(level):
            for child in range(tree.first_child[node], tree.first_child[node + 1]):
                edge = probability(child)
                scored = {i: z * edge[i] for i, z in points_of.get(node, {}).items()}
                if level + 1 < tree.height:
                    points_of[child] = retain_top(scored, most(child, level + 1, len(points_BF), len(scored)))
                elif tree.leaf_item[child - tree.leaf_offset] >= 0:
                    item = int(tree.leaf_item[child - tree.leaf_offset])
                    found |= {(item, i): score for i, score in scored.items()}
                    kept |= {(item, i) for i in retain_top(scored, per_item)}
    return kept, found


def as_dict(pairs: Pairs) -> dict[tuple[int, int], float]:
    found = dict(zip(zip(pairs.item.tolist(), pairs.point.tolist(), strict=True), pairs.score.tolist(), strict=True))
    assert len(found) == len(pairs.item), "each pair once"
    return found


@given(st.integers(0, 10_000), st.sampled_from([1, 2, 3]), st.integers(1, 12), st.sampled_from([0.5, 1.0, 3.0, 100.0]))
def test_a_block_is_predicted_as_algorithm_1_has_it(seed: int, trees: int, per_item: int, factor: float) -> None:
    rng = np.random.default_rng(seed)
    first = random_tree(rng, int(rng.integers(1, 4)), 3)
    points_BF = rng.normal(size=(int(rng.integers(1, 30)), F)) * (rng.random((1, F)) < 0.7)
    counts = rng.integers(0, 5, first.item_count)
    scored = []
    for tree in [first, *(same_items(first, rng) for _ in range(trees - 1))]:
        scored.append(ScoredTree(tree, random_chunks(rng, tree, F, integer=False), by_share(tree, counts, 20, factor, 1)))
    by_tree = [algorithm_1(tree, chunks, points_BF, retention.most, per_item) for tree, chunks, retention in scored]
    expected = {pair: sum(scores.get(pair, 0) for _, scores in by_tree) / trees for kept, _ in by_tree for pair in kept}
    found = as_dict(Labelwise(scored, SIGMOID, np.ones(first.item_count, np.bool_), per_item, threads=2).predict(sparse_rows(points_BF)))
    assert found.keys() == expected.keys()
    assert_allclose([found[pair] for pair in expected], list(expected.values()), rtol=1e-4, atol=1e-7)


@given(st.integers(0, 10_000), st.integers(1, 5), st.sampled_from([1, 1 << 20]))
def test_a_point_that_is_limited_keeps_the_best_of_all_items_that_score_it(seed: int, per_point: int, held: int) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, int(rng.integers(1, 4)), 4)
    chunks, retention = random_chunks(rng, tree, F, integer=False), by_share(tree, np.full(tree.item_count, 9), 20, 9.0, 1)
    points_BF = rng.normal(size=(9, F))
    _, scores = algorithm_1(tree, chunks, points_BF, retention.most, 1)
    by_point = sorted(scores, key=lambda pair: (pair[1], -scores[pair]))
    expected = {pair for _, pairs in groupby(by_point, lambda pair: pair[1]) for pair in [*pairs][:per_point]}
    predictor = Labelwise([ScoredTree(tree, chunks, retention)], SIGMOID, np.ones(tree.item_count, np.bool_), 1)
    with patch.object(labelwise, "HELD", held):
        assert as_dict(predictor.predict(sparse_rows(points_BF), per_point)).keys() == expected


def test_few_pairs_of_points_that_are_limited_are_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def trimmed(pairs: Pairs, per_point: int) -> Pairs:
        sizes.append(len(pairs.item))
        return best_of_points(pairs, per_point)

    monkeypatch.setattr(labelwise, "HELD", 1)
    monkeypatch.setattr(labelwise, "best_of_points", trimmed)
    groups = (Pairs(np.full(10, item), np.arange(10), np.full(10, item / 100, np.float32)) for item in range(100))
    pairs = labelwise._joined(groups, 2)
    assert as_dict(pairs).keys() >= {(item, point) for item in (98, 99) for point in range(10)}
    assert max(sizes) == 50
    assert len(sizes) < 40, "not after every group"
    assert len(pairs.item) <= 50


def test_blocks_are_smaller_where_points_may_have_many_items() -> None:
    trees = [ScoredTree(complete_tree(np.arange(64), 2), cast(Chunks, None), cast(Retention, None))] * 2
    assert [command.block_limit(trees, per_point) for per_point in (None, 4, 10**9)] == [
        command.MAX_RANKS // 2,
        command.MAX_RANKS // 16,
        command.MAX_RANKS // 256,
    ]


def test_a_point_keeps_its_best_items() -> None:
    pairs = Pairs(np.array([0, 0, 1, 1, 2]), np.array([3, 4, 3, 4, 3]), np.array([0.5, 0.1, 0.5, 0.2, 0.6], np.float32))
    assert set(as_dict(best_of_points(pairs, 2))) == {(2, 3), (0, 3), (0, 4), (1, 4)}, "of equal scores the lower item row"
    assert set(as_dict(best_of_points(pairs, 1))) == {(2, 3), (1, 4)}
    assert as_dict(best_of_points(pairs, 9)) == as_dict(pairs)


@given(st.lists(st.sampled_from([-np.inf, -3.0, -1.0, -0.5, 0.0]), min_size=1, max_size=40), st.integers(1, 45))
def test_the_best_positions_are_those_of_a_stable_sort(ranks: list[float], most: int) -> None:
    ranks_R = np.array(ranks, np.float32)
    order = np.argsort(-ranks_R, kind="stable")
    assert_array_equal(best_positions(ranks_R, most), np.sort(order[ranks_R[order] > -np.inf][:most]))


@pytest.mark.parametrize("branching", [2, 4])
def test_points_whose_logits_are_not_finite_are_left_out(branching: int) -> None:
    tree = complete_tree(np.arange(4), branching)
    chunks = random_chunks(np.random.default_rng(9), tree, F, integer=False)
    chunks = replace(chunks, entry_weight=1000 * chunks.entry_weight)
    points = np.zeros((3, F))
    points[1] = np.finfo(np.float32).max
    predictor = Labelwise([ScoredTree(tree, chunks, all_points(tree))], SIGMOID, np.ones(4, np.bool_), 9)
    found = as_dict(predictor.predict(sparse_rows(points)))
    assert as_dict(predictor.predict(sparse_rows(points), 4)) == found
    assert {pair for pair in found if pair[1] != 1} == {(item, point) for item in range(4) for point in (0, 2)}
    assert 0 < len({pair for pair in found if pair[1] == 1}) < 4
    assert np.isfinite(list(found.values())).all()


def test_the_papers_rule_gives_a_node_its_share_of_the_block() -> None:
    tree = complete_tree(np.arange(4), 2)
    retention = by_share(tree, np.array([1, 2, 0, 40]), 100, factor=4, least=2)
    assert_allclose(retention.of_block_N, [1, 0.12, 1, 0.04, 0.08, 0, 1])
    assert retention.most(1, 1, block=1000, parent=1000) == 120
    assert retention.most(1, 1, block=1000, parent=50) == 50
    assert retention.most(5, 2, block=1000, parent=1000) == 2, "no fewer than an item is to get"


def test_the_released_rule_lets_so_many_points_an_item_reach_the_leaf_clusters() -> None:
    tree = complete_tree(np.arange(64), 2)  # 32 clusters of 2 items on level 5
    retention = by_depth(tree, 10_000, factor=10, least=1)
    kept = retention.of_parent_H[1:6]
    assert kept.prod() == pytest.approx(20 / 10_000)
    assert_allclose(np.diff(kept), -0.05)
    reached = 10_000
    for level in range(1, 6):
        reached = retention.most(0, level, 10_000, reached)
    assert 20 <= reached <= 25
    assert_array_equal(by_depth(tree, 10, factor=10, least=1).of_parent_H[1:6], np.ones(5))  # fewer points than that: all


# -- the best points so far -------------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.integers(1, 6), st.sampled_from([1, 6, 1000]))
def test_blocks_come_to_the_same_as_one_however_few_items_are_merged_at_a_time(seed: int, per_item: int, most: int) -> None:
    rng = np.random.default_rng(seed)
    item, point = np.nonzero(rng.random((5, 40)) < 0.4)
    score = rng.integers(0, 6, len(item)).astype(np.float32) / 8
    best, cuts = BestPoints(np.arange(5), per_item), [0, *np.sort(rng.integers(0, 41, 3)).tolist(), 40]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(best_points, "MERGED_PAIRS", most)
        for begin, end in pairwise(cuts):
            own = (point >= begin) & (point < end)
            best.add(Pairs(item[own], point[own] - begin, score[own]), end - begin)
    expected = [
        (int(i), int(p), float(s))
        for k in range(5)
        for s, p, i in sorted(zip(-score[item == k], point[item == k], item[item == k], strict=True))[:per_item]
    ]
    pairs, place = best.pairs()
    assert list(zip(pairs.item.tolist(), pairs.point.tolist(), (-pairs.score).tolist(), strict=True)) == expected
    assert_array_equal(place, np.concatenate([np.arange(1, 1 + (pairs.item == k).sum()) for k in range(5)]))
    assert best.done == 40


def test_the_state_is_kept_and_read_again_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    best, again, file = BestPoints(np.array([3, 7]), 2), BestPoints(np.array([3, 7]), 2), tmp_path / "state.npz"
    best.add(Pairs(np.array([3, 7, 7]), np.array([0, 1, 4]), np.array([0.5, 0.25, 0.75], np.float32)), 6)
    best.write(file)
    again.read(file)
    assert again.done == 6
    assert_array_equal(again.point_IK, [[0, -1], [4, 1]])
    assert_array_equal(again.score_IK, best.score_IK)
    file.write_bytes(b"damaged")
    with pytest.raises(InvalidConfig, match="expected a readable state"):
        again.read(file)


def test_memory_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best_points, "MAX_PAIRS", 10)
    assert BestPoints(np.arange(5), 2).point_IK.shape == (5, 2)
    for per_item, trees, most in (
        (3, 1, "at most 2 for 5 items and 1 trees: a --filter makes"),
        (2, 2, "at most 1 for 5 items and 2 trees"),
    ):
        with pytest.raises(InvalidConfig, match=f"--per-item: got {per_item}, expected {most}"):
            BestPoints(np.arange(5), per_item, trees)


# -- the command ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 30 items, and its points as an XMC file and as a matrix."""
    folder = tmp_path_factory.mktemp("assign")
    data = random_points(np.random.default_rng(5), 300, 60, 30, density=0.02)
    (folder / "points.txt").write_text(as_xmc(data))
    scipy.sparse.save_npz(folder / "points.npz", scipy.sparse.csr_matrix(data.points))
    pl.DataFrame({"id": [f"item-{i}" for i in range(30)], "parity": ["even", "odd"] * 15}).write_parquet(folder / "items.parquet")
    data_of_points = {"format": "xmc", "train": str(folder / "points.txt"), "items": str(folder / "items.parquet")}
    trained(folder, {"kind": "xreg", "data": data_of_points, "tree": {"max_leaf": 4}})
    return folder


def assigned(model: Path, file: str = "points.txt", **asked: Any) -> pl.DataFrame:
    out = model / "pairs.parquet"
    count = assign(Bundle.open(model / "models" / "any" / "1"), model / file, Assignment(**asked), out)
    pairs = pl.read_parquet(out)
    assert len(pairs) == count
    assert not list(model.glob(".pairs*")), "nothing else is left"
    return pairs


def test_every_item_gets_the_points_that_search_scores_highest(model: Path) -> None:
    bundle = Bundle.open(model / "models" / "any" / "1")
    pairs = assigned(model, per_item=7, factor=1000.0)
    points = normalised(read_xmc(model / "points.txt").points)
    everything = SearchParams(np.full(300, 30), np.full(300, 30))
    found = open_engine(bundle, "cpu").search(QueryBatch(bundle.manifest.query, as_rows(points)), everything)
    scores_BI = np.zeros((300, 30), np.float32)
    np.put_along_axis(scores_BI, found.item_rows_BM, found.scores_BM, axis=1)
    assert pairs["item"].to_list() == [f"item-{i}" for i in range(30) for _ in range(7)]
    assert pairs["place"].to_list() == [*range(1, 8)] * 30
    best = -np.sort(-scores_BI.T, axis=1)[:, :7]
    assert pairs["score"].sum() == pytest.approx(best.sum(), rel=0.005)  # of a forest, the best points of no tree alone are lost
    assert_allclose(pairs.filter(pl.col("place") == 1)["score"].to_numpy(), best[:, 0], rtol=1e-4)
    item = pairs["item"].str.strip_prefix("item-").cast(pl.Int64).to_numpy()
    assert_allclose(scores_BI[pairs["point"].to_numpy(), item], pairs["score"].to_numpy(), rtol=1e-4)


def test_files_blocks_and_rules_give_the_same_where_nothing_is_cut(model: Path) -> None:
    whole = assigned(model, per_item=5, factor=1000.0)
    for other in (
        assigned(model, per_item=5, factor=1000.0, block=64),
        assigned(model, file="points.npz", per_item=5, factor=1000.0, block=299),
        assigned(model, per_item=5, rule="released", factor=1000.0),
    ):
        first = pl.col("place") == 1
        assert other.filter(first).select("item", "point").equals(whole.filter(first).select("item", "point"))
        assert other.select("item", "place").equals(whole.select("item", "place"))
        assert other["score"].sum() == pytest.approx(whole["score"].sum(), rel=0.005)  # a smaller block may keep what a larger one lost


def test_a_filter_and_a_limit_of_a_point_hold(model: Path) -> None:
    pairs = assigned(model, per_item=20, per_point=2, filter='{"parity": ["odd"]}')
    assert {int(item.removeprefix("item-")) % 2 for item in pairs["item"].unique()} == {1}
    assert pairs.group_by("point").len()["len"].max() == 2
    assert pairs.group_by("item").len()["len"].max() == 20


@pytest.mark.parametrize("block", [64, 1 << 14])
def test_a_limit_of_a_point_takes_its_best_items_in_blocks_of_any_size(model: Path, block: int) -> None:
    pairs = assigned(model, per_item=1, per_point=3, factor=1000.0, block=block)
    everything = assigned(model, per_item=10**4, factor=1000.0)
    number = pl.col("item").str.strip_prefix("item-").cast(pl.Int64)
    best = everything.sort("point", -pl.col("score"), number).group_by("point", maintain_order=True).head(3)
    of_items = best.sort("item", -pl.col("score"), "point").group_by("item", maintain_order=True).head(1)
    assert pairs.sort("item").equals(of_items.with_columns(place=pl.lit(1, pl.Int32)).select(pairs.columns))


def test_a_run_that_was_killed_while_it_tidied_up_starts_anew(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, out = model / ".tidied.parquet.work", model / "tidied.parquet"
    bundle, asked = Bundle.open(model / "models" / "any" / "1"), Assignment(per_item=2)
    monkeypatch.setattr(command, "KEEP_EVERY_S", -1.0)
    with monkeypatch.context() as patch:
        patch.setattr("training.versions.shutil.rmtree", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            assign(bundle, model / "points.txt", asked, out)
    assert [path.name for path in work.iterdir()] == ["identity.json"], "a state without it would be of an unknown run"
    assert assign(bundle, model / "points.txt", asked, out, resume=True) == 60
    assert not work.exists()


def test_a_full_disk_keeps_nothing_but_the_state(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **others: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    bundle, asked, out = Bundle.open(model / "models" / "any" / "1"), Assignment(per_item=2, block=64), tmp_path / "pairs.parquet"
    monkeypatch.setattr(command, "KEEP_EVERY_S", -1.0)
    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with pytest.raises(OSError, match="No space left"):
        assign(bundle, model / "points.txt", asked, out)
    assert [path.name for path in tmp_path.iterdir()] == [".pairs.parquet.work"]
    monkeypatch.setattr("training.assign.best_points.np.savez", full)
    with pytest.raises(OSError, match="No space left"):
        assign(bundle, model / "points.txt", asked, out)
    assert [path.name for path in tmp_path.rglob("*")] == [".pairs.parquet.work", "identity.json"]
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        assign(bundle, model / "points.txt", asked, out)
    assert [*tmp_path.iterdir()] == [], "there is no progress to go on from"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"per_item": 0}, "--per-item: got 0, expected at least 1"),
        ({"per_point": 0}, "--per-point: got 0"),
        ({"factor": float("nan")}, "--factor: got nan"),
        ({"filter": "odd"}, "--filter: got 'odd', expected JSON"),
        ({"filter": "[1]"}, "--filter: .*an object"),
        ({"filter": "[" * 100_000}, "--filter: .*expected JSON"),
        ({"filter": '{"parity": ' + "9" * 5000 + "}"}, "--filter: .*expected JSON"),
        ({"filter": '{"parity": ["none"]}'}, "conditions that some item meets"),
        ({"file": "other.txt"}, "got '59 features', expected 60, those of the model"),
        ({"file": "short.txt"}, "got '1 points', expected 3, as its first line says"),
        ({"file": "more.txt"}, "got 'more than 300 points', expected 300, as its first line says"),
        ({"file": "none.txt"}, r"none\.txt"),
    ],
)
def test_what_cannot_be_is_refused(model: Path, asked: dict[str, Any], expected: str) -> None:
    (model / "other.txt").write_text("1 59 30\n0 1:1\n")
    (model / "short.txt").write_text("3 60 30\n0 1:1\n")
    (model / "more.txt").write_text((model / "points.txt").read_text() + "0 1:1\n")
    with pytest.raises((InvalidConfig, InvalidData), match=expected):
        assigned(model, **({"per_item": 1} | asked))
    with pytest.raises(InvalidConfig, match=r"--out: got .*, expected a file to write, not a folder or a device"):
        assign(Bundle.open(model / "models" / "any" / "1"), model / "points.txt", Assignment(per_item=1), model)


# -- texts ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Of numbers, as texts: 007 and 7 are two words."""
    folder = tmp_path_factory.mktemp("numbers")
    (folder / "log.csv").write_text("query,item\n" + "".join(f"007 agent{i},bond\n7 dwarfs{i},seven\n" for i in range(8)))
    raw = {"kind": "xreg", "data": {"format": "log", "train": str(folder / "log.csv"), "test_share": 0}, "tree": {"count": 1}}
    return trained(folder, raw | {"text": [{"unit": "word", "n": 1, "max_share": 1}]})


def test_texts_that_look_like_numbers_are_texts(text_model: Bundle, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("other,query\n1,7\n1,007\n")
    (block,) = PointFile(text_model, tmp_path / "t.csv").blocks(10)
    expected = text_model.vectoriser.transform(["7", "007"])
    assert_array_equal(block.indices, expected.indices)
    assert len(set(expected.indices.tolist())) == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", b"", r"t\.csv: got 'an empty file', expected a line that names the columns, and texts$"),
        ("t.csv.gz", gzip.compress(b"", mtime=0), r"got 'an empty file'"),
        ("t.txt", b"query\nred\n", r"--data: got .*t\.txt', expected a \.csv, \.tsv or \.parquet file of texts$"),
        ("folder.csv", None, r"--data: got .*folder\.csv', expected a \.csv, \.tsv or \.parquet file of texts$"),
        ("t.csv", b"text\nred\n", r"column --column: got 'query', expected one of \['text'\]"),
        ("t.csv", b"query\nred,1\n", r"line 2: got 'red,1', expected 1 fields, not 2$"),
        ("t.csv", b"query\nred \xe9\n", r"line 2.*, expected text in utf-8 in column 'query'|expected text in utf-8$"),
    ],
)
def test_a_table_that_is_none_of_texts_is_refused_without_keys_that_the_command_has_not(
    text_model: Bundle, tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    file = tmp_path / name
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    with pytest.raises((InvalidConfig, InvalidData), match=message) as refused:
        PointFile(text_model, file).count()
    assert "items_format" not in str(refused.value)


@pytest.mark.parametrize("query", [[["a"], ["b"]], [{"a": 1}, {"a": 2}], [b"\xff", b"\xfe"], None])
def test_a_column_that_holds_no_texts_and_a_table_that_is_ragged_far_below_are_named(
    text_model: Bundle, tmp_path: Path, query: list[Any] | None
) -> None:
    file, found = tmp_path / "t.csv", "line 500002: got '7,7', expected 1 fields, not 2"
    if query is None:
        file.write_text("query\n" + "007\n" * 500_000 + "7,7\n")
    else:
        file, found = tmp_path / "t.parquet", "column --column: got .*, expected strings or integers"
        pl.DataFrame({"query": query}).write_parquet(file)
    with pytest.raises(InvalidData, match=rf"{file.name}: {found}"):
        assign(text_model, file, Assignment(per_item=1), tmp_path / "pairs.parquet")
