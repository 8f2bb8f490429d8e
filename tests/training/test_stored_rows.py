"""What node rows are stored as: float16, and int8 where the rows are large and validation users lose nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from espalier.manifest import Ranking
from espalier.node_rows import rounded
from tests.training.planted import planted_log, settings
from training.deep import export as module
from training.deep.export import store_rows
from training.deep.first_model import build_model
from training.deep.prepare import build_tree, prepare
from training.deep.ranking import Figures, Searches
from training.deep.scorers.model import NodeScorer
from training.deep.topology import Topology
from training.specification.models import deep_config

RANKING = Ranking(own="logit", gamma=0.0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """Configuration, data, tree and the first rows of a model."""
    folder = tmp_path_factory.mktemp("stored")
    config = deep_config(settings(planted_log(folder), "tdm", scorer={"kind": "product", "hidden": [4]}))
    prepared = prepare(config, None, folder)
    tree = build_tree(config, prepared)
    model = build_model(config, tree, prepared).eval()
    return config, prepared, tree, model, model.node_rows.detach().clone()


def stored(made: tuple[Any, ...], dtype: str, rows: torch.Tensor | None = None) -> tuple[str, NodeScorer]:
    config, prepared, tree, model, first = made
    model.node_rows.data = (first if rows is None else rows).clone()
    config = config.model_copy(update={"scorer": config.scorer.model_copy(update={"dtype": dtype})})
    return store_rows(config, prepared, Topology(tree, torch.device("cpu")), model, RANKING), model


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_a_configured_type_is_taken_and_the_model_answers_with_it(made: tuple[Any, ...], dtype: str) -> None:
    found, model = stored(made, dtype)
    assert found == dtype
    np.testing.assert_array_equal(model.node_rows.detach().numpy(), rounded(made[-1].numpy(), dtype))


def test_a_type_that_cannot_hold_the_rows_is_refused_or_not_chosen(made: tuple[Any, ...]) -> None:
    large = made[-1] + 1e6
    with pytest.raises(FloatingPointError, match="node rows are not finite in float16"):
        stored(made, "float16", large)
    assert stored(made, "auto", large)[0] == "float32"


@pytest.mark.parametrize(
    ("large_bytes", "lost", "expected"), [(-1, 0.0, "float16"), (0, 0.0, "int8"), (0, 0.0019, "int8"), (0, 0.0021, "float16")]
)
def test_int8_is_chosen_where_rows_are_large_and_nothing_is_lost(
    made: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, large_bytes: int, lost: float, expected: str
) -> None:
    monkeypatch.setattr(module, "LARGE_BYTES", 2 * made[-1].numel() - 1 - large_bytes * (large_bytes < 0))
    recalls = iter([1.0, 1.0 - lost])
    figures = lambda searches, options: Figures(np.full((3, 4), next(recalls)))  # noqa: E731
    monkeypatch.setattr(Searches, "measured", figures)
    found, model = stored(made, "auto")
    assert found == expected
    np.testing.assert_array_equal(model.node_rows.detach().numpy(), rounded(made[-1].numpy(), expected))
