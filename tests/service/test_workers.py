"""Processes: several workers over one models folder, what they count, and how they start and stop. Real ones, with a real engine."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from espalier.checks.random_bundles import make_bundle
from espalier.tree import complete_tree
from service.__main__ import listen, main
from service.models.worker_progress import WorkerProgress, Workers, living
from service.processes.supervisor import Supervisor
from service.settings import Settings
from service.watch.metrics import Metrics, ModelMetrics
from service.watch.multiprocess import forget_process
from tests import ROOT
from tests.service.test_counts import fill, small_disk
from tests.service.test_registry import add_version, until

pytestmark = pytest.mark.slow

KEY = "an-admin-key-of-a-test"
ANSWERED = 'espalier_requests_total{model="books",status="200"}'
BODY = json.dumps({"queries": [{"history": ["item-3"]}], "m": 32, "beam_size": 32}).encode()


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A models folder with version 1 of `books`."""
    rng = np.random.default_rng(0)
    make_bundle(tmp_path / "models", rng, complete_tree(rng.permutation(32), 2), name="books")
    return tmp_path / "models"


@dataclass
class Service:
    """`python -m service` in a process of its own; `log` grows while it runs."""

    process: subprocess.Popen[str]
    port: int
    log: list[str]

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON of a request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            content = answer.read()
            return answer.status, json.loads(content) if "json" in str(answer.headers["content-type"]) else content.decode()
        finally:
            connection.close()

    def served(self, requests: int = 40) -> tuple[set[int], set[str]]:
        """Versions and item ids in the answers to many requests, eight at a time."""
        answers: list[tuple[int, Any]] = []
        counted = self.metric(ANSWERED)

        def ask() -> None:
            for _ in range(requests // 8):
                answers.append(self.request("POST", "/retrieve", json.loads(BODY)))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [status for status, _ in answers] == [200] * requests
        until(lambda: self.metric(ANSWERED) == counted + requests, "the answers have been counted, which is after they were sent")
        items = {item["id"] for _, answer in answers for item in answer["results"][0]["items"]}
        return {answer["version"] for _, answer in answers}, items

    def metric(self, line: str) -> float:
        """One sample of /metrics, as `name{labels}`; 0 where it is not there."""
        _, text = self.request("GET", "/metrics")
        found = [row for row in text.splitlines() if row.startswith(line + " ")]
        return float(found[0].rpartition(" ")[2]) if found else 0.0

    def workers(self) -> list[int]:
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


@contextmanager
def service(models: Path, workers: int, **settings: str) -> Iterator[Service]:
    """A service that is ready. Its run folder is beside the models."""
    environment = os.environ | {"ESPALIER_MODELS": str(models), "ESPALIER_DEVICE": "cpu", "ESPALIER_ADMIN_KEYS": KEY}
    environment |= {"TMPDIR": str(models.parent)} | settings
    command = [sys.executable, "-m", "service", "--port", "0", "--workers", str(workers)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    log: list[str] = []
    assert process.stderr is not None
    stream = process.stderr
    reader = threading.Thread(target=lambda: log.extend(stream), daemon=True)
    reader.start()
    try:
        until(lambda: any("listening on" in line for line in log) or process.poll() is not None, "the service listens")
        found = re.search(r"listening on http://127.0.0.1:(\d+)", "".join(log))
        assert found, "".join(log)
        running = Service(process, int(found[1]), log)
        until(lambda: "".join(log).count("is ready on") >= workers, "every worker is ready")
        yield running
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join(20)
        stream.close()


def exit_code(running: Service) -> int:
    try:
        return running.process.wait(20)
    except subprocess.TimeoutExpired:
        pytest.fail("still running:\n" + "".join(running.log))


# -- several workers ------------------------------------------------------------------------------------------------------


def test_every_worker_follows_a_change_before_it_is_answered(models: Path) -> None:
    add_version(models, 2)
    (models / "books" / "serving.json").write_text('{"generation": 1, "versions": [1], "default": 1}')
    add_version(models, 3, damaged=True)
    with service(models, 2) as running:
        loaded = 'espalier_reload_total{model="books",outcome="loaded"}'
        assert (running.served()[0], running.metric(loaded)) == ({1}, 2)
        status, answer = running.request("POST", "/models/books/load", {"version": 2, "default": True})
        assert status == 200, answer
        assert (running.metric(loaded), running.served()[0]) == (4, {2})
        status, answer = running.request("POST", "/models/books/load", {"version": 3, "default": True})
        assert status == 409, answer
        assert answer["detail"].count("books/3/nodes.safetensors: its SHA-256") == 2  # both say so
        assert running.served()[0] == {2}
        assert running.request("PUT", "/models/books/removed", {"ids": ["item-7", "gone"]})[0] == 200
        assert "item-7" not in running.served()[1]
        assert running.request("PUT", "/models/books/removed", {"ids": []})[0] == 200
        assert "item-7" in running.served()[1]
        assert running.request("POST", "/models/books/unload", {"version": 1})[0] == 200
        unloaded = 'espalier_reload_total{model="books",outcome="unloaded"}'
        until(lambda: running.metric(unloaded) == 2, "both have taken version 1 apart")
        assert running.metric('espalier_reload_total{model="books",outcome="rolled_back"}') == 1
        assert running.metric('espalier_model_info{engine="onnx-cpu",model="books",version="2"}') == 1
        assert running.metric(ANSWERED) == 5 * 40
        assert running.metric('espalier_request_seconds_count{model="books"}') == 5 * 40
        assert running.metric('espalier_batch_queries_sum{model="books"}') == 5 * 40


def test_whichever_worker_is_asked_tells_what_all_have_counted(models: Path) -> None:
    with service(models, 2) as running:
        running.served()
        for pid in running.workers():
            with paused(pid):  # the other one answers
                assert running.metric('espalier_reload_total{model="books",outcome="loaded"}') == 2
                assert running.metric(ANSWERED) == 40


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """The process does nothing meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: _state(pid) == "T", "it has stopped")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
        until(lambda: _state(pid) != "T", "it goes on")


def test_a_worker_that_dies_is_replaced_and_what_it_counted_stays(models: Path) -> None:
    with service(models, 2) as running:
        running.served()
        first, second = running.workers()
        os.kill(first, signal.SIGKILL)
        until(lambda: len(running.workers()) == 2 and first not in running.workers(), "another one takes its place")
        running.served()  # nobody gets a 503 from a worker that has just begun
        until(lambda: "".join(running.log).count("is ready on") == 3, "it has loaded")
        running.served()
        assert second in running.workers()
        assert running.metric(ANSWERED) == 3 * 40
        assert running.metric("espalier_worker_restarts_total") == 1
        shown = re.findall(r'^espalier_worker_resident_bytes\{worker="(\d+)"\}', running.request("GET", "/metrics")[1], re.MULTILINE)
        assert sorted(shown) == ["0", "1"]  # it has the number of the one whose place it took
        assert {path.stem.rpartition("_")[2] for path in models.parent.glob("espalier-*/metrics/*.db")} == {
            *map(str, running.workers()),
            "0",
        }
        assert running.metric('espalier_queue_depth{model="books"}') == 0
        assert f"worker {first} ended with exit code -9" in "".join(running.log)


def test_a_worker_that_comes_in_for_another_removes_what_the_others_do(models: Path) -> None:
    with service(models, 2) as running:
        assert running.request("PUT", "/models/books/removed", {"ids": ["item-7"]})[0] == 200
        (models / "books" / "removed.json").unlink()
        for pid in running.workers():
            before = "".join(running.log).count("is ready on")
            os.kill(pid, signal.SIGKILL)
            until(lambda count=before: "".join(running.log).count("is ready on") == count + 1, "another one takes its place")  # type: ignore[misc]
        assert "item-7" not in running.served()[1]
        assert "books/removed.json: the file is gone; the 1 ids" in running.request("GET", "/models/books")[1]["reason"]
        assert running.metric('espalier_desired_state_wrong{model="books"}') == 1
        assert running.request("GET", "/readyz")[0] == 200
        assert running.request("PUT", "/models/books/removed", {"ids": []})[0] == 200
        assert "item-7" in running.served()[1]
        assert running.metric('espalier_desired_state_wrong{model="books"}') == 0


def test_while_the_models_folder_is_away_the_workers_that_have_loaded_serve_on(models: Path) -> None:
    with service(models, 2) as running:
        models.rename(models.parent / "away")
        os.kill(running.workers()[0], signal.SIGKILL)
        until(lambda: "".join(running.log).count("ended with exit code 1;") >= 3, "others could not begin")
        running.served()
        assert running.process.poll() is None
        (models.parent / "away").rename(models)
        until(lambda: "".join(running.log).count("is ready on") == 3, "another one has taken its place")
        running.served()


def test_a_worker_takes_no_connections_before_it_serves_what_the_others_do(models: Path) -> None:
    add_version(models, 1, name="films")
    with service(models, 2) as running:
        (models / "books").rename(models.parent / "away")
        os.kill(running.workers()[0], signal.SIGKILL)
        until(lambda: any("takes no connections: others serve books" in line for line in running.log), "it says so")
        body = json.loads(BODY) | {"model": "books"}
        assert {running.request("POST", "/retrieve", body)[0] for _ in range(40)} == {200}
        (models.parent / "away").rename(models / "books")
        until(lambda: "".join(running.log).count("books version 1 is ready on") == 3, "it has loaded it")
        until(lambda: running.metric('espalier_model_default_version{model="books"}') == 1, "and says so")
        assert {running.request("POST", "/retrieve", body)[0] for _ in range(40)} == {200}


def test_a_full_temporary_folder_ends_no_worker_and_keeps_no_change_from_being_made(models: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "1m") as disk, service(models, 2, TMPDIR=str(disk)) as running:
        workers = running.workers()
        filler = fill(disk)
        bodies = [json.loads(BODY) | {"m": 1, "beam_size": 2**power} for power in range(7)] + [{"queries": 1}, {"model": "films"}]
        for body in bodies * 8:  # each beam is a histogram of its own, and each worker will have seen some
            assert running.request("POST", "/retrieve", body)[0] in (200, 404, 422)
        assert running.request("PUT", "/models/books/removed", {"ids": ["item-7"]})[0] == 200
        assert "no room" in "".join(running.log)
        assert running.workers() == workers
        filler.unlink()
        seen = 'espalier_query_seconds_count{beam="%d",engine="onnx-cpu",model="books"}'
        until(lambda: [running.metric(seen % 2**power) for power in range(6)] == [8] * 6, "what was counted meanwhile is there")
        assert "item-7" not in running.served()[1]


def test_what_only_dead_workers_served_is_not_said_to_be_served(models: Path) -> None:
    with service(models, 2) as running:
        running.served()
        add_version(models, 2)
        for pid in running.workers():
            os.kill(pid, signal.SIGKILL)
        until(lambda: "".join(running.log).count("is ready on") == 4, "others have loaded what is the highest version now")
        until(lambda: running.metric('espalier_model_info{engine="onnx-cpu",model="books",version="2"}') == 1, "it serves")
        _, text = running.request("GET", "/metrics")
        assert 'version="1"' not in text
        assert running.metric(ANSWERED) == 40
        assert running.metric('espalier_reload_total{model="books",outcome="loaded"}') == 4


def test_one_worker_counts_in_no_file(models: Path) -> None:
    for workers in (1, 2):
        with service(models, workers) as running:
            running.served()
            assert running.metric(ANSWERED) == 40
            counted = {path.stem.rpartition("_")[2] for path in models.parent.glob("espalier-*/**/*.db")}
            assert counted == (set() if workers == 1 else set(map(str, running.workers())))  # the parent of workers does not count


def test_workers_do_not_outlive_their_parent(models: Path) -> None:
    with service(models, 2) as running:
        workers = running.workers()
        running.process.kill()
        until(lambda: not any(_runs(pid) for pid in workers), "the workers have ended")


def _runs(pid: int) -> bool:
    try:
        return _state(pid) != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _state(pid: int) -> str:
    """One letter: T is stopped, Z has ended."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_workers_that_cannot_begin_are_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with listen("127.0.0.1", 0) as listening:
        assert Supervisor(Settings(models=tmp_path, workers=1), listening).run() == 1
    assert "the service gives up" in caplog.text


@pytest.mark.parametrize("setting", ["device", "engine"])
def test_several_workers_on_a_gpu_are_refused(
    models: Path, setting: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ESPALIER_MODELS", str(models))
    monkeypatch.setenv(f"ESPALIER_{setting.upper()}", {"device": "cuda", "engine": "onnx-cuda"}[setting])
    assert main(["--workers", "2"]) == 1
    assert "one process owns the GPU" in capsys.readouterr().err


def test_several_workers_are_refused_where_a_gpu_would_be_taken(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ESPALIER_MODELS", str(models))
    monkeypatch.setattr("service.__main__.gpu_usable", lambda: True)
    assert main(["--workers", "2"]) == 1
    assert "ESPALIER_WORKERS: got 2, expected 1" in capsys.readouterr().err


# -- the way out ----------------------------------------------------------------------------------------------------------


class Begun:
    """A request of which the server has read the head and waits for the body."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        head = f"POST /retrieve HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\n"
        self.socket.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
        assert self.socket.recv(1000).startswith(b"HTTP/1.1 100")

    def finish(self) -> tuple[int, str | None]:
        """Status and Connection header of the complete answer."""
        self.socket.sendall(BODY)
        answer = http.client.HTTPResponse(self.socket)
        answer.begin()
        json.loads(answer.read())
        self.socket.close()
        return answer.status, answer.headers["connection"]


@pytest.mark.parametrize("workers", [1, 2])
def test_what_was_accepted_is_finished(models: Path, workers: int) -> None:
    with service(models, workers) as running:
        begun = [Begun(running.port) for _ in range(12)]
        running.process.send_signal(signal.SIGTERM)
        until(lambda: _refused(running.port), "the service listens no more")
        assert [request.finish() for request in begun] == [(200, "close")] * 12
        assert exit_code(running) == 0


def _refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=30).close()
    except ConnectionError:
        return True
    return False


@pytest.mark.parametrize("workers", [1, 2])
def test_a_load_balancer_notices_before_anything_is_refused(models: Path, workers: int) -> None:
    """Clients under load, which open another connection where an answer said close, until /readyz says 503."""
    failures: list[BaseException] = []
    answered, closed = [0] * 8, [0] * 8
    unready = threading.Event()

    def client(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
        try:
            while not unready.is_set():
                connection.request("POST", "/retrieve", BODY, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                assert len(json.loads(answer.read())["results"]) == 1
                assert answer.status == 200
                answered[number] += 1
                closed[number] += answer.headers["connection"] == "close"
        except BaseException as error:
            failures.append(error)
        finally:
            connection.close()

    with service(models, workers, ESPALIER_DRAIN_DELAY_S="2") as running:
        threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        until(lambda: min(answered) > 5, "all clients are served")
        running.process.send_signal(signal.SIGTERM)
        until(lambda: min(closed) > 0, "all are told to close")
        status, document = running.request("GET", "/readyz")
        assert (status, document) == (503, {"ready": False, "reasons": ["shutting down"]})
        unready.set()
        for thread in threads:
            thread.join()
        assert failures == []
        assert exit_code(running) == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_a_second_signal_stops_at_once(models: Path, workers: int) -> None:
    with service(models, workers, ESPALIER_DRAIN_S="60") as running:
        begun = Begun(running.port)
        running.process.send_signal(signal.SIGTERM)
        until(lambda: _refused(running.port), "the service listens no more")
        running.process.send_signal(signal.SIGTERM)
        assert exit_code(running) == (-signal.SIGTERM if workers == 1 else 1)
        begun.socket.close()


# -- what workers share ---------------------------------------------------------------------------------------------------


@contextmanager
def other_process(folder: Path, pid: int, monkeypatch: pytest.MonkeyPatch, lives: bool = True) -> Iterator[None]:
    """What happens inside is done by another worker, as far as its files tell."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: pid)
        lock = (folder / f"{pid}.lock").open("w")
        if lives:
            fcntl.flock(lock, fcntl.LOCK_EX)
            patch.setattr("tests.service.test_workers._HELD", [*_HELD, lock])
        yield
    if lives:
        _HELD.append(lock)
    else:
        lock.close()


_HELD: list[Any] = []


@pytest.fixture(autouse=True)
def _let_go() -> Iterator[None]:
    yield
    while _HELD:
        _HELD.pop().close()


def test_progress_is_that_of_the_living(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Workers(tmp_path)
    assert not own.others_serve()
    own.join()
    own.report("books", WorkerProgress(serving=3))
    with other_process(tmp_path, 11, monkeypatch):
        Workers(tmp_path).report("books", WorkerProgress(serving=2, removed=1, failed="no room"))
    with other_process(tmp_path, 12, monkeypatch, lives=False):
        Workers(tmp_path).report("books", WorkerProgress(serving=1))
    with other_process(tmp_path, 13, monkeypatch):
        pass
    assert own.progress("books") == {os.getpid(): WorkerProgress(serving=3), 11: WorkerProgress(2, 1, "no room"), 13: WorkerProgress()}
    assert own.progress("films") == {os.getpid(): WorkerProgress(), 11: WorkerProgress(), 13: WorkerProgress()}
    assert own.others_serve()
    own.leave()
    assert living(tmp_path) == [11, 13]


def test_a_process_alone_writes_nothing() -> None:
    alone = Workers()
    alone.join()
    alone.report("books", WorkerProgress(serving=3))
    assert alone.progress("books") == {os.getpid(): WorkerProgress(serving=3)}
    assert not alone.others_serve()
    alone.leave()


# -- what is counted ------------------------------------------------------------------------------------------------------


COUNTING = """
import sys
from pathlib import Path
from service.watch.metrics import Metrics, ModelMetrics
from service.watch.multiprocess import count_in

version, waiting, requests = map(int, sys.argv[2:])
count_in(Path(sys.argv[1]))
metrics = Metrics()
metrics.model_state("books", 1, "onnx-cpu", ready=version == 1)
metrics.model_state("books", version, "onnx-cpu", ready=True)
ModelMetrics(metrics, "books", "onnx-cpu", lambda: waiting).call(waiting, 0.5)
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


def test_what_a_dead_process_counted_stays_and_its_gauges_go(tmp_path: Path) -> None:
    reader = Metrics()  # of a process that does not count in the folder
    reader.share(tmp_path)
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
            }
            one = 'espalier_model_info{engine="onnx-cpu",model="books",version="1"}'
            two = 'espalier_model_info{engine="onnx-cpu",model="books",version="2"} 1.0'
            assert lines(reader) >= {*both, two, f"{one} 1.0", 'espalier_queue_depth{model="books"} 7.0'}
        forget_process(pid, tmp_path)
        assert lines(reader) >= {*both, two, f"{one} 0.0", 'espalier_queue_depth{model="books"} 5.0'}


UNLOADING = """
import sys
from pathlib import Path
from service.watch.metrics import Metrics
from service.watch.multiprocess import count_in

count_in(Path(sys.argv[1]))
metrics = Metrics()
for version in range(1, 51):
    metrics.model_state("books", version, "onnx-cpu", ready=True)
    metrics.probed("books", version, {10: 0.5, 50: 0.6}, {10: 0.5, 50: 0.6}, 0.0)
    metrics.probe_query("books", version, "answered")
    metrics.forget_version("books", version - 1)
print(flush=True)
sys.stdin.read()
"""


def test_workers_forget_versions_that_do_not_serve(tmp_path: Path) -> None:
    reader = Metrics()
    reader.share(tmp_path)
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


def test_what_is_scraped_is_what_was_counted() -> None:
    metrics = Metrics()
    waiting = [3]
    model = ModelMetrics(metrics, "books", "onnx-cpu", lambda: waiting[0])
    for seconds in (15e-6, 1e-3, 20.0):
        metrics.request("books", 200, seconds)
    metrics.request("", 404, 1e-5)
    model.retrieved((1e-5, 2e-5, 3e-5, 4e-5), 1e-3, 100, incomplete=2, degraded=1)
    model.retrieved((1e-5, 2e-5, 3e-5, 4e-5), 1e-3, 127, incomplete=0)
    model.call(7, 0.5)
    metrics.shed("books")
    lines = metrics.render().decode().splitlines()
    assert set(lines) >= {
        'espalier_requests_total{model="books",status="200"} 3.0',
        'espalier_requests_total{model="",status="404"} 1.0',
        'espalier_request_seconds_bucket{le="1.5e-05",model="books"} 1.0',
        'espalier_request_seconds_bucket{le="+Inf",model="books"} 3.0',
        'espalier_request_seconds_count{model="books"} 3.0',
        'espalier_request_seconds_sum{model="books"} 20.001015',
        'espalier_query_seconds_count{beam="64",engine="onnx-cpu",model="books"} 2.0',
        'espalier_batch_queries_bucket{le="8.0",model="books"} 1.0',
        'espalier_batch_queries_bucket{le="4.0",model="books"} 0.0',
        'espalier_incomplete_total{model="books"} 2.0',
        'espalier_degraded_total{model="books"} 1.0',
        'espalier_shed_total{model="books"} 1.0',
        'espalier_queue_depth{model="books"} 3.0',
    }
    model.close()
    assert 'espalier_queue_depth{model="books"} 0.0' in metrics.render().decode()


def test_two_versions_of_a_model_wait_in_one_gauge() -> None:
    metrics = Metrics()
    models = [ModelMetrics(metrics, "books", "onnx-cpu", partial(int, depth)) for depth in (2, 5)]
    assert 'espalier_queue_depth{model="books"} 7.0' in metrics.render().decode()
    models[0].close()
    assert 'espalier_queue_depth{model="books"} 5.0' in metrics.render().decode()
