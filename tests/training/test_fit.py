"""From a log to a bundle: training learns what was planted, the types of rows that are stored, and what the commands say."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

import training.deep.fit as fit_module
import training.deep.ranking as ranking_module
import training.deep.validation as validation_module
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.engines.reference import ReferenceEngine
from espalier.errors import BundleCorrupt, InvalidConfig
from espalier.items import ItemTable
from espalier.manifest import Ranking
from espalier.masks.eligibility import excluded_nodes
from espalier.metrics import precision_recall_f
from espalier.node_rows import rounded
from espalier.queries import HistoryKind, pad_histories
from espalier.search import SearchParams
from tests.espalier.test_signature import replay
from tests.pictures import Pictures
from tests.training.commands import command, written_toml
from tests.training.planted import CLUSTERS, SIZE, planted_log, settings
from tests.training.runs import Begun, begun, weights
from training.baselines.popularity import most_popular, rank
from training.data.splits import without_seen
from training.deep import export as module
from training.deep.beam import search_states, sorted_excluded_nodes
from training.deep.checkpoint import run_identity
from training.deep.export import check_parity, export, store_rows
from training.deep.fit import fit
from training.deep.prepare import SharedStart
from training.deep.ranking import ChosenRanking
from training.deep.scorers.model import NodeScorer, export_graphs
from training.deep.scorers.row_table import lookup
from training.deep.searches import Searches
from training.deep.topology import Topology
from training.deep.validation import compiled_search, encode_blocks, search_encoded, search_pairs
from training.live.run_journal import RunJournal
from training.retrieval.task import Deadline
from training.retrieval.tuning import Figures
from training.run_files import check_identity, stored_tree
from training.specification.deep import DeepConfig, TdmObjective
from training.specification.models import deep_config
from training.specification.splits import FileSplit
from training.versions import IDENTITY, run_folder, work_folder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted_log(tmp_path_factory.mktemp("data"))


RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "tdm": {"search": {"gamma": 0.0}},
    "plt": {},
    "otm-robust": {
        "scorer": {"kind": "product", "init": "random", "dropout": 0.0},
        "objective": {"gamma": 0.5, "random_nodes": 10},
        "search": {"gamma": 0.5},
    },
}


def recall_of(run: Begun, model: NodeScorer) -> float:
    """recall@10 of test users, seen items excluded."""
    pairs = without_seen(run.prepared.split.test)
    gamma = 1.0 if run.config.kind == "plt" else float(run.config.search.gamma)
    own: Any = "log_activation" if run.config.kind == "plt" else "logit"
    rows_BM, _ = search_pairs(run.config, run.topology, model, pairs, gamma, own, 20, 10)
    return float(precision_recall_f(rows_BM, [pair.relevant for pair in pairs], 10)[1].mean())


def recall_of_popularity(run: Begun) -> float:
    pairs = without_seen(run.prepared.split.test)
    popular_I = most_popular(run.prepared.interactions, run.prepared.split.train)
    rows_BM = rank(popular_I, [pair.history for pair in pairs], 10, exclude_seen=True)
    return float(precision_recall_f(rows_BM, [pair.relevant for pair in pairs], 10)[1].mean())


@dataclass(frozen=True)
class Trained:
    run: Begun
    model: NodeScorer
    rows_ND: np.ndarray
    recall: float
    bundle: Bundle


@pytest.fixture(scope="module")
def trained(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """A model of each objective, trained and exported once, when first asked for."""
    models: dict[str, Trained] = {}

    def of(kind: str) -> Trained:
        if kind not in models:
            folder = tmp_path_factory.mktemp(kind)
            run = begun(settings(log, kind, **RECIPES[kind]), folder / "work")
            model = run.fit(folder / "work")
            rows_ND = model.node_rows.detach().numpy().copy()
            bundle = export(run.config, run.prepared, run.tree, model, folder / "models" / "planted" / "3")
            models[kind] = Trained(run, model, rows_ND, recall_of(run, model), bundle)
        return models[kind]

    return of


# -- learning -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RECIPES)
def test_training_finds_the_planted_clusters(trained: Callable[[str], Trained], kind: str) -> None:
    run = trained(kind).run
    assert recall_of_popularity(run) < 0.2
    assert trained(kind).recall > 0.8


def test_ties_between_gammas_go_to_the_trained_one_and_a_softmaxs_logits_are_always_calibrated(log: Path, tmp_path: Path) -> None:
    run = begun(settings(log, "otm-robust", objective={"gamma": 0.3}), tmp_path / "work")
    model, topology = run.model, run.topology

    def always(*_: object) -> tuple[Any, Any]:
        return np.tile(np.arange(10), (30, 1)), np.tile(-np.arange(10.0, dtype=np.float32), (30, 1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.deep.searches.search_encoded", always)
        patch.setattr(ranking_module, "VALIDATION_QUERIES", 30)
        auto = run.config.model_copy(update={"search": run.config.search.model_copy(update={"gamma": "auto"})})
        chosen = ranking_module.choose_ranking(auto, run.prepared, topology, model)
        assert len({tried["figure"] for tried in chosen.trials}) == 1
        assert {tried["options"]["gamma"] for tried in chosen.trials} == {*ranking_module.GAMMAS, 0.3}
        assert chosen.ranking.gamma == 0.3
        assert chosen.memory is None  # which would find no more
        fixed = run.config.model_copy(update={"search": run.config.search.model_copy(update={"gamma": 0.0})})
        assert ranking_module.choose_ranking(fixed, run.prepared, topology, model).ranking.calibration is not None
        tdm = fixed.model_copy(update={"kind": "tdm", "objective": TdmObjective()})
        assert ranking_module.choose_ranking(tdm, run.prepared, topology, model).ranking.calibration is None
        patch.setattr(ranking_module, "validation_pairs", lambda *_: [])
        assert ranking_module.choose_ranking(auto, run.prepared, topology, model).ranking.gamma == 0.3


# -- a run is a function of its configuration ---------------------------------------------------------------------------

SHORT: dict[str, dict[str, Any]] = {
    "objective": {"warm_start": 0.5, "random_nodes": 5},
    "optimiser": {"steps": 24, "validate_every": 7, "average": 20},
}


@pytest.fixture
def short(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begun:
    """24 steps, of which the first 12 are TDM's, with a checkpoint after every 5."""
    monkeypatch.setattr(fit_module, "CHECKPOINT_EVERY", 5)
    return begun(settings(log, "otm", **SHORT), tmp_path / "data")


