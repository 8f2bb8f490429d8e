"""The run of docs/text-search.md on the sample: its commands, its request over HTTP, its numbers."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from espalier.engines import open_engine
from tests import ROOT
from tests.service.running import run as serving

pytestmark = pytest.mark.release

SECTION = (ROOT / "docs" / "text-search.md").read_text().partition("## An example on the sample\n")[2].partition("\n## ")[0]


def run(folder: Path, command: str) -> None:
    program, *words = shlex.split(command)
    words = ["-m", "espalier_cli", *words] if program == "espalier" else words
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where the page's commands have run, but for the service's."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("espalier", "espalier_cli", "training", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "data").mkdir()
    (folder / "data" / "debian-bookworm").symlink_to(ROOT / "data" / "debian-bookworm")
    commands = [line for line in SECTION.splitlines() if line.startswith(("python -m ", "espalier "))]
    assert [command.split()[1] for command in commands] == ["-m", "fit", "serve", "assign"]
    for command in commands:
        if "espalier serve" not in command:
            run(folder, command)
    return folder


def test_the_request_is_answered_as_the_page_says(checkout: Path) -> None:
    body = json.loads(re.findall(r"-d '(\{.*?\})'\n```", SECTION, re.DOTALL)[0])
    with serving(checkout / "models", lambda bundle: open_engine(bundle, "cpu")) as running:
        found = running.client.post("/retrieve", json=body).json()["results"][0]
        described = running.client.get("/models/debian-kinds").json()
    said = {item: float(score) for item, score in re.findall(r"`([a-z0-9.+-]+)`\s\((\.\d+)\)", SECTION)}
    assert [item["id"] for item in found["items"]] == list(said)
    for item in found["items"]:
        assert item["score"] == pytest.approx(said[item["id"]], abs=0.03)
        assert item["score"] >= body["min_score"]
    assert (described["trees"], described["tail"]) == (3, None)


def test_assign_finds_the_kinds_that_the_page_names(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout)
    names: dict[str, Any] = {"__name__": "docs", "print": lambda table: names.update(table=table)}
    exec(compile(re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)[0], "docs/text-search.md", "exec"), names)
    table = names["table"]
    assert table.group_by("item").len().rows_by_key("item").keys() == {"libsdl2-2.0-0", "python3"}
    first = {row["item"]: row["kind"] for row in table.filter(pl.col("place") == 1).iter_rows(named=True)}
    for item, kind in first.items():
        assert re.search(rf"`{re.escape(kind)}`\s+for\s+`{re.escape(item)}`", SECTION), f"{item}: {kind}"
    assert (table["kind"].str.contains("sdl") == (table["item"] == "libsdl2-2.0-0")).all()
