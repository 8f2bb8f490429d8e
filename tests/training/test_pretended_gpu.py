"""Training keeps to the device that it is given: no array of another one in an operation, no NumPy on what lies there, its generators."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from tests.training import shared_runs
from tests.training.pretended_gpu import GPU, TwoDevices, pretended_gpu
from tests.training.shared_runs import KINDS, configuration, write_log


def test_what_a_gpu_would_refuse_is_refused() -> None:
    with pretended_gpu() as gpu:
        there = torch.zeros(3, device=gpu)
        assert (there + 1).device == there.to(gpu).device == torch.nn.Linear(2, 2).to(gpu).weight.device == GPU
        assert there.cpu().device == torch.device("cpu")
        with pytest.raises(TwoDevices, match="add"):
            there + torch.ones(3)
        with pytest.raises(TwoDevices, match="numpy"):
            there.numpy()
        with pytest.raises(TwoDevices, match="generator"):
            torch.rand(3, device=gpu, generator=torch.Generator())
        assert np.array_equal(there.cpu().numpy(), np.zeros(3))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "attention"])
def test_every_kind_trains_on_the_device_that_it_is_given(tmp_path: Path, kind: str) -> None:
    """Not attention: torch's recomputation of its hidden layers sees through the pretence."""
    write_log(tmp_path)
    raw = configuration(tmp_path, kind)
    losses = shared_runs.train(raw, tmp_path / "cpu", "whole")
    with pretended_gpu() as gpu:
        there = shared_runs.train(raw, tmp_path / "gpu", "whole", device=gpu)
    assert_allclose(there, losses, rtol=1e-5)
