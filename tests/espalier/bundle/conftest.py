"""Small random models, and a copy of one that a test may damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.random_bundles import make_bundle, random_tree
from espalier.bundle import Bundle
from tests.espalier.bundle.parts import MADE, with_golden


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    """A bundle of each kind of MADE. Not to be written to."""
    return {name: make(tmp_path_factory.mktemp("made")) for name, make in MADE.items()}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    rng = np.random.default_rng(11)
    return make_bundle(tmp_path_factory.mktemp("original"), rng, random_tree(rng, 3, 3, empty_share=0.2))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    rng = np.random.default_rng(12)
    folder = tmp_path_factory.mktemp("other")
    bundle = make_bundle(folder, rng, random_tree(rng, 3, 4), width=5)
    return with_golden(bundle, folder / "tiny" / "2", 0.0, heldout=pa.table({"history": [["item-1"]], "relevant": [["item-2"]]}))


@pytest.fixture
def copy(original: Bundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original.path, tmp_path / "models" / "tiny" / "1"))
