"""The Makefile and .ci/run: what they would run, without running it."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from itertools import combinations, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.mark.expression import Expression, ExpressionMatcher

from tests import ROOT
from tests.reruns import RerunHistory

PYTHON = ".venv/bin/python"
COMPILE = f"{PYTHON} -m espalier.compile --write"


def make(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """`make` as from a fresh shell: nothing inherited from a make that runs these tests."""
    ours = ("PYTHON", "PORT", "HOST", "EXTRA", "TORCH_INDEX", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run(["make", *arguments], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What make needs of a fresh clone: nothing installed, nothing trained."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def would_run(*arguments: str, folder: Path) -> list[str]:
    run = make("-n", *arguments, folder=folder)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_help_is_the_default_and_lists_every_target_and_variable() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[0].split()
    run = make()
    assert run.returncode == 0, run.stderr
    described = re.findall(r"^make ([\w-]+) ", run.stdout, re.MULTILINE)
    assert sorted(described) == sorted(targets)
    assert sorted(re.findall(r"^  (\w+)=", run.stdout, re.MULTILINE)) == ["EXTRA", "HOST", "PORT", "PYTHON", "TORCH_INDEX"]
    assert make("help").stdout == run.stdout


def test_run_installs_the_service_alone_and_serves_every_new_version(clone: Path) -> None:
    lines = would_run("run", "PORT=9000", folder=clone)
    install = next(i for i, line in enumerate(lines) if "-e '.[cpu,service]' -c constraints.txt" in line)
    serve = lines.index(f"ESPALIER_POLL_S=${{ESPALIER_POLL_S-10}} {PYTHON} -m service --host 127.0.0.1 --port 9000")
    assert install < lines.index(COMPILE) < serve
    assert not any("torch" in line or "training" in line for line in lines)


@pytest.mark.parametrize(("command", "library"), [("training", "typer"), ("loadtest.sweep", "tqdm")])
def test_after_run_alone_other_commands_say_in_a_line_what_to_install(command: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for loaded in (f"{command}.__main__", command):
        monkeypatch.delitem(sys.modules, loaded, raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(SystemExit, match=f"^error: {library} is not installed.*`make install`, or `pip install .*`$"):
        runpy.run_module(command, run_name="__main__")


@pytest.mark.parametrize(("versions", "trained", "before"), [([], 1, []), (["1"], 2, [1]), (["2", "10", ".11.work", "01"], 11, [10])])
def test_train_trains_the_next_version_and_says_how_to_compare_it(
    clone: Path, versions: list[str], trained: int, before: list[int]
) -> None:
    for version in versions:
        (clone / "models/debian-depends" / version).mkdir(parents=True)
    lines = would_run("train", folder=clone)
    install = next(i for i, line in enumerate(lines) if "-e '.[cpu,service,training]' -c constraints.txt" in line)
    out = f"models/debian-depends/{trained}"
    assert install < lines.index(f"{PYTHON} -m training fit --config training/configs/debian-depends.toml --out {out} --resume")
    compared = [int(version) for line in lines for version in re.findall(r"training evaluate --model models/debian-depends/(\d+)", line)]
    assert compared == [trained, *before]


def test_test_is_check_and_then_the_tests(clone: Path) -> None:
    types = f"{COMPILE} & compiling=$!; echo {PYTHON} -m mypy; {PYTHON} -m mypy; wait $compiling"
    checks = [f"{PYTHON} -m ruff check", f"{PYTHON} -m ruff format --check", types, ".venv/bin/lint-imports"]
    checks += [f"{PYTHON} docker/pin_images.py", f"{PYTHON} docker/audit.py constraints.txt"]
    assert would_run("check", folder=clone)[-6:] == checks
    *before, tests = would_run("test", folder=clone)
    assert before[-6:] == checks
    assert f"{PYTHON} -m pytest " in tests


@pytest.mark.parametrize("target", ["run", "train", "install", "test", "slow-test"])
def test_what_is_compiled_is_compiled_before_anything_that_calls_it_runs(target: str, clone: Path) -> None:
    lines = would_run(target, folder=clone)
    after = [line for line in lines if f"{PYTHON} -m " in line and not re.search(" pip | -m ruff ", line)]
    assert after[0].startswith(COMPILE)
    assert after[0] == COMPILE or "wait $compiling" in after[0]


@pytest.mark.parametrize(("target", "command"), [("run", "-m service"), ("train", "-m training fit")])
def test_what_compiled_code_cannot_be_kept_of_runs_all_the_same(target: str, command: str, clone: Path) -> None:
    """A full disk, or folders that are read-only: it is compiled in memory."""
    python = clone / PYTHON
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\ncase "$*" in *espalier.compile*) exit 1 ;; *) echo "$*" ;; esac\n')
    python.chmod(0o755)
    for part in ("service", "training"):
        (clone / f".venv/installed-cpu-{part}").touch()
    done = make(target, folder=clone)
    assert done.returncode == 0, done.stderr
    assert any(line.startswith(command) for line in done.stdout.splitlines())


def test_everything_but_torch_is_installed_by_its_hash(clone: Path) -> None:
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    pip = f"{PYTHON} -m pip --disable-pip-version-check install --no-compile "
    lines = [line.partition(" | ")[0] for line in would_run("check", folder=clone) if line.startswith(f"{PYTHON} -m pip ")]
    assert [line.removeprefix(pip) for line in lines] == [
        "--require-hashes -r .venv/installers.txt",
        "--require-hashes -c requirements.lock -r .venv/requirements.txt",
        f"--no-deps {torch}",
        "--require-hashes -c requirements.lock -r .venv/of-torch.txt",
        "--quiet --quiet --no-index --no-build-isolation -e '.[cpu,service,training,dev]' -c constraints.txt",
    ]
    assert f"{PYTHON} docker/requirements.py cpu service training dev --without torch > .venv/requirements.txt" in would_run(
        "check", folder=clone
    )


def chosen(*targets: str, folder: Path) -> list[Expression]:
    """Which marks each pytest of the targets asks for."""
    commands = [shlex.split(line) for target in targets for line in would_run(target, folder=folder) if "-m pytest" in line]
    usual = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    words = [shlex.split(usual) + command[command.index("pytest") :] for command in commands]
    return [Expression.compile([value for name, value in pairwise(each) if name == "-m"][-1]) for each in words]


def marks_of(test: Iterable[str]) -> ExpressionMatcher:
    known = set(test)
    return lambda name, /, **_: name in known


def test_every_test_is_run_by_one_of_the_targets_and_no_slow_one_by_make_test(clone: Path) -> None:
    names = ("slow", "hypothesis", "console", "release", "stack", "hostile")
    tiers = chosen("test", "test-all", "hostile-test", folder=clone)
    for count in range(len(names) + 1):
        for marks in combinations(names, count):
            assert any(expression.evaluate(marks_of(marks)) for expression in tiers), marks
    targets = ("test", "console-test", "release-test", "stack-test", "hostile-test")
    [fast], [console], [release], [stack], [hostile] = (chosen(target, folder=clone) for target in targets)
    assert [fast.evaluate(marks_of(marks)) for marks in ([], ["hypothesis"], ["slow"])] == [True, True, False]
    for target in ("test", "slow-test", "release-test"):  # xdist would wait without end for the tests that a crashed process left
        (command,) = [line for line in would_run(target, folder=clone) if "-m pytest" in line]
        assert "--dist loadfile --max-worker-restart 0" in command
    for own, mark in ((console, "console"), (release, "release"), (stack, "stack"), (hostile, "hostile")):
        assert [own.evaluate(marks_of(marks)) for marks in (["slow", mark], ["slow"], [])] == [True, False, False]


def test_installing_happens_once_and_again_when_what_is_wanted_changes(clone: Path) -> None:
    installed = clone / ".venv" / "installed-cpu-dev"
    installed.parent.mkdir()
    installed.touch()
    assert not any("pip" in line for line in would_run("check", folder=clone))
    assert any("[gpu," in line for line in would_run("check", "EXTRA=gpu", folder=clone))
    names = ("pyproject.toml", "constraints.txt", "requirements.lock")
    for name in names:
        os.utime(installed, (1, 1))
        for other in names:
            os.utime(clone / other, (1, 1))
        os.utime(clone / name, (2, 2))
        assert any("pip" in line for line in would_run("check", folder=clone)), name


def python_of_version(clone: Path, version: tuple[int, int]) -> Path:
    """A Python that says to be of a version, and makes no environments."""
    python = clone / "python-of-mine"
    check = f'exec {sys.executable} -c "import sys; sys.version_info = {version}; $2"'
    python.write_text(f'#!/bin/sh\ncase "$1" in -c) {check};; --version) echo "Python of $0";; *) exit 7;; esac\n')
    python.chmod(0o755)
    return python


@pytest.mark.parametrize("version", [None, (3, 10), (3, 11)])
def test_a_python_that_is_too_old_or_not_there_is_refused_with_what_is_expected(clone: Path, version: tuple[int, int] | None) -> None:
    python = python_of_version(clone, version) if version else clone / "python-of-nobody"
    run = make("check", f"PYTHON={python}", folder=clone)
    assert run.returncode != 0
    new_enough = version == (3, 11)
    assert (f"Making .venv with Python of {python}" in run.stdout) == new_enough
    assert (f"No Python 3.11 or newer with the venv module: tried {python}." in run.stderr) == (not new_enough)
    if not new_enough:
        assert "make PYTHON=" in run.stderr
        assert not (clone / ".venv").exists()


def ci(folder: Path, cache: Path | None = None, /, *words: str, **tools: str) -> subprocess.CompletedProcess[str]:
    """.ci/run in a copy of the repository's root where `make` and the given commands are scripts, and nothing else is installed."""
    kept = {} if cache is None else {"ESPALIER_CI_CACHE": str(cache)}
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci")
    programs = folder / "programs"
    programs.mkdir()
    for name in ("bash", "dirname", "sh"):
        (programs / name).symlink_to(str(shutil.which(name)))
    for name, script in {"make": 'echo "make $*"', **tools}.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    return subprocess.run([folder / ".ci" / "run", *words], env={"PATH": str(programs)} | kept, capture_output=True, text=True)


