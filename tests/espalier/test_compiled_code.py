"""Compiled code is made by one command and read by everyone else: it follows its sources, and damage costs time alone.

Most tests compile a small package of their own, which takes some seconds.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import typeof as typeof_untyped

from espalier import compile as command
from espalier.code_files import FOLDER, CodeFile, DamagedFile, OtherSources, content_of, imported_sources
from espalier.compile import needed_sources
from espalier.hardware import baseline
from espalier.signatures import accepts, read_signatures, text_of, types_of
from tests import ROOT

typeof: Any = typeof_untyped
HEAD = "import numpy as np\nfrom espalier.compiled_code import compiled\n"
SOURCES = {
    "__init__.py": "",
    "rates.py": "RATE = 2\n",
    "tax.py": f"{HEAD}from shop.rates import RATE\n\n\n@compiled()\ndef tax(x):\n    return RATE * x\n",
    "price.py": f"{HEAD}from .tax import tax\n\n\n@compiled()\ndef price(x):\n    return x + tax(x)\n",
    "orders.py": f"{HEAD}\n\n@compiled()\ndef order(x):\n    return np.argsort(x)\n",
    "sorts.py": f"{HEAD}\n\n@compiled()\ndef ascending(x):\n    y = x.copy()\n    y.sort()\n    return y\n",
    "unrelated.py": "X = 1\n",
    "signatures.txt": "shop.price:price int64\nshop.orders:order int64[:]r\nshop.sorts:ascending int64[:]r\n",
}
READ = """
import numpy as np
from shop.orders import order
from shop.price import price
from shop.sorts import ascending

