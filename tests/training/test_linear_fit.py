"""Models of linear scorers, from their data to an answer over HTTP: XMC files, matrices, logs of texts; those of kind xreg."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import polars as pl
import pytest
from numpy.testing import assert_allclose
from scipy.sparse import csr_array, vstack

from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.errors import BundleExists, InvalidConfig, InvalidData
from espalier.manifest import Activation, Ranking
from espalier.queries import QueryBatch
from espalier.search import SearchParams
from loadtest.queries import held_out
from service.models.probe import Replay
from tests.file_modes import assert_every_user_can_read, umask
from tests.service.running import Json, Running, problem, run
from tests.training.commands import command, trained
from tests.training.points import as_xmc, npz_files, points_of_degrees, random_points
from tests.training.shared_runs import Killed
from tests.training.shop import COLOURS, THINGS, write_shop
from training.__main__ import fit
from training.data.csr import as_rows
from training.data.xmc import LabelledPoints
from training.inspect import inspect
from training.linear import run as linear_run
from training.linear.prepare import prepare
from training.specification.linear import LinearConfig
from training.specification.models import SPECIFICATION

TREE = {"branching": 4, "max_leaf": 4}


def answer(running: Running, **body: Any) -> httpx.Response:
    return running.client.post("/retrieve", json=body)


def assert_refused(running: Running, query: Json, field: str, expected: str = "") -> None:
    refused = answer(running, queries=[query])
    assert refused.status_code == 422
    (error,) = problem(refused)["errors"]
    assert (error["field"], expected in error["expected"]) == (f"queries[0]{field}", True)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shop of coloured things, a log of what was searched for and bought, and a model of it."""
    folder = tmp_path_factory.mktemp("shop")
    data = {"weight": "times", "own_texts": ["title", "tags"]}
    config = write_shop(folder, data=data, linear={"weighted": True})
    fit(config=config, out=folder / "models" / "shop" / "1", data=None, test=None, device="cpu", resume=False)
    return folder


def test_a_model_of_texts_finds_what_was_bought(shop: Path) -> None:
    bundle = Bundle.open(shop / "models" / "shop" / "1")
    assert bundle.manifest.query.kind == "text"
    assert bundle.manifest.metrics["golden_overlap"] == 1
    assert bundle.manifest.metrics["test"]["raw"][0]["recall"] > 0.9
    assert held_out(bundle)[0].body() == {"text": bundle.heldout().column("text")[0].as_py()}
    assert Replay(bundle).expected[10] == pytest.approx(np.mean(bundle.heldout().column("recall@10").to_pylist()))
    assert len(held_out(bundle)) == len(bundle.heldout()) == bundle.manifest.data["test_queries"]
    counts = bundle.manifest.data["queries"], bundle.manifest.data["test_queries"]
    assert counts == (234, 14)  # a tenth of the log's 48 · 4 less 48 titles; the others, and the items' titles and tags
    assert sorted(path.name for path in (shop / "models" / "shop").iterdir()) == ["1"]
    assert command("evaluate", "--model", bundle.path, "--beam", "1,10", "--m", "1,10", "--json", shop / "rows.json").status == 0
    rows = json.loads((shop / "rows.json").read_text())["rows"]
    assert [(row["beam_size"], row["m"]) for row in rows] == [(1, 1), (1, 10), (10, 1), (10, 10)]
    assert rows[3]["recall"] > 0.9
    assert rows[3]["recall"] >= rows[2]["recall"] > 0.4
    options = ("--model", bundle.path, "--beam", 10, "--m", 10)
    whole = command("evaluate", *options, "--data", shop / "log.csv", "--engine", "reference")
    assert "shop version 1 on reference, 192 queries" in whole.out
    assert re.search(r"query: text, [\d,]+ features: word 1-grams, word 2-grams, char 3-grams", inspect(bundle))
    refused = command("evaluate", *options, "--exclude-seen")
    assert "--exclude-seen: got true, expected a model of histories, not of text queries" in refused.err


