"""Compiled code on disk follows the sources that it was made of, and does not pile up."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import numba
import pytest

from espalier import compiled_code
from espalier.compiled_code import KEPT, forget, sources_digest
from tests import ROOT


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A package whose function `price` calls one in another file, which takes a constant from a third."""
    numba.config.reload_config()  # type: ignore[no-untyped-call]  # numba; or it reads what a test before changed at its next compilation
    package = tmp_path / "shop"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "rates.py").write_text("RATE = 2\n")
    head = "from espalier.compiled_code import compiled\n"
    (package / "tax.py").write_text(f"{head}from shop.rates import RATE\n\n@compiled()\ndef tax(x):\n    return RATE * x\n")
    (package / "price.py").write_text(f"{head}from shop.tax import tax\n\n@compiled()\ndef price(x):\n    return x + tax(x)\n")
    return package


def run(shop: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """The price of 10 as a new process has it, and how often compiled code came from the disk."""
    monkeypatch.syspath_prepend(shop.parent)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    importlib.invalidate_caches()
    for cached in (compiled_code.sources_digest, compiled_code.forget, compiled_code._imported):
        cached.cache_clear()
    price = importlib.import_module("shop.price").price
    found = price(10)
    for name in [name for name in sys.modules if name.split(".")[0] == "shop"]:
        del sys.modules[name]
    return found, sum(price.stats.cache_hits.values())


def test_a_change_of_a_called_function_or_of_its_constant_recompiles_the_caller(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(shop, monkeypatch) == (30, 0)
    assert run(shop, monkeypatch) == (30, 1)
    (shop / "tax.py").write_text((shop / "tax.py").read_text().replace("RATE * x", "RATE * x + 1"))
    assert run(shop, monkeypatch) == (31, 0)
    (shop / "rates.py").write_text("RATE = 5\n")
    assert run(shop, monkeypatch) == (61, 0)
    (shop / "rates.py").write_text("RATE = 2\n")
    assert run(shop, monkeypatch) == (31, 1)  # the code of a state that comes back is still there


def test_a_folder_that_the_user_names_is_used_and_guarded_likewise(shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path / "mine"))
    assert run(shop, monkeypatch) == (30, 0)
    (shop / "rates.py").write_text("RATE = 3\n")
    assert run(shop, monkeypatch) == (40, 0)
    assert run(shop, monkeypatch) == (40, 1)
    assert not [*shop.glob("__pycache__/*.nbi")]


def test_code_of_the_newest_states_is_kept_and_that_of_older_ones_deleted(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process keeps KEPT states of those that it finds, and adds its own."""
    for rate in range(3, 5 + KEPT):
        (shop / "rates.py").write_text(f"RATE = {rate}\n")
        assert run(shop, monkeypatch) == (10 + 10 * rate, 0)
    digests = {path.name.rsplit("-", 1)[1][:16] for path in shop.glob("__pycache__/price.*.nbi")}
    assert len(digests) == KEPT + 1
    assert run(shop, monkeypatch)[1] == 1


def test_files_of_others_stay(tmp_path: Path) -> None:
    others = ["price.price-4.py311.nbi", "price.cpython-311.pyc", "price.price-4.py311-0123.nbi"]
    own = [f"price.price-4.py311-{number:016x}{end}" for number in range(KEPT + 2) for end in (".nbi", ".1.nbc")]
    for age, name in enumerate(others + own):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (age, age))
    forget(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*others, *own[4:]}


def test_only_imported_sources_count(shop: Path) -> None:
    before = sources_digest(shop / "price.py")
    (shop / "unrelated.py").write_text("X = 1\n")
    sources_digest.cache_clear()
    assert sources_digest(shop / "price.py") == before
    assert sources_digest(shop / "tax.py") != before


def test_all_compiled_functions_of_the_project_are_cached_so() -> None:
    for package in ("espalier", "training"):
        for file in (ROOT / package).rglob("*.py"):
            assert file.name == "compiled_code.py" or "njit" not in file.read_text(), f"{file}: use espalier.compiled_code"