def changed(run: Begun, **top: Any) -> Begun:
    return dataclasses.replace(run, config=deep_config(run.config.model_dump(mode="json") | top))


def test_the_weights_of_the_best_validation_are_kept_and_patience_ends_the_run_for_good(
    short: Begun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recalls = iter([0.2, 0.5, 0.4, 0.5, 0.3, 0.9])
    seen: list[dict[str, Any]] = []
    steps: list[int] = []
    make = fit_module.InstanceSteps.make

    def scripted(config: DeepConfig, topology: Topology, model: NodeScorer, pairs: object) -> float:
        seen.append(weights(model))
        return next(recalls)

    def noted(own: fit_module.InstanceSteps, step: int) -> torch.Tensor:
        steps.append(step)
        return make(own, step)

    monkeypatch.setattr(fit_module, "validation_recall", scripted)
    monkeypatch.setattr(fit_module.InstanceSteps, "make", noted)
    optimiser = short.config.optimiser.model_dump() | {"validate_every": 4, "patience": 3}
    run = changed(short, optimiser=optimiser)
    kept = weights(run.fit(tmp_path / "work"))
    assert steps == list(range(20))  # five measurements, the last three no better than the second
    for name, array in kept.items():
        assert_array_equal(array, seen[3][name], err_msg=name)  # as good as the second, and trained for longer
    assert not np.array_equal(seen[1]["node_rows"], seen[3]["node_rows"])
    steps.clear()
    assert_array_equal(weights(run.fit(tmp_path / "work", resume=True))["node_rows"], kept["node_rows"])
    assert steps == [], "a run that patience ended is not trained again"


def test_few_validation_users_choose_no_weights_and_a_deadline_between_two_checkpoints_leaves_rows_that_are_up_to_date(
    short: Begun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_module, "MIN_VALIDATION_QUERIES", 1000)
    monkeypatch.setattr(fit_module, "validation_recall", lambda *_: pytest.fail("asked"))
    run = changed(short, optimiser=short.config.optimiser.model_dump() | {"batch": 2})  # so small that a step reads few rows
    kept = []
    for every in (8, 100):  # all rows are brought up to date at a checkpoint, too
        monkeypatch.setattr(fit_module, "CHECKPOINT_EVERY", every)
        work = tmp_path / str(every)
        work.mkdir()
        deadline = Deadline(8.0, partial(next, count(0.0)))
        kept.append(weights(fit(run.config, run.prepared, run.tree, CPU, work, False, deadline))["node_rows"])
    assert_array_equal(kept[1], kept[0])


def test_a_run_that_goes_on_refuses_changed_inputs(short: Begun, tmp_path: Path) -> None:
    """Fields of items and queries of a test are inputs, even if the log and the ids are the same."""
    items, test = tmp_path / "items.csv", tmp_path / "test.csv"
    items.write_text("id,title\na,one\n")
    test.write_text("user,item\nu,a\n")
    split = {"kind": "file", "test": test}
    data = short.config.data.model_copy(update={"items": items, "split": FileSplit.model_validate(split)})
    config, prepared, work = short.config.model_copy(update={"data": data}), short.prepared, tmp_path / "work"

    def assert_refused(identity: dict[str, str], named: str) -> None:
        with pytest.raises(InvalidConfig, match=rf"--resume: .* the same configuration and inputs; changed: {named}\."):
            check_identity(work, identity, resume=True)

    work.mkdir()
    check_identity(work, run_identity(config, prepared), resume=False)
    check_identity(work, run_identity(config, prepared), resume=True)
    for file, key in ((items, "data.items"), (test, "data.split.test")):
        content = file.read_text()
        file.write_text(content + "\n")
        assert_refused(run_identity(config, prepared), f"{key} {file}")
        file.write_text(content)
    lists = dataclasses.replace(prepared.interactions, fingerprint="0" * 64)
    changes: dict[str, Any]
    for changed_config, changes, named in (
        (config.model_copy(update={"seed": 99}), {}, "the configuration"),
        (config, {"split": dataclasses.replace(prepared.split, lists=lists)}, "the log"),
        (config, {"items": ItemTable.build(pa.table({"id": [f"other-{row}" for row in range(len(prepared.items))]}))}, "the items"),
        (config, {"shared_start": SharedStart(short.tree, tmp_path)}, "the shared start"),
        (config, {"run_journal": RunJournal(cast(Any, None), 5, tmp_path)}, "the journal"),
    ):
        assert_refused(run_identity(changed_config, dataclasses.replace(prepared, **changes)), named)
    (work / IDENTITY).write_text(json.dumps(run_identity(config, prepared) | {"data.gone gone.csv": "0"}))
    assert_refused(run_identity(config, prepared), "data.gone gone.csv")
    (work / IDENTITY).write_text("[]")
    assert_refused(run_identity(config, prepared), "the program")
    (work / IDENTITY).write_text("{")
    with pytest.raises(InvalidConfig, match=r"--resume: .*identity\.json.*, expected JSON; it is damaged"):
        check_identity(work, run_identity(config, prepared), resume=True)
    (work / IDENTITY).unlink()
    stored_tree(work / "tree.npz", lambda: short.tree, resume=False)
    assert_refused(run_identity(config, prepared), "the program")


def test_a_folder_without_an_identity_is_cleared(tmp_path: Path) -> None:
    """A run was killed while it read its inputs. A journal's copy, for example, may be of another model than that of the next run."""
    out = tmp_path / "books" / "1"
    work = work_folder(out)
    work.mkdir(parents=True)
    (work / "journal.ndjson").write_text("{}")
    with run_folder(out, resume=True) as folder:
        assert [*folder.iterdir()] == []
        check_identity(folder, {"the log": "a"}, resume=True)
        (folder / "journal.ndjson").write_text("{}")
        shutil.copytree(folder, tmp_path / "killed")
    assert not work.exists()
    (tmp_path / "killed").rename(work)
    with run_folder(out, resume=True) as folder:
        assert {file.name for file in folder.iterdir()} == {IDENTITY, "journal.ndjson"}


def test_validated_weights_are_averages_over_steps(short: Begun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every five steps, from those of step 5 on: m ← d · m + (1 − d) · w, d = 1 − 5 / average, or less at first: (1 + i) / (10 + i)."""
    path: list[Any] = []
    make = fit_module.InstanceSteps.make

    def noted(own: fit_module.InstanceSteps, step: int) -> torch.Tensor:
        loss = make(own, step)
        path.append(own.model.node_rows.detach().numpy().astype(np.float64))
        return loss

    monkeypatch.setattr(fit_module.InstanceSteps, "make", noted)
    optimiser = short.config.optimiser.model_dump() | {"steps": 25, "validate_every": 25, "average": 7}
    kept = weights(changed(short, optimiser=optimiser).fit(tmp_path / "work"))
    expected = path[4]
    for decay, step in ((2 / 11, 9), (3 / 12, 14), (2 / 7, 19), (2 / 7, 24)):
        expected = decay * expected + (1 - decay) * path[step]
    assert_allclose(kept["node_rows"], expected, atol=1e-5)


def test_a_warm_start_trains_tdm_first() -> None:
    objective = {"beam_size": 40, "warm_start": 0.25, "negatives": 30}
    config = deep_config({"kind": "otm", "name": "x", "data": {"log": "x"}, "optimiser": {"steps": 100}, "objective": objective})
    stages = [fit_module.stage(config, step) for step in range(100)]
    assert stages[:25] == [("tdm", TdmObjective(negatives=30))] * 25
    assert stages[25:] == [("otm", config.objective)] * 75


def test_a_batch_that_the_processes_cannot_share_alike_is_refused(short: Begun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_module, "processes", lambda: 7)
    with pytest.raises(InvalidConfig, match=r"optimiser\.batch: .*60.*a multiple of the 7 processes"):
        short.fit(tmp_path / "work")


def test_a_loss_that_is_not_finite_ends_the_run(short: Begun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named with its step, the first after the warm start."""

    def broken(model: NodeScorer, *_: Any) -> torch.Tensor:
        return lookup(torch.tensor([0]), model.table).sum() * float("inf")

    monkeypatch.setitem(fit_module.LOSSES, "otm", broken)
    with pytest.raises(FloatingPointError, match=r"step 12: the loss is .*; lower optimiser\.learning_rate"):
        short.fit(tmp_path / "work")


def test_a_model_that_is_not_finite_does_not_pass_the_parity_check(short: Begun) -> None:
    model = short.model.eval()
    example = torch.full((2, short.tree.height + 1, 14), -1)
    torch.nn.init.constant_(model.head.out.bias, float("nan"))  # type: ignore[union-attr, arg-type]  # an MlpHead
    graphs = export_graphs(model, "history_nodes", example)
    with pytest.raises((BundleCorrupt, FloatingPointError)):
        check_parity(model, graphs, example)


@pytest.mark.parametrize(("kind", "own", "gamma"), [("tdm", "logit", 0.0), ("plt", "log_activation", 1.0), ("otm-robust", "logit", 0.5)])
def test_an_exported_model_answers_as_the_trained_one_and_says_what_it_was_made_of(
    trained: Callable[[str], Trained], kind: str, own: str, gamma: float
) -> None:
    """The signature test, on graphs that torch exported: the reference rescores the beams that the engine kept."""
    made = trained(kind)
    bundle, run, manifest = made.bundle, made.run, made.bundle.manifest
    engine, reference = open_engine(bundle, engine="onnx-cpu"), ReferenceEngine(bundle)
    histories = [pair.history for pair in run.prepared.split.test][:10]
    queries = pad_histories(HistoryKind(length=14), [np.empty(0, np.int64), *histories])
    rng = np.random.default_rng(6)
    batch = len(queries)
    exclude_BE = rng.integers(-1, bundle.tree.item_count, (batch, 30))
    params = SearchParams(rng.integers(1, 40, batch), rng.integers(1, 30, batch), exclude_BE, trace=True)
    got, expected = engine.search(queries, params), reference.search(queries, params)
    for b in range(batch):
        start = bundle.tree.start_level(int(params.beam_size_B[b]))
        kept = {level.level: level.nodes_BK[b][level.nodes_BK[b] >= 0] for level in got.traces[0] if level.level >= start}
        replay(reference, queries, params, b, kept, engine.rounding)
    assert (got.item_rows_BM == expected.item_rows_BM).mean() > 0.99
    scores = got.scores_BM[got.item_rows_BM >= 0]
    assert 0 <= scores.min() <= scores.max() <= 1, "probabilities"

    assert (manifest.ranking.own, manifest.ranking.gamma, manifest.algorithm) == (own, gamma, kind)
    assert (manifest.ranking.calibration is not None) == (own == "logit" and gamma > 0)
    assert deep_config(manifest.training) == run.config
    assert manifest.data["sha256"] == run.prepared.interactions.fingerprint
    assert (manifest.version, manifest.name) == (3, "planted")
    assert_array_equal(bundle.node_rows_ND, made.rows_ND.astype(np.float16))
    assert bundle.golden().num_rows > 20
    assert bundle.golden().column("history")[0].as_py() == []  # a cold user is among them
    excluded = manifest.metrics["test"]["seen_excluded"]
    assert [row["m"] for row in excluded] == [10, 50, 64]  # 200 is over the model's limit
    assert excluded[0]["recall"] == pytest.approx(made.recall, abs=0.02)


@pytest.mark.parametrize("beam_size", [1, 3, 32])
@pytest.mark.parametrize("kind", RECIPES)
def test_the_training_beam_finds_what_the_reference_finds_without_excluded_items(
    trained: Callable[[str], Trained], kind: str, beam_size: int
) -> None:
    """Scattered items, and all items of the nodes that a search would visit: those take no place in a small beam."""
    made, rng, m = trained(kind), np.random.default_rng(4), 20
    bundle, tree, reference = made.bundle, made.bundle.tree, ReferenceEngine(made.bundle)
    queries = pad_histories(HistoryKind(length=14), [rng.integers(0, tree.item_count, size) for size in (0, 1, 14, 20)])
    visited = [reference.steps(queries, SearchParams.uniform(4, 2, 3), b)[3].kept_K for b in range(4)]
    below = [np.flatnonzero(np.isin(tree.ancestors(tree.leaf_of_item)[:, 4], nodes)) for nodes in visited]
    exclude_BE = np.full((4, 100), -1)
    for row, items in zip(exclude_BE, below, strict=True):
        row[: len(items) + 20] = [*items, *rng.integers(-1, tree.item_count, 20)]
    topology, ranking = Topology(tree, CPU), bundle.manifest.ranking
    query = topology.history_nodes(torch.from_numpy(queries.array.astype(np.int64)))
    for excluded in (None, exclude_BE):
        expected = reference.search(queries, SearchParams.uniform(4, beam_size, m, excluded))
        out = None if excluded is None else sorted_excluded_nodes(topology, excluded_nodes(tree, excluded))
        with torch.no_grad():
            states_BLS = made.model.eval().state(query)
            rows_BM, ranks_BM = search_states(made.model, topology, states_BLS, beam_size, m, ranking.gamma, ranking.own, out)
        assert_array_equal(rows_BM, expected.item_rows_BM)
        assert_allclose(ranks_BM, expected.ranks_BM, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", RECIPES)
def test_the_compiled_search_of_validation_finds_what_the_torch_one_finds(trained: Callable[[str], Trained], kind: str) -> None:
    made = trained(kind)
    topology, ranking, gamma = Topology(made.bundle.tree, CPU), made.bundle.manifest.ranking, 0.7
    pairs = list(made.run.prepared.split.validation)
    blocks = [(block, None) for block in encode_blocks(made.run.config, topology, made.model.eval(), pairs)]
    asked = made.model, topology, blocks, gamma, ranking.own, 6, 20
    assert compiled_search(made.model, topology.tree, gamma, ranking.own, 0.0) is not None
    rows_BM, keys_BM = search_encoded(*asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation_module, "compiled_search", lambda *_: None)
        torch_rows_BM, torch_keys_BM = search_encoded(*asked)
    assert len(rows_BM) == len(pairs) > 0
    assert (rows_BM == torch_rows_BM).mean() > 0.98  # ties of rounding
    assert_allclose(keys_BM, torch_keys_BM, rtol=1e-3, atol=1e-3)


# -- commands -------------------------------------------------------------------------------------------------------------


def test_evaluate_and_inspect_show_what_was_fitted(
    trained: Callable[[str], Trained], log: Path, tmp_path: Path, pictures: Pictures
) -> None:
    out = trained("tdm").bundle.path
    report, plot = tmp_path / "report.json", tmp_path / "plot.png"
    options = ("--beam", "4,16", "--m", "5,10", "--batch", 8, "--exclude-seen", "--json", report, "--plot", plot)
    assert command("evaluate", "--model", out, *options).status == 0
    written = json.loads(report.read_text())
    assert written.keys() - {"version"} == {"model", "engine", "arithmetic", "queries", "rows", "warnings"}
    assert (written["model"], written["engine"], written["queries"]) == ("planted", "compiled-cpu", 30)
    assert [(row["beam_size"], row["m"], row["batch"]) for row in written["rows"]] == [(4, 5, 8), (4, 10, 8), (16, 5, 8), (16, 10, 8)]
    for row in written["rows"]:
        against = {"recall_against"} if row["beam_size"] == 16 else set()
        assert row.keys() - against == {"beam_size", "m", "batch", "precision", "recall", "f", "ndcg", "ms_per_query"}
        assert 0 < row["recall"] <= 1
        assert 0 < row["precision"] <= 1
        assert row["ms_per_query"] > 0
    assert pictures.lines(plot) == {
        f"recall@{m}": [(row["ms_per_query"], row["recall"]) for row in written["rows"] if row["m"] == m] for m in (5, 10)
    }

    again = command("evaluate", "--model", out, "--data", log, "--beam", "16", "--m", "10", "--exclude-seen", "--engine", "reference")
    assert "planted version 3 on reference, 30 queries, seen items excluded" in again.out
    assert f"{written['rows'][3]['recall']:.4f}" in again.out  # the held-out queries are all 30 test users

    shown = command("inspect", "--model", out)
    assert "planted version 3: tdm" in shown.out
    assert f"tree: {CLUSTERS * SIZE} items, 255 nodes, 8 levels" in shown.out
    assert shown.out.count("item-") > 10


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({"optimiser": {"steps": 0}}, {}, "optimiser.steps: got 0, expected"),
        ({"data": {"log": "nowhere.csv"}}, {}, "log: got 'nowhere.csv', expected a file that exists"),
        *(({}, {"--out": f"planted/{version}"}, "--out: got") for version in ("one", "0", "01")),
        ({}, {"--out": "Bad Name/1"}, "--out: got 'Bad Name', expected a model name"),
        ({}, {"--config": "none.toml"}, "--config: got"),
    ],
)
def test_a_bad_option_or_key_of_a_fit_is_named(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], options: dict[str, str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"--config": written_toml(tmp_path / "planted.toml", settings(log, "tdm") | changed), "--out": "planted/9", "--device": "cpu"}
    outcome = command("fit", *(part for pair in (given | options).items() for part in pair))
    assert outcome.status == 1
    assert f"error: {message}" in outcome.err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--beam", "four", "--beam: got 'four', expected whole numbers"),
        ("--m", "0", "--m: got 0, expected 1 to 64"),
        ("--m", "65", "--m: got 65, expected 1 to 64"),
        ("--beam", "33", "--beam: got 33, expected 1 to 32"),
        ("--engine", "abacus", "engine 'abacus': expected one of"),
        ("--model", "nowhere", "nowhere/manifest.json: missing"),
        ("--data", "nowhere.csv", "log: got"),
    ],
)
def test_a_bad_option_of_evaluate_is_named(trained: Callable[[str], Trained], option: str, value: str, message: str) -> None:
    given = {"--model": trained("tdm").bundle.path, "--beam": "4", "--m": "5"} | {option: value}
    outcome = command("evaluate", *(part for pair in given.items() for part in pair))
    assert outcome.status == 1
    assert f"error: {message}" in outcome.err


