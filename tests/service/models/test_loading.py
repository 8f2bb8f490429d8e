"""What a version has to answer before it serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.random_bundles import make_bundle
from espalier.bundle import Bundle
from espalier.bundle_writer import write_bundle
from espalier.engines import open_engine
from espalier.manifest import SMALLEST_BEAM
from espalier.queries import QueryBatch
from espalier.search import SearchParams, SearchResult
from espalier.tree import complete_tree
from service.models import loading
from service.models.loading import GPU_BATCH, EngineSource, LoadFailed, limits_of, load_version
from service.settings import Settings
from service.watch.metrics import Metrics
from tests.espalier.bundle.parts import content_of, draft_of
from tests.golden import golden_of_histories
from tests.service.fake_engine import FakeEngine
from tests.service.running import small_model


class WrongTogether:
    """An engine whose answers to more than 64 queries in one call are another query's."""

    def __init__(self, bundle: Bundle) -> None:
        self._engine: Any = open_engine(bundle, "cpu", "onnx-cpu")
        self.asked: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def search(self, queries: QueryBatch, params: SearchParams, trace: bool = False) -> SearchResult:
        self.asked.append(len(queries))
        others = np.roll(np.arange(len(queries)), 1) if len(queries) > 64 else np.arange(len(queries))
        found: SearchResult = self._engine.search(queries.take(others), params, trace)
        return found


@pytest.mark.parametrize("on_gpu", [True, False])
def test_what_a_gpu_answers_to_many_queries_at_once_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_gpu: bool) -> None:
    rng = np.random.default_rng(5)
    bare = make_bundle(tmp_path / "bare", rng, complete_tree(rng.permutation(32), 2), integer=False, name="books", beam_size=8, m=4)
    histories = [np.array(rows, np.int64) for rows in ([1, 2], [5, 9, 30, 2], [7], [20, 21])]
    golden = golden_of_histories(bare, histories, [8] * 4, [4] * 4)
    bundle = write_bundle(tmp_path / "books" / "1", draft_of(bare), content_of(bare, golden=golden))
    engine = WrongTogether(bundle)
    monkeypatch.setattr(loading, "runs_on_gpu", lambda name: on_gpu)
    opened: Any = engine  # its other parts are those of the engine in it
    source = EngineSource(lambda *_: opened)
    if on_gpu:
        with pytest.raises(LoadFailed, match="golden quer"):
            load_version(Settings(models=tmp_path, engine="reference"), Metrics(), source, "books", 1, print)
        assert max(engine.asked) >= GPU_BATCH
    else:
        load_version(Settings(models=tmp_path, engine="reference"), Metrics(), source, "books", 1, print)
        assert max(engine.asked) <= 64


@pytest.mark.parametrize(("said", "smallest"), [({}, SMALLEST_BEAM), ({"min_beam_size": 3}, 3)])
def test_a_beam_shrinks_as_far_as_the_model_says_and_else_to_ten(tmp_path: Path, said: dict[str, Any], smallest: int) -> None:
    bundle = small_model(tmp_path, **said)
    assert limits_of(Settings(models=tmp_path), bundle, FakeEngine(32)).smallest_beam_size == smallest
