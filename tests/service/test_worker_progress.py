"""What workers tell one another and count together, over files, without a service."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from service.models.worker_progress import WorkerProgress, Workers
from service.run_folder import ROOM, Page, living, make, read_page, remove_dead
from service.watch.counter_files import remove_process
from service.watch.metrics import Metrics
from tests import ROOT


def test_progress_is_that_of_the_living(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Workers(tmp_path)
    assert not own.others_serve()
    own.join()
    own.report("books", WorkerProgress(serving=3))
    for pid, progress in ((11, WorkerProgress(serving=2, removed=1, failed="no room")), (12, WorkerProgress(serving=1))):
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda pid=pid: pid)
            Workers(tmp_path).report("books", progress)
    (tmp_path / "12.lock").touch()  # it has ended
    with (tmp_path / "11.lock").open("w") as first, (tmp_path / "13.lock").open("w") as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        fcntl.flock(second, fcntl.LOCK_EX)
        assert own.progress("books") == {os.getpid(): WorkerProgress(serving=3), 11: WorkerProgress(2, 1, "no room"), 13: WorkerProgress()}
        assert own.progress("films") == {os.getpid(): WorkerProgress(), 11: WorkerProgress(), 13: WorkerProgress()}
        assert own.others_serve()
        own.leave()
        assert living(tmp_path) == [11, 13]


def test_a_full_disk_leaves_a_page_as_it_was_until_the_next_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, write, room = Workers(tmp_path), os.pwrite, [ROOM]
    worker.join()
    worker.report("books", WorkerProgress(serving=3))
    monkeypatch.setattr(os, "pwrite", lambda file, content, at: write(file, content[: max(room[0] - at, 0)], at))
    long = WorkerProgress(serving=4, failed="x" * ROOM)
    worker.report("books", long)
    assert b'"serving":3' in read_page(tmp_path, os.getpid(), "json")
    room[0] = 4 * ROOM
    worker.report("books", long)
    assert b'"serving":4' in read_page(tmp_path, os.getpid(), "json")
    worker.report("books", WorkerProgress(serving=5))  # shorter again
    assert b'"serving":5' in read_page(tmp_path, os.getpid(), "json")


def test_a_page_is_read_whole_while_its_worker_writes_it(tmp_path: Path) -> None:
    page, texts = Page(tmp_path, 7, "json"), [letter * length for letter, length in ((b"a", 3 * ROOM), (b"b", 2 * ROOM), (b"c", 5))]
    page.write(texts[0])

    def write() -> None:
        for text in texts * 500:
            page.write(text)

    writing = threading.Thread(target=write)
    writing.start()
    seen = {texts[0]}
    while writing.is_alive():
        seen.add(read_page(tmp_path, 7, "json"))
    writing.join()
    assert seen <= {*texts}
    assert read_page(tmp_path, 7, "json") == texts[-1]
    page.close()


def test_a_page_is_read_whole_though_its_writer_is_held_up_in_the_middle_of_it(tmp_path: Path) -> None:
    page = Page(tmp_path, 7, "json")
    page.write(b"before")
    file = tmp_path / "7.json"
    whole = file.read_bytes()
    file.write_bytes(whole[:10])
    finishing = threading.Timer(0.02, lambda: file.write_bytes(whole))
    finishing.start()
    assert read_page(tmp_path, 7, "json") == b"before"
    finishing.join()
    page.close()


def test_workers_have_started_once_each_has_served_every_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def report(pid: int, **progress: WorkerProgress) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: pid)
            worker = Workers(tmp_path)
            for model, of_model in progress.items():
                worker.report(model, of_model)

    def locked(pid: int) -> AbstractContextManager[object]:
        file = (tmp_path / f"{pid}.lock").open("w")
        fcntl.flock(file, fcntl.LOCK_EX)
        return file

    own, serves, loading = Workers(tmp_path), WorkerProgress(serves=True), WorkerProgress()
    own.join()
    with locked(11):
        assert not own.have_started({"books"})  # the other one has not begun
        report(11, books=serves, films=loading)
        with locked(12):
            assert not own.have_started({"books"})
            report(12, books=serves, films=WorkerProgress(failed="no room"))
            assert not own.have_started({"books", "films"})
            report(11, books=serves, films=serves)
            assert own.have_started({"books", "films"})  # nobody waits for what cannot be loaded
    with locked(13):
        assert own.have_started({"books", "films"})
        assert Workers(tmp_path).have_started({"books"})  # of a worker that comes in for another
    own.leave()


def test_a_process_alone_writes_nothing() -> None:
    alone = Workers()
    alone.join()
    alone.report("books", WorkerProgress(serving=3))
    assert alone.progress("books") == {os.getpid(): WorkerProgress(serving=3)}
    assert not alone.others_serve()
    assert alone.have_started({"books"})
    alone.leave()


COUNTING = """
import sys
import tempfile
import threading
from pathlib import Path
from service.watch.metrics import Metrics, ModelMetrics
from service.watch.multiprocess import count_in

