"""A saved PECOS model becomes a bundle that finds what PECOS finds.

One model and its predictions are PECOS's own (tests/data/pecos). The other models are random, written in the format that PECOS reads.

Legend: D depth, L clusters of a level, F features, B queries.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.sparse import csc_array, csr_array, load_npz, save_npz

from benchmarks.random_bundles import Rng, sparse_rows
from espalier.arrays import Float32, Float64, Int64
from espalier.bundle import Bundle
from espalier.checks.golden import verify_golden
from espalier.checks.heldout import read_heldout
from espalier.engines import open_engine
from espalier.errors import InvalidConfig, InvalidData
from espalier.queries import FeaturesKind, QueryBatch
from espalier.search import SearchParams
from service.models.probe import Replay
from tests.file_modes import assert_every_user_can_read, umask
from tests.training.commands import command
from training.data.csr import as_rows
from training.linear import pecos_files
from training.linear.import_pecos import import_pecos
from training.linear.pecos_files import PROCESSORS
from training.publish import GOLDEN_QUERIES

PECOS = Path(__file__).parents[1] / "data" / "pecos"
WIDTH = 30
SIZES = {1: (40,), 2: (6, 50), 3: (3, 12, 90), 4: (2, 7, 30, 120)}
"""Clusters and labels of models of each depth."""


@dataclass(frozen=True)
class Level:
    """weights float32[F (+ 1), L]; parent int64[L]."""

    weights: Float32
    parent: Int64
    bias: float


def random_model(rng: Rng, sizes: tuple[int, ...], bias: float = 1.0) -> list[Level]:
    """Clusters in any order, each with a child at least; half of the weights 0."""
    levels, above = [], 1
    for size in sizes:
        parent = rng.permutation(np.concatenate([np.arange(above), rng.integers(0, above, size - above)]))
        shape = (WIDTH + (bias > 0), size)
        weights = np.where(rng.random(shape) < 0.5, 0.8 * rng.normal(size=shape), 0).astype(np.float32)
        levels.append(Level(weights, parent, bias))
        above = size
    return levels


def write(folder: Path, levels: list[Level], processor: str = "l3-hinge", topk: tuple[int | None, ...] = ()) -> Path:
    """As XLinearModel.save() does."""
    for d, level in enumerate(levels):
        own = folder / "ranker" / f"{d}.model"
        own.mkdir(parents=True)
        codes = int(level.parent.max()) + 1
        only_topk = topk[d] if d < len(topk) else 20
        options = {"post_processor": processor} | ({} if only_topk is None else {"only_topk": only_topk})
        write_json(
            own, model="MLModel", nr_labels=len(level.parent), nr_features=WIDTH, nr_codes=codes, bias=level.bias, pred_kwargs=options
        )
        ones = np.ones(len(level.parent), np.float32)
        save_npz(own / "W.npz", csc_array(level.weights), compressed=False)
        save_npz(
            own / "C.npz",
            csc_array((ones, (np.arange(len(level.parent)), level.parent)), shape=(len(level.parent), codes)),
            compressed=False,
        )
    last = len(levels[-1].parent)
    write_json(folder / "ranker", model="HierarchicalMLModel", depth=len(levels), nr_features=WIDTH, nr_codes=1, nr_labels=last)
    write_json(folder, __meta__={"class_fullname": "pecos.xmc.xlinear.model###XLinearModel"})
    return folder


def write_json(folder: Path, **params: Any) -> None:
    (folder / "param.json").write_text(json.dumps(params))


def change(file: Path, **params: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | params))


def pecos_predict(levels: list[Level], x_F: Float64, processor: str, beam_size: int, m: int) -> list[tuple[int, float]]:
    """PECOS's prediction (pecos/core/xmc/inference.hpp): labels with their scores, best first."""
    kept: list[tuple[int, float]] = [(0, 0.0)]
    for d, level in enumerate(levels):
        found = []
        for cluster, above in kept:
            for child in np.flatnonzero(level.parent == cluster).tolist():
                features = np.append(x_F, level.bias) if level.bias > 0 else x_F
                value = float(features @ level.weights[:, child])
                if processor.removeprefix("log-") == "sigmoid":
                    score = 1 / (1 + np.exp(-value))
                elif processor != "noop":
                    score = np.exp(-(max(0.0, 1 - value) ** int(processor.removeprefix("log-")[1])))
                else:
                    score = value
                if processor.startswith("log-"):
                    score = np.log(score)
                if d > 0 and processor != "noop":
                    score = score + above if processor.startswith("log-") else score * above
                found.append((child, score))
        found.sort(key=lambda pair: -pair[1])  # stable: of equals the first
        kept = found[: beam_size if d + 1 < len(levels) else m]
    return kept