def test_a_text_is_answered_and_explained_over_http(shop: Path) -> None:
    """Levels are listed from the first that has to be cut."""
    with run(shop / "models", lambda opened: open_engine(opened, "cpu"), max_text=40) as running:
        found = answer(running, queries=[{"text": "a YELLOW lamp, please"}, {"text": ""}], m=3, fields=["title"]).json()
        assert found["engine"] == "sparse-cpu" == running.client.get("/models").json()["models"][0]["versions"][0]["engine"]
        first, second, _ = found["results"][0]["items"]
        assert first | {"score": 0} == {"id": "yellow-lamp", "score": 0, "fields": {"title": "Yellow Lamp"}}
        assert 0 < second["score"] < first["score"] <= 1
        assert len(found["results"][1]["items"]) == 3
        filtering = {"queries": [{"text": "yellow lamp", "exclude": ["blue-lamp", "gone"]}], "filter": {"colour": ["blue"]}}
        filtered = answer(running, m=48, **filtering).json()["results"][0]
        assert filtered["complete"]
        assert filtered["unknown"] == ["gone"]
        assert sorted(item["id"] for item in filtered["items"]) == sorted(f"blue-{thing}" for thing in THINGS if thing != "lamp")

        wanted = {"queries": [{"text": "yellow lamp"}], "explain_items": ["yellow-lamp", "red-chair"]}
        explained = answer(running, m=3, **wanted).json()["results"][0]["explain"]
        best, other = explained["items"]
        assert (best["outcome"], best["place"]) == ("returned", 1)
        reasons = {entry["feature"]: entry["contribution"] for entry in best["features"]}
        assert min(reasons["lamp"], reasons["yellow"]) > 0
        assert len(reasons) <= 10
        least = min(reasons.values())
        assert all(entry["contribution"] < reasons.get(entry["feature"], least) for entry in other["features"])
        bundle = Bundle.open(shop / "models" / "shop" / "1")
        start = bundle.tree.start_level(bundle.manifest.search.beam_size)
        assert [level["level"] for level in explained["levels"]] == list(range(start, bundle.tree.height + 1))

        for query, field, expected in (
            ({"history": []}, "", "text, the query kind of this model"),
            ({"text": "x" * 41}, ".text", "at most 40 characters"),
            ({"text": "x", "exclude_seen": True}, ".exclude_seen", "false"),
            ({"text": "x", "vector": [1]}, "", "text, "),
            ({"text": 3}, ".text", "string"),
        ):
            assert_refused(running, query, field, expected)


# -- points ---------------------------------------------------------------------------------------------------------------


def points_of(count: int, seed: int = 4) -> LabelledPoints:
    return random_points(np.random.default_rng(seed), count, 30, 12, density=0.03)


@pytest.mark.parametrize("form", ["xmc", "npz"])
def test_points_become_a_model_of_features(tmp_path: Path, form: str) -> None:
    parts = {"train": points_of(300), "test": points_of(50, seed=5)}
    data = npz_files(tmp_path, **parts) if form == "npz" else {"format": "xmc"} | {name: str(tmp_path / f"{name}.txt") for name in parts}
    for name, part in parts.items():
        (tmp_path / f"{name}.txt").write_text(as_xmc(part))
    linear = {"loss": "logistic", "cost": 10} if form == "npz" else {}
    with umask(0o077):
        bundle = trained(tmp_path, {"data": data, "tree": TREE, "linear": linear}, "points/1", device="auto", resume=True)
    assert_every_user_can_read(tmp_path / "models")
    assert bundle.manifest.name == "points"
    activation: Activation = "l3-hinge" if form == "xmc" else "sigmoid"
    chosen = bundle.manifest.metrics["validation"]
    assert chosen["cost"] == 10 or form == "xmc"  # the configured one is kept
    assert bundle.manifest.ranking == Ranking(activation=activation, own="log_activation", gamma=chosen["gamma"])
    recall = bundle.manifest.metrics["test"]["raw"][0]["recall"]
    assert recall > 0.9
    if form == "xmc":
        options = ("--data", data["test"], "--beam", 10, "--m", 10, "--json", tmp_path / "rows.json")
        assert command("evaluate", "--model", bundle.path, *options).status == 0
        assert json.loads((tmp_path / "rows.json").read_text())["rows"][0]["recall"] == recall


