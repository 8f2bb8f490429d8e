"""Weighted data from a file to the figures of `evaluate` and the distribution in `inspect`; wrong degrees are refused; what `evaluate`
says of recall and beams: a fall that is more than noise, and nothing else.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from numpy.testing import assert_array_equal
from safetensors.numpy import load_file, save_file

import espalier.engines
from benchmarks.random_bundles import make_bundle, random_queries
from espalier.arrays import Bool, Float32
from espalier.bundle import LABEL_COUNTS, Bundle
from espalier.bundle_writer import with_parts
from espalier.checks.heldout import read_heldout
from espalier.errors import BundleCorrupt, InvalidConfig
from espalier.queries import QueryBatch
from espalier.search import NO_ITEM, SearchParams, SearchResult
from espalier.tree import complete_tree
from tests.training.commands import command, trained
from training import evaluate as evaluate_module
from training.__main__ import fit
from training.data.relevance import inverse_propensities
from training.data.splits import EvaluationPair
from training.evaluate import MIN_QUERIES, LabelledQueries, falls, measure
from training.graded import Grades, graded_figures
from training.graded_metrics import RankedErrors, wp_at_k
from training.graded_relevance import Relevance
from training.held_out import labelled_queries
from training.inspect import inspect as report

FEATURES, LABELS = 30, 12
SMALL_TREE = {"branching": 2, "max_leaf": 4}


def points(count: int, seed: int) -> str:
    """Points whose features say which labels they have and, by their size, how relevant these are."""
    rng = np.random.default_rng(seed)
    lines = [f"{count} {FEATURES} {LABELS}"]
    for _ in range(count):
        labels = np.sort(rng.choice(LABELS, 3, replace=False))
        weights = rng.choice([0.5, 1.0, 4.0], 3)
        noise = int(rng.integers(2 * LABELS, FEATURES))
        features = sorted([(int(label), weight) for label, weight in zip(labels, weights, strict=True)] + [(noise, 0.3)])
        lines.append(
            ",".join(f"{label}:{weight:g}" for label, weight in zip(labels, weights, strict=True))
            + " "
            + " ".join(f"{feature}:{value:g}" for feature, value in features)
        )
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def weighted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with weighted training and test points, and models/weighted/1 trained on them."""
    folder = tmp_path_factory.mktemp("weighted")
    (folder / "train.txt").write_text(points(300, 1))
    (folder / "test.txt").write_text(points(60, 2))
    trained(folder, of_points(folder), "weighted/1")
    return folder


def of_points(folder: Path, test: str = "test.txt") -> dict[str, Any]:
    return {"data": {"format": "xmc", "train": str(folder / "train.txt"), "test": str(folder / test)}, "tree": SMALL_TREE}


def known(grades: Grades | None) -> tuple[Grades, Sequence[Float32]]:
    """Grades with degrees."""
    assert grades is not None
    assert grades.relevance is not None
    return grades, grades.relevance


def evaluated(bundle: Bundle, folder: Path, data: Path | None) -> tuple[list[dict[str, Any]], str]:
    source = () if data is None else ("--data", data)
    options = ("--beam", 10, "--m", "1,3", "--batch", 7, "--json", folder / "rows.json", *source)
    printed = command("evaluate", "--model", bundle.path, *options).out
    rows: list[dict[str, Any]] = json.loads((folder / "rows.json").read_text())["rows"]
    return rows, printed