def random_features(rng: Rng, batch: int) -> Float64:
    kept = rng.random((batch, WIDTH)) < 0.4
    return np.where(kept, 0.5 * rng.normal(size=kept.shape), 0).astype(np.float32).astype(np.float64)


def assert_finds_what_pecos_finds(bundle: Bundle, levels: list[Level], processor: str, x_BF: Float64) -> None:
    """The same labels with the same scores, in the same order but for labels that 32 bits cannot tell apart."""
    engine, queries = open_engine(bundle, "cpu"), QueryBatch(bundle.manifest.query, sparse_rows(x_BF))
    for beam_size, m in ((1, 5), (3, 10), (10, 20), (200, 120)):
        m = min(m, len(levels[-1].parent))
        found = engine.search(queries, SearchParams.uniform(len(x_BF), beam_size, m))
        for b, x_F in enumerate(x_BF):
            wanted = pecos_predict(levels, x_F, processor, beam_size, m)
            if processor.startswith("log-"):
                wanted = [(label, np.exp(score)) for label, score in wanted]
            labels = [int(label) for label in bundle.items.ids_of(found.item_rows_BM[b, : found.count_B[b]])]
            assert sorted(labels) == sorted(label for label, _ in wanted)
            scores = [score for _, score in wanted]
            assert_allclose([dict(wanted)[label] for label in labels], scores, rtol=1e-4)
            ours = found.ranks_BM if processor == "noop" else found.scores_BM
            assert_allclose(ours[b, : len(labels)], scores, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("beam_size", [2, 10])
def test_a_model_that_pecos_trained_predicts_what_pecos_predicts(tmp_path: Path, beam_size: int) -> None:
    bundle = import_pecos(PECOS / "model", tmp_path / "models" / "law" / "1")
    queries, expected = csr_array(load_npz(PECOS / "queries.npz")), csr_array(load_npz(PECOS / f"predictions-beam-{beam_size}.npz"))
    m = 10
    params = SearchParams.uniform(queries.shape[0], beam_size, m)
    found = open_engine(bundle, "cpu").search(QueryBatch(bundle.manifest.query, as_rows(queries)), params)
    for b in range(queries.shape[0]):
        own = expected[[b]]
        order = np.argsort(-own.data, kind="stable")
        assert bundle.items.ids_of(found.item_rows_BM[b]) == [str(label) for label in own.indices[order]]
        assert_allclose(found.scores_BM[b], own.data[order], rtol=1e-5)


@pytest.mark.parametrize(
    ("processor", "depth", "bias"),
    [*((processor, 3, 1.0) for processor in PROCESSORS), ("l3-hinge", 1, -1.0), ("l3-hinge", 2, 0.25), ("l3-hinge", 4, -1.0)],
)
def test_it_finds_what_pecos_finds_at_every_depth_by_every_post_processor(tmp_path: Path, processor: str, depth: int, bias: float) -> None:
    rng = np.random.default_rng(PROCESSORS.index(processor) if depth == 3 else [depth, int(bias * 8) + 8])
    levels = random_model(rng, SIZES[depth], bias)
    bundle = import_pecos(write(tmp_path / "pecos", levels, processor), tmp_path / "models" / "law" / "1")
    assert_finds_what_pecos_finds(bundle, levels, processor, random_features(rng, 6))


def test_of_equal_labels_the_lower_comes_first(tmp_path: Path) -> None:
    levels = random_model(np.random.default_rng(5), (4, 60), bias=-1.0)
    levels = [Level(np.zeros_like(level.weights), level.parent, -1.0) for level in levels]
    bundle = import_pecos(write(tmp_path / "pecos", levels), tmp_path / "models" / "law" / "1")
    found = open_engine(bundle, "cpu").search(
        QueryBatch(bundle.manifest.query, sparse_rows(np.ones((1, WIDTH)))), SearchParams.uniform(1, 2, 40)
    )
    wanted = [str(label) for label, _ in pecos_predict(levels, np.ones(WIDTH), "l3-hinge", 2, 40)]
    assert wanted == [str(label) for cluster in (0, 1) for label in np.flatnonzero(levels[1].parent == cluster)]
    assert bundle.items.ids_of(found.item_rows_BM[0, : found.count_B[0]]) == wanted
    assert len(bundle.chunks.entry_weight) == 0


def test_the_first_level_needs_no_clusters_and_the_ranker_no_model_around_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    levels = random_model(rng, SIZES[2])
    folder = write(tmp_path / "pecos", levels)
    (folder / "ranker" / "0.model" / "C.npz").unlink()
    bundle = import_pecos(folder / "ranker", tmp_path / "models" / "law" / "1")
    assert_finds_what_pecos_finds(bundle, levels, "l3-hinge", random_features(rng, 3))
    change(folder / "param.json", model="XLinearModel")
    whole = import_pecos(folder, tmp_path / "models" / "law" / "2")
    assert_array_equal(whole.chunks.entry_weight, bundle.chunks.entry_weight)


def test_unsorted_matrices_of_other_formats_with_zeros_and_entries_in_two_parts_are_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    levels = random_model(rng, SIZES[2])
    folder = write(tmp_path / "pecos", levels)
    last = folder / "ranker" / "1.model"
    weights = csc_array(np.where(levels[1].weights == 0, 7, levels[1].weights).astype(np.float64))
    weights.data[weights.data == 7] = 0
    for column in range(weights.shape[1]):  # what is stored in any order means the same
        entries = slice(weights.indptr[column], weights.indptr[column + 1])
        weights.indices[entries], weights.data[entries] = weights.indices[entries][::-1].copy(), weights.data[entries][::-1].copy()
    halves = np.repeat(weights.data / 2, 2), np.repeat(weights.indices, 2), 2 * weights.indptr
    weights = csc_array(halves, shape=weights.shape)
    save_npz(last / "W.npz", weights)
    parents = np.zeros((50, 6), np.float32)
    parents[np.arange(50), levels[1].parent] = 1
    save_npz(last / "C.npz", csr_array(parents))
    bundle = import_pecos(folder, tmp_path / "models" / "law" / "1")
    assert len(bundle.chunks.entry_weight) == sum(np.count_nonzero(level.weights[:WIDTH]) for level in levels)
    assert_finds_what_pecos_finds(bundle, levels, "l3-hinge", random_features(rng, 3))


def test_the_manifest_says_where_it_comes_from_and_searches_as_pecos_does(tmp_path: Path) -> None:
    levels = random_model(np.random.default_rng(5), SIZES[3])
    folder = write(tmp_path / "pecos", levels, "log-l2-hinge", topk=(7, 7, 12))
    manifest = import_pecos(folder, tmp_path / "models" / "law" / "3").manifest
    assert (manifest.name, manifest.version, manifest.algorithm) == ("law", 3, "xr-linear")
    assert manifest.query == FeaturesKind(width=WIDTH)
    assert (manifest.ranking.activation, manifest.ranking.own, manifest.ranking.gamma) == ("l2-hinge", "log_activation", 1)
    assert manifest.search.model_dump() == {"beam_size": 7, "m": 12, "max_beam_size": 90, "max_m": 90, "min_beam_size": None}
    assert manifest.training["imported_from"] == "PECOS"
    assert manifest.training["pecos"]["ranker/param.json"]["nr_labels"] == 90
    assert manifest.training["pecos"]["ranker/2.model/param.json"]["pred_kwargs"] == {"only_topk": 12, "post_processor": "log-l2-hinge"}


def test_pecos_defaults_hold_where_the_model_has_none_and_the_widest_beam_where_levels_differ(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    levels = random_model(np.random.default_rng(5), SIZES[3])
    silent = import_pecos(write(tmp_path / "silent", levels, topk=(None,) * 3), tmp_path / "models" / "law" / "1").manifest.search
    assert (silent.beam_size, silent.m) == (10, 20)
    uneven = import_pecos(write(tmp_path / "uneven", levels, topk=(2, 9, 500)), tmp_path / "models" / "law" / "2").manifest.search
    assert (uneven.beam_size, uneven.m) == (9, 90)
    assert "only_topk of the inner levels is [2, 9]: the beam is 9 on all of them" in caplog.text


def test_golden_queries_are_the_references_answers_and_clearly_decided(tmp_path: Path) -> None:
    folder = write(tmp_path / "pecos", random_model(np.random.default_rng(5), SIZES[3]))
    bundle, again = (import_pecos(folder, tmp_path / "models" / "law" / str(version)) for version in (1, 2))
    golden = bundle.golden()
    assert golden.equals(again.golden())
    assert len(golden) == GOLDEN_QUERIES
    assert golden.column("features")[0].as_py() == {"indices": [], "values": []}
    assert len(set(golden.column("beam_size").to_pylist())) == 4
    engine = open_engine(bundle, "cpu")
    assert np.median(golden.column("margin").to_numpy()) > 2 * engine.rounding
    assert verify_golden(bundle, engine) == bundle.manifest.metrics["golden_overlap"] == 1
    assert len(read_heldout(bundle).queries) == 0
    replay = Replay(bundle)
    assert replay.query_order == [("golden", row) for row in range(GOLDEN_QUERIES)]
    queries, params = replay.next()
    replay.take(engine.search(queries, params))
    assert replay.drift == pytest.approx(0, abs=1e-6)
    assert replay.recall == {}


# -- labels' names --------------------------------------------------------------------------------------------------------


def test_labels_get_ids_and_attributes_from_a_file_in_their_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    levels = random_model(rng, SIZES[2])
    file, names = tmp_path / "items.parquet", [f"law-{label}" for label in range(50)]
    pq.write_table(pa.table({"year": list(range(1950, 2000)), "id": names}), file)
    bundle = import_pecos(write(tmp_path / "pecos", levels), tmp_path / "models" / "law" / "1", file)
    x_BF = random_features(rng, 1)
    found = open_engine(bundle, "cpu").search(QueryBatch(bundle.manifest.query, sparse_rows(x_BF)), SearchParams.uniform(1, 10, 3))
    labels = [label for label, _ in pecos_predict(levels, x_BF[0], "l3-hinge", 10, 3)]
    assert bundle.items.ids_of(found.item_rows_BM[0]) == [f"law-{label}" for label in labels]
    assert bundle.items.values("year", found.item_rows_BM[0]) == [1950 + label for label in labels]


def test_an_item_file_must_fit_the_labels(tmp_path: Path) -> None:
    folder = write(tmp_path / "pecos", random_model(np.random.default_rng(5), (4,)))
    file, out = tmp_path / "items.parquet", tmp_path / "models" / "law" / "1"
    with pytest.raises(InvalidConfig, match=r"--items: got .*items.parquet', expected a Parquet file that exists"):
        import_pecos(folder, out, file)
    file.write_text("id\n")
    with pytest.raises(InvalidConfig, match=r"--items: got .*, expected a Parquet file \("):
        import_pecos(folder, out, file)
    for columns, message in (
        ({"name": ["a", "b", "c", "d"]}, r"--items: got \['name'\], expected a column named 'id'"),
        ({"id": ["a", "b", "c"]}, r"--items: got '3 rows', expected 4, one per label in the order of the labels"),
    ):
        pq.write_table(pa.table(columns), file)
        with pytest.raises(InvalidConfig, match=message):
            import_pecos(folder, out, file)
    pq.write_table(pa.table({"id": ["a", "b", "c", "a"]}), file)
    with pytest.raises(InvalidData, match=r"items.id: got 'a', expected each id once"):
        import_pecos(folder, out, file)
    assert not out.exists()


# -- what is refused ------------------------------------------------------------------------------------------------------


def clusters(parents: list[list[int]], columns: int) -> csc_array[Any]:
    dense = np.zeros((len(parents), columns), np.float32)
    for row, own in enumerate(parents):
        dense[row, own] = 1
    return csc_array(dense)


def matrix(name: str, new: Any, level: int = 1) -> Callable[[Path], None]:
    return lambda ranker: save_npz(ranker / f"{level}.model" / name, csc_array(new))


def nan(rows: int, columns: int) -> Float32:
    return np.full((rows, columns), np.nan, np.float32)


def param(level: int | None, **params: Any) -> Callable[[Path], None]:
    return lambda ranker: change((ranker if level is None else ranker / f"{level}.model") / "param.json", **params)


def fewer_features(ranker: Path) -> None:
    save_npz(ranker / "1.model" / "W.npz", csc_array(np.ones((WIDTH, 4), np.float32)))
    change(ranker / "1.model" / "param.json", nr_features=WIDTH - 1)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no ranker": (lambda ranker: ranker.rename(ranker.parent / "old"), r"ranker/param.json: got .*No such file"),
    "no top param": (
        lambda ranker: (ranker.parent / "param.json").unlink(),
        r"pecos: got 'no param.json', expected an XLinearModel, or one",
    ),
    "no W": (lambda ranker: (ranker / "1.model/W.npz").unlink(), r"1.model/W.npz: got 'no file', expected a matrix"),
    "no npz": (lambda ranker: (ranker / "1.model/W.npz").write_bytes(b"weights"), r"1.model/W.npz: got .*, expected a sparse matrix"),
    "no JSON": (lambda ranker: (ranker / "param.json").write_text("{"), r"ranker/param.json: got .*, expected a JSON file"),
    "a list": (lambda ranker: (ranker / "param.json").write_text("[]"), r"ranker/param.json: got \[\], expected a JSON object"),
    "rows of W": (
        matrix("W.npz", np.ones((WIDTH, 4), np.float32)),
        r"1.model/W.npz: got '30 rows, 4 columns', expected 30 rows, one more for the bias, 4 columns",
    ),
    "columns of W": (matrix("W.npz", np.ones((WIDTH + 1, 5), np.float32)), r"got '31 rows, 5 columns', expected 30 rows, .*4 columns"),
    "NaN": (matrix("W.npz", nan(WIDTH + 1, 4)), r"1.model/W.npz: got 'numbers that are not finite'"),
    "shape of C": (matrix("C.npz", np.ones((4, 3), np.float32)), r"C.npz: got '4 rows, 3 columns', expected 4 rows, 2 columns"),
    "no cluster": (matrix("C.npz", clusters([[0], [], [1], []], 2)), r"C.npz: got 'row 1, 3 in no cluster', expected each row in one"),
    "two clusters": (matrix("C.npz", clusters([[0], [0, 1], [1], [0]], 2)), r"C.npz: got 'row 1 in several clusters'"),
    "no children": (matrix("C.npz", clusters([[0], [0], [0], [0]], 2)), r"C.npz: got 'column 1 without an entry', expected no cluster"),
    "part of a model": (matrix("C.npz", clusters([[0], [1]], 2), level=0), r"0.model/C.npz: got '2 clusters above level 0', expected 1: a"),
    "bias": (param(1, bias="yes"), r"1.model/param.json: got .*bias 'yes'.*, expected a finite number"),
    "options": (param(1, pred_kwargs=3), r"1.model/param.json: got 'pred_kwargs 3', expected only_topk and post_processor"),
    "processor": (
        param(1, pred_kwargs={"post_processor": "softmax"}),
        r"1.model.*post_processor 'softmax'.*, expected one of noop, sigmoid",
    ),
    "processors": (
        param(1, pred_kwargs={"post_processor": "noop"}),
        r"1.model.*post_processor 'noop'.*'l3-hinge' as on level 0: the same on all",
    ),
    "topk": (param(0, pred_kwargs={"only_topk": 0}), r"0.model/param.json: got 'only_topk 0', expected a whole number of at least 1"),
    "other features": (fewer_features, r"1.model/W.npz: got 'weights of 29 features', expected 30 as on level 0"),
    "depth": (param(None, depth=0), r"ranker/param.json: got 0, expected a depth of 1 to 63"),
    "shallower": (param(None, depth=1), r"ranker/param.json: got 'nr_labels 4', expected 2 as in the matrices"),
    "features": (param(None, nr_features=9), r"ranker/param.json: got 'nr_features 9', expected 30"),
    "mmap": (
        param(None, is_mmap=True),
        r"ranker: got 'a memory-mapped model', expected W.npz and C.npz: give the folder that compile_mmap",
    ),
    "mmap level": (lambda ranker: (ranker / "1.model/W.mmap_store").touch(), r"1.model: got 'a memory-mapped model'"),
    "transformer": (
        lambda ranker: change(ranker.parent / "param.json", model="XTransformer"),
        r"pecos/param.json: got 'XTransformer', expected an XLinearModel with all its levels: only linear scorers",
    ),
    "one level": (
        lambda ranker: change(ranker.parent / "param.json", model="MLModel"),
        r"got 'MLModel', expected an XLinearModel with all its levels",
    ),
    "unsaid": (lambda ranker: (ranker.parent / "param.json").write_text("{}"), r"pecos/param.json: got null, expected an XLinearModel"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_that_is_no_whole_model_is_refused_with_the_reason(tmp_path: Path, damage: str) -> None:
    folder, out = write(tmp_path / "pecos", random_model(np.random.default_rng(5), (2, 4))), tmp_path / "models" / "law" / "1"
    spoil, message = DAMAGES[damage]
    spoil(folder / "ranker")
    with pytest.raises(InvalidData, match=message):
        import_pecos(folder, out)
    assert not out.exists()


def test_a_model_of_too_many_features_one_inside_another_and_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = tmp_path / "text2text", tmp_path / "models" / "law" / "1"
    inside = write(folder / "xlinear_ensemble" / "0", random_model(np.random.default_rng(5), (2, 4)))
    with pytest.raises(
        InvalidData, match=r"text2text: got 'no param.json', expected an XLinearModel, or one of a Text2Text model \(xlinear_ensemble/0\)"
    ):
        import_pecos(folder, out)
    with pytest.raises(InvalidData, match=r"nowhere: got 'no folder', expected a folder with a PECOS model"):
        import_pecos(tmp_path / "nowhere", out)
    monkeypatch.setattr(pecos_files, "MAX_FEATURES", WIDTH - 1)
    with pytest.raises(InvalidData, match=r"0.model/W.npz: got '30 features', expected at most 29"):
        import_pecos(inside, out)


# -- the command ----------------------------------------------------------------------------------------------------------


def test_import_pecos_from_the_command_line(tmp_path: Path) -> None:
    folder, out = write(tmp_path / "pecos", random_model(np.random.default_rng(5), (2, 4))), tmp_path / "models" / "law" / "1"
    with umask(0o077):
        done = command("import-pecos", folder, "--out", out)
    assert (done.status, done.err) == (0, "")
    assert_every_user_can_read(tmp_path / "models")
    assert Bundle.open(out).manifest.tree.items == 4
    assert [file.name for file in out.parent.iterdir()] == ["1"]
    again = command("import-pecos", folder, "--out", out)
    assert (again.status, again.err) == (1, f"error: {out}: a bundle is never overwritten; choose another version\n")
    assert "a version number of at least 1" in command("import-pecos", folder, "--out", out.parent / "first").err
    assert "nowhere: got 'no folder'" in command("import-pecos", tmp_path / "nowhere", "--out", out.parent / "2").err
