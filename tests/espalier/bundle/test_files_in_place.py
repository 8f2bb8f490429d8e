"""A bundle that is open answers as before after its tables were overwritten or cut in place. Each attempt is a process of its own: what
reads outside an array, or a file that became shorter, ends it by a signal.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from benchmarks.random_bundles import make_bundle, make_linear_bundle, random_memory, random_queries, random_tree
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.engines.linear import feature_tables
from espalier.manifest import Ranking
from espalier.search import SearchParams
from tests.espalier.test_stacking import with_stacking
from tests.espalier.test_tail import with_tail

pytestmark = pytest.mark.slow
WRONG = 1 << 30
"""Far outside every table."""


def remembering(folder: Path) -> Bundle:
    rng = np.random.default_rng(4)
    tree = random_tree(rng, 3, 16)
    return make_bundle(folder, rng, tree, "product", gamma=0.5, memory=random_memory(rng, tree.item_count, 3))


def linear(folder: Path) -> Bundle:
    rng = np.random.default_rng(4)
    return make_linear_bundle(folder, rng, random_tree(rng, 3, 8), Ranking(own="log_activation", gamma=1), integer=False)


MADE: Mapping[str, Callable[[Path], Bundle]] = {
    "memory.safetensors": remembering,
    "chunks.safetensors": linear,
    "tail.safetensors": lambda folder: with_tail(folder, 4)[0],
    "stacking.safetensors": lambda folder: with_stacking(folder, 4)[0],
}


def spoil(file: Path, way: str) -> None:
    if way == "cut":
        with file.open("r+b") as stream:
            stream.truncate(0)
        return
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    with file.open("r+b") as stream:
        stream.seek(header)
        stream.write(np.full((file.stat().st_size - header) // 4, WRONG, np.int32).tobytes())


def main(path: Path, name: str, way: str) -> None:
    """Answers before and after a file was spoilt are the same."""
    feature_tables.DIRECT_BYTES = 0  # as for very many features: rows of weights are read where the bundle has them
    bundle = Bundle.open(path)
    engine, rng = open_engine(bundle, "cpu"), np.random.default_rng(5)
    before, after = (random_queries(rng, bundle, 20, integer=False) for _ in range(2))
    params = SearchParams.uniform(20, 4, 9)
    engine.search(before, params)
    spoil(path / name, way)
    found = engine.search(after, params)
    twin = Bundle.open(path.with_name("twin"), verify=False)
    expected = open_engine(twin, "cpu").search(after, params)
    assert np.array_equal(found.item_rows_BM, expected.item_rows_BM)
    assert np.array_equal(found.keys_BM, expected.keys_BM)


@pytest.mark.parametrize("way", ["overwritten", "cut"])
@pytest.mark.parametrize("name", MADE)
def test_answers_stay_right_where_a_file_is_changed_in_place(tmp_path: Path, name: str, way: str) -> None:
    path = MADE[name](tmp_path).path
    path.with_name("twin").mkdir()
    for file in path.iterdir():
        (path.with_name("twin") / file.name).write_bytes(file.read_bytes())
    done = subprocess.run([sys.executable, "-m", __name__, str(path), name, way], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
