"""Every benchmark is a command of its own: `python -m benchmarks.NAME` finds it in the folder of its theme."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

from benchmarks import FOLDERS
from tests import ROOT
from tests.helps import help_of

FOLDER = ROOT / "benchmarks"
THEMES = sorted(Path(folder).name for folder in FOLDERS)
SHARED = sorted(path for path in FOLDER.glob("*.py") if path.stem != "__init__")
IN_THEMES = sorted(path for folder in FOLDERS for path in (FOLDER / folder).glob("*.py") if path.stem != "__init__")
PROCESSES = ("stage", "xrlinear_peer")
"""Started by other benchmarks, with arguments of theirs."""


def commands() -> list[str]:
    named = [path.stem for path in IN_THEMES if '\nif __name__ == "__main__":\n' in path.read_text()]
    return sorted(set(named) - set(PROCESSES))


def test_no_two_themes_have_the_same_file_name() -> None:
    names = [*THEMES, *(path.stem for path in (*SHARED, *IN_THEMES))]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("path", IN_THEMES, ids=lambda path: path.stem)
def test_a_module_is_found_by_its_short_name_and_imported_by_its_long_one(path: Path) -> None:
    short = importlib.util.find_spec(f"benchmarks.{path.stem}")
    assert short is not None
    assert Path(str(short.origin)) == path
    long = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    assert Path(str(importlib.import_module(long).__file__)) == path


def test_modules_import_each_other_by_their_long_names() -> None:
    """By two names a module would be there twice."""
    short = {f"benchmarks.{path.stem}" for path in IN_THEMES}
    for path in FOLDER.rglob("*.py"):
        imported: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
        assert imported & short == set(), path
        if path.stem != "hostile":  # which runs the attacks of tests/hostile
            assert not {name for name in imported if name.split(".")[0] == "tests"}, path


@pytest.mark.slow
@pytest.mark.parametrize("name", commands())
def test_a_command_says_what_it_measures(name: str) -> None:
    assert f"python -m benchmarks.{name}" in help_of(f"benchmarks.{name}")
