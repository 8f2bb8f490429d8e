"""`python -m benchmarks.xrlinear_peers` without peers: our models are trained as `fit` does, kept, and compared at equal trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array

from benchmarks.papers.product_search import xrlinear_peers
from benchmarks.papers.product_search.xrlinear_ours import STEPS, saved
from espalier.bundle import Bundle
from training.data.xmc import LabelledPoints


def set_of(seed: int) -> LabelledPoints:
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 40, 120)
    points = np.eye(40, 60, dtype=np.float32)[label] + 0.1 * rng.random((120, 60)).astype(np.float32)
    return LabelledPoints(csr_array(points), csr_array(np.eye(40, dtype=np.float32)[label]))


@pytest.mark.slow
@pytest.mark.parametrize(("system", "trees"), [("espalier", 1), ("forest", 3)])
def test_a_model_is_trained_as_fit_does_then_timed(tmp_path: Path, system: str, trees: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for part, seed in (("train", 1), ("test", 2)):
        saved(tmp_path, part, set_of(seed))
    (tmp_path / "compiled").mkdir()
    (tmp_path / "compiled" / "something").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "compiled"))
    report = STEPS["train"](system, tmp_path, [2])
    bundle = Bundle.open(tmp_path / system / "models" / "peers" / "1")
    assert report["trees"] == len(bundle.alone) == trees
    assert "train_cpu_s" in report
    assert "train_cpu_s_cold" not in report
    assert bundle.manifest.scorer.model_dump()["dtype"] == "float16"
    assert report["model_mb"] <= report["bundle_mb"]
    found = np.load(tmp_path / f"{system}-2.npy")
    assert (found[:, 0] == set_of(2).labels.indices).mean() > 0.9
    timed = STEPS["time"](system, tmp_path, [1, 2])
    assert set(timed) == {1, 2}
    assert all(figures["ms_p50"] > 0 for figures in timed.values())


def row(system: str, trees: int, beam: int | None, ms: float) -> dict[str, Any]:
    return {"system": system, "trees": trees, "beam_size": beam, "ms_p50": ms}


def test_our_trees_stand_beside_the_fastest_peer_with_as_many() -> None:
    rows = [row("espalier", 1, 10, 2.0), row("forest", 3, 10, 6.0), row("pecos", 1, 10, 4.0), row("omikuji", 1, 10, 5.0),
            row("omikuji-3", 3, 10, 8.0), row("omikuji-3", 3, 50, 1.0), row("ova", 1, None, 1.0)]  # fmt: skip
    for one in rows:
        xrlinear_peers._beside_the_fastest(one, rows)
    assert [one.get("of_fastest_peer") for one in rows] == [0.5, 0.75, None, None, None, None, None]