x = np.array([50, 10, 40, 20, 30] * 4)
assert list(x[order(x)]) == list(ascending(x)) == sorted(x)
print(price(10), sum(sum(one.stats.cache_hits.values()) for one in (order, price, ascending)))
"""


class Shop:
    """A package with compiled functions in a folder of its own: `price` calls one in another file, which has a constant of a third."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.package, self.kept = folder, folder / "shop", folder / "kept" / FOLDER

    def environment(self, **more: str) -> dict[str, str]:
        path = f"{ROOT}{os.pathsep}{self.folder}"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
        return clean | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "NUMBA_CACHE_DIR": str(self.folder / "kept")} | more

    def start(self, *arguments: str, **more: str) -> subprocess.Popen[str]:
        arguments = (sys.executable, *arguments)
        return subprocess.Popen(arguments, env=self.environment(**more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, *arguments: str, **more: str) -> tuple[int, str]:
        """Exit code and output of a Python."""
        process = self.start(*arguments, **more)
        said, _ = process.communicate()
        return process.returncode, said

    def compile(self, *options: str, **more: str) -> tuple[int, str]:
        return self.run("-m", "espalier.compile", *options, "shop", **more)

    def read(self, program: str = READ, **more: str) -> list[int]:
        """The price of 10, and how many functions came from the disk, in a new process."""
        code, said = self.run("-c", program, **more)
        assert code == 0, said
        return [int(number) for number in said.split("\n")[-2].split()]

    @property
    def file(self) -> Path:
        (file,) = self.kept.glob("shop-*")
        return file


@pytest.fixture(scope="module")
def compiled_shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    shop = Shop(tmp_path_factory.mktemp("compiled"))
    shop.package.mkdir()
    for name, text in SOURCES.items():
        (shop.package / name).write_text(text)
    code, said = shop.compile("--write")
    assert code == 0, said
    return shop


@pytest.fixture
def shop(compiled_shop: Shop, tmp_path: Path) -> Shop:
    """A copy, whose code is complete: files are named by what is in the sources, not by where these are."""
    shutil.copytree(compiled_shop.folder, tmp_path / "copy")
    return Shop(tmp_path / "copy")


# -- who compiles, and who reads ----------------------------------------------------------------------------------------------


@pytest.mark.release
def test_what_was_compiled_is_read_and_nothing_is_written(shop: Shop) -> None:
    before = {path: path.stat().st_mtime_ns for path in shop.kept.iterdir()}
    assert shop.compile("--check")[0] == 0
    assert shop.compile("--write")[0] == 0
    assert shop.read() == [30, 3]
    assert {path: path.stat().st_mtime_ns for path in shop.kept.iterdir()} == before


@pytest.mark.release
def test_a_call_that_is_not_written_down_is_compiled_in_memory_or_refused(shop: Shop) -> None:
    assert shop.read("from shop.price import price\nprint(int(price(2.5) * 2), sum(price.stats.cache_hits.values()))") == [15, 0]
    code, said = shop.run("-c", "from espalier.compile import make_ready\nmake_ready('shop')\nfrom shop.price import price\nprice(2.5)")
    assert code != 0
    assert "NotCompiled: no compiled code for shop.price:price float64" in said
    assert len([*shop.kept.glob("shop-*")]) == 1


@pytest.mark.release
def test_code_compiled_beside_what_was_read_shares_nothing_with_it(shop: Shop) -> None:
    """numba's sort and argsort have parts of one name, which only a number tells apart."""
    own = """
import numba
import numpy as np

y = np.array([5, 1, 4, 2, 3] * 9)
assert list(y[numba.njit(lambda y: np.argsort(y))(y)]) == list(numba.njit(lambda y: np.sort(y))(y)) == sorted(y)
"""
    assert shop.read(own + READ) == [30, 3]
    assert shop.read(READ.replace("print(", f"{own}\nprint(")) == [30, 3]


@pytest.mark.release
def test_of_three_that_start_at_once_one_compiles_and_the_others_wait(shop: Shop) -> None:
    shutil.rmtree(shop.kept)
    started = [shop.start("-m", "espalier.compile", "--write", "shop") for _ in range(3)]
    said = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    assert sum("compiled in" in text for text in said) == 1
    assert shop.read() == [30, 3]


def kill_a_writer(shop: Shop) -> None:
    """At any moment."""
    shutil.rmtree(shop.kept)
    writer = shop.start("-m", "espalier.compile", "--write", "shop")
    with suppress(subprocess.TimeoutExpired):
        writer.wait(random.uniform(0.1, 2.5))
    writer.kill()
    writer.communicate()


def change_a_constant_of_another_file(shop: Shop) -> None:
    (shop.package / "rates.py").write_text("RATE = 5\n")


def change_sources_in_a_process(shop: Shop) -> None:
    """It imported `tax` before the change and `price` after it; a process after it has the new one of both."""
    shop.read("""
import pathlib, shop.tax
pathlib.Path(shop.tax.__file__).with_name("tax.py").write_text(pathlib.Path(shop.tax.__file__).read_text().replace("RATE *", "5 + RATE *"))
from shop.price import price
print(price(10))
""")


def damage_a_page(shop: Shop) -> None:
    whole = shop.file.read_bytes()
    begin = len(whole) // 2 // 4096 * 4096
    shop.file.write_bytes(whole[:begin] + bytes(len(whole[begin : begin + 4096])) + whole[begin + 4096 :])


@pytest.mark.release
@pytest.mark.parametrize(
    ("change", "said", "price"),
    [
        (kill_a_writer, "", 30),
        (change_a_constant_of_another_file, "shop: no complete and sound file", 60),
        (change_sources_in_a_process, "shop: no complete and sound file", 35),
        (damage_a_page, "is damaged", 30),
    ],
)
def test_nothing_stale_half_written_or_damaged_is_taken_for_code(shop: Shop, change: Callable[[Shop], None], said: str, price: int) -> None:
    """It is compiled anew, in memory by who needs it, and by who is to write it down."""
    change(shop)
    code, output = shop.compile("--check")
    assert (code == 1) or change is kill_a_writer
    assert said in output
    assert shop.read("import logging\n" + READ) == [price, 0 if code else 3]
    assert shop.compile("--write")[0] == 0
    assert shop.read() == [price, 3]


# -- sources, processors, switches --------------------------------------------------------------------------------------------


@pytest.mark.release
def test_code_is_named_by_all_that_it_was_made_of(shop: Shop) -> None:
    before = needed_sources(shop.package)
    found = {Path(name).name for name in before if name.startswith("shop/")}
    assert found == {"price.py", "tax.py", "rates.py", "orders.py", "sorts.py", "signatures.txt"}
    (shop.package / "unrelated.py").write_text("X = 2\n")
    assert needed_sources(shop.package) == before
    for name in sorted(found):
        former = (shop.package / name).read_text()
        (shop.package / name).write_text(f"{former}# changed\n")
        assert needed_sources(shop.package) != before, name
        (shop.package / name).write_text(former)


@pytest.mark.release
def test_sources_that_change_while_they_are_imported_are_not_kept(shop: Shop) -> None:
    """`price` would have the new rate under the name of the old one, to which the sources return."""
    program = """
import pathlib, shop.orders, shop
from espalier.compile import main
rates = pathlib.Path(shop.__file__).with_name("rates.py")
rates.write_text("RATE = 5\\n")
print(main(["--write", "shop"]))
"""
    shop.file.unlink()
    code, said = shop.run("-c", program)
    assert (code, said.splitlines()[-1]) == (0, "1"), said
    (shop.package / "rates.py").write_text("RATE = 2\n")
    assert shop.read() == [30, 0]


@pytest.mark.release
def test_bounds_checks_and_other_processors_have_code_of_their_own(shop: Shop) -> None:
    for more in ({"NUMBA_BOUNDSCHECK": "1"}, {"NUMBA_OPT": "1"}, {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}):
        assert shop.read(**more) == [30, 0]


@pytest.mark.release
def test_code_of_the_baseline_is_taken_where_there_is_none_of_the_processor(shop: Shop) -> None:
    shop.file.unlink()
    code, said = shop.compile("--write", "--baseline")
    usual = baseline()
    if usual is None:
        pytest.skip("no baseline for this kind of machine")
    assert code == 0, said
    assert usual.name in shop.file.name
    if shop.compile("--check")[0] != 0:
        pytest.skip("this machine's processor is older")
    assert shop.read() == [30, 3]


# -- damage -------------------------------------------------------------------------------------------------------------------


@pytest.mark.release
def test_a_file_with_any_damaged_page_is_not_read(shop: Shop) -> None:
    """Truncated anywhere, a page of zeros anywhere, or under another name."""
    whole = shop.file.read_bytes()
    CodeFile(shop.file)
    damaged = [whole[:size] for size in (0, 7, 40, 200, len(whole) // 2, len(whole) - 1)]
    for begin in range(0, len(whole), 4096):
        page = whole[begin : begin + 4096]
        if page.strip(b"\0"):
            damaged.append(whole[:begin] + bytes(len(page)) + whole[begin + len(page) :])
    for content in damaged:
        shop.file.write_bytes(content)
        with pytest.raises(DamagedFile):
            CodeFile(shop.file)
    shop.file.write_bytes(content_of("shop-another", {}, {}))
    with pytest.raises(DamagedFile, match="it was written as shop-another"):
        CodeFile(shop.file)


@pytest.mark.release
def test_an_open_file_is_read_to_its_end_after_another_took_its_place(shop: Shop) -> None:
    opened = CodeFile(shop.file)
    key = next(iter(opened.keys))
    before = opened.read(key)
    command._write_file(shop.kept, shop.file.name, content_of(shop.file.name, {}, {key: b"another"}))
    assert opened.read(key) == before
    assert CodeFile(shop.file).read(key) == b"another"


def test_code_of_other_sources_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "shop-1"
    file.write_bytes(content_of("shop-1", {"shop/tax.py": "a", "shop/rates.py": "b"}, {"tax": b"code"}))
    assert CodeFile(file, {"shop/tax.py": "a", "shop/rates.py": "b", "shop/unrelated.py": "c"}).read("tax") == b"code"
    for sources in ({"shop/tax.py": "a", "shop/rates.py": "changed"}, {"shop/tax.py": "a"}):
        with pytest.raises(OtherSources):
            CodeFile(file, sources)


def test_the_sources_of_this_process_are_those_that_code_is_made_of() -> None:
    for package in (ROOT / "espalier", ROOT / "training"):
        assert needed_sources(package).items() <= imported_sources(package).items()


@pytest.mark.parametrize("began_at", [10**9, 10**10])
def test_the_newest_files_of_a_package_are_kept_and_the_one_just_written(tmp_path: Path, began_at: int) -> None:
    """Also beside files of a clock that was ahead."""
    for number in range(command.KEPT_FILES + 2):
        command._write_file(tmp_path, f"shop-{number}", b"")
        os.utime(tmp_path / f"shop-{number}", (began_at + number, began_at + number))
    for name in ("other-1", "shop-new"):
        command._write_file(tmp_path, name, b"code")
    kept = {path.name for path in tmp_path.iterdir()}
    assert {"other-1", "shop-new", f"shop-{command.KEPT_FILES + 1}"} <= kept
    assert "shop-0" not in kept
    assert (tmp_path / "shop-new").read_bytes() == b"code"
    assert len([*tmp_path.glob("shop-*")]) == command.KEPT_FILES


@pytest.mark.parametrize("is_locked", [False, True])
def test_where_the_first_folder_takes_nothing_the_next_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_locked: bool) -> None:
    """Its disk is full, or a process that was stopped has locked it."""
    first, second = tmp_path / "first", tmp_path / "second"
    before = os.fsync

    def refuse(descriptor: int) -> None:
        if str(first) in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        before(descriptor)

    monkeypatch.setattr("espalier.compile.folders", lambda _: iter((first, second)))
    monkeypatch.setattr("espalier.compile._compile", lambda _: {"a": b"code"})
    monkeypatch.setattr("espalier.compile.PATIENCE_S", 0.0)
    first.mkdir()
    with (first / "lock").open("wb") as lock:
        if is_locked:
            fcntl.flock(lock, fcntl.LOCK_EX)
        else:
            monkeypatch.setattr("espalier.compile.os.fsync", refuse)
        assert command._write(ROOT / "espalier")
    (file,) = second.glob("espalier-*")
    assert CodeFile(file).read("a") == b"code"
    assert [path.name for path in first.iterdir()] == ["lock"]


def test_a_package_without_signatures_is_not_complete() -> None:
    for option in ("--check", "--write"):
        assert command.main([option, "no_such_package"]) == 1
        assert command.main([option, "espalier_client"]) == 1


@pytest.mark.release
def test_code_that_cannot_be_compiled_is_said_and_no_folder_is_blamed(shop: Shop) -> None:
    (shop.package / "signatures.txt").write_text(f"{SOURCES['signatures.txt']}shop.price:price (int64,int64)\n")
    code, said = shop.compile("--write")
    assert code == 1
    assert "shop: a process that compiles ended early" in said
    assert said.splitlines()[-1] == "shop: no complete and sound file of compiled code"


@pytest.mark.release
def test_a_service_that_can_keep_nothing_compiles_before_it_is_ready(shop: Shop) -> None:
    program = "import logging\nlogging.basicConfig(level=20)\nfrom espalier.compile import make_ready\nmake_ready('shop')\n" + READ
    code, said = shop.run("-c", program, NUMBA_CACHE_DIR="/proc/nowhere")
    assert code == 0, said
    assert "so it compiles in memory" in said
    assert said.splitlines()[-1].startswith("30 ")


# -- signatures ---------------------------------------------------------------------------------------------------------------


def test_types_are_written_as_they_are_read() -> None:
    array = np.zeros((2, 3), np.float32)
    constant = np.zeros(3, np.int16)
    constant.flags.writeable = False
    arguments = 1, 2.5, True, None, array, constant, (array, 1), (constant, constant), np.uint16(3)
    types = tuple(typeof(one) for one in arguments)
    assert text_of(types) == "int64 float64 bool none float32[:,:] int16[:]r (float32[:,:],int64) (int16[:]r,int16[:]r) uint16"
    assert types_of(text_of(types)) == types
    for package in ("espalier", "training"):
        for function, text in read_signatures(ROOT / package):
            assert text_of(types_of(text)) == text, function
    with pytest.raises(ValueError, match="expected a scalar"):
        text_of([typeof(array.T)])


def test_code_that_only_reads_an_array_takes_one_that_can_be_written_to() -> None:
    assert accepts("int64[:]r (float32[:]r,int64)", "int64[:] (float32[:]r,int64)")
    assert not accepts("int64[:] int64", "int64[:]r int64")
    assert not accepts("int64[:]r", "int32[:]r")


def test_all_compiled_functions_of_the_project_are_compiled_so() -> None:
    for package in ("espalier", "training"):
        for file in (ROOT / package).rglob("*.py"):
            assert file.name == "compiled_code.py" or "njit" not in file.read_text(), f"{file}: use espalier.compiled_code"


KERNELS = (
    "tests/espalier/live",
    "tests/espalier/placement",
    "tests/espalier/test_compiled_engine.py",
    "tests/espalier/test_finite_ranks.py",
    "tests/espalier/test_forest.py",
    "tests/espalier/test_memory.py",
    "tests/espalier/test_packed_chunks.py",
    "tests/espalier/test_signature.py",
    "tests/espalier/test_text.py",
)


@pytest.mark.release
@pytest.mark.timeout(1600)
def test_compiled_code_stays_within_its_arrays(tmp_path: Path) -> None:
    """The tests of all compiled loops once more, in a process in which numba checks every index, with few examples of each property: they
    are to reach all code, not all values.

    Most of the time goes into compiling. numba writes the checks before LLVM optimises, which is left out here.
    """
    checked = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_OPT": "0", "NUMBA_CACHE_DIR": str(tmp_path)}
    tests = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--hypothesis-profile", "quick", *KERNELS]
    done = subprocess.run(tests, cwd=ROOT, env=checked, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