@pytest.mark.parametrize("broken", [None, 0, 1, 2])
@pytest.mark.parametrize(("words", "tiers"), [([], ["test", "slow-test", "console-test"]), (["all"], ["test", "test-all"])])
def test_ci_runs_its_tiers_and_fails_with_any_of_them(tmp_path: Path, broken: int | None, words: list[str], tiers: list[str]) -> None:
    assert (ROOT / ".ci" / "run").stat().st_mode & stat.S_IXUSR
    failing = tiers[broken] if broken is not None and broken < len(tiers) else ""
    run = ci(tmp_path, None, *words, id="echo 1000", make=f'echo "make $*"; test "$1" != "{failing}"')
    assert (run.returncode == 0) == (not failing)
    assert run.stdout.splitlines() == [f"make {tier}" for tier in (tiers[: tiers.index(failing) + 1] if failing else tiers)]


def test_ci_installs_what_the_images_need_and_is_missing_where_it_may(tmp_path: Path) -> None:
    run = ci(tmp_path, None, "all", id="echo 0", **{"apt-get": 'echo "apt-get $*"', "dockerd": "", "ip": ""})
    assert run.returncode == 0, run.stderr
    installed = next(line for line in run.stdout.splitlines() if line.startswith("apt-get install"))
    assert "--no-install-recommends" in installed
    assert installed.split()[-4:] == ["prometheus", "chromium", "docker-compose", "debootstrap"]
    assert run.stdout.splitlines()[-2:] == ["make test", "make test-all"]


