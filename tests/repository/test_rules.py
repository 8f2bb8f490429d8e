"""House rules that no linter knows."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT

PACKAGES = ("espalier", "espalier_client", "training", "service", "loadtest")
PRODUCT = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: str(path.relative_to(ROOT)))
def test_environment_variables_are_read_in_the_settings_alone(path: Path) -> None:
    knowing = (ROOT / "service" / "settings.py", ROOT / "espalier" / "engines" / "runtime.py")  # the second one only sets one
    assert not {"environ", "getenv"} & set(names(path)) or path in knowing


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_checked_with_assert(path: Path) -> None:
    assert not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(path.read_text())))


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_pickled(path: Path) -> None:
    assert not {"pickle", "cPickle", "joblib", "dill"} & set(names(path))


def test_what_searches_keeps_no_book_for_anybody(models: Path, tmp_path: Path) -> None:
    """ONNX Runtime's telemetry writes a device id and what it has seen below the home folder."""
    code = "import sys, pathlib, espalier as e; e.open_engine(e.Bundle.open(pathlib.Path(sys.argv[1])), 'cpu').warm_up()"
    environment = {name: text for name, text in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"} | {"HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code, str(models / "books" / "1")], cwd=ROOT, env=environment, check=True)
    assert list(tmp_path.rglob("*")) == []
