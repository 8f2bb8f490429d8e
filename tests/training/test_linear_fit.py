"""Models of linear scorers from their data to an answer over HTTP: XMC files, sparse matrices, logs of texts."""

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
from numpy.typing import NDArray
from scipy.sparse import csr_array

from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.errors import BundleExists, InvalidConfig, InvalidData
from espalier.manifest import Activation, Ranking
from espalier.queries import TextKind, encode_texts
from espalier.search import SearchParams
from loadtest.queries import held_out
from service.models.probe import Replay
from tests.file_modes import assert_every_user_can_read, umask
from tests.service.running import Json, problem, run
from tests.training.commands import command, written_toml
from tests.training.points import as_xmc, npz_files
from tests.training.shop import IDS, THINGS, item_frame
from training.__main__ import fit
from training.data.xmc import LabelledPoints
from training.inspect import inspect
from training.linear import run as linear_run
from training.linear.run import fit_and_export
from training.rankers.log_queries import from_log
from training.specification.linear import LinearConfig
from training.specification.models import SPECIFICATION


def write_toml(path: Path, text: str) -> Path:
    path.write_text('kind = "xr-linear"\nname = "any"\n' + text)
    return path


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shop of coloured things, a log of what was searched for and bought, and a model of it."""
    folder = tmp_path_factory.mktemp("shop")
    item_frame(IDS).write_parquet(folder / "items.parquet")
    rng = np.random.default_rng(3)
    rows = []
    for item in IDS:
        colour, thing = item.split("-")
        title = f"{colour} {thing}".title()
        for text in (title, f"{title} for my kitchen", f"buy a {thing} in {colour}", f"cheap {colour} {thing}s"):
            rows.append((text, item, float(rng.integers(1, 5))))
    log = pl.DataFrame(rows, schema=["query", "bought", "times"], orient="row")
    log.write_csv(folder / "log.csv")
    data: dict[str, Any] = {"format": "log", "train": str(folder / "log.csv"), "items": str(folder / "items.parquet")}
    data |= {"item": "bought", "weight": "times", "own_texts": [["title", "tags"]]}
    sections = {"labels": {"kind": "both", "columns": ["title"]}, "tree": {"branching": 4, "max_leaf": 8}, "linear": {"weighted": True}}
    written_toml(folder / "shop.toml", {"kind": "xr-linear", "name": "any", "data": data} | sections)
    fit(config=folder / "shop.toml", out=folder / "models" / "shop" / "1", data=None, test=None, device="cpu", resume=False)
    return folder


def test_a_model_of_texts_finds_what_was_bought(shop: Path) -> None:
    bundle = Bundle.open(shop / "models" / "shop" / "1")
    assert bundle.manifest.query.kind == "text"
    assert bundle.manifest.metrics["golden_overlap"] == 1
    assert bundle.manifest.metrics["test"]["raw"][0]["recall"] > 0.9
    assert held_out(bundle)[0].body() == {"text": bundle.heldout().column("text")[0].as_py()}
    assert Replay(bundle).expected[10] == pytest.approx(np.mean(bundle.heldout().column("recall@10").to_pylist()))
    assert (
        len(held_out(bundle)) == len(bundle.heldout()) == bundle.manifest.data["test_queries"] == 14
    )  # a tenth of the log's 48 · 4 less 48 titles
    assert bundle.manifest.data["queries"] == 226  # the others, and the items' own texts
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
    assert "--exclude-seen: got True, expected a model of histories, not of text queries" in refused.err


def test_a_text_is_answered_and_explained_over_http(shop: Path) -> None:
    """Levels are listed from the first that has to be cut."""

    def ask(**body: Any) -> httpx.Response:
        return running.client.post("/retrieve", json=body)

    with run(shop / "models", lambda opened: open_engine(opened, "cpu"), max_text=40) as running:
        answer = ask(queries=[{"text": "a YELLOW lamp, please"}, {"text": ""}], m=3, fields=["title"]).json()
        assert answer["engine"] == "sparse-cpu" == running.client.get("/models").json()["models"][0]["versions"][0]["engine"]
        assert answer["results"][0]["items"][0] | {"score": 0} == {"id": "yellow-lamp", "score": 0, "fields": {"title": "Yellow Lamp"}}
        assert 0 < answer["results"][0]["items"][1]["score"] < answer["results"][0]["items"][0]["score"] <= 1
        assert len(answer["results"][1]["items"]) == 3
        filtering = {"queries": [{"text": "yellow lamp", "exclude": ["blue-lamp", "gone"]}], "filter": {"colour": ["blue"]}}
        filtered = ask(m=48, **filtering).json()["results"][0]
        assert filtered["complete"]
        assert filtered["unknown"] == ["gone"]
        assert sorted(item["id"] for item in filtered["items"]) == sorted(f"blue-{thing}" for thing in THINGS if thing != "lamp")

        explained = ask(queries=[{"text": "yellow lamp"}], m=3, explain_items=["yellow-lamp", "red-chair"]).json()["results"][0]["explain"]
        best, other = explained["items"]
        assert (best["outcome"], best["place"]) == ("returned", 1)
        reasons = {entry["feature"]: entry["contribution"] for entry in best["features"]}
        assert reasons["lamp"] > 0
        assert reasons["yellow"] > 0
        assert len(reasons) <= 10
        assert all(entry["contribution"] < reasons["lamp"] for entry in other["features"])
        bundle = Bundle.open(shop / "models" / "shop" / "1")
        start = bundle.tree.start_level(bundle.manifest.search.beam_size)
        assert [level["level"] for level in explained["levels"]] == list(range(start, bundle.tree.height + 1))

        wrong: list[tuple[Json, str, str]] = [
            ({"history": []}, "queries[0]", "'text', the query kind of this model"),
            ({"text": "x" * 41}, "queries[0].text", "at most 40 characters"),
            ({"text": "x", "exclude_seen": True}, "queries[0].exclude_seen", "false"),
            ({"text": "x", "vector": [1]}, "queries[0]", "'text'"),
            ({"text": 3}, "queries[0].text", "string"),
        ]
        for query, field, expected in wrong:
            answer = ask(queries=[query])
            assert answer.status_code == 422
            assert problem(answer)["errors"][0]["field"] == field
            assert expected in problem(answer)["errors"][0]["expected"]


# -- points ---------------------------------------------------------------------------------------------------------------


def random_points(rng: np.random.Generator, points: int) -> LabelledPoints:
    """Points of 30 features whose labels, of 12, show in them."""
    labels = rng.random((points, 12)) < 0.15
    noise = np.where(rng.random((points, 30)) < 0.03, rng.random((points, 30)), 0)
    features = labels @ (np.eye(12, 30) + np.eye(12, 30, 12)) + noise
    return LabelledPoints(csr_array(features.astype(np.float32)), csr_array(labels.astype(np.float32)))


@pytest.mark.parametrize("form", ["xmc", "npz"])
def test_points_become_a_model_of_features(tmp_path: Path, form: str) -> None:
    rng = np.random.default_rng(4)
    parts = {"train": random_points(rng, 300), "test": random_points(rng, 50)}
    data = npz_files(tmp_path, **parts) if form == "npz" else {"format": "xmc"} | {name: str(tmp_path / f"{name}.txt") for name in parts}
    for name, part in parts.items():
        (tmp_path / f"{name}.txt").write_text(as_xmc(part))
    linear = {"loss": "logistic", "cost": 10} if form == "npz" else {}
    raw = {"kind": "xr-linear", "name": "any", "data": data, "tree": {"branching": 4, "max_leaf": 4}, "linear": linear}
    out = tmp_path / "models" / "points" / "1"
    with umask(0o077):
        fit(config=written_toml(tmp_path / "c.toml", raw), out=out, data=None, test=None, device="auto", resume=True)
    assert_every_user_can_read(tmp_path / "models")
    bundle = Bundle.open(out)
    assert bundle.manifest.name == "points"
    activation: Activation = "l3-hinge" if form == "xmc" else "sigmoid"
    chosen = bundle.manifest.metrics["validation"]
    assert chosen["cost"] == 10 or form == "xmc"  # the configured one is kept
    assert bundle.manifest.ranking == Ranking(activation=activation, own="log_activation", gamma=chosen["gamma"])
    recall = bundle.manifest.metrics["test"]["raw"][0]["recall"]
    assert recall > 0.9
    if form == "xmc":
        options = ("--data", data["test"], "--beam", 10, "--m", 10, "--json", tmp_path / "rows.json")
        assert command("evaluate", "--model", out, *options).status == 0
        assert json.loads((tmp_path / "rows.json").read_text())["rows"][0]["recall"] == recall


def test_features_are_answered_and_explained_over_http(tmp_path: Path) -> None:
    raw = {"kind": "xr-linear", "name": "any", "data": npz_files(tmp_path, train=random_points(np.random.default_rng(4), 300))}
    config = written_toml(tmp_path / "c.toml", raw | {"tree": {"branching": 4, "max_leaf": 4}, "linear": {"cost": 1, "gamma": 0.5}})
    fit(config=config, out=tmp_path / "models" / "points" / "1", data=None, test=None, device="cpu", resume=False)
    bundle = Bundle.open(tmp_path / "models" / "points" / "1")
    with run(tmp_path / "models", lambda opened: open_engine(opened, "cpu"), max_features=4) as running:
        query = {"features": {"indices": [15, 3], "values": [2.0, 2.0]}}
        item = running.client.post("/retrieve", json={"queries": [query], "m": 2}).json()["results"][0]["items"][0]
        assert item["id"] == "3"
        for features, field in (
            ({"indices": [30], "values": [1.0]}, "queries[0].features.indices"),
            ({"indices": [2**70], "values": [1.0]}, "queries[0].features.indices"),
            ({"indices": [1, 2, 3, 4, 5], "values": [1.0] * 5}, "queries[0].features.indices"),
            ({"indices": [1], "values": []}, "queries[0].features.values"),
            ({"indices": [1]}, "queries[0].features.values"),
            (None, "queries[0]"),
        ):
            answer = running.client.post("/retrieve", json={"queries": [{"features": features}]})
            assert answer.status_code == 422
            assert problem(answer)["errors"][0]["field"] == field
        explained = running.client.post("/retrieve", json={"queries": [query], "m": 2, "explain_items": ["3"]}).json()["results"][0]
    path = bundle.tree.ancestors(bundle.tree.leaf_of_item[3:4])[0][1:]
    weights = sum(bundle.chunks.weights_of(bundle.tree, int(node), np.array([3, 15], np.int32)) for node in path)
    told = {entry["feature"]: entry["contribution"] for entry in explained["explain"]["items"][0]["features"]}
    assert told == pytest.approx(dict(zip(["3", "15"], (np.sqrt(0.5) * weights).tolist(), strict=True)), abs=1e-6)


def test_what_was_chosen_before_a_run_was_killed_is_not_chosen_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = npz_files(tmp_path, train=random_points(np.random.default_rng(4), 300))
    raw = {"kind": "xr-linear", "name": "any", "data": data, "tree": {"branching": 4, "max_leaf": 4}}
    config, out = written_toml(tmp_path / "c.toml", raw), tmp_path / "models" / "points" / "1"
    with monkeypatch.context() as patch:
        patch.setattr("training.linear.run.export", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fit(config=config, out=out, data=None, test=None, device="cpu", resume=False)
    kept = out.with_name(".1.work")
    assert sorted(file.name for file in kept.iterdir()) == ["chosen.json", "identity", "level-1.npz", "level-2.npz"]
    chosen = json.loads((kept / "chosen.json").read_text())["options"]
    monkeypatch.setattr("training.linear.fit.LevelTrainer.train", None)
    fit(config=config, out=out, data=None, test=None, device="cpu", resume=True)
    validation = Bundle.open(out).manifest.metrics["validation"]
    assert {name: validation[name] for name in chosen} == chosen
    assert not kept.exists()
    with pytest.raises(BundleExists):
        fit(config=config, out=out, data=None, test=None, device="cpu", resume=False)


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
    config = written_toml(tmp_path / "c.toml", {"kind": "xr-linear", "name": "any", "data": data})
    with pytest.raises(InvalidData, match=message):
        fit(config=config, out=tmp_path / "m" / "1", data=None, test=None, device="cpu", resume=False)
    assert not (tmp_path / "m" / "1").exists()


WEIGHTS = r"expected 0, or a number from 1e-09 to 1e\+09"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("query,item\nred lamp,red-lamp\n", r"column item: got 'bought', expected one of \['query', 'item'\]"),
        ("query,bought,times\n,red-lamp,1\n", "line 2, column query: got None, expected a text in column 'query'"),
        ("query,bought,times\nx,red-lamp,1\ny,,1\n", "line 3, column item: got None, expected an item id in column 'bought'"),
        *(
            (
                f"query,bought,times\nx,red-lamp,1\ny,red-lamp,{weight}\n",
                f"line 3, column weight: got '{weight}', {WEIGHTS} in column 'times'",
            )
            for weight in ("-2", "nan", "many")
        ),
        ("query,bought,times\nx,red-lamp,1\ny,red-lump,1\n", "item: got 'red-lump', expected an id of the item table"),
    ],
)
def test_a_wrong_log_says_which_line(shop: Path, tmp_path: Path, rows: str, message: str) -> None:
    (tmp_path / "log.csv").write_text(rows)
    with pytest.raises(InvalidData, match=message):
        fit(config=shop / "shop.toml", out=tmp_path / "m" / "1", data=tmp_path / "log.csv", test=None, device="cpu", resume=False)


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
    pl.DataFrame({"who": ["red-lamp", "blue-chair"], "needs": ["red-table", "red-lamp"]}).write_parquet(tmp_path / "needs.parquet")
    config = write_toml(
        tmp_path / "c.toml",
        f'[data]\nformat = "log"\ntrain = "{tmp_path}/needs.parquet"\nquery = "who"\nitem = "needs"\ntexts = "{shop}/items.parquet"\n'
        'text_columns = ["title", "tags"]\ntest_share = 0\n[[text]]\nunit = "word"\nn = 1\n',
    )
    fit(config=config, out=tmp_path / "m" / "1", data=None, test=None, device="cpu", resume=False)
    bundle = Bundle.open(tmp_path / "m" / "1")
    assert bundle.items.ids_of(np.arange(2)) == ["red-table", "red-lamp"]
    assert set(bundle.vectoriser.features_of(np.arange(bundle.vectoriser.width))) >= {"red", "lamp", "blue", "chair"}
    config.write_text(config.read_text().replace("who", "needs"))
    (tmp_path / "needs.parquet").unlink()
    pl.DataFrame({"who": ["a"], "needs": ["pink-table"]}).write_parquet(tmp_path / "needs.parquet")
    with pytest.raises(InvalidData, match=r"query: got 'pink-table', expected an id of .*items.parquet"):
        fit(config=config, out=tmp_path / "m" / "2", data=None, test=None, device="cpu", resume=False)


# -- texts of items teach, but nothing is chosen by them ----------------------------------------------------------------


WORDS = np.array(
    [f"{first}{last}" for first in ("ba", "co", "di", "fu", "ga", "lo", "mi", "pe") for last in ("ra", "tin", "lop", "nes", "k")]
)
ITEMS = 2500


def titles_of(rng: np.random.Generator, count: int) -> list[NDArray[np.str_]]:
    """Titles of five words, some of them frequent, so that many titles are alike."""
    share = 1 / np.arange(1, len(WORDS) + 1)
    return [rng.choice(WORDS, 5, p=share / share.sum()) for _ in range(count)]


def write_shop(folder: Path, items: int, queries: int, **log: Any) -> LinearConfig:
    """A shop whose items have titles, and a log of so many different queries of two or three words of the title of what was bought."""
    rng = np.random.default_rng(5)
    titles = titles_of(rng, items)
    frame = pl.DataFrame({"id": [f"i{row}" for row in range(items)], "title": [" ".join(title) for title in titles]})
    frame.write_parquet(folder / "items.parquet")
    searched: dict[str, str] = {}
    while len(searched) < queries:
        row = int(rng.integers(items))
        searched[" ".join(rng.permutation(titles[row])[: rng.integers(2, 4)])] = f"i{row}"
    pl.DataFrame({"query": list(searched), "item": list(searched.values())}).write_csv(folder / "log.csv")
    data = {"format": "log", "items": str(folder / "items.parquet"), "own_texts": [["title"]], **log}
    raw = {"kind": "xr-linear", "name": "shop", "data": data, "labels": {"kind": "text", "columns": ["title"]}}
    config = SPECIFICATION.checked(raw)
    assert isinstance(config, LinearConfig)
    return config


def fitted_shop(config: LinearConfig, folder: Path) -> Bundle:
    (folder / "work").mkdir()
    return fit_and_export(config, folder / "models" / "shop" / "1", folder / "work", threads=1)


def share_with_all_words(bundle: Bundle) -> float:
    """Of the first three results of queries of two words that some title has."""
    kind, titles, rng = bundle.manifest.query, bundle.items.column("title").to_pylist(), np.random.default_rng(6)
    assert isinstance(kind, TextKind)
    searched = [" ".join(rng.permutation(sorted(set(title.split())))[:2]) for title in titles[::10]]
    params = SearchParams.uniform(len(searched), 50, 3)
    found = open_engine(bundle, "cpu").search(encode_texts(kind, bundle.vectoriser, searched), params)
    return float(np.mean([set(query.split()) <= set(titles[row].split())
                          for query, rows in zip(searched, found.item_rows_BM.tolist(), strict=True) for row in rows]))  # fmt: skip


def test_nothing_is_chosen_by_texts_of_items(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    config = write_shop(tmp_path, ITEMS, 0)
    bundle = fitted_shop(config, tmp_path)
    assert bundle.stacking is None
    assert "validation" not in bundle.manifest.metrics
    assert (bundle.manifest.ranking.gamma, bundle.manifest.data["tested"]) == (0.5, "texts of items, which the tree has seen")
    assert "figures will be of texts of items, which the tree has seen" in caplog.text
    assert "no stacking: 0 points with labels that are not texts of items, it takes 2000" in caplog.text
    assert share_with_all_words(bundle) > 0.9


def test_queries_of_the_log_are_held_out_and_texts_of_items_are_not(tmp_path: Path) -> None:
    """Two logs of the same queries: one beside the items' texts, one alone; the same number of them chooses."""
    config = write_shop(tmp_path, 120, 300, train=str(tmp_path / "log.csv"))
    bundle = fitted_shop(config, tmp_path)
    assert bundle.manifest.data["tested"] == "queries of the log, held out"
    assert (bundle.manifest.data["queries"], bundle.manifest.data["test_queries"]) == (120 + 270, 30)
    assert bundle.manifest.metrics["validation"]["held_out"] == 5 * 27
    texts = set(bundle.items.column("title").to_pylist())
    assert not texts & set(bundle.heldout().column("text").to_pylist())
    parts = from_log(bundle, None, "training", False)
    assert (len(parts.train), len(parts.valid), len(parts.test)) == (243, 27, 30), "nor does a ranker learn from them"


def test_a_log_of_the_items_own_texts_chooses_nothing(tmp_path: Path) -> None:
    """In other letters and with other signs, too."""
    config = write_shop(tmp_path, 300, 0, train=str(tmp_path / "log.csv"))
    frame = pl.read_parquet(tmp_path / "items.parquet")
    log = frame.select(pl.col("title").str.to_uppercase().str.replace(" ", ", ").alias("query"), pl.col("id").alias("item"))
    log.write_csv(tmp_path / "log.csv")
    bundle = fitted_shop(config, tmp_path)
    assert bundle.manifest.data["tested"] == "texts of items, which the tree has seen"
    with pytest.raises(InvalidConfig, match="0 training queries that are not texts of items"):
        from_log(bundle, None, "training", False)
    wanted = SPECIFICATION.checked(json.loads(config.model_dump_json()) | {"stacking": {"model": "network"}})
    assert isinstance(wanted, LinearConfig)
    with pytest.raises(InvalidConfig, match="0 training points have labels that are not texts of items, a network takes 10"):
        fit_and_export(wanted, tmp_path / "models" / "shop" / "2", tmp_path, threads=1)
    assert "validation" not in bundle.manifest.metrics
