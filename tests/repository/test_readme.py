"""The README's commands, run for real on the trained sample, and what a short training of it is worth."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.engines.reference import ReferenceEngine
from espalier.metrics import precision_recall_f
from espalier.queries import HistoryKind, encode_histories
from espalier.search import SearchParams
from tests import ROOT
from tests.service.running import Client
from tests.service.running import run as running
from training.baselines.popularity import most_popular, rank
from training.data.interactions import read_interactions
from training.data.splits import split_log, without_seen
from training.specification.models import read_deep_config

pytestmark = pytest.mark.release

README = (ROOT / "README.md").read_text()
PAGES = README + "\n".join((ROOT / f"docs/{page}.md").read_text() for page in ("judge", "train", "serve"))
"""README.md and the pages that go on with its sample."""
CONFIG = Path("training/configs/debian-depends.toml")
STEPS = 40


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where the README's commands work: the packages, the sample, and its configuration with fewer steps."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("espalier", "espalier_cli", "service", "data"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "models/debian-depends/1", folder / "models/debian-depends/1")
    shutil.copytree(ROOT / "training", folder / "training")
    config = folder / CONFIG
    config.write_text(re.sub(r"steps = \d+", f"steps = {STEPS}", config.read_text()))
    return folder


def run(checkout: Path, command: str) -> str:
    _, *arguments = shlex.split(command, comments=True)
    words = [sys.executable, "-m", "espalier_cli", *arguments]
    done = subprocess.run(words, cwd=checkout, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def model(checkout: Path) -> Bundle:
    return Bundle.open(checkout / "models/debian-depends/1")


@pytest.fixture(scope="module")
def served(checkout: Path) -> Iterator[Client]:
    with running(checkout / "models", lambda bundle: open_engine(bundle, "cpu")) as service:
        yield service.client


def test_a_short_training_of_the_sample_beats_popularity_by_far(checkout: Path, tmp_path: Path) -> None:
    command = next(line for line in PAGES.splitlines() if line.startswith(f"espalier fit --config {CONFIG}"))
    run(checkout, f"{command.partition(' --out ')[0]} --out {tmp_path}/debian-depends/1")
    trained = Bundle.open(tmp_path / "debian-depends/1")
    config = read_deep_config(ROOT / CONFIG)
    interactions = read_interactions(ROOT / config.data.log, config.data.format, tmp_path)
    split = split_log(interactions, config.data.split, config.data.format, tmp_path, seed=config.seed)
    pairs = without_seen(split.test)
    ranked = rank(most_popular(interactions, split.train), [pair.history for pair in pairs], 50, True)
    popularity = float(precision_recall_f(ranked, [pair.relevant for pair in pairs], 50)[1].mean())
    recall = next(row["recall"] for row in trained.manifest.metrics["test"]["seen_excluded"] if row["m"] == 50)
    assert popularity > 0.3
    assert recall > popularity + 0.1


def test_the_evaluate_and_inspect_commands_of_the_readme_run(checkout: Path, model: Bundle) -> None:
    lines = [line for line in PAGES.splitlines() if re.match(r"espalier (evaluate|inspect) --model models/debian-depends/1", line)]
    assert len(lines) == 2
    outputs = [run(checkout, line) for line in lines]
    assert any("recall" in output and " 400   200 " in output for output in outputs)
    assert any("Sample paths" in output for output in outputs)
    assert (checkout / "frontier.png").stat().st_size > 10_000


def test_the_curl_of_the_readme_is_answered_as_the_reference_engine_answers(served: Client, model: Bundle) -> None:
    found = re.search(r"curl -s localhost:8000/retrieve -H 'Content-Type: application/json' -d '(.*?)'", README, re.DOTALL)
    assert found is not None
    body = json.loads(found[1])
    answer = served.post("/retrieve", json=body).raise_for_status().json()
    items = answer["results"][0]["items"]
    assert [sorted(item["fields"]) for item in items] == [["section", "title"]] * 5
    assert answer["timing"]["ms_per_query"] > 0
    written = re.findall(r'^ +\{"id": "(\S+)", "score": ([\d.]+),', README, re.MULTILINE)
    assert [name for name, _ in written] == [item["id"] for item in items[: len(written)]] != []
    assert [float(score) for _, score in written] == pytest.approx([item["score"] for item in items[: len(written)]], abs=1e-4)

    kind = model.manifest.query
    assert isinstance(kind, HistoryKind)
    queries, rows = encode_histories(kind, model.items, [body["queries"][0]["history"]])
    expected = ReferenceEngine(model).search(queries, SearchParams.uniform(1, 100, 5, np.stack(rows)))
    assert [item["id"] for item in items] == model.items.ids_of(expected.item_rows_BM[0])
    assert [item["score"] for item in items] == pytest.approx(expected.scores_BM[0].tolist(), abs=1e-4)


def history_bodies() -> list[str]:
    found = re.findall(r"/retrieve -H 'Content-Type: application/json' -d '(.*?)'", PAGES, re.DOTALL)
    return [body for body in found if "history" in body]


def test_the_requests_and_the_python_of_the_readme_are_answered(
    served: Client, checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (body,) = (body for body in history_bodies() if '"python"' in body)
    result = served.post("/retrieve", json=json.loads(body) | {"fields": ["section"]}).raise_for_status().json()["results"][0]
    assert [item["fields"]["section"] for item in result["items"]] == ["python"] * 5
    assert [item["outcome"] for item in result["explain"]["items"]] == ["filtered"]
    (block,) = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(checkout)
    exec(block, {})
    table = capsys.readouterr().out
    assert "shape: (5, 5)" in table
    assert table.count("\n│ 0 ") == 5


def test_the_ranker_of_the_readme_is_trained_measured_and_asked(checkout: Path, model: Bundle) -> None:
    """With few queries to learn from."""
    fit, evaluate = (
        next(line for line in PAGES.splitlines() if line.startswith(f"espalier {command} ") and "debian-depends/2" in line)
        for command in ("fit-ranker", "evaluate")
    )
    run(checkout, f"{fit} --queries 300")
    assert "best 200 re-ranked" in run(checkout, evaluate)
    with running(checkout / "models", lambda bundle: open_engine(bundle, "cpu")) as service:
        body = next(body for body in history_bodies() if '"rerank": true' in body)
        result = service.retrieve(**json.loads(body))["results"][0]
        assert service.client.get("/models").json()["models"][0]["version"] == 2
    scores = [item["rerank_score"] for item in result["items"]]
    assert len(scores) == 5
    assert scores == sorted(scores, reverse=True)
