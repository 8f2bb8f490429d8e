"""What processes count together in files: whatever the disk does, nothing ends a process, and nothing that was counted is lost."""

from __future__ import annotations

import fcntl
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.mmap_dict import MmapedDict, mmap_key

from service.watch import counter_files
from service.watch.counter_files import FREE, CountsFile, key_of, read, remove_process
from tests import ROOT
from tests.waiting import until


def key(number: int, version: str = "1") -> str:
    return key_of("espalier_x", "espalier_x", {"model": f"m{number}", "version": version}, "About x.")


def numbers(path: Path) -> dict[str, float]:
    """As prometheus_client reads them, and as we do, which must be the same."""
    theirs = {name: value for name, value, *_ in MmapedDict.read_all_values_from_file(str(path))}
    assert theirs == dict(read(path))
    return {name: value for name, value in theirs.items() if FREE not in name}


def test_numbers_are_read_by_prometheus_client(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    file = CountsFile(tmp_path / "gauge_livesum_7.db")
    wanted: dict[str, float] = {}
    for number in rng.integers(0, 2000, 6000):  # over the first size of the file
        name = key(int(number), "1" * int(number % 9))
        wanted[name] = float(rng.normal())
        file.write(name, wanted[name])
    assert numbers(file.path) == wanted
    assert file.path.stat().st_size > counter_files.FIRST_BYTES
    assert key(3) == mmap_key("espalier_x", "espalier_x", ["version", "model"], ["1", "m3"], "About x.")
    assert [path.name for path in tmp_path.iterdir()] == ["gauge_livesum_7.db"]


def test_what_is_forgotten_makes_room_for_what_comes(tmp_path: Path) -> None:
    file = CountsFile(tmp_path / "counter_7.db")
    file.write(key(0, "x"), 5.0)
    for version in range(100, 999):
        file.write(key(1, str(version)), version)
        file.write(key(2, str(version)), -version)
        assert numbers(file.path) == {key(0, "x"): 5.0, key(1, str(version)): version, key(2, str(version)): -version}
        file.forget({"version": str(version)})
    assert numbers(file.path) == {key(0, "x"): 5.0}
    assert len(list(read(file.path))) <= 3
    file.write(key(1, "100"), 1.0)
    assert numbers(file.path)[key(1, "100")] == 1.0  # not what it was before


def test_only_what_has_all_the_labels_is_forgotten(tmp_path: Path) -> None:
    file = CountsFile(tmp_path / "counter_7.db")
    for number in (1, 2):
        for version in ("1", "11"):
            file.write(key(number, version), 1.0)
    file.forget({"model": "m1", "version": "1"})
    assert numbers(file.path) == {key(1, "11"): 1.0, key(2, "1"): 1.0, key(2, "11"): 1.0}


# -- a process that has ended ---------------------------------------------------------------------------------------------


def test_what_ended_processes_counted_is_in_one_file(tmp_path: Path) -> None:
    plain = key_of("espalier_y", "espalier_y_total", {"model": "m"}, "About y.")
    for pid in (11, 12, 13):
        for kind in ("counter", "histogram", "gauge_livesum"):
            file = CountsFile(tmp_path / f"{kind}_{pid}.db")
            file.write(plain, pid)
            file.write(key(1), 1.0)
            file.close()
    for pid in (11, 12):
        remove_process(tmp_path, pid)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("counter_0.db", "histogram_0.db"),
        *("counter_13.db", "histogram_13.db", "gauge_livesum_13.db"),
    }
    for kind in ("counter", "histogram"):
        assert numbers(tmp_path / f"{kind}_0.db") == {plain: 23.0}  # nobody would forget what is of a version


def test_while_somebody_reads_nothing_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counter_files, "PATIENCE_S", 0.01)
    CountsFile(tmp_path / "counter_11.db").write(key_of("y", "y_total", {}, ""), 2.0)
    with counter_files.locked(tmp_path, fcntl.LOCK_SH):
        remove_process(tmp_path, 11)
        assert [path.name for path in tmp_path.iterdir()] == ["counter_11.db"]
    remove_process(tmp_path, 11)
    assert [path.name for path in tmp_path.iterdir()] == ["counter_0.db"]