def test_features_are_answered_and_explained_over_http(tmp_path: Path) -> None:
    data, linear = npz_files(tmp_path, train=points_of(300)), {"cost": 1, "gamma": 0.5}
    bundle = trained(tmp_path, {"data": data, "tree": TREE, "linear": linear})
    with run(tmp_path / "models", lambda opened: open_engine(opened, "cpu"), max_features=4) as running:
        queries = [{"features": {"indices": [24, 3], "values": [2.0, 2.0]}}]
        found = answer(running, queries=queries, m=2, explain_items=["3"]).json()["results"][0]
        for features, field in (
            ({"indices": [30], "values": [1.0]}, ".features.indices"),
            ({"indices": [2**70], "values": [1.0]}, ".features.indices"),
            ({"indices": [1, 2, 3, 4, 5], "values": [1.0] * 5}, ".features.indices"),
            ({"indices": [1], "values": []}, ".features.values"),
            ({"indices": [1]}, ".features.values"),
            (None, ".features"),
        ):
            assert_refused(running, {"features": features}, field)
    assert found["items"][0]["id"] == "3"
    path = bundle.tree.ancestors(bundle.tree.leaf_of_item[3:4])[0][1:]
    weights = sum(bundle.chunks.weights_of(bundle.tree, int(node), np.array([3, 24], np.int32)) for node in path)
    told = {entry["feature"]: entry["contribution"] for entry in found["explain"]["items"][0]["features"]}
    assert told == pytest.approx(dict(zip(["3", "24"], (np.sqrt(0.5) * weights).tolist(), strict=True)), abs=1e-6)


def test_equal_points_are_all_learned_from_or_all_held_out(tmp_path: Path) -> None:
    few = points_of(60)
    points = csr_array(vstack([few.points] * 4))
    labels = csr_array(vstack([few.labels] * 4))
    data = npz_files(tmp_path, train=LabelledPoints(points, labels)) | {"test_share": 0.11}
    prepared = prepare(LinearConfig.model_validate({"kind": "xr-linear", "name": "points", "data": data}))
    held_out, learned = ({row.tobytes() for row in part.points.toarray()} for part in (prepared.test, prepared.train))
    assert not held_out & learned
    assert len(prepared.test) == 24, "of 26"
    assert len(prepared.test) + len(prepared.train) == 240


