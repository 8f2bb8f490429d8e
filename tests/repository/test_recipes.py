"""The code of docs/recipes.md, and the nightly job, run for real."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
import yaml

from espalier_client import Item, Query
from tests import ROOT
from tests.repository.test_python_page import log

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs/recipes.md").read_text()
BLOCKS = dict(
    zip(("own", "airflow", "vectors", "optuna", "langchain", "haystack"), re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL), strict=True)
)


def nightly(*more: str) -> int:
    (command,) = re.findall(r"^python (examples/nightly\.py .*)$", PAGE, re.MULTILINE)
    script, *arguments = shlex.split(command)
    main = runpy.run_path(str(ROOT / script))["main"]
    return int(main([*arguments, "--kind", "neighbours", *more]))


def test_a_nightly_job_publishes_what_is_not_worse_and_keeps_the_last_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    log(160).write_parquet("events.parquet")
    assert nightly() == 0
    assert nightly("--worse", "0.5", "--keep", "1") == 0
    assert nightly("--worse", "-5") == 3  # better by as much as no version can be
    assert [path.name for path in Path("models/books").iterdir()] == ["2"]
    assert not [*Path("models/.staging").rglob("manifest.json")]
    assert re.search(r"recall@10: version 2 0\.\d{4}, version 3 0\.\d{4}\nversion 2 stays\n", capsys.readouterr().out)


def test_a_method_of_ones_own_is_one_that_compare_takes() -> None:
    scope: dict[str, Any] = {}
    exec(BLOCKS["own"], scope)
    method = scope["Popular"]()
    method.fit([["a", "b"], ["b"]])
    assert method.recommend([["a"], []], 1) == [["b"], ["b"]]


def test_vectors_of_texts_are_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts = [f"book {i % 7} of {i % 5} rivers and {i} planets" for i in range(40)]
    exec(BLOCKS["vectors"], {"texts": texts, "led_to": [[f"b{i}"] for i in range(40)]})
    found = pl.read_parquet("vectors.parquet")
    assert found.schema["vector"] == pl.Array(pl.Float32, 16)


def test_options_are_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for Optuna tries one value of each option."""
    values: list[float] = []

    def optimize(objective: Any, n_trials: int) -> None:
        trial = SimpleNamespace(suggest_float=lambda name, low, high, log: low, suggest_categorical=lambda name, of: of[0])
        values.append(objective(trial))

    study = SimpleNamespace(optimize=optimize, best_params={})
    monkeypatch.setitem(sys.modules, "optuna", SimpleNamespace(create_study=lambda **named: study))
    monkeypatch.chdir(tmp_path)
    log(160).write_parquet("events.parquet")
    exec(BLOCKS["optuna"].replace("minutes=2", "minutes=0.001"), {})
    assert len(values) == 1
    assert 0 < values[0] <= 1


ITEM = Item("p1", 0.5, {"title": "A tent", "description": "For two."})


class Answering:
    """In the client's place: one item to every text."""

    def __init__(self, url: str) -> None:
        assert url == "http://search"

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, *error: object) -> None: ...

    def retrieve(self, queries: list[Query], **options: Any) -> Any:
        assert ([query.text for query in queries], options["model"], options["m"]) == (["tents"], "shop", 10)
        assert options["fields"] == ["title", "description"]
        return SimpleNamespace(results=[SimpleNamespace(items=[ITEM])])


def test_retrievers_of_other_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for what they are written for: classes whose fields, or decorators, do what the recipes rely on."""

    class Made:
        def __init__(self, **given: Any) -> None:
            vars(self).update(given)

    class Component:
        def __call__(self, made: Any) -> Any:
            return made

        def output_types(self, **types: Any) -> Any:
            return lambda run: run

    Base = type("BaseRetriever", (Made,), {"m": 10})
    for name, found in {
        "langchain_core.documents": SimpleNamespace(Document=Made),
        "langchain_core.retrievers": SimpleNamespace(BaseRetriever=Base),
        "haystack": SimpleNamespace(Document=Made, component=Component()),
    }.items():
        monkeypatch.setitem(sys.modules, name, found)
    for block in ("langchain", "haystack"):
        scope: dict[str, Any] = {}
        exec(BLOCKS[block], scope)
        scope["Client"] = Answering
        retriever = scope["EspalierRetriever"](url="http://search", model="shop")
        if block == "langchain":
            (document,) = retriever._get_relevant_documents("tents")
            assert (document.page_content, document.metadata) == ("For two.", {"id": "p1", "title": "A tent", "score": 0.5})
        else:
            (document,) = retriever.run("tents")["documents"]
            assert vars(document) == {"id": "p1", "content": "For two.", "meta": {"title": "A tent"}, "score": 0.5}


def test_schedules_can_be_read() -> None:
    tree = ast.parse(BLOCKS["airflow"])
    assert [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)] == ["books"]
    job = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0])
    container = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"][0]
    options = {word for word in container["args"] if word.startswith("--")}
    (cron,) = re.findall(r"^30 2 .*$", PAGE, re.MULTILINE)
    known = set(re.findall(r'add_argument\("(--[a-z-]+)"', (ROOT / "examples/nightly.py").read_text()))
    assert options <= known
    assert {word for word in cron.split("nightly.py")[1].split() if word.startswith("--")} <= known
