"""The benchmark of dense queries: honest vectors, and a tree beside a two-tower and item means on the same test points."""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.testing import assert_allclose

from benchmarks.quality.dense_queries import benchmark, write_vectors
from training.data.xmc import read_xmc

LABELS, FEATURES = 24, 40


def points(file: Path, count: int, seed: int) -> Path:
    """Points with the features of their first label's group, and labels of that group."""
    rng, lines = np.random.default_rng(seed), [f"{count} {FEATURES} {LABELS}"]
    for _ in range(count):
        group = rng.integers(6)
        labels = np.sort(rng.choice(4, 2, replace=False)) * 6 + group
        features = np.sort(np.append(rng.choice(6, 4, replace=False) * 6 + group, 36 + rng.integers(4)))
        lines.append(",".join(map(str, labels)) + " " + " ".join(f"{feature}:{1 + rng.random():.3f}" for feature in features))
    text = ("\n".join(lines) + "\n").encode()
    file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)
    return file


def test_vectors_are_made_from_training_points_alone(tmp_path: Path) -> None:
    train = read_xmc(points(tmp_path / "train.txt", 120, 1))
    both = []
    for seed in (2, 3):
        test = read_xmc(points(tmp_path / "test.txt", 30, seed))
        files = write_vectors(train, test, 5, 1, tmp_path)
        both.append([np.stack(pq.read_table(file).column("vector").to_numpy()) for file in files])
        assert pq.read_table(files[1]).column("items").to_pylist()[7] == [str(label) for label in test.labels_of(7)]
    assert_allclose(both[0][0], both[1][0])
    assert both[0][0].shape == (120, 5)
    assert both[1][1].shape == (30, 5)


def test_a_report_compares_all_at_the_beam(tmp_path: Path) -> None:
    folder = tmp_path / "eurlex-4k"
    folder.mkdir()
    points(folder / "eurlex_train.txt.gz", 300, 1)
    points(folder / "eurlex_test.txt.gz", 60, 2)
    small = ["scorer.node_dim=12", "scorer.hidden=[24]", "optimiser.batch=20", "optimiser.validate_every=10"]
    options = argparse.Namespace(data=tmp_path, set="eurlex-4k", width=8, beam=6, beams=[4, 6], seed=1, steps=20, option=small)
    report = benchmark(options)
    rows = {(row["method"], row["beam_size"]): row for row in report["rows"]}
    assert rows.keys() == {("two-tower", None), ("popularity", None), ("item-means", None), ("recipe", 4), ("recipe", 6), ("recipe", 24)}
    assert report["queries"] == 60
    assert min(row["recall10"] for key, row in rows.items() if key[0] != "popularity") > 0.8 > rows["popularity", None]["recall10"]
    assert report["difference"].keys() == {"two-tower", "popularity", "item-means", "recipe 4", "recipe 24"}
    assert report["difference"]["popularity"]["queries"] == 60
