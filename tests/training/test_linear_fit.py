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
import scipy.sparse
from numpy.testing import assert_array_equal

from espalier.bundle import TEXT, Bundle
from espalier.chunks import ARRAYS
from espalier.engines import open_engine
from espalier.errors import BundleCorrupt, BundleExists, InvalidConfig, InvalidData
from espalier.manifest import Activation, Ranking
from espalier.search import Engine
from loadtest.queries import held_out
from service.models.probe import Replay
from tests.file_modes import assert_every_user_can_read, umask
from tests.service.running import Json, problem, run
from training.__main__ import evaluate, fit, inspect
from training.linear import run as linear_run

COLOURS = ["red", "green", "blue", "yellow", "black", "white"]
THINGS = ["teapot", "kettle", "lamp", "chair", "table", "spoon", "ladder", "bucket"]


def write_toml(path: Path, text: str) -> Path:
    path.write_text('kind = "xr-linear"\nname = "any"\n' + text)
    return path


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shop of coloured things, a log of what was searched for and bought, and a model of it."""
    folder = tmp_path_factory.mktemp("shop")
    items = [(f"{colour}-{thing}", f"{colour.title()} {thing}", colour, ["goods", thing]) for colour in COLOURS for thing in THINGS]
    frame = pl.DataFrame(items, schema=["id", "title", "colour", "tags"], orient="row")
    frame.write_parquet(folder / "items.parquet")
    rng = np.random.default_rng(3)
    rows = []
    for item_id, title, colour, tags in items:
        for text in (title, f"{title} for my kitchen", f"buy a {tags[1]} in {colour}", f"cheap {colour} {tags[1]}s"):
            rows.append((text, item_id, float(rng.integers(1, 5))))
    log = pl.DataFrame(rows, schema=["query", "bought", "times"], orient="row")
    log.write_csv(folder / "log.csv")
    write_toml(
        folder / "shop.toml",
        f'''
        [data]
        format = "log"
        train = "{folder}/log.csv"
        item = "bought"
        weight = "times"
        items = "{folder}/items.parquet"
        own_texts = [["title", "tags"]]
        [labels]
        kind = "both"
        columns = ["title"]
        [tree]
        branching = 4
        max_leaf = 8
        [linear]
        weighted = true
        ''',
    )
    fit(config=folder / "shop.toml", out=folder / "models" / "shop" / "1", data=None, test=None, device="cpu", resume=False)
    return folder


def test_a_model_of_texts_finds_what_was_bought(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = Bundle.open(shop / "models" / "shop" / "1")
    assert bundle.manifest.query.kind == "text"
    assert bundle.manifest.metrics["golden_overlap"] == 1
    assert bundle.manifest.metrics["test"]["raw"][0]["recall"] > 0.9
    assert len(bundle.heldout()) == bundle.manifest.data["test_queries"] == 14  # a tenth of the log's 48 · 4 less 48 titles
    assert bundle.manifest.data["queries"] == 226  # the others, and the items' own texts
    assert sorted(path.name for path in (shop / "models" / "shop").iterdir()) == ["1"]
    evaluate(model=bundle.path, data=None, beam="1,10", m="1,10", engine=None, device="cpu", precision="float32", exclude_seen=False,
             batch=1, json_file=shop / "rows.json", plot=shop / "plot.svg")  # fmt: skip
    rows = json.loads((shop / "rows.json").read_text())["rows"]
    assert [(row["beam_size"], row["m"]) for row in rows] == [(1, 1), (1, 10), (10, 1), (10, 10)]
    assert rows[3]["recall"] > 0.9
    assert rows[3]["recall"] >= rows[2]["recall"] > 0.4
    evaluate(model=bundle.path, data=shop / "log.csv", beam="10", m="10", engine="reference", device="cpu", precision="float32",
             exclude_seen=False, batch=1, json_file=None, plot=None)  # fmt: skip
    assert "shop version 1 on reference, 192 queries" in capsys.readouterr().out
    inspect(bundle.path)
    assert re.search(r"query: text, [\d,]+ features: word 1-grams, word 2-grams, char 3-grams", capsys.readouterr().out)
    with pytest.raises(InvalidConfig, match="--exclude-seen: got True, expected a model of histories, not of text queries"):
        evaluate(model=bundle.path, data=None, beam="10", m="10", engine=None, device="cpu", precision="float32", exclude_seen=True,
                 batch=1, json_file=None, plot=None)  # fmt: skip


@pytest.mark.parametrize("engine", ["sparse-cpu", "sparse-cuda"])
def test_a_text_is_answered_and_explained_over_http(shop: Path, engine: str) -> None:
    """On a GPU's engine too, in Triton's interpreter; levels are listed from the first that has to be cut."""
    if engine == "sparse-cuda":
        pytest.importorskip("triton")

    def opened(bundle: Bundle) -> Engine:
        if engine == "sparse-cpu":
            return open_engine(bundle, "cpu")
        from espalier.engines.pipeline import Pipeline
        from espalier.engines.triton.cells import FixedShapes
        from espalier.engines.triton.linear_engine import SparseCudaSearch

        return Pipeline(bundle, SparseCudaSearch(bundle, "cpu", shapes=FixedShapes(batches=(1,), m_sizes=(64,))))

    def ask(**body: Any) -> httpx.Response:
        return running.client.post("/retrieve", json=body)

    with run(shop / "models", opened, max_text=40, timeout_ms=60_000) as running:
        answer = ask(queries=[{"text": "a YELLOW lamp, please"}, {"text": ""}], m=3, fields=["title"]).json()
        assert answer["engine"] == engine == running.client.get("/models").json()["models"][0]["versions"][0]["engine"]
        assert answer["results"][0]["items"][0] | {"score": 0} == {"id": "yellow-lamp", "score": 0, "fields": {"title": "Yellow lamp"}}
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


def test_the_features_that_are_told_are_what_made_the_rank(shop: Path) -> None:
    """Contributions and biases of a path add up to its logits."""
    bundle = Bundle.open(shop / "models" / "shop" / "1")
    chunks, tree = bundle.chunks, bundle.tree
    rows = bundle.vectoriser.transform(["cheap green kettle"])
    dense = np.zeros(rows.width)
    dense[rows.indices] = rows.values
    for node in (1, tree.leaf_offset, tree.node_count - 1):
        parent = int(tree.parent[node])
        begin, end = chunks.chunk_row[parent], chunks.chunk_row[parent + 1]
        entries = slice(int(chunks.row_entry[begin]), int(chunks.row_entry[end]))
        features = np.repeat(chunks.row_feature[begin:end], np.diff(chunks.row_entry[begin : end + 1]))
        mine = chunks.entry_child[entries] == node - tree.first_child[parent]
        expected = (dense[features[mine]] * chunks.entry_weight[entries][mine]).sum()
        got = (chunks.weights_of(tree, node, rows.indices) * rows.values).sum()
        assert got == pytest.approx(expected, abs=1e-6)


def test_held_out_texts_go_to_load_tests_and_to_the_probe(shop: Path) -> None:
    bundle = Bundle.open(shop / "models" / "shop" / "1")
    queries = held_out(bundle)
    assert len(queries) == 14
    assert queries[0].body() == {"text": bundle.heldout().column("text")[0].as_py()}
    assert Replay(bundle).expected[10] == pytest.approx(np.mean(bundle.heldout().column("recall@10").to_pylist()))


def test_a_damaged_vocabulary_is_refused(shop: Path, tmp_path: Path) -> None:
    import shutil

    path = Path(shutil.copytree(shop / "models" / "shop" / "1", tmp_path / "1"))
    raw = bytearray((path / TEXT).read_bytes())
    at = raw.index(b"vocabulary")
    raw[at : at + 10] = b"Vocabulary"
    (path / TEXT).write_bytes(raw)
    with pytest.raises(BundleCorrupt, match=f"{TEXT}"):
        Bundle.open(path)
    with pytest.raises(BundleCorrupt, match="vocabulary"):
        Bundle.open(path, verify=False).vectoriser  # noqa: B018


# -- points ---------------------------------------------------------------------------------------------------------------


def random_matrices(rng: np.random.Generator, points: int) -> tuple[Any, Any]:
    """Points of 30 features whose labels, of 12, show in them."""
    labels = rng.random((points, 12)) < 0.15
    noise = np.where(rng.random((points, 30)) < 0.03, rng.random((points, 30)), 0)
    return scipy.sparse.csr_array(labels @ (np.eye(12, 30) + np.eye(12, 30, 12)) + noise), scipy.sparse.csr_array(labels.astype(float))


def as_xmc(points: Any, labels: Any) -> str:
    lines = [f"{points.shape[0]} {points.shape[1]} {labels.shape[1]}"]
    for b in range(points.shape[0]):
        own = labels.indices[labels.indptr[b] : labels.indptr[b + 1]]
        entries = slice(points.indptr[b], points.indptr[b + 1])
        pairs = (f"{f}:{v:.6g}" for f, v in zip(points.indices[entries], points.data[entries], strict=True))
        lines.append(",".join(map(str, own)) + " " + " ".join(pairs))
    return "\n".join(lines) + "\n"


def test_every_user_can_read_a_trained_model(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    for name in ("train", "test"):
        (tmp_path / f"{name}.txt").write_text(as_xmc(*random_matrices(rng, 60)))
    files = "".join(f'{name} = "{tmp_path / name}.txt"\n' for name in ("train", "test"))
    config = write_toml(tmp_path / "c.toml", f'[data]\nformat = "xmc"\n{files}[tree]\nbranching = 4\nmax_leaf = 4\n')
    with umask(0o077):
        fit(config=config, out=tmp_path / "models" / "points" / "1", data=None, test=None, device="auto", resume=True)
    assert_every_user_can_read(tmp_path / "models")


@pytest.mark.parametrize("form", ["xmc", "npz"])
def test_points_become_a_model_of_features(tmp_path: Path, form: str) -> None:
    rng = np.random.default_rng(4)
    files = {}
    for name, count in (("train", 300), ("test", 50)):
        points, labels = random_matrices(rng, count)
        if form == "xmc":
            files[name] = tmp_path / f"{name}.txt"
            files[name].write_text(as_xmc(points, labels))
        else:
            for key, matrix in ((name, points), (f"{name}_labels", labels)):
                files[key] = tmp_path / f"{key}.npz"
                scipy.sparse.save_npz(files[key], matrix)
    keys = "".join(f'{key} = "{file}"\n' for key, file in files.items())
    options = "[tree]\nbranching = 4\nmax_leaf = 4\n" + '[linear]\nloss = "logistic"\ncost = 10\n' * (form == "npz")
    config = write_toml(tmp_path / "c.toml", f'[data]\nformat = "{form}"\n{keys}{options}')
    fit(config=config, out=tmp_path / "models" / "points" / "1", data=None, test=None, device="auto", resume=True)
    bundle = Bundle.open(tmp_path / "models" / "points" / "1")
    assert bundle.manifest.name == "points"
    activation: Activation = "l3-hinge" if form == "xmc" else "sigmoid"
    chosen = bundle.manifest.metrics["validation"]
    assert chosen["cost"] == 10 or form == "xmc"  # the configured one is kept
    assert bundle.manifest.ranking == Ranking(activation=activation, own="log_activation", gamma=chosen["gamma"])
    assert bundle.manifest.metrics["test"]["raw"][0]["recall"] > 0.9
    with run(tmp_path / "models", lambda opened: open_engine(opened, "cpu"), max_features=4) as running:
        good = running.client.post("/retrieve", json={"queries": [{"features": {"indices": [15, 3], "values": [2.0, 2.0]}}], "m": 2})
        assert good.json()["results"][0]["items"][0]["id"] == "3"
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
        reasons = running.client.post(
            "/retrieve", json={"queries": [{"features": {"indices": [15, 3], "values": [2.0, 2.0]}}], "m": 2, "explain_items": ["3"]}
        ).json()["results"][0]["explain"]["items"][0]["features"]
        path = bundle.tree.ancestors(bundle.tree.leaf_of_item[3:4])[0][1:]
        weights = sum(bundle.chunks.weights_of(bundle.tree, int(node), np.array([3, 15], np.int32)) for node in path)
        told = {entry["feature"]: entry["contribution"] for entry in reasons}
        assert told == pytest.approx(dict(zip(["3", "15"], (np.sqrt(0.5) * weights).tolist(), strict=True)), abs=1e-6)
    if form == "xmc":
        evaluate(model=bundle.path, data=files["test"], beam="10", m="10", engine=None, device="cpu", precision="float32",
                 exclude_seen=False, batch=1, json_file=tmp_path / "rows.json", plot=None)  # fmt: skip
        same = json.loads((tmp_path / "rows.json").read_text())
        assert same["rows"][0]["recall"] == bundle.manifest.metrics["test"]["raw"][0]["recall"]


def test_a_killed_run_is_resumed_and_gives_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points, labels = random_matrices(np.random.default_rng(4), 300)
    (tmp_path / "train.txt").write_text(as_xmc(points, labels))
    config = write_toml(
        tmp_path / "c.toml", f'[data]\nformat = "xmc"\ntrain = "{tmp_path}/train.txt"\n[tree]\nbranching = 4\nmax_leaf = 4\n'
    )

    def train(out: str, resume: bool = False) -> Bundle:
        fit(config=config, out=tmp_path / "models" / out, data=None, test=None, device="cpu", resume=resume)
        return Bundle.open(tmp_path / "models" / out)

    whole = train("whole/1")
    with monkeypatch.context() as patch:
        patch.setattr("training.linear.run.export", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train("whole/2")
    kept = tmp_path / "models" / "whole" / ".2.work"
    assert sorted(file.name for file in kept.iterdir()) == ["chosen.json", "identity", "level-1.npz", "level-2.npz"]
    with monkeypatch.context() as patch:
        patch.setattr("training.linear.fit.LevelTrainer.train", None)  # nor is anything chosen again
        resumed = train("whole/2", resume=True)
    assert not kept.exists()
    for name in ARRAYS:
        assert_array_equal(getattr(resumed.chunks, name), getattr(whole.chunks, name))
    other = kept.with_name(".3.work")
    other.mkdir()
    (other / "identity").write_text("another")
    with pytest.raises(InvalidConfig, match=r"--resume: .* expected the folder of a run with this configuration and data"):
        train("whole/3", resume=True)
    with pytest.raises(BundleExists):
        train("whole/1")


# -- what is wrong --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[data]\nformat = "csv"', "data.format: got 'csv', expected 'xmc', 'npz' or 'log'"),
        ('[data]\nformat = "xmc"', "data.train: got None, expected this key, which is required"),
        ('[data]\nformat = "log"', "data.train: got None, expected a log, or data.own_texts to learn from"),
        ('[data]\nformat = "log"\nown_texts = [["title"]]', "data.items: got None, expected a table of items"),
        ('[data]\nformat = "log"\ntrain = "a"\ntexts = "b"', r"data.text_columns: got \[\], expected columns exactly where"),
        (
            '[data]\nformat = "npz"\ntrain = "a"\ntrain_labels = "b"\ntest = "c"',
            "data.test_labels: got None, expected a file exactly",
        ),
        ('[data]\nformat = "xmc"\ntrain = "a"\n[[text]]\nunit = "word"\nn = 1', "text: got 1, expected nothing, since data of format xmc"),
        ('[data]\nformat = "xmc"\ntrain = "a"\n[labels]\nkind = "text"\ncolumns = ["b"]', "labels.kind: got 'text', expected pifa"),
        ('[data]\nformat = "log"\ntrain = "a"\n[labels]\nkind = "text"', "labels.columns: got None, expected this key, which is required"),
        ('[data]\nformat = "log"\ntrain = "a"\n[labels]\nkind = "text"\ncolumns = ["b"]', "data.items: got None, expected a table"),
        (
            '[data]\nformat = "log"\ntrain = "a"\n[linear]\nnegatives = "all"',
            "linear.negatives: got 'all', expected 'teacher', ",
        ),
        ('[data]\nformat = "log"\ntrain = "a"\n[linear]\nloss = "log"', "linear.loss: got 'log', expected 'squared-hinge', 'logistic' or"),
        ('[data]\nformat = "log"\ntrain = "a"\n[linear]\ngamma = 2', 'linear.gamma: got 2, expected "auto" or a number from 0 to 1'),
        ('[data]\nformat = "log"\ntrain = "a"\n[linear]\ncosts = 1', "linear.costs: got 1, expected no such key"),
        ('[data]\nformat = "log"\ntrain = "a"\n[search]\nm = 2000', "search.m: got 2000, expected at most search.max_m, 1000"),
        ('[data]\nformat = "log"\ntrain = "a"\n[search]\nmax_m = 16777217', "search.max_m: got 16777217, expected"),
        ('[data]\nformat = "log"\ntrain = "a"\n[search]\nmax_beam_size = 100000000', "search.max_beam_size: got 100000000, expected"),
        ('[data]\nformat = "log"\ntrain = "a"\n[linear]\nprior = 1e10', "linear.prior: got 10000000000.0, expected"),
        ('[data]\nformat = "log"\ntrain = "a"\n[linear]\ncost = 1e10', "linear.cost: got 10000000000.0, expected .*, at most 1e.09"),
        ('[data]\nformat = "log"\ntrain = "nowhere.csv"', "nowhere.csv: .*expected a readable"),
        ('[data]\nformat = "xmc"\ntrain = "nowhere.txt"', "nowhere.txt: .*expected a readable"),
        ('[data]\nformat = "npz"\ntrain = "nowhere.npz"\ntrain_labels = "b"', "nowhere.npz: .*expected a sparse matrix"),
    ],
)
def test_a_wrong_configuration_says_which_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises((InvalidConfig, InvalidData), match=message):
        fit(config=write_toml(tmp_path / "c.toml", text), out=tmp_path / "m" / "1", data=None, test=None, device="cpu", resume=False)
    assert not (tmp_path / "m" / "1").exists()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("query,item\nred lamp,red-lamp\n", "columns: .* expected a column 'bought'"),
        ("query,bought,times\n,red-lamp,1\n", "line 2, query: got None, expected a text"),
        ("query,bought,times\nx,red-lamp,1\ny,,1\n", "line 3, bought: got None, expected an item id"),
        ("query,bought,times\nx,red-lamp,1\ny,red-lamp,-2\n", "line 3, times: got '-2', expected 0, or a number from 1e-09 to 1e.09"),
        ("query,bought,times\nx,red-lamp,1\ny,red-lamp,nan\n", "line 3, times: got 'nan', expected 0, or a number from 1e-09 to 1e.09"),
        ("query,bought,times\nx,red-lamp,1\ny,red-lamp,many\n", "line 3, times: got 'many', expected 0, or a number from 1e-09 to 1e.09"),
        ("query,bought,times\nx,red-lamp,1\ny,red-lump,1\n", "item: got 'red-lump', expected an id of the item table"),
    ],
)
def test_a_wrong_log_says_which_line(shop: Path, tmp_path: Path, rows: str, message: str) -> None:
    (tmp_path / "log.csv").write_text(rows)
    with pytest.raises(InvalidData, match=message):
        fit(config=shop / "shop.toml", out=tmp_path / "m" / "1", data=tmp_path / "log.csv", test=None, device="cpu", resume=False)


def test_training_takes_the_cores_that_the_process_may_use(shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine of more cores, as in a container or under taskset."""
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


def test_linear_scorers_are_not_trained_on_a_gpu(shop: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="--device: got 'cuda', expected auto or cpu"):
        fit(config=shop / "shop.toml", out=tmp_path / "m" / "1", data=None, test=None, device="cuda", resume=False)


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