# -- no room --------------------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(folder: Path, size: str = "256k") -> Iterator[Path]:
    """A file system of that size, of this test's own."""
    folder.mkdir(exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a full disk is NOT tested: no file system may be mounted here ({mounted.stderr.strip()})")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """A file that takes what is left."""
    file = folder / "filler"
    with file.open("wb", buffering=0) as stream:
        try:
            while True:
                stream.write(bytes(4096))
        except OSError:
            return file


WRITER = """
import sys, time
from pathlib import Path
from service.watch.counter_files import CountsFile, key_of

file, written = CountsFile(Path(sys.argv[1]) / "counter_7.db"), 0
for line in sys.stdin:
    if line.strip() == "settle":
        file.settle()
    else:
        for written in range(written, written + int(line)):
            with file.lock:
                file.write(key_of("x", "x_total", {"number": str(written)}, ""), float(written))
        written += 1
    print(written, flush=True)
"""


@contextmanager
def writer(folder: Path, before: Callable[[], None] | None = None) -> Iterator[Callable[[str], int]]:
    """A process of its own, which a SIGBUS would end. Gives what tells it to write so many more numbers."""
    command = [sys.executable, "-c", WRITER, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=before) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        into, out = process.stdin, process.stdout

        def tell(line: str) -> int:
            into.write(line + "\n")
            into.flush()
            answer = out.readline()
            assert answer, f"the process ended with {signal.Signals(-process.wait()).name}"
            return int(answer)

        yield tell
        process.kill()


def counted(folder: Path) -> list[float]:
    return sorted(value for path in folder.glob("counter_*.db") for value in dict(read(path)).values())


@pytest.mark.parametrize("beforehand", [0, 100])
def test_a_full_disk_ends_no_process_and_loses_no_number(tmp_path: Path, beforehand: int) -> None:
    """Full before the file is there, or before it has to grow."""
    with small_disk(tmp_path / "disk") as disk, writer(disk) as tell:
        if beforehand:
            tell(str(beforehand))
        filler = fill(disk)
        assert tell("3000") == beforehand + 3000  # some 200 KB
        assert len(counted(disk)) < 3000
        filler.unlink()
        until(lambda: tell("settle") and len(counted(disk)) == beforehand + 3000, "all numbers are in the file")
        assert counted(disk) == list(range(beforehand + 3000))


def test_a_limit_of_file_sizes_ends_no_process(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    with writer(tmp_path, limit) as tell:
        assert tell("3000") == 3000
        assert 500 < len(counted(tmp_path)) < 1500  # what 64 KiB hold
        tell("settle")


def test_a_number_that_changes_once_there_is_room_is_the_newer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("service.watch.counter_files.time.monotonic", lambda: now[0])
    file = CountsFile(tmp_path / "gone" / "counter_7.db")
    file.write(key(1), 2.0)
    file.write(key(2), 5.0)
    (tmp_path / "gone").mkdir()
    file.write(key(1), 3.0)
    assert not file.path.exists()  # it is tried once a second
    now[0] += counter_files.RETRY_S
    file.write(key(1), 4.0)
    assert numbers(file.path) == {key(1): 4.0}
    file.settle()
    assert sorted(read(file.path)) == sorted([(key(1), 4.0), (key(2), 5.0)])


def test_what_cannot_be_summed_for_want_of_room_is_counted_as_before(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "300k") as disk:
        for pid in (11, 12):
            file = CountsFile(disk / f"counter_{pid}.db")
            file.write(key_of("y", "y_total", {}, ""), float(pid))
            file.close()
        filler = fill(disk)
        remove_process(disk, 11)
        assert {path.name for path in disk.iterdir()} == {"filler", "counter_11.db", "counter_12.db"}
        filler.unlink()
        remove_process(disk, 11)
        assert {path.name for path in disk.iterdir()} == {"counter_0.db", "counter_12.db"}


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    """Files appear with their head, and grow and are used again while they are read."""
    stop = threading.Event()
    seen: list[BaseException] = []

    def look() -> None:
        while not stop.is_set():
            for path in tmp_path.glob("*.db"):
                try:
                    dict(read(path))
                except (struct.error, UnicodeDecodeError) as error:
                    seen.append(error)

    reader = threading.Thread(target=look)
    reader.start()
    for number in range(20):
        file = CountsFile(tmp_path / f"counter_{number + 1}.db")
        for name in range(600):
            file.write(key(name), 1.0)
        file.close()
    stop.set()
    reader.join()
    assert seen == []
