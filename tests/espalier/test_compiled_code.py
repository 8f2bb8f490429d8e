"""Compiled code on disk follows the sources that it was made of, and does not pile up."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest
from numba.core.bytecode import FunctionIdentity

from espalier import compiled_code
from espalier.compiled_code import KEPT, forget, sources_digest
from tests import ROOT


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose function `price` calls one in another file, which takes a constant from a third."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    numba.config.reload_config()  # type: ignore[no-untyped-call]  # numba; or it reads what a test before changed at its next compilation
    package = tmp_path / "shop"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "rates.py").write_text("RATE = 2\n")
    head = "from espalier.compiled_code import compiled\n"
    (package / "tax.py").write_text(f"{head}from shop.rates import RATE\n\n@compiled()\ndef tax(x):\n    return RATE * x\n")
    (package / "price.py").write_text(f"{head}from shop.tax import tax\n\n@compiled()\ndef price(x):\n    return x + tax(x)\n")
    return package


def run(shop: Path, monkeypatch: pytest.MonkeyPatch, *numbers: float) -> tuple[float, int]:
    """The price of 10, or of the last of some numbers, as a new process has it, and how often compiled code came from the disk."""
    monkeypatch.syspath_prepend(shop.parent)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    importlib.invalidate_caches()
    for cached in (compiled_code.sources_digest, compiled_code.forget, compiled_code._imported):
        cached.cache_clear()
    price = importlib.import_module("shop.price").price
    found = [price(number) for number in numbers or (10,)][-1]
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
    assert not [*shop.glob("__pycache__/*.nbc")]


def test_code_of_the_newest_states_is_kept_and_that_of_older_ones_deleted(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process keeps KEPT states of those that it finds, and adds its own."""
    for rate in range(3, 5 + KEPT):
        (shop / "rates.py").write_text(f"RATE = {rate}\n")
        assert run(shop, monkeypatch) == (10 + 10 * rate, 0)
    digests = {path.name.rsplit("-", 1)[1][:16] for path in shop.glob("__pycache__/price.*.nbc")}
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