SHOWN = 'echo "$*: mypy ${MYPY_CACHE_DIR-} compiled ${NUMBA_CACHE_DIR-} pytest ${PYTEST_ADDOPTS-}"'


def test_ci_keeps_caches_and_counts_where_a_folder_is_named(tmp_path: Path) -> None:
    cache = tmp_path / "kept between runs"
    fast, *others = ci(tmp_path, cache, id="echo 1000", make=SHOWN).stdout.splitlines()
    assert fast == f"test: mypy {cache}/mypy compiled {cache}/compiled pytest "
    for other, tier in zip(others, ("slow-test", "console-test"), strict=True):
        assert other.startswith(f"{tier}: mypy {cache}/mypy compiled {cache}/compiled pytest --reruns=2 ")
        assert f"--rerun-history={cache}/reruns.json" in shlex.split(other)


# -- what becomes of a test that CI must run again: at once, and over the runs --------------------------------------------


CONFTEST = """
from tests import reruns

def pytest_addoption(parser):
    reruns.add_option(parser)

def pytest_configure(config):
    reruns.configure(config)
"""
LATE = """
from pathlib import Path
from tests.waiting import until

def test_late():
    came = Path("came").exists()
    Path("came").touch()
    until(lambda: came, within_s=0)

def test_right():
    pass
"""
WRONG = """
from pathlib import Path

def test_wrong():
    came = Path("came").exists()
    Path("came").touch()
    assert came, "an answer that is wrong now and then"
"""