def test_what_was_chosen_before_a_run_was_killed_is_not_chosen_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw: Json = {"data": npz_files(tmp_path, train=points_of(300)), "tree": TREE}
    with monkeypatch.context() as patch:
        patch.setattr("training.linear.run.export", lambda *arguments: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            trained(tmp_path, raw)
    kept = tmp_path / "models" / "any" / ".1.work"
    assert {file.name for file in kept.iterdir()} == {
        *("chosen.json", "identity.json", "level-1.safetensors", "level-2.safetensors", "tree.npz")
    }
    chosen = json.loads((kept / "chosen.json").read_text())["options"]
    monkeypatch.setattr("training.linear.fit.LevelTrainer.train", None)
    monkeypatch.setattr(linear_run, "hierarchical_kmeans", lambda *_: pytest.fail("another processor would round another tree"))
    npz_files(tmp_path, train=points_of(300, seed=6))
    with pytest.raises(InvalidConfig, match=rf"--resume: .* changed: data.train {raw['data']['train']}"):
        trained(tmp_path, raw, resume=True)
    npz_files(tmp_path, train=points_of(300))
    (kept / "identity.json").rename(kept / "identity")
    with pytest.raises(InvalidConfig, match=r"--resume: .* changed: the program"):
        trained(tmp_path, raw, resume=True)
    (kept / "identity").rename(kept / "identity.json")
    validation = trained(tmp_path, raw, resume=True).manifest.metrics["validation"]
    assert {name: validation[name] for name in chosen} == chosen
    assert not kept.exists()
    with pytest.raises(BundleExists):
        trained(tmp_path, raw)


# -- XReg -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def xreg(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and one with a tail."""
    folder, data = tmp_path_factory.mktemp("xreg"), points_of_degrees(400)
    files = npz_files(folder, train=data.take(np.arange(300)), test=data.take(np.arange(300, 400)))
    raw = {"kind": "xreg", "data": files, "tree": {"max_leaf": 8}}
    trained(folder, raw)
    trained(folder, raw | {"tree": {"max_leaf": 8, "count": 2}, "tail": {"form": "product", "alpha": 0.8}}, "tail/1")
    return folder / "models"


def test_scores_estimate_how_relevant_an_item_is(xreg: Path) -> None:
    bundle = Bundle.open(xreg / "any" / "1")
    assert bundle.manifest.algorithm == "xreg"
    assert bundle.manifest.tree.max_children == (2, 2, 8)
    assert (bundle.manifest.ranking.gamma, bundle.manifest.ranking.activation) == (1, "sigmoid")
    data = points_of_degrees(400).take(np.arange(300))
    queries = QueryBatch(bundle.manifest.query, as_rows(data.points))
    found = open_engine(bundle, "cpu").search(queries, SearchParams.uniform(300, 4, 30))
    estimates = np.zeros((300, 30))
    np.put_along_axis(estimates, found.item_rows_BM, found.scores_BM, axis=1)
    truth = data.labels.toarray() / 4
    assert np.abs(estimates - truth)[truth > 0].mean() < 0.25
    assert np.abs(estimates - truth)[truth == 0].mean() < 0.03
    by_degree = [estimates[truth == degree / 4].mean() for degree in (1, 2, 3, 4)]
    assert np.all(np.diff(by_degree) > 0.1)


def test_a_tail_holds_the_direction_of_each_items_points(xreg: Path) -> None:
    bundle = Bundle.open(xreg / "tail" / "1")
    assert bundle.tail is not None
    assert (bundle.tail.info.form, bundle.tail.info.alpha) == ("product", 0.8)
    assert bundle.manifest.metrics["golden_overlap"] == 1
    data = points_of_degrees(400).take(np.arange(300))
    sums = (data.labels.toarray() > 0).T @ data.points.toarray()
    rows = np.zeros((30, 60))
    rows[np.repeat(np.arange(30), np.diff(bundle.tail.row_begin)), bundle.tail.feature] = bundle.tail.value
    assert_allclose(rows, sums / np.linalg.norm(sums, axis=1, keepdims=True), atol=1e-6)


@pytest.mark.parametrize("name", ["any", "tail"])
def test_xreg_is_served_with_scores_filters_of_scores_and_explanations(xreg: Path, name: str) -> None:
    bundle = Bundle.open(xreg / name / "1")
    body = {"model": name, "queries": [{"features": bundle.heldout().column("features")[0].as_py()}], "m": 30, "beam_size": 30}
    with run(xreg, lambda opened: open_engine(opened, "cpu")) as running:
        items = answer(running, **body).json()["results"][0]["items"]
        scores = [item["score"] for item in items]
        some = answer(running, **body, min_score=(scores[4] + scores[5]) / 2).json()["results"][0]["items"]
        explained = answer(running, **body, explain_items=[items[0]["id"], items[7]["id"]]).json()["results"][0]["explain"]
        described = running.client.get(f"/models/{name}").json()
    assert len(items) == 30
    assert scores == sorted(scores, reverse=True)
    assert 0 < scores[-1] < scores[0] <= 1
    assert [item["id"] for item in some] == [item["id"] for item in items[:5]]
    first = explained["items"][0]
    mean = sum(np.exp(tree["rank"]) for tree in first["trees"] if tree["outcome"] == "scored") / len(first["trees"])
    assert ("tail" in first) == (name == "tail")
    assert first["rank"] == pytest.approx(0.8 * np.log(mean) + first["tail"] if name == "tail" else np.log(mean), abs=1e-4)
    tail = {"form": "product", "alpha": 0.8, "gamma": 30.0, "entries": len(bundle.tail.value)} if bundle.tail is not None else None
    assert (described["trees"], described["tail"]) == ((2, tail) if name == "tail" else (3, None))


# -- what is wrong --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"format": "log", "train": "nowhere.csv"}, "nowhere.csv: .*expected a readable"),
        ({"format": "xmc", "train": "nowhere.txt"}, "nowhere.txt: .*expected a readable"),
        ({"format": "npz", "train": "nowhere.npz", "train_labels": "b"}, "nowhere.npz: .*expected a sparse matrix"),
    ],
)
def test_a_file_that_is_not_there_is_named(tmp_path: Path, data: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidData, match=message):
        trained(tmp_path, {"data": data})
    assert not (tmp_path / "models" / "any" / "1").exists()


def test_a_row_of_the_log_whose_item_the_item_table_lacks_is_refused_or_left_out(shop: Path, tmp_path: Path) -> None:
    model, config = shop / "models" / "shop" / "1", write_shop(tmp_path, data={"bad_rows": "skip", "test": str(tmp_path / "log.csv")})
    with (tmp_path / "log.csv").open("a") as log:
        log.write("old lump,red-lump,1\n")
    where, remedy = r"log\.csv: line 194, column item: got 'red-lump', expected an id of", r'data\.bad_rows = "skip" leaves such rows out'
    with pytest.raises(InvalidData, match=rf"{where} the item table in column 'item'; {remedy}"):
        fit(config=shop / "shop.toml", out=tmp_path / "m" / "1", data=tmp_path / "log.csv", test=None, device="cpu", resume=False)
    refused = command("evaluate", "--model", model, "--data", tmp_path / "log.csv")
    assert re.search(rf"{where} the model's item table in column 'item'; {remedy}", refused.err)
    fit(config=config, out=tmp_path / "m" / "1", data=None, test=None, device="cpu", resume=False)
    assert Bundle.open(tmp_path / "m" / "1").manifest.data["bad_rows"] == {"unknown item": 1}
    measured = command("evaluate", "--model", tmp_path / "m" / "1", "--data", tmp_path / "log.csv", "--beam", 10, "--m", 10)
    assert ", 192 queries" in measured.out