def test_processes_that_compile_for_other_arguments_at_the_same_time_keep_their_own_code(
    shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each knows nothing of the other's file. Numba would give both the same number, and one would later run the other's code."""
    made = {}
    for number in (10, 2.5):
        assert run(shop, monkeypatch, number) == (3 * number, 0)
        made[number] = {path.name: path.read_bytes() for path in shop.glob("__pycache__/*.nb?")}
        for name in made[number]:
            (shop / "__pycache__" / name).unlink()
    for files in made.values():
        for name, content in files.items():
            (shop / "__pycache__" / name).write_bytes(content)
    assert run(shop, monkeypatch, 10, 2.5) == (7.5, 2)
    assert run(shop, monkeypatch, 2.5, 10) == (30, 2)


SORTS = """
import numpy as np
from espalier.compiled_code import compiled

@compiled()
def order(x):
    return np.argsort(x)

@compiled()
def ascending(x):
    x = x.copy()
    x.sort()
    return x
"""
CALLS = """
import sys
import numpy as np
from numba.core.bytecode import FunctionIdentity
import sorts

for number in range(int(sys.argv[1])):
    next(FunctionIdentity._unique_ids)
for name in sys.argv[2:]:
    print(name, *getattr(sorts, name)(np.array([50, 10, 40, 20, 30] * 4)))
    print("hits", sum(getattr(sorts, name).stats.cache_hits.values()))
"""
COMPILES_FIRST = """
import numba
import numpy as np

numba.njit(lambda x: np.argsort(x))(np.arange(3))
"""


def called(folder: Path, *arguments: str, program: str = CALLS) -> dict[str, list[int]]:
    """What a new process gets from the functions of SORTS."""
    (folder / "sorts.py").write_text(SORTS)
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "PYTHONDONTWRITEBYTECODE": "1"}
    lines = subprocess.run([sys.executable, "-c", program, *arguments], env=environment, check=True, capture_output=True, text=True).stdout
    return {name: [int(number) for number in numbers] for name, *numbers in map(str.split, lines.splitlines())}


def test_numbers_of_what_is_compiled_begin_anywhere() -> None:
    """numba's own class: were its counter elsewhere, this would be 1 or so."""
    assert FunctionIdentity.from_function(called).unique_id > 1_000_000  # type: ignore[no-untyped-call]


@pytest.mark.slow
def test_a_process_that_compiled_something_before_keeps_nothing(tmp_path: Path) -> None:
    found = called(tmp_path, "0", "order", program=COMPILES_FIRST + CALLS)
    assert sorted(found["order"]) == list(range(20))
    assert not [*tmp_path.rglob("*.nbc")]
    assert [called(tmp_path, "0", "order")["hits"] for _ in range(2)] == [[0], [1]]


@pytest.mark.slow
def test_sorts_that_processes_compiled_under_one_number_are_not_taken_for_each_other(tmp_path: Path) -> None:
    """With numba's own numbers the second process gives the parts of its sort those that the first gave its argsort."""
    called(tmp_path, "2", "order")
    called(tmp_path, "0", "ascending")
    for names in (["order", "ascending"], ["ascending", "order"]):
        found = called(tmp_path, "0", *names)
        assert found["hits"] == [1]
        assert found["ascending"] == sorted([50, 10, 40, 20, 30] * 4)
        assert sorted(found["order"]) == list(range(20))


@pytest.mark.slow
def test_a_process_numbers_what_it_compiles_otherwise_than_the_one_that_it_was_forked_from(tmp_path: Path) -> None:
    """As processes of one training do."""
    fork = """
import os
from numba.core.bytecode import FunctionIdentity
import sorts

child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
print("parent" if child else "child", next(FunctionIdentity._unique_ids), flush=True)
"""
    numbers = called(tmp_path, program=fork)
    assert abs(numbers["child"][0] - numbers["parent"][0]) > 1_000_000


def test_named_tuples_of_one_name_have_code_of_their_own(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """numba writes both as `Point(int64 x 2)`."""
    head = "from typing import NamedTuple\n\n"
    function = "\n@compiled()\ndef first(point):\n    return point.x\n"
    (shop / "points.py").write_text(f"from espalier.compiled_code import compiled\n{function}")
    for name, fields in (("own", "x: int\n    y: int"), ("others", "y: int\n    x: int")):
        (shop / f"{name}.py").write_text(f"{head}class Point(NamedTuple):\n    {fields}\n")
    monkeypatch.syspath_prepend(shop.parent)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    importlib.invalidate_caches()
    for name in ("own", "others"):
        first = importlib.import_module("shop.points").first
        assert first(importlib.import_module(f"shop.{name}").Point(x=1, y=2)) == 1
        assert sum(first.stats.cache_hits.values()) == 0
        for module in [module for module in sys.modules if module.split(".")[0] == "shop"]:
            del sys.modules[module]


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


# -- what cannot be read or written -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [0, 40])
def test_code_that_a_crash_has_torn_is_compiled_anew_and_then_kept(
    shop: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, left: int
) -> None:
    assert run(shop, monkeypatch) == (30, 0)
    for path in (shop / "__pycache__").glob("price.*.nbc"):
        path.write_bytes(path.read_bytes()[:left])
    assert run(shop, monkeypatch) == (30, 0)
    assert "is compiled anew: its code on disk cannot be read" in caplog.text
    assert run(shop, monkeypatch) == (30, 1)


def test_a_disk_that_is_full_costs_time_alone(shop: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile._save_data", full)
    compiled_code.warn_once.cache_clear()
    assert run(shop, monkeypatch) == (30, 0)
    assert caplog.text.count("compiled code is not kept: [Errno 28]") == 1


def test_without_a_folder_that_may_be_written_nothing_is_kept(
    shop: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("numba.core.caching._CacheLocator.ensure_cache_path", refused)
    compiled_code.warn_once.cache_clear()
    assert run(shop, monkeypatch) == (30, 0)
    assert "name a folder that may be written in NUMBA_CACHE_DIR" in caplog.text