IN_A_BROWSER = """
from pathlib import Path

def test_late():
    came = Path("came").exists()
    Path("came").touch()
    if not came:
        raise AssertionError("Locator expected to have count '3'\\nActual value: 1")
"""


def run_of(file: Path, rerun: list[str], tier: str = "slow", status: int = 0) -> tuple[int, Any]:
    """The exit status of a run in which some tests were run again, and which ones were it too often."""
    history = RerunHistory(file, tier)
    session: Any = SimpleNamespace(exitstatus=status)
    for test in [*rerun, *rerun]:
        history.pytest_runtest_logreport(report("rerun", test))
    history.pytest_runtest_logreport(report("passed", "fine"))
    history.pytest_sessionfinish(session)
    return session.exitstatus, history.often


def report(outcome: str, test: str) -> Any:
    """What the history reads of a report."""
    return SimpleNamespace(outcome=outcome, nodeid=test)


def test_the_third_rerun_in_ten_runs_fails_the_build_and_tiers_are_counted_apart(tmp_path: Path) -> None:
    file = tmp_path / "kept" / "reruns.json"
    for rerun in (["a"], [], ["a", "b"], *[[]] * 6):
        assert run_of(file, rerun) == (0, [])
    assert run_of(file, ["a", "b"]) == (1, ["a"])
    assert run_of(file, []) == (0, [])  # the first one is eleven runs ago
    assert run_of(file, ["b"]) == (1, ["b"])
    file = tmp_path / "reruns.json"
    for _ in range(2):
        assert run_of(file, ["a"], "slow") == run_of(file, ["a"], "console") == (0, [])
    assert run_of(file, ["a"], "slow", status=2) == (2, ["a"])
    assert {tier: len(runs) for tier, runs in json.loads(file.read_text()).items()} == {"slow": 3, "console": 2}


def options_of_ci() -> list[str]:
    """What .ci/run asks of pytest beyond the fast tier."""
    (options,) = re.findall(r'^export PYTEST_ADDOPTS="(.*) \$\{PYTEST_ADDOPTS-\}"$', (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    return shlex.split(options.replace("$reruns", "reruns.json"))


def pytest_in(folder: Path, test: str) -> subprocess.CompletedProcess[str]:
    """A run of CI's over one file of tests."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(test)
    (folder / "came").unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "--rootdir", str(folder), "-c", os.devnull, "-p", "no:cacheprovider", *options_of_ci()]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("late", [LATE, IN_A_BROWSER], ids=["a condition", "a browser"])
def test_ci_runs_what_came_too_late_again_and_counts_it_and_no_wrong_answer(tmp_path: Path, late: str) -> None:
    """In its third run, after two in which the test was late, too."""
    (tmp_path / "reruns.json").write_text(json.dumps({"": [["test_it.py::test_late"]] * 2}))
    ran = pytest_in(tmp_path, late)
    assert "RERUN test_it.py::test_late" in ran.stdout, ran.stdout + ran.stderr
    assert ran.returncode == 1, ran.stdout
    assert "RERUN TOO OFTEN test_it.py::test_late" in ran.stdout
    assert json.loads((tmp_path / "reruns.json").read_text()) == {"": [["test_it.py::test_late"]] * 3}
    ran = pytest_in(tmp_path, WRONG)
    assert ran.returncode == 1
    assert "1 failed" in ran.stdout
    assert "rerun" not in ran.stdout.splitlines()[-1]
