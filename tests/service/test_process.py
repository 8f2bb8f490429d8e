"""What a process takes of its machine, and how much memory there is for it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from service.__main__ import main as serve
from service.http.connections import RESERVE
from service.router.__main__ import main as route
from service.watch.metrics import Metrics
from service.watch.process_usage import memory_limit, usage
from tests import ROOT
from tests.service.listening import get, listening
from tests.service.models.registry import run
from tests.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells it")


MORE = """
import os, resource
from service.watch.process_usage import usage

before = usage()
opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(50)]
taken = bytearray(os.urandom(1)) * (64 << 20)
after = usage()
assert after.descriptors == before.descriptors + len(opened), (before, after)
assert after.max_descriptors == resource.getrlimit(resource.RLIMIT_NOFILE)[0], after
assert after.anonymous_bytes - before.anonymous_bytes > len(taken) * 0.9, (before, after)
assert after.resident_bytes > after.anonymous_bytes, after
assert after.cpu_s > before.cpu_s, (before, after)
"""


def test_descriptors_and_memory_are_those_of_this_process() -> None:
    """In a process of its own: what else a process of tests has open comes and goes with its other threads."""
    run = subprocess.run([sys.executable, "-c", MORE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


EXHAUSTED = """
import os, resource
from service.watch.process_usage import usage

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    while True:
        os.open("/dev/null", os.O_RDONLY)
except OSError:
    found = usage()