version, waiting, requests = map(int, sys.argv[2:])
count_in(Path(sys.argv[1]))
metrics = Metrics()
metrics.add_model("books")
live = {"items": waiting, "tombstones": 2, "capacity_ratio": waiting / 10, "canary_recall": 1 / waiting, "displacement": -0.01 * waiting}
for name, value in live.items():
    metrics.show(f"espalier_live_{name}", value, "books", 1)
metrics.show("espalier_live_lag", waiting, "books")
metrics.observe("espalier_live_visible_seconds", 0.01, "books")
metrics.count("espalier_live_refused_total", "books", 507)
metrics.show("espalier_model_info", version == 1, "books", 1, "onnx-cpu")
metrics.show("espalier_model_info", True, "books", version, "onnx-cpu")
ModelMetrics(metrics, "books", version, "onnx-cpu", lambda: waiting).call(waiting, 0.5)
for _ in range(requests):
    metrics.request("books", 200, 1e-3)
print(flush=True)
sys.stdin.read()
"""


@contextmanager
def counting(folder: Path, version: int, waiting: int, requests: int) -> Iterator[int]:
    """A process that has counted as a worker would. Gives its id; at the end it is killed."""
    command = [sys.executable, "-c", COUNTING, *map(str, (folder, version, waiting, requests))]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


@pytest.mark.slow
def test_what_a_dead_process_counted_stays_and_its_gauges_go(tmp_path: Path) -> None:
    """Counts add up, and so does what waits; of what a version holds and finds the worst shows."""
    reader = Metrics()  # of a process that does not count in the folder
    reader.folder = tmp_path
    reader.request("books", 200, 1.0)
    with counting(tmp_path, 2, 5, 30):
        with counting(tmp_path, 1, 2, 10) as pid:
            both = {
                'espalier_requests_total{model="books",status="200"} 40.0',
                'espalier_request_seconds_count{model="books"} 40.0',
                'espalier_batch_queries_bucket{le="2.0",model="books"} 1.0',
                'espalier_batch_queries_bucket{le="8.0",model="books"} 2.0',
                'espalier_batch_queries_sum{model="books"} 7.0',
                'espalier_shed_total{model="books"} 0.0',
                'espalier_live_visible_seconds_count{model="books"} 2.0',
                'espalier_live_refused_total{model="books",status="507"} 2.0',
            }
            worst = {
                'espalier_live_items{model="books",version="1"} 5.0',
                'espalier_live_lag{model="books"} 5.0',
                'espalier_live_canary_recall{model="books",version="1"} 0.2',
                'espalier_live_displacement{model="books",version="1"} -0.05',
            }
            one = 'espalier_model_info{engine="onnx-cpu",model="books",version="1"}'
            two = 'espalier_model_info{engine="onnx-cpu",model="books",version="2"} 1.0'
            assert lines(reader) >= {*both, *worst, two, f"{one} 1.0", 'espalier_queue_depth{model="books"} 7.0'}
        remove_process(tmp_path, pid)
        assert lines(reader) >= {*both, two, f"{one} 0.0", 'espalier_queue_depth{model="books"} 5.0'}


UNLOADING = """
import sys
import tempfile
import threading
from pathlib import Path
from service.watch.metrics import Metrics
from service.watch.multiprocess import count_in

count_in(Path(sys.argv[1]))
metrics = Metrics()
for version in range(1, 51):
    metrics.show("espalier_model_info", True, "books", version, "onnx-cpu")
    metrics.probed("books", version, {10: 0.5, 50: 0.6}, {10: 0.5, 50: 0.6}, 0.0)
    metrics.count("espalier_probe_queries_total", "books", version, "answered")
    metrics.forget_version("books", version - 1)
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_workers_forget_versions_that_do_not_serve(tmp_path: Path) -> None:
    reader = Metrics()
    reader.folder = tmp_path
    with subprocess.Popen(
        [sys.executable, "-c", UNLOADING, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        told = {line for line in lines(reader) if "version=" in line}
        process.kill()
    assert told == {
        'espalier_model_info{engine="onnx-cpu",model="books",version="50"} 1.0',
        'espalier_probe_recall{m="10",model="books",version="50"} 0.5',
        'espalier_probe_recall{m="50",model="books",version="50"} 0.6',
        'espalier_probe_expected_recall{m="10",model="books",version="50"} 0.5',
        'espalier_probe_expected_recall{m="50",model="books",version="50"} 0.6',
        'espalier_probe_drift{model="books",version="50"} 0.0',
        'espalier_probe_queries_total{model="books",outcome="answered",version="50"} 1.0',
    }
    assert "espalier_free" not in "".join(lines(reader))


def lines(metrics: Metrics) -> set[str]:
    return set(metrics.render().decode().splitlines())


def test_folders_of_killed_services_are_removed_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (lives, _), (killed, lock), (with_worker, parent) = make(), make(), make()
    others = tmp_path / "espalier-notes"
    others.mkdir()
    (tmp_path / "espalier-link").symlink_to(others)
    (killed / "metrics").mkdir()
    os.close(lock)
    os.close(parent)
    worker = os.open(with_worker / "7.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(worker, fcntl.LOCK_EX)
    remove_dead()
    assert {*tmp_path.iterdir()} == {lives, with_worker, others, tmp_path / "espalier-link"}
    os.close(worker)
    remove_dead()
    assert not with_worker.exists()