# -- the types of node rows -----------------------------------------------------------------------------------------------


RANKING = Ranking(own="logit", gamma=0.0)


@pytest.fixture(scope="module")
def made(log: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """Configuration, data, tree and the first rows of a model."""
    run = begun(settings(log, "tdm", scorer={"kind": "product", "hidden": [4]}), tmp_path_factory.mktemp("stored"))
    return run.config, run.prepared, run.tree, run.model.eval(), run.model.node_rows.detach().clone()


def stored(made: tuple[Any, ...], dtype: str, rows: torch.Tensor | None = None) -> tuple[str, NodeScorer]:
    config, prepared, tree, model, first = made
    model.node_rows.data = (first if rows is None else rows).clone()
    config = config.model_copy(update={"scorer": config.scorer.model_copy(update={"dtype": dtype})})
    chosen = ChosenRanking(RANKING, None, [])
    return store_rows(config, prepared, Topology(tree, torch.device("cpu")), model, chosen), model


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_a_configured_type_is_taken_and_the_model_answers_with_it(made: tuple[Any, ...], dtype: str) -> None:
    found, model = stored(made, dtype)
    assert found == dtype
    np.testing.assert_array_equal(model.node_rows.detach().numpy(), rounded(made[-1].numpy(), dtype))


def test_a_type_that_cannot_hold_the_rows_is_refused_or_not_chosen(made: tuple[Any, ...]) -> None:
    large = made[-1] + 1e6
    with pytest.raises(FloatingPointError, match="node rows are not finite in float16"):
        stored(made, "float16", large)
    assert stored(made, "auto", large)[0] == "float32"


@pytest.mark.parametrize(
    ("large_bytes", "lost", "expected"), [(-1, 0.0, "float16"), (0, 0.0, "int8"), (0, 0.0019, "int8"), (0, 0.0021, "float16")]
)
def test_int8_is_chosen_where_rows_are_large_and_nothing_is_lost(
    made: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, large_bytes: int, lost: float, expected: str
) -> None:
    monkeypatch.setattr(module, "LARGE_BYTES", 2 * made[-1].numel() - 1 - large_bytes * (large_bytes < 0))
    recalls = iter([1.0, 1.0 - lost])
    monkeypatch.setattr(Searches, "figures_of", lambda searches, rows_BM: Figures(np.full((3, 4), next(recalls))))
    found, model = stored(made, "auto")
    assert found == expected
    np.testing.assert_array_equal(model.node_rows.detach().numpy(), rounded(made[-1].numpy(), expected))
