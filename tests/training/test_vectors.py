"""Queries that are vectors of somebody's encoder: from pairs of vectors and items in Parquet to a bundle that answers them.

The log: 400 queries, each the direction of one of 8 clusters with noise, off the origin, and most of the cluster's 12 items.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray
from typer.testing import CliRunner

import training.data.vector_files as vector_files
import training.deep.vector_start as vector_start
from espalier.bundle import Bundle
from espalier.checks.golden import verify_golden
from espalier.checks.heldout import read_heldout
from espalier.engines import open_engine
from espalier.engines.reference import ReferenceEngine
from espalier.errors import InvalidConfig, InvalidData
from espalier.manifest import GraphScorer
from espalier.metrics import precision_recall_f
from espalier.queries import MAX_VECTOR_WIDTH, VectorKind, encode_vectors
from espalier.search import SearchParams
from training.__main__ import app
from training.data.interactions import Interactions, read_interactions
from training.data.splits import Split, split_log
from training.deep.export import most_kept
from training.deep.fit import build_model, fit
from training.deep.instances import source_of
from training.deep.jtm_samples import draw_samples
from training.deep.prepare import build_tree, item_embeddings, prepare
from training.deep.run import fit_and_export
from training.deep.scorers.encoders import VectorEncoder
from training.deep.topology import Topology
from training.deep.validation import validation_recall
from training.deep.vector_start import item_means, start_of
from training.inspect import inspect
from training.specification.deep import DeepConfig, InstanceConfig
from training.specification.log_format import VectorsFormat
from training.specification.models import config_of, deep_config
from training.specification.splits import FileSplit, UserSplit

CLUSTERS, SIZE, QUERIES, WIDTH = 8, 12, 400, 10
FORMAT = VectorsFormat()
CPU = torch.device("cpu")


def table(seed: int, queries: int = QUERIES) -> pa.Table:
    rng = np.random.default_rng(seed)
    directions = np.random.default_rng(7).normal(size=(CLUSTERS, WIDTH))
    cluster = rng.integers(CLUSTERS, size=queries)
    vectors = 50 + 3 * directions[cluster] + rng.normal(size=(queries, WIDTH))
    items = [[f"item-{item * CLUSTERS + c}" for item in rng.permutation(SIZE)[:9]] for c in cluster]
    flat = pa.array(vectors.ravel().astype(np.float32))
    return pa.table({"vector": pa.FixedSizeListArray.from_arrays(flat, WIDTH), "items": items})


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "vectors.parquet"
    pq.write_table(table(1), file, row_group_size=150)
    return file


def settings(log: Path, **sections: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "kind": "otm-robust",
        "name": "planted",
        "data": {"log": str(log), "format": {"format": "vectors"}},
        "instances": {"targets": 20},
        "scorer": {"node_dim": 12, "hidden": [24], "dropout": 0.0},
        "objective": {"beam_size": 10},
        "optimiser": {"steps": 60, "batch": 50, "learning_rate": 0.01, "average": 1, "validate_every": 30},
        "search": {"beam_size": 20, "m": 10, "max_beam_size": 96, "max_m": 64},
    }
    return plain | {key: plain[key] | value if isinstance(value, dict) else value for key, value in sections.items()}


def written(folder: Path, vectors: Any, items: Any) -> Path:
    file = folder / "log.parquet"
    pq.write_table(pa.table({"vector": vectors, "items": items}), file)
    return file


def read(file: Path, work: Path, **keys: Any) -> Interactions:
    return read_interactions(file, VectorsFormat(**keys), work)


def as_pairs(log: Interactions) -> dict[tuple[float, ...], list[str]]:
    ids = log.item_ids.to_pylist()
    assert log.vectors_UF is not None
    return {tuple(log.vectors_UF[user].tolist()): [ids[row] for row in log.of(user)] for user in range(log.user_count)}


# -- reading --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vectors", [pa.list_(pa.float32(), 2), pa.list_(pa.float64()), pa.large_list(pa.float16()), pa.list_(pa.int8())])
@pytest.mark.parametrize("items", [pa.list_(pa.string()), pa.large_list(pa.int64())])
def test_vectors_and_items_may_be_lists_of_any_kind(tmp_path: Path, vectors: pa.DataType, items: pa.DataType) -> None:
    ids = [[1, 2], [2]] if pa.types.is_integer(items.value_type) else [["1", "2"], ["2"]]
    numbers: list[list[Any]] = [[np.float16(1), np.float16(-2)], [np.float16(3), np.float16(4)]]
    if not pa.types.is_float16(vectors.value_type):
        numbers = [[int(value) for value in row] for row in numbers]
    file = written(tmp_path, pa.array(numbers, vectors), pa.array(ids, items))
    assert as_pairs(read(file, tmp_path)) == {(1.0, -2.0): ["1", "2"], (3.0, 4.0): ["2"]}


def test_rows_with_one_item_are_read_and_rows_with_equal_vectors_are_one_query(tmp_path: Path) -> None:
    file = tmp_path / "pairs.parquet"
    pq.write_table(pa.table({"embedding": [[0.0, 1.0], [5.0, 6.0], [-0.0, 1.0]], "product": ["a", "b", "c"]}), file)
    log = read(file, tmp_path, vector="embedding", items="product")
    assert as_pairs(log) == {(0.0, 1.0): ["a", "c"], (5.0, 6.0): ["b"]}


def test_rows_without_items_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = written(tmp_path, [[1.0], [2.0], [3.0]], [["a"], [], None])
    assert as_pairs(read(file, tmp_path)) == {(1.0,): ["a"]}
    assert "2 of 3 vectors have no items" in caplog.text


def test_the_size_of_blocks_changes_nothing(log: Path, tmp_path: Path) -> None:
    whole = read_interactions(log, FORMAT, tmp_path / "whole")
    small = read_interactions(log, FORMAT, tmp_path / "small", block_bytes=7 * 4 * WIDTH)
    assert whole.user_ids.equals(small.user_ids)
    assert as_pairs(whole) == as_pairs(small)
    assert whole.user_count == QUERIES
    assert whole.item_count == CLUSTERS * SIZE
    ordered = vector_files.vectors_in_order(tmp_path / "whole" / "vector_of_user.float32", np.array([5, 3]), QUERIES, tmp_path / "two")
    assert whole.vectors_UF is not None
    assert_array_equal(ordered, whole.vectors_UF[[5, 3]])


def test_rare_items_and_short_lists_are_dropped(tmp_path: Path) -> None:
    file = written(tmp_path, [[1.0], [2.0], [3.0]], [["a", "b"], ["b", "c"], ["a", "b"]])
    assert as_pairs(read(file, tmp_path, min_item_events=2, min_user_events=2)) == {(1.0,): ["a", "b"], (3.0,): ["a", "b"]}


@pytest.mark.parametrize(
    ("vectors", "items", "expected"),
    [
        ([[1.0, 2.0], [1.0]], [["a"], ["a"]], "row 2, column vector: got '1 numbers', expected 2 numbers, as in the first row"),
        ([[1.0], [float("nan")]], [["a"], ["a"]], "row 2, column vector: got nan, expected finite 32-bit numbers"),
        ([[1.0], [1e39]], [["a"], ["a"]], "row 2, column vector: got 1e[+]39, expected finite"),
        ([[1.0, None]], [["a"]], "row 1, column vector: got nan, expected finite"),
        ([[1.0], None], [["a"], ["a"]], "row 2, column vector: got None, expected a list of numbers"),
        ([[]], [["a"]], "column vector: got '0 numbers', expected 1 to 65536"),
        ([1.0], [["a"]], "column vector: got 'double', expected lists of numbers"),
        ([["x"]], [["a"]], "column vector: got 'string', expected numbers"),
        ([[1.0], [2.0]], [["a"], [""]], "row 2, column items: got '', expected ids"),
        ([[1.0], [2.0]], [["a"], ["b", None]], "row 2, column items: got None, expected ids"),
        ([[1.0]], [[0.5]], "column items: got 'double', expected strings or integers"),
        ([[1.0]], [[]], "no events"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, vectors: Any, items: Any, expected: str) -> None:
    item_type = pa.list_(pa.string()) if items == [[]] else None
    with pytest.raises(InvalidData, match=expected):
        read(written(tmp_path, vectors, pa.array(items, item_type)), tmp_path)


def test_a_missing_column_is_named(log: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match=r"column vector: got 'embedding', expected one of \['vector', 'items'\]"):
        read(log, tmp_path, vector="embedding")
    with pytest.raises(InvalidData, match=r"column items: got 'item', expected one of"):
        read(log, tmp_path, items="item")


def test_vectors_may_be_as_wide_as_the_service_takes_them(tmp_path: Path) -> None:
    for width in (MAX_VECTOR_WIDTH, MAX_VECTOR_WIDTH + 1):
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(width, np.float32)), width)
        file = written(tmp_path, vectors, [["a"]])
        if width == MAX_VECTOR_WIDTH:
            found = read(file, tmp_path).vectors_UF
            assert found is not None
            assert found.shape == (1, width)
        else:
            with pytest.raises(InvalidData, match="65537 numbers"):
                read(file, tmp_path)


# -- splits and batches ---------------------------------------------------------------------------------------------------


def test_whole_queries_are_held_out(log: Path, tmp_path: Path) -> None:
    interactions = read_interactions(log, FORMAT, tmp_path)
    split = split_log(interactions, UserSplit(), FORMAT, tmp_path, seed=3)
    users = [set(split.train.tolist()), {pair.user for pair in split.validation}, {pair.user for pair in split.test}]
    assert [len(part) for part in users] == [320, 40, 40]
    assert len(set.union(*users)) == QUERIES
    assert interactions.vectors_UF is not None
    for pair in (*split.validation, *split.test):
        assert_array_equal(pair.relevant, interactions.of(pair.user))
        assert pair.vector is not None
        assert len(pair.history) == 0
        assert_array_equal(pair.vector, interactions.vectors_UF[pair.user])


def test_a_second_file_holds_the_test_queries(log: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    second, learned = table(2, 30), table(1).slice(0, 2)
    unknown = pa.table({"vector": second.column("vector").slice(0, 1), "items": [["item-1", "new"]]}, schema=second.schema)
    test = tmp_path / "test.parquet"
    pq.write_table(pa.concat_tables([unknown, second.slice(1), learned]), test)
    interactions = read_interactions(log, FORMAT, tmp_path)
    split = split_log(interactions, FileSplit(test=test, validation_share=0.25), FORMAT, tmp_path, seed=3)
    assert "1 items are not in the log and are left out; 2 queries are in the log, too" in caplog.text
    assert len(split.validation) == 100
    assert len(split.train) == 300
    assert len(split.test) == 32
    assert not {pair.user for pair in split.validation} & set(split.train.tolist())
    ids, found = interactions.item_ids.to_pylist(), {}
    for pair in split.test:
        assert pair.vector is not None
        assert pair.user >= QUERIES
        found[tuple(pair.vector.tolist())] = {ids[row] for row in pair.relevant}
    assert found[tuple(second.column("vector")[0].as_py())] == {"item-1"}
    assert found[tuple(second.column("vector")[5].as_py())] == set(second.column("items")[5].as_py())


def test_a_second_file_of_other_vectors_is_refused(log: Path, tmp_path: Path) -> None:
    interactions = read_interactions(log, FORMAT, tmp_path)
    test = written(tmp_path, [[1.0]], [["item-1"]])
    with pytest.raises(InvalidData, match=r"column vector: got '1 numbers', expected 10, as in the log"):
        split_log(interactions, FileSplit(test=test), FORMAT, tmp_path, seed=3)
    with pytest.raises(InvalidConfig, match="a file that exists"):
        split_log(interactions, FileSplit(test=tmp_path / "none"), FORMAT, tmp_path, seed=3)


@pytest.mark.parametrize("targets", [1, 4, 50])
def test_a_batch_has_queries_with_some_of_their_items(log: Path, tmp_path: Path, targets: int) -> None:
    interactions = read_interactions(log, FORMAT, tmp_path)
    users = np.arange(100)
    source = source_of(interactions, users, InstanceConfig(targets=targets), 1)
    batch, vectors = source.batch(3, 500), interactions.vectors_UF
    assert vectors is not None
    assert batch.query.dtype == np.float32
    row_of = {tuple(vectors[user].tolist()): user for user in users.tolist()}
    drawn = [row_of[tuple(query.tolist())] for query in batch.query]
    assert len(set(drawn)) > 90
    seen: set[tuple[int, int]] = set()
    for user, items in zip(drawn, batch.target_BP.tolist(), strict=True):
        named = [item for item in items if item >= 0]
        assert len(named) == len(set(named)) == min(targets, 9)
        assert set(named) <= set(interactions.of(user).tolist())
        seen |= {(user, item) for item in named}
    if targets == 1:
        assert (
            len({place for user, item in seen for place in np.flatnonzero(interactions.of(user) == item)}) == 9
        )  # any item, not the first
    assert_array_equal(source.batch(3, 500).target_BP, batch.target_BP)


def test_samples_of_vectors_are_all_events(log: Path, tmp_path: Path) -> None:
    interactions = read_interactions(log, FORMAT, tmp_path)
    samples = draw_samples(interactions, np.array([4, 7]), 5, 1000, seed=1)
    assert interactions.vectors_UF is not None
    assert samples.query_S is not None
    events = {(user, item) for user in (4, 7) for item in interactions.of(user).tolist()}
    assert set(zip(samples.query_S.tolist(), samples.target_S.tolist(), strict=True)) == events
    assert_array_equal(samples.queries(slice(2, 9)), interactions.vectors_UF[samples.query_S[2:9]])


# -- training -------------------------------------------------------------------------------------------------------------


def nearest_means(log: Interactions, split: Split, m: int) -> NDArray[np.int64]:
    """The items of each test query whose mean training vector, off the mean of all, has the largest cosine with it, by NumPy alone."""
    vectors = np.asarray(log.vectors_UF, np.float64)
    mean = vectors[split.train].mean(0)
    means = np.zeros((log.item_count, vectors.shape[1]))
    for item in range(log.item_count):
        led = [user for user in split.train.tolist() for other in log.of(user).tolist() if other == item]
        means[item] = vectors[led].mean(0) - mean
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    scores = np.stack([pair.vector for pair in split.test if pair.vector is not None]) - mean
    return np.argsort(-(scores @ means.T), axis=1, kind="stable")[:, :m]


@pytest.mark.parametrize(("hidden", "node_dim"), [((), 12), ((24,), 12), ((64, 30), 40), ((7,), 12), ((24,), 5)])
def test_training_starts_at_the_nearest_item_means(log: Path, tmp_path: Path, hidden: tuple[int, ...], node_dim: int) -> None:
    config = deep_config(settings(log, scorer={"hidden": hidden, "node_dim": node_dim}, search={"beam_size": 96, "gamma": 0.0}))
    prepared = prepare(config, None, tmp_path)
    model = build_model(config, build_tree(config, prepared), prepared).eval()
    topology = Topology(build_tree(config, prepared), torch.device("cpu"))
    model.node_rows.data[:, -1] = 0  # popularity aside
    recall = validation_recall(config, topology, model, prepared.split.test)
    expected = precision_recall_f(nearest_means(prepared.interactions, prepared.split, 10), [p.relevant for p in prepared.split.test], 10)[
        1
    ]
    assert expected.mean() > 0.5
    whole = node_dim > WIDTH and all(width >= 2 * WIDTH for width in hidden)  # else the start has fewer axes than the vectors
    assert recall == pytest.approx(expected.mean(), abs=1e-6) if whole else recall > 0.6 * expected.mean()


@pytest.mark.parametrize(("scale", "shift"), [(1e-6, 0.0), (1e4, -3e5)])
@pytest.mark.parametrize("width", [4, 50])
def test_the_scale_and_the_origin_of_an_encoder_do_not_matter(log: Path, tmp_path: Path, scale: float, shift: float, width: int) -> None:
    interactions, queries = read_interactions(log, FORMAT, tmp_path), np.arange(0, QUERIES, 2)
    vectors = np.asarray(interactions.vectors_UF)
    moved = dataclasses.replace(interactions, vectors_UF=np.asarray(vectors * scale + shift, np.float32))
    starts = [start_of(one, queries, width, seed=1) for one in (interactions, moved)]
    assert starts[0].axes_kF.shape == (min(width, WIDTH), WIDTH)
    assert_allclose(starts[0].axes_kF @ starts[0].axes_kF.T, np.eye(min(width, WIDTH)), atol=1e-4)
    means = [
        item_means(one, queries, start.projected, len(start.axes_kF)) for one, start in zip((interactions, moved), starts, strict=True)
    ]
    assert_allclose(means[0] @ means[0].T, means[1] @ means[1].T, atol=0.05)
    lists = [set(interactions.of(query).tolist()) for query in queries.tolist()]
    led = queries[[3 in items for items in lists]]
    assert_allclose(means[0][3], starts[0].projected(vectors[led]).mean(0), atol=1e-4)


def test_blocks_of_vectors_change_nothing(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interactions, queries = read_interactions(log, FORMAT, tmp_path), np.arange(QUERIES)
    start = start_of(interactions, queries, 20, seed=1)
    means = item_means(interactions, queries, start.projected, WIDTH)
    monkeypatch.setattr(vector_start, "BLOCK", 13 * WIDTH)
    assert_allclose(start_of(interactions, queries, 20, seed=1).mean_F, start.mean_F, rtol=1e-6)
    assert_allclose(item_means(interactions, queries, start.projected, WIDTH), means, atol=1e-4)
    monkeypatch.setattr(vector_start, "SAMPLE", 5 * WIDTH)
    assert len(start_of(interactions, queries, 8, seed=1).axes_kF) == 5


def test_items_without_training_queries_get_the_vector_of_another(log: Path, tmp_path: Path) -> None:
    config = deep_config(settings(log))
    prepared = prepare(config, None, tmp_path)
    lone = dataclasses.replace(prepared, split=dataclasses.replace(prepared.split, train=prepared.split.train[:2]))
    embeddings_ID = item_embeddings(lone, 64, 1)
    assert embeddings_ID.shape == (CLUSTERS * SIZE, WIDTH)
    assert embeddings_ID.any(axis=1).all()
    assert len(np.unique(embeddings_ID, axis=0)) <= 3


def fitted(raw: dict[str, Any], out: Path) -> Bundle:
    bundle = fit_and_export(deep_config(raw), None, out, CPU, resume=False)
    assert bundle is not None
    return bundle


def of_kind(log: Path, kind: str, scorer: str) -> dict[str, Any]:
    raw = settings(log, kind=kind, optimiser={"steps": 4, "validate_every": 2})
    raw["objective"] = {} if kind in ("plt", "hsm") else {"negatives": 40}
    return raw | {"scorer": {"kind": scorer, "node_dim": 12, "hidden": [24]}}


@pytest.mark.parametrize(
    ("kind", "scorer"), [("otm", "product"), ("otm-no-bs", "mlp"), ("otm-no-optest", "mlp"), ("tdm", "mlp"), ("hsm", "mlp")]
)
def test_every_objective_trains_on_vectors(log: Path, tmp_path: Path, kind: str, scorer: str) -> None:
    config = deep_config(of_kind(log, kind, scorer))
    prepared = prepare(config, None, tmp_path)
    tree = build_tree(config, prepared)
    before, after = build_model(config, tree, prepared), fit(config, prepared, tree, CPU, tmp_path, resume=False)
    assert not torch.equal(before.node_rows, after.node_rows)
    assert_array_equal(cast(VectorEncoder, after.encoder).mean_F, cast(VectorEncoder, before.encoder).mean_F)


@pytest.mark.parametrize(("kind", "scorer"), [("otm-robust", "mlp"), ("plt", "product")])
def test_engines_answer_vectors_as_the_reference_does(log: Path, tmp_path: Path, kind: str, scorer: str) -> None:
    bundle = fitted(of_kind(log, kind, scorer), tmp_path / "planted" / "1")
    held, engine = read_heldout(bundle), open_engine(bundle, "cpu")
    params = SearchParams.uniform(len(held.queries), 20, 10)
    found, expected = engine.search(held.queries, params), ReferenceEngine(bundle).search(held.queries, params)
    assert_allclose(found.ranks_BM, expected.ranks_BM, atol=1e-4)
    scorer_info = bundle.manifest.scorer
    assert isinstance(scorer_info, GraphScorer)
    assert scorer_info.state_levels == 1
    assert bundle.manifest.query == VectorKind(width=WIDTH)


@pytest.fixture(scope="module")
def trained(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return fitted(settings(log), tmp_path_factory.mktemp("models") / "planted" / "1")


def test_a_vector_is_answered_with_the_items_of_its_cluster(trained: Bundle) -> None:
    engine = open_engine(trained, "cpu")
    fresh = table(9, 50)
    queries = encode_vectors(VectorKind(width=WIDTH), fresh.column("vector").to_pylist())
    found_BM = engine.search(queries, SearchParams.uniform(50, 20, 9)).item_rows_BM
    relevant = [trained.items.rows_of(ids) for ids in fresh.column("items").to_pylist()]
    assert precision_recall_f(found_BM, relevant, 9)[1].mean() > 0.65  # 9 of the cluster's 12: .75 is the most to be expected
    assert trained.manifest.metrics["test"].keys() == {"raw"}
    assert trained.manifest.metrics["test"]["raw"][0]["recall"] > 0.65
    assert trained.manifest.data["users"] == QUERIES


def test_golden_and_held_out_queries_are_vectors(trained: Bundle) -> None:
    golden, held = trained.golden(), read_heldout(trained)
    assert len(golden) == 32
    assert len(held.queries) == 40
    assert set(held.recall_by_m) == {10, 50, 64}
    assert verify_golden(trained, open_engine(trained, "cpu")) == 1
    with_wide = [most_kept(VectorKind(width=width)) for width in (1, 4194, 4195, MAX_VECTOR_WIDTH)]
    assert with_wide == [1000, 1000, 999, 64]


def test_a_bundle_is_evaluated_on_its_own_queries_or_a_file(log: Path, trained: Bundle, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    rows = {}
    for name, option in (("own", []), ("file", ["--data", str(log)])):
        command = ["evaluate", "--model", str(trained.path), *option, "--beam", "20", "--m", "10", "--json", str(report)]
        assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
        rows[name] = json.loads(report.read_text())
    assert rows["own"]["queries"] == rows["file"]["queries"] == 40
    assert rows["own"]["rows"][0]["recall"] == rows["file"]["rows"][0]["recall"] > 0.65
    with pytest.raises(InvalidConfig, match=r"exclude-seen.*a model of histories, not of vector queries"):
        CliRunner().invoke(app, [*command, "--exclude-seen"], catch_exceptions=False)


def test_a_bundle_is_shown(trained: Bundle) -> None:
    assert f"query: vectors of {WIDTH} numbers" in inspect(trained)


def test_training_goes_on_from_a_bundle_with_items_that_are_new(trained: Bundle, log: Path, tmp_path: Path) -> None:
    plain = pq.read_table(log)
    items = [["new", *ids] if f"item-{CLUSTERS * 3 + 2}" in ids else ids for ids in plain.column("items").to_pylist()]  # cluster 2
    grown = tmp_path / "grown.parquet"
    pq.write_table(pa.table({"vector": plain.column("vector"), "items": items}), grown)
    raw = settings(log, data={"log": str(grown)}, scorer={"init": "earlier"}, optimiser={"steps": 1, "learning_rate": 1e-9})
    bundle = fitted(raw | {"earlier_model": str(trained.path), "tree": {"kind": "earlier"}}, tmp_path / "planted" / "2")
    parent = bundle.tree.parent[bundle.tree.leaf_of_item[bundle.items.rows_of(["new"])[0]]]
    beside = [
        bundle.items.ids_of(np.array([row]))[0]
        for row in range(len(bundle.items))
        if bundle.tree.parent[bundle.tree.leaf_of_item[row]] == parent
    ]
    assert {int(name.removeprefix("item-")) % CLUSTERS for name in beside if name != "new"} == {2}
    assert bundle.manifest.metrics["test"]["raw"][0]["recall"] > 0.6


def test_a_tree_is_learned_anew_by_its_scorer(trained: Bundle, log: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    raw = settings(log, scorer={"init": "earlier"}, optimiser={"steps": 2})
    with caplog.at_level("INFO"):
        bundle = fitted(raw | {"earlier_model": str(trained.path), "tree": {"kind": "jtm"}}, tmp_path / "planted" / "2")
    assert "tree: rank per sample" in caplog.text
    assert bundle.manifest.metrics["test"]["raw"][0]["recall"] > 0.6


def test_a_bundle_of_other_vectors_is_no_start(trained: Bundle, log: Path, tmp_path: Path) -> None:
    plain = pq.read_table(log)
    narrow = tmp_path / "narrow.parquet"
    pq.write_table(
        pa.table({"vector": [vector[:4] for vector in plain.column("vector").to_pylist()], "items": plain.column("items")}), narrow
    )
    raw = settings(log, data={"log": str(narrow)}, scorer={"init": "earlier"})
    with pytest.raises(InvalidConfig, match=r"earlier_model.*vectors of 4 numbers"):
        fitted(raw | {"earlier_model": str(trained.path), "tree": {"kind": "earlier"}}, tmp_path / "planted" / "2")


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"scorer": {"kind": "attention"}}, "scorer.kind: got 'attention', expected product or mlp, since data.format.format is vectors"),
        ({"instances": {"windows": [4, 2]}}, "instances.windows: .*, since data.format.format is vectors"),
        ({"instances": {"cold_share": 0.5}}, "instances.cold_share: got 0.5, expected its default 0.02"),
        ({"tree": {"kind": "category"}}, "tree.kind: got 'category', expected another kind, .*vectors have no categories"),
        ({"data": {"split": {"kind": "last"}}}, "data.split.kind: got 'last'"),
        ({"data": {"split": {"kind": "date"}}}, "data.split.kind: got 'date'"),
        ({"data": {"format": {"format": "vectors", "items": "vector"}}}, "vector and items: expected different columns"),
    ],
)
def test_what_vectors_cannot_have_is_refused(log: Path, sections: dict[str, Any], expected: str) -> None:
    raw = settings(log)
    for name, section in sections.items():
        raw[name] = raw.get(name, {}) | section
    if raw["scorer"].get("kind") == "attention":
        raw["scorer"] = {"kind": "attention"}
    with pytest.raises(InvalidConfig, match=expected):
        deep_config(raw)


def test_a_bundle_remembers_its_configuration(trained: Bundle, log: Path) -> None:
    assert config_of(trained.manifest, DeepConfig).model_dump() == deep_config(settings(log)).model_dump() | {"name": "planted"}
