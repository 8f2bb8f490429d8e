"""What all tests of training share: one thread, so that sums have one order and "bit for bit" means it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Small products are fastest so, too, most of all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def still_one_thread(one_thread: None) -> Iterator[None]:
    """Names the test that leaves another number behind: the next one's sums would have another order."""
    yield
    assert torch.get_num_threads() == 1