print(found.descriptors, found.max_descriptors)
"""


@pytest.mark.slow
def test_a_process_without_a_descriptor_left_says_so() -> None:
    run = subprocess.run([sys.executable, "-c", EXHAUSTED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["64", "64"]


def machine(folder: Path, groups: str, limits: dict[str, str]) -> tuple[Path, Path]:
    """/proc and /sys/fs/cgroup of a machine of 8000 kB."""
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "meminfo").write_text("MemTotal:        8000 kB\nMemFree:         10 kB\n")
    (folder / "proc" / "self" / "cgroup").write_text(groups)
    (folder / "cgroup").mkdir()
    for file, limit in limits.items():
        (folder / "cgroup" / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup" / file).write_text(limit + "\n")
    return folder / "proc", folder / "cgroup"


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/\n", {}, 8000 << 10),
        ("0::/\n", {"memory.max": "max"}, 8000 << 10),
        ("0::/\n", {"memory.max": "5000000"}, 5_000_000),  # a container sees its own group as the root
        ("0::/\n", {"memory.max": "99999999999"}, 8000 << 10),
        ("0::/system.slice/espalier.service\n", {"system.slice/espalier.service/memory.max": "3000000"}, 3_000_000),
        (
            "0::/system.slice/espalier.service\n",
            {"system.slice/espalier.service/memory.max": "max", "system.slice/memory.max": "2000000"},
            2_000_000,
        ),
        ("5:cpu:/x\n4:memory:/docker/abc\n", {"memory/memory.limit_in_bytes": "4000000"}, 4_000_000),  # version 1, in a container
        ("4:memory:/docker/abc\n", {"memory/docker/abc/memory.limit_in_bytes": "9223372036854771712"}, 8000 << 10),
    ],
)
def test_the_smallest_limit_counts(tmp_path: Path, groups: str, limits: dict[str, str], expected: int) -> None:
    assert memory_limit(*machine(tmp_path, groups, limits)) == expected


def test_where_the_system_does_not_say_nothing_is_said(tmp_path: Path) -> None:
    assert memory_limit(tmp_path, tmp_path) is None
    assert usage(tmp_path) is None


def test_a_worker_shows_them_under_its_number() -> None:
    metrics = Metrics()
    metrics.begin(3, restarted=True)
    found = dict(
        line.rsplit(" ", 1) for line in metrics.render().decode().splitlines() if line.startswith(("espalier_worker_", "espalier_memory"))
    )
    assert found.keys() == {
        'espalier_worker_resident_bytes{worker="3"}',
        'espalier_worker_anonymous_bytes{worker="3"}',
        'espalier_worker_open_descriptors{worker="3"}',
        'espalier_worker_max_descriptors{worker="3"}',
        'espalier_worker_start_time_seconds{worker="3"}',
        'espalier_worker_cpu_seconds_total{worker="3"}',
        "espalier_worker_restarts_total",
        "espalier_memory_limit_bytes",
    }
    assert float(found["espalier_worker_restarts_total"]) == 1
    assert float(found["espalier_memory_limit_bytes"]) > float(found['espalier_worker_resident_bytes{worker="3"}']) > 1 << 20
    assert 0 < float(found['espalier_worker_cpu_seconds_total{worker="3"}']) <= sum(os.times()[:2]) + 0.1


# -- descriptors: what a service needs besides connections is left for it, and too few are refused ------------------------


Limit = Callable[[int], None]


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limit:
    """Let the system give this process so many descriptors and no more."""

    def give(most: int) -> None:
        monkeypatch.setattr("resource.getrlimit", lambda _: (most, most))
        monkeypatch.setattr("resource.setrlimit", lambda _, wanted: pytest.fail(f"{wanted} is above the limit"))

    return give


def open_in(folder: Path) -> list[str]:
    """Files of the folder that this process has a descriptor of."""
    files = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            files.append(os.readlink(descriptor))
    return [file for file in files if file.startswith(f"{folder}/")]


@contextmanager
def opened(count: int) -> Iterator[None]:
    """So many files are open meanwhile."""
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(count)]
    try:
        yield
    finally:
        for file in files:
            os.close(file)


def test_what_is_open_for_other_things_takes_no_room_of_connections(models: Path, limit: Limit, caplog: pytest.LogCaptureFixture) -> None:
    def promised() -> int:
        """Descriptors of all connections that may be open, by the log."""
        return int(re.findall(r"at most (\d+) connections are accepted", caplog.text)[-1]) + 2 * RESERVE

    limit(2000)
    with opened(300), listening(models, max_connections=5000):
        before = promised()
        assert before + 300 <= 2000
        with opened(500):  # as where many versions are loaded later
            until(lambda: promised() + 800 <= 2000, "there is room for them")


def test_where_all_connections_have_room_all_are_taken(models: Path, limit: Limit, caplog: pytest.LogCaptureFixture) -> None:
    limit(2000)
    with listening(models, max_connections=1000) as running:
        assert running.ask(get("/livez")).status == 200
    assert "connections are accepted" not in caplog.text


def test_a_version_that_is_loaded_keeps_no_file_open(models: Path, tmp_path: Path) -> None:
    """Where it did, connections would have no room beside some dozens of versions. What is mapped needs no descriptor."""
    shutil.copytree(models / "books", tmp_path / "books")
    with run(tmp_path) as running:
        loaded = running.registry.choose("books", None)
        assert loaded.file_maps
        folder = tmp_path / "books" / str(loaded.version)
        assert folder.is_dir()
        until(lambda: not open_in(folder), "what looks for new versions has closed what it read")


@pytest.mark.parametrize(
    "start", [partial(serve, ["--port", "0"]), partial(route, ["--port", "0", "--shards", "http://127.0.0.1:1"])], ids=["serve", "route"]
)
def test_too_few_descriptors_are_refused_with_what_is_needed(
    models: Path, limit: Limit, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], start: Callable[[], int]
) -> None:
    monkeypatch.setenv("ESPALIER_MODELS", str(models))
    monkeypatch.setenv("ESPALIER_DEVICE", "cpu")
    monkeypatch.setattr("service.__main__.Server.serve_on", lambda server, *listening: listening[0].close())
    limit(64)
    assert start() == 1
    found = re.search(r"may have 64 open files \(ulimit -n\), expected at least (\d+)", capsys.readouterr().err)
    assert found
    limit(int(found[1]) - 1)
    assert start() == 1
    limit(int(found[1]))
    assert start() == 0
