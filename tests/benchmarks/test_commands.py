"""Every benchmark is a command of its own: `python -m benchmarks.NAME` finds it in the folder of its theme."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from benchmarks import FOLDERS
from tests import ROOT
from tests.helps import help_of

FOLDER = ROOT / "benchmarks"
IN_THEMES = sorted(path for folder in FOLDERS for path in (FOLDER / folder).glob("*.py") if path.stem != "__init__")
PROCESSES = {"stage", "xrlinear_peer"}
"""Started by other benchmarks, with arguments of theirs."""
COMMANDS = sorted({path.stem for path in IN_THEMES if '\nif __name__ == "__main__":\n' in path.read_text()} - PROCESSES)


def imported_by(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {
        name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module
        for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    }


def test_a_module_is_found_by_its_short_name_which_no_other_has() -> None:
    names = [*(Path(folder).name for folder in FOLDERS), *(path.stem for path in (*FOLDER.glob("[!_]*.py"), *IN_THEMES))]
    assert sorted(names) == sorted(set(names))
    for path in IN_THEMES:
        short = importlib.util.find_spec(f"benchmarks.{path.stem}")
        assert short is not None
        assert Path(str(short.origin)) == path


def test_modules_import_each_other_by_their_long_names() -> None:
    """By two names a module would be there twice."""
    short = {f"benchmarks.{path.stem}" for path in IN_THEMES}
    for path in FOLDER.rglob("*.py"):
        imported = imported_by(path)
        assert imported & short == set(), path
        if path.stem != "hostile":  # which runs the attacks of tests/hostile
            assert not {name for name in imported if name.split(".")[0] == "tests"}, path


@pytest.mark.release
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_what_it_measures(name: str) -> None:
    assert f"python -m benchmarks.{name}" in help_of(f"benchmarks.{name}")