def test_an_item_of_the_test_queries_is_one_of_the_log(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("query,item\n" + "".join(f"red {thing},{thing}\n" for thing in THINGS))
    (tmp_path / "test.csv").write_text("query,item\nblue lamp,lamp\nblue lump,lump\n")
    data = {"format": "log", "train": str(tmp_path / "log.csv"), "test": str(tmp_path / "test.csv")}
    with pytest.raises(InvalidData, match=r"test\.csv: line 3, column item: got 'lump', expected an id of the training log"):
        trained(tmp_path, {"data": data})


def test_training_takes_the_cores_that_the_process_may_use_and_no_gpu(shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine of more cores, as in a container or under taskset."""
    with pytest.raises(InvalidConfig, match="--device: got 'cuda', expected auto or cpu"):
        fit(config=shop / "shop.toml", out=tmp_path / "m" / "1", data=None, test=None, device="cuda", resume=False)
    used: list[int] = []

    def stop(*arguments: Any) -> None:
        used.append(arguments[-1])
        raise OSError("seen enough")

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 5, 7})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(linear_run, "hierarchical_kmeans", stop)
    with pytest.raises(OSError, match="seen enough"):
        fit(config=shop / "shop.toml", out=tmp_path / "models" / "shop" / "2", data=None, test=None, device="cpu", resume=False)
    assert used == [3]


def test_texts_may_be_looked_up_by_their_ids(shop: Path, tmp_path: Path) -> None:
    needs, columns = tmp_path / "needs.parquet", {"query": "who", "item": "needs", "text_columns": ["title", "tags"], "test_share": 0}
    pl.DataFrame({"who": ["red-lamp", "blue-chair"], "needs": ["red-table", "red-lamp"]}).write_parquet(needs)
    data = {"format": "log", "train": str(needs), "texts": str(shop / "items.parquet")} | columns
    raw = {"data": data, "text": [{"unit": "word", "n": 1}]}
    bundle = trained(tmp_path, raw)
    assert bundle.items.ids_of(np.arange(2)) == ["red-table", "red-lamp"]
    assert set(bundle.vectoriser.features_of(np.arange(bundle.vectoriser.width))) >= {"red", "lamp", "blue", "chair"}
    pl.DataFrame({"who": ["pink-table"], "needs": ["a"]}).write_parquet(needs)
    with pytest.raises(
        InvalidData, match=r"column query: got 'pink-table', expected an id of .*items.parquet in column 'who'; .*leaves such"
    ):
        trained(tmp_path, raw, "any/2")


@pytest.mark.parametrize(("asked", "ids"), [([0, 1, 2], [0.0, 1.0, 2.0, None]), ([0.0, 1.0, 2.0, None], [0, 1, 2])])
def test_ids_of_texts_are_ids_as_in_other_tables(tmp_path: Path, asked: list[Any], ids: list[Any]) -> None:
    """pandas makes floats where integers are missing."""
    log, texts = tmp_path / "log.parquet", tmp_path / "texts.parquet"
    pl.DataFrame({"query": asked, "item": COLOURS[: len(asked)]}).write_parquet(log)
    pl.DataFrame({"id": ids, "text": THINGS[: len(ids)]}).write_parquet(texts)
    data = {"format": "log", "train": str(log), "texts": str(texts), "text_columns": ["text"], "test_share": 0, "bad_rows": "skip"}
    config = SPECIFICATION.checked({"kind": "xr-linear", "name": "any", "data": data})
    assert isinstance(config, LinearConfig)
    people_queries = prepare(config).people_queries
    assert people_queries is not None
    assert people_queries.texts == THINGS[:3]
    pl.DataFrame({"id": [0, 1, 2, 1], "text": THINGS[:4]}).write_parquet(texts)
    with pytest.raises(InvalidData, match=r"texts\.parquet: column id: got '1', expected each id once"):
        prepare(config)
