"""The code of docs/recipes.md, and the nightly job, run for real."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml

from tests import ROOT
from tests.repository.test_python_page import log

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs/recipes.md").read_text()
BLOCKS = dict(zip(("own", "airflow", "vectors"), re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL), strict=True))


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
    assert nightly("--worse", "0.5", "--keep", "2") == 0
    assert nightly("--worse", "0.5", "--keep", "2") == 0
    assert sorted(path.name for path in Path("models/books").iterdir()) == ["2", "3"]
    assert nightly("--worse", "-5") == 3  # better by as much as no version can be
    assert sorted(path.name for path in Path("models/books").iterdir()) == ["2", "3"]
    assert not [*Path("models/.staging").rglob("manifest.json")]
    assert re.search(r"recall@10: version 3 0\.\d{4}, version 4 0\.\d{4}\nversion 3 stays\n", capsys.readouterr().out)


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
