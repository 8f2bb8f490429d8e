"""The predictor of zeros on EURLex-4K, whose errors are known: `pytest -m slow tests/training/test_all_zero.py --data DIR`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from espalier.regression_metrics import RankedErrors, xmad_at_k
from espalier.relevance import Relevance
from training.data.csr import as_rows
from training.data.relevance import LabelRelevance
from training.data.xmc import read_xmc
from training.specification.relevance import RelevanceOptions

pytestmark = pytest.mark.slow


def test_errors_of_zeros_are_those_of_the_set(request: pytest.FixtureRequest) -> None:
    """Relevance is inverse propensity over its maximum of all labels, 12.457."""
    if request.config.getoption("--data") is None:
        pytest.skip("without --data DIR, a folder with eurlex-4k")
    folder = Path(str(request.config.getoption("--data"))) / "eurlex-4k"
    train, test = (read_xmc(folder / f"eurlex_{part}.txt.gz") for part in ("train", "test"))
    relevance = LabelRelevance.of_training(RelevanceOptions(source="inverse-propensity"), train.labels)
    largest = float(relevance.inverse_propensity_I.max())
    assert largest == pytest.approx(12.457, abs=5e-4)
    assert relevance.of(train.labels).data.max() == pytest.approx(9.651, abs=5e-4)
    true = Relevance.of_rows(as_rows(relevance.of(test.labels))).times(1 / largest)
    nothing = Relevance(np.zeros(len(true) + 1, np.int64), np.zeros(0, np.int64), np.zeros(0), true.width)
    xmad = [float(xmad_at_k(true, nothing, k).mean()) for k in (1, 3, 5)]
    xrmse = [float(RankedErrors.of(true, nothing).xrmse(k).mean()) for k in (1, 3, 5)]
    assert xmad == pytest.approx([0.3942, 0.2859, 0.2255], abs=5e-4)
    assert xrmse == pytest.approx([0.3942, 0.3025, 0.2536], abs=5e-4)