def test_evaluate_measures_degrees_of_relevance(weighted: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(weighted / "models" / "weighted" / "1")
    own, printed = evaluated(bundle, tmp_path, None)
    for word in ("pointwise", "labelwise", "wp", "xmad", "tau", "psp", "auprc_zero", "released_xmad"):
        assert re.search(rf"^.*\b{word}\b", printed, re.MULTILINE)
    read, _ = evaluated(bundle, tmp_path, weighted / "test.txt")
    written = bundle.manifest.metrics["test"]["raw"]
    for row, same in zip(own, read, strict=True):
        for side in ("pointwise", "labelwise"):
            assert row["graded"][side] == pytest.approx(same["graded"][side]), "held-out queries are the test points, with their weights"
    assert own[1]["graded"]["pointwise"]["wp"] > 0.7
    assert 0 < own[1]["graded"]["pointwise"]["xmad"] < 0.75
    assert "graded" in written[0]
    expected = r"^relevance: 900 training labels, mean 1\.\d+, scale 4; quantiles 0 % 0\.5, 5 % 0\.5, .* 50 % 1, .* 100 % 4$"
    assert re.search(expected, report(bundle), re.MULTILINE)


def test_the_figures_are_those_of_the_metrics() -> None:
    found_BM, scores_BM = np.array([[1, 0], [2, -1]]), np.array([[0.5, 0.25], [1, 0]], np.float32)
    relevant = [np.array([0, 1]), np.array([0])]
    weights = [np.array([4.0, 2.0], np.float32), np.array([1.0], np.float32)]
    inverse_I = np.array([1.0, 2.0, 3.0])
    figures = graded_figures(relevant, Grades(weights, 4.0, inverse_I), found_BM, scores_BM, [2], 3)[2]
    true = Relevance.of_lists(relevant, [np.array([1.0, 0.5]), np.array([0.25])], 3)
    found = Relevance.of_predictions(found_BM, scores_BM, 3)
    pointwise, labelwise = figures["pointwise"], figures["labelwise"]
    assert pointwise["wp"] == wp_at_k(true, found, 2) == 1.5 / 1.75
    assert pointwise["psp"] == 3 / 4
    assert pointwise["xmad"] == RankedErrors.of(true, found).xmad(2).mean() == (0.75 / 2 + 1.25 / 2) / 2
    assert pointwise["released_xmad"] == pytest.approx((0.75 / 2 + 1 / 2) / 2 / (1.5 / 1.75))
    assert labelwise["wp"] == (1.0 + 0.5) / (1.25 + 0.5)
    assert labelwise["xmad"] == pytest.approx(((0.75 + 0.25) / 2 + 0 + 1 / 2) / 3)
    plain = graded_figures(relevant, Grades(None, 4.0, inverse_I), found_BM, scores_BM, [1, 2], 3)[2]
    assert plain["pointwise"].keys() == plain["labelwise"].keys() == {"psp", "psn"}
    assert plain["pointwise"]["psp"] == pointwise["psp"]
    repeated = [np.array([1, 0, 1]), np.array([0, 0])]  # of users who touch an item again
    assert graded_figures(repeated, Grades(None, 4.0, inverse_I), found_BM, scores_BM, [1, 2], 3)[2] == plain


def test_a_bundle_keeps_the_counts_of_its_labels(weighted: Path) -> None:
    bundle = Bundle.open(weighted / "models" / "weighted" / "1")
    counts = bundle.label_counts()
    assert counts is not None
    assert (counts.counts_I.sum(), counts.points, len(counts.counts_I)) == (900, 300, LABELS)
    grades = labelled_queries(bundle, None).grades
    assert grades is not None
    assert grades.inverse_propensity_I is not None
    assert_array_equal(grades.inverse_propensity_I, inverse_propensities(counts, 0.55, 1.5))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"counts": np.zeros(LABELS - 1, np.int64)}, "counts has 11 entries, expected 12"),
        ({"counts": np.zeros(LABELS, np.int32)}, r"counts is int32\[12\], expected one-dimensional int64"),
        ({"counts": np.full(LABELS, 301)}, "counts from 301 to 301, expected 0 to 300, the number of points"),
        ({"counts": np.full(LABELS, -1)}, "counts from -1 to -1, expected 0 to 300"),
        ({"points": np.array([1, 2])}, "points has 2 entries, expected 1"),
        ({"other": np.zeros(1, np.int64)}, r"arrays \['counts', 'other', 'points'\], expected \['counts', 'points'\]"),
    ],
)
def test_wrong_counts_are_refused(weighted: Path, tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    bundle = Bundle.open(weighted / "models" / "weighted" / "1")
    path = tmp_path / "weighted" / "1"
    shutil.copytree(bundle.path, path)
    save_file(load_file(path / LABEL_COUNTS) | changed, path / LABEL_COUNTS)
    with pytest.raises(BundleCorrupt, match=rf"label-counts\.safetensors: {message}"):
        Bundle(path, bundle.manifest).label_counts()


def test_wrong_degrees_of_held_out_queries_and_a_wrong_scale_are_refused(weighted: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(weighted / "models" / "weighted" / "1")
    table = bundle.heldout()
    at = table.column_names.index("relevance")
    for version, values in enumerate(([1.0, 2.0], [1.0, 2.0, 0.0], [1.0, 2.0, float("nan")], None), start=2):
        column = pa.array([values, *table.column("relevance").to_pylist()[1:]], pa.list_(pa.float32()))
        changed = table.set_column(at, "relevance", column)
        wrong = with_parts(bundle, tmp_path / "weighted" / str(version), {}, {"heldout.parquet": changed})
        with pytest.raises(BundleCorrupt, match="row 0 of relevance: expected 3 finite numbers above 0"):
            read_heldout(wrong)
    scales: tuple[object, ...] = ({"scale": 0.0}, {"scale": "4"}, {"scale": float("inf")}, {}, 4)
    for told in scales:
        wrong = Bundle(bundle.path, bundle.manifest.model_copy(update={"data": bundle.manifest.data | {"relevance": told}}))
        with pytest.raises(BundleCorrupt, match=r"data\.relevance\.scale of the manifest is .* expected a number above 0"):
            labelled_queries(wrong, None)
        with pytest.raises(BundleCorrupt, match=r"data\.relevance of the manifest is .* expected labels, mean, scale and quantiles"):
            report(wrong)


# -- clicks ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a log of ads that were shown and clicked, and models/ads/1 trained on it."""
    folder, rng, rows = tmp_path_factory.mktemp("clicks"), np.random.default_rng(5), []
    for q in range(40):
        for ad in rng.choice(6, 3, replace=False):
            shown = int(rng.integers(20, 200))
            rows.append((f"shop {'abcdef'[ad]} word{q}", f"ad-{ad}", shown, int(rng.binomial(shown, 0.1 * (1 + ad)))))
    pl.DataFrame(rows, schema=["query", "item", "shown", "clicked"], orient="row").write_csv(folder / "log.csv")
    trained(folder, of_clicks(folder), "ads/1")
    return folder


def of_clicks(folder: Path) -> dict[str, Any]:
    return {"data": {"format": "log", "train": str(folder / "log.csv"), "views": "shown", "clicks": "clicked"}, "tree": SMALL_TREE}


def test_rates_of_clicks_are_learned_from_and_measured_with(clicks: Path) -> None:
    bundle = Bundle.open(clicks / "models" / "ads" / "1")
    prior = bundle.manifest.data["prior"]
    log = pl.read_csv(clicks / "log.csv")
    held = bundle.heldout().column("text").to_pylist()
    learned = log.filter(~pl.col("query").is_in(held))
    assert 0 < len(learned) < len(log)
    assert prior == int(learned["clicked"].sum()) / int(learned["shown"].sum()), "held-out queries have no part in it"
    (own, rates), read = known(labelled_queries(bundle, None).grades), labelled_queries(bundle, clicks / "log.csv")
    first = log.filter(pl.col("query") == held[0]).row(0, named=True)
    rate = (first["clicked"] + 10 * prior) / (first["shown"] + 10)
    assert np.isclose(rates[0], rate, rtol=1e-5).any()
    assert len(read) == log["query"].n_unique()
    assert own.scale == pytest.approx(max(float(some.max()) for some in known(read.grades)[1]), rel=0.2)


def test_a_prior_that_is_no_rate_and_a_threshold_that_leaves_nothing_are_refused(clicks: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(clicks / "models" / "ads" / "1")
    wrong = Bundle(bundle.path, bundle.manifest.model_copy(update={"data": bundle.manifest.data | {"prior": 2.0}}))
    with pytest.raises(BundleCorrupt, match=r"data\.prior of the manifest is 2\.0, expected a rate from 0 to 1"):
        labelled_queries(wrong, clicks / "log.csv")
    with pytest.raises(InvalidConfig, match=r"relevance\.threshold: got 1\.5, expected a number that some training label reaches"):
        trained(tmp_path, of_clicks(clicks) | {"relevance": {"threshold": 1.5}})


def test_queries_of_a_file_get_the_relevance_that_training_had(weighted: Path, tmp_path: Path) -> None:
    """Inverse propensities of training points, and the threshold."""
    relevance = {"source": "inverse-propensity", "threshold": 1.028, "propensity_a": 1.5}
    bundle = trained(tmp_path, of_points(weighted) | {"relevance": relevance})
    counts = bundle.label_counts()
    assert counts is not None
    inverse_I = inverse_propensities(counts, 1.5, 1.5)
    assert inverse_I.min() < 1.028 < inverse_I.max()
    own, read = labelled_queries(bundle, None), labelled_queries(bundle, weighted / "test.txt")
    for queries in (own, read):
        for rows, values in zip(queries.relevant, known(queries.grades)[1], strict=True):
            np.testing.assert_allclose(values, inverse_I[rows], rtol=1e-6)
            assert (values >= 1.028).all()
    assert [rows.tolist() for rows in own.relevant] == [rows.tolist() for rows in read.relevant]


def test_a_file_that_could_be_read_either_way_is_read_as_the_training_file(weighted: Path, tmp_path: Path) -> None:
    """Test points with a label each, whose pair could be a feature."""
    one = weighted / "one.txt"
    one.write_text(f"2 {FEATURES} {LABELS}\n3:4 3:4\n5:0.5 5:0.5\n")
    bundle = trained(tmp_path, of_points(weighted, one.name))
    for queries in (labelled_queries(bundle, None), labelled_queries(bundle, one)):
        assert [rows.tolist() for rows in queries.relevant] == [[3], [5]]
        assert [values.tolist() for values in known(queries.grades)[1]] == [[4.0], [0.5]]


# -- docs/text-search.md --------------------------------------------------------------------------------------------------


def test_the_example_of_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ads that belong to a word, clicked at rates of their own by users whose text has it."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "text-search.md").read_text()
    (tmp_path / "ads.toml").write_text(re.findall(r'```toml\n(kind = "xreg".*?)```', page, re.DOTALL)[0])
    rng = np.random.default_rng(6)
    words = ["running", "cooking", "travel", "garden", "chess", "sailing"]
    rows = []
    for user in range(400):
        likes = rng.choice(len(words), 2, replace=False)
        text = f"{words[likes[0]]} {words[likes[1]]} user{user}"
        rows += [(text, f"ad-{ad}", 200, int(rng.binomial(200, 0.05 * (1 + ad)))) for ad in likes]
    pl.DataFrame(rows, schema=["user", "ad", "shown", "clicked"], orient="row").write_csv("ads.csv")
    pl.DataFrame({"user": [f"{word} fan" for word in words]}).write_csv("users.csv")
    out = tmp_path / "models" / "ads" / "1"
    fit(config=tmp_path / "ads.toml", out=out, data=None, test=None, device="cpu", resume=False)
    bundle = Bundle.open(out)
    figures = evaluated(bundle, tmp_path, None)[0][1]["graded"]["pointwise"]
    nothing = float(np.mean([sum(row) / 3 for row in bundle.heldout().column("relevance").to_pylist()]))
    assert figures["wp"] > 0.95
    assert figures["xmad"] * bundle.manifest.data["relevance"]["scale"] < nothing / 3, "zeros"
    options = ("--data", "users.csv", "--column", "user", "--per-item", 1, "--out", "pairs.parquet")
    assert command("assign", "--model", out, *options).status == 0
    pairs = pl.read_parquet("pairs.parquet")
    assert {row["item"]: row["point"] for row in pairs.iter_rows(named=True)} == {f"ad-{ad}": ad for ad in range(len(words))}


# -- falls of recall ----------------------------------------------------------------------------------------------------


class Scripted:
    """An engine that finds item 0, which is relevant, for the queries that a script names for a beam size."""

    name, rounding = "scripted", 0.0

    def __init__(self, finds_B: dict[int, Bool]) -> None:
        self.finds_B, self.at = finds_B, dict.fromkeys(finds_B, 0)

    def search(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
        beam, batch = int(params.beam_size_B[0]), len(queries)
        found_B = self.finds_B[beam]
        assert batch == len(found_B), "one call has all queries"
        rows_BM = np.where(found_B[:, None], 0, 1).astype(np.int64)
        width = int(params.m_B[0])
        rows_BM = np.concatenate([rows_BM, np.full((batch, width - 1), NO_ITEM)], axis=1)
        scores = np.ones(rows_BM.shape, np.float32)
        return SearchResult(rows_BM, scores, scores, scores, np.ones(batch, np.int64), np.ones(batch, np.bool_))


@pytest.fixture(scope="module")
def scripted_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    rng = np.random.default_rng(1)
    return make_bundle(tmp_path_factory.mktemp("models"), rng, complete_tree(rng.permutation(8), 2))


def rows_of(scripted_bundle: Bundle, finds_B: dict[int, Bool]) -> list[dict[str, Any]]:
    """The rows of measuring beams with queries that find what they should."""
    count = len(next(iter(finds_B.values())))
    queries = random_queries(np.random.default_rng(1), scripted_bundle, count)
    engine: Any = Scripted(finds_B)
    return measure(scripted_bundle, engine, LabelledQueries(queries, [np.zeros(1, np.int64)] * count), list(finds_B), [1, 2], batch=count)


def shares(count: int, share: float, seed: int) -> Bool:
    return np.random.default_rng(seed).random(count) < share


def test_a_fall_beyond_noise_is_told_with_its_figures_against_the_beam_that_finds_most(scripted_bundle: Bundle) -> None:
    found_B = shares(400, 0.6, 1)
    fewer_B = found_B & shares(400, 0.9, 2)
    rows = rows_of(scripted_bundle, {10: found_B, 40: fewer_B, 20: found_B})
    told = falls(rows, 400)
    lost = float(found_B.mean() - fewer_B.mean())
    assert len(told) == 2, "one for each m"
    assert told[0].startswith(
        f"recall@1 falls as the beam grows: {fewer_B.mean():.4f} at beam 40, {lost:.4f} less than at beam 10 (standard"
    )
    against = next(row["recall_against"] for row in rows if row["beam_size"] == 40)
    assert against["difference"] == pytest.approx(-lost)
    assert against["standard_error"] == pytest.approx(np.std(1.0 * fewer_B - found_B, ddof=1) / 20)
    assert "recall_against" not in rows[0], "nothing is smaller than the smallest"
    slow = {10 * (step + 1): shares(1000, 0.8, 3) & (np.arange(1000) >= 4 * step) for step in range(6)}
    told = falls(rows_of(scripted_bundle, slow), 1000)
    assert len(told) == 2
    assert re.search("at beam 60, .* than at beam 10 ", told[0])


def test_a_rise_few_queries_and_one_beam_are_not_told(scripted_bundle: Bundle) -> None:
    found_B = shares(400, 0.9, 5)
    fewer_B = found_B & shares(400, 0.5, 6)
    assert falls(rows_of(scripted_bundle, {10: fewer_B, 40: found_B}), 400) == []
    assert falls(rows_of(scripted_bundle, {40: found_B}), 400) == []
    for count in (MIN_QUERIES - 1, MIN_QUERIES):
        told = falls(rows_of(scripted_bundle, {10: found_B[:count], 40: fewer_B[:count]}), count)
        assert bool(told) == (count == MIN_QUERIES)


def test_the_command_warns_on_standard_error_and_in_its_report(
    scripted_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found_B = shares(60, 0.9, 7)
    engine = Scripted({10: found_B, 20: found_B & (np.arange(60) % 3 > 0)})
    monkeypatch.setattr(espalier.engines, "open_engine", lambda *_, **__: engine)
    queries = random_queries(np.random.default_rng(1), scripted_bundle, 60)

    pairs = [EvaluationPair(i, row[row >= 0], np.zeros(1, np.int64)) for i, row in enumerate(queries.array.astype(np.int64))]
    monkeypatch.setattr(evaluate_module, "held_out_pairs", lambda _: pairs)
    options = ("--beam", "10,20", "--m", 1, "--batch", 60, "--json", tmp_path / "rows.json")
    assert command("evaluate", "--model", scripted_bundle.path, *options).status == 0
    report = json.loads((tmp_path / "rows.json").read_text())
    assert len(report["warnings"]) == 1
    assert "recall@1 falls as the beam grows" in report["warnings"][0]
    assert f"WARNING: {report['warnings'][0]}" in caplog.text
