"""The example with which the library begins."""

from __future__ import annotations

import doctest

import pytest

import espalier
from tests import ROOT


def test_the_example_of_the_library_finds_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert doctest.testmod(espalier, raise_on_error=True) == (0, 4)
