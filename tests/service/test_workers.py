"""Processes: several workers over one models folder, what they count, and how they start and stop. Real ones, with a real engine."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from service.__main__ import listen, main
from service.processes.supervisor import Supervisor
from service.settings import Settings
from service.tls import calling
from service.watch.unknown_ids import most_frequent, read
from tests.certificates import Authority
from tests.service.models.registry import add_version
from tests.service.processes import ANSWERED, BODY, COMPILING_S, exit_code, process_state, service
from tests.service.running import small_model
from tests.service.test_counts import fill, small_disk
from tests.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A models folder with version 1 of `books`."""
    small_model(tmp_path / "models")
    return tmp_path / "models"


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
        assert running.metric('espalier_model_info{engine="compiled-cpu",model="books",version="2"}') == 1
        assert running.metric(ANSWERED) == 5 * 40
        assert running.metric('espalier_request_seconds_count{model="books"}') == 5 * 40
        assert running.metric('espalier_batch_queries_sum{model="books"}') == 5 * 40


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


def test_a_worker_that_stands_still_is_replaced(models: Path) -> None:
    processes = set[str]()

    def both_answer() -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
        connection.request("GET", "/livez")
        processes.add(connection.getresponse().headers["X-Request-Id"][:12])
        connection.close()
        return len(processes) == 2

    with service(models, 2, ("tests.service.hasty_supervisor",)) as running:
        until(both_answer, "both event loops run: before, a worker may take its time")
        first, _ = running.workers()
        os.kill(first, signal.SIGSTOP)
        try:
            until(lambda: len(running.workers()) == 2 and first not in running.workers(), "another one takes its place")
        finally:
            with suppress(ProcessLookupError):
                os.kill(first, signal.SIGCONT)  # if it is still there, it would keep the log open
        until(lambda: "".join(running.log).count("is ready on") == 3, "it has loaded")
        running.served()
        assert f"worker {first} has stood still for " in "".join(running.log)


def test_a_worker_that_is_killed_takes_no_history_with_it(models: Path) -> None:
    def healths() -> list[dict[str, Any]]:
        """What is answered to some requests, by any worker."""
        return [running.request("GET", "/models/books/health")[1] for _ in range(8)]

    def counts() -> list[dict[str, int]]:
        return [{one["id"]: one["count"] for one in health["unknown_ids"]} for health in healths()]

    with service(models, 2) as running:
        [shared] = models.parent.glob("espalier-*")
        for _ in range(8):
            assert running.request("POST", "/retrieve", {"queries": [{"history": ["lost"]}]})[0] == 200
        until(lambda: counts() == [{"lost": 8}] * 8, "each worker has told the others")
        until(lambda: most_frequent(read(shared / "history"), "books", time.time()) == [("lost", 8)], "each has written it")
        since = {health["since"] for health in healths()}
        running.replace_workers()  # whichever of them is the recorder
        until(lambda: all("ended and w" in str(health["events"]) for health in healths()), "it is an event")
        assert counts() == [{"lost": 8}] * 8
        assert {health["since"] for health in healths()} == since
        assert len(since) == 1


def test_a_worker_that_comes_in_for_another_removes_what_the_others_do(models: Path) -> None:
    with service(models, 2) as running:
        assert running.request("PUT", "/models/books/removed", {"ids": ["item-7"]})[0] == 200
        (models / "books" / "removed.json").unlink()
        running.replace_workers()
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
        until(lambda: "".join(running.log).count("ended with exit code 1 and is replaced") >= 3, "others could not begin", COMPILING_S)
        running.served()
        assert running.process.poll() is None
        (models.parent / "away").rename(models)
        until(lambda: "".join(running.log).count("is ready on") == 3, "another one has taken its place")
        running.served()


def test_a_worker_takes_no_connections_before_it_serves_what_the_others_do(models: Path) -> None:
    add_version(models, 1, name="films")
    with service(models, 2) as running:
        until(lambda: "".join(running.log).count("is ready on") == 4, "both workers serve both models")
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
    with small_disk(tmp_path / "small", "2m") as disk, service(models, 2, TMPDIR=str(disk)) as running:
        workers = running.workers()
        filler = fill(disk)
        bodies = [json.loads(BODY) | {"m": 1, "beam_size": 2**power} for power in range(7)] + [{"queries": 1}, {"model": "films"}]
        for body in bodies * 8:  # each beam is a histogram of its own, and each worker will have seen some
            answer = running.request("POST", "/retrieve", body)
            assert answer[0] in (200, 404, 422), (answer, running.log)
        assert running.request("PUT", "/models/books/removed", {"ids": ["item-7"]})[0] == 200
        until(lambda: "has no space" in "".join(running.log), "the log says so")
        assert running.workers() == workers
        filler.unlink()
        seen = 'espalier_query_seconds_count{beam="%d",engine="compiled-cpu",model="books"}'
        until(lambda: [running.metric(seen % 2**power) for power in range(6)] == [8] * 6, "what was counted meanwhile is there")
        assert "item-7" not in running.served()[1]


def test_keys_are_counted_though_the_temporary_folder_is_full(models: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    names = [f"key-{number}-of-a-test-of-limits" for number in range(40)]  # in many pages of the file of limits
    keys.write_text("".join(f'[[keys]]\nname = "{name[:7]}"\nkey = "{name}"\nrole = "retrieve"\nrate = 0.1\nburst = 2\n' for name in names))
    with small_disk(tmp_path / "small", "2m") as disk, service(models, 2, TMPDIR=str(disk), ESPALIER_KEYS_FILE=str(keys)) as running:
        workers = running.workers()
        fill(disk)
        for name in names:
            statuses = [running.request("POST", "/retrieve", json.loads(BODY), Authorization=f"Bearer {name}")[0] for _ in range(3)]
            assert statuses == [200, 200, 429], running.log
        assert running.workers() == workers


def test_workers_do_not_outlive_their_parent(models: Path) -> None:
    with service(models, 2) as running:
        workers = running.workers()
        running.process.kill()
        until(lambda: not any(_runs(pid) for pid in workers), "the workers have ended")


def _runs(pid: int) -> bool:
    try:
        return process_state(pid) != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_workers_that_cannot_begin_are_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with listen("127.0.0.1", 0) as listening:
        assert Supervisor(Settings(models=tmp_path, workers=1), listening).run() == 1
    assert "the service gives up" in caplog.text


@pytest.mark.parametrize(("name", "value"), [("DEVICE", "cuda"), ("ENGINE", "onnx-cuda"), ("MODELS", None)])
def test_several_workers_on_a_gpu_are_refused(
    models: Path, name: str, value: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where one is wanted, and where one would be taken."""
    monkeypatch.setenv("ESPALIER_MODELS", str(models))
    monkeypatch.setenv(f"ESPALIER_{name}", value or str(models))
    monkeypatch.setattr("service.__main__.gpu_usable", lambda: True)
    assert main(["--workers", "2"]) == 1
    said = capsys.readouterr().err
    assert ("one process owns the GPU" in said) if value else ("ESPALIER_WORKERS: got 2, expected 1" in said)


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


@pytest.mark.parametrize(
    ("workers", "signals"), [(1, [signal.SIGHUP, signal.SIGTERM]), (2, [signal.SIGTERM, signal.SIGHUP, signal.SIGHUP])]
)
def test_what_was_accepted_is_finished(models: Path, workers: int, signals: list[signal.Signals]) -> None:
    """Also when the terminal closes: SIGHUP stops as SIGTERM does, and is no second signal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the service would leave it ignored
    with service(models, workers) as running:
        signal.signal(signal.SIGHUP, before)
        assert bool([*models.parent.glob("espalier-*/**/*.db")]) == (workers > 1)  # one worker counts in no file
        begun = [Begun(running.port) for _ in range(12)]
        running.process.send_signal(signals[0])
        until(lambda: _refused(running.port), "the service listens no more")
        for sent in signals[1:]:  # once the first has been heard, or they would be one
            running.process.send_signal(sent)
        assert [request.finish() for request in begun] == [(200, "close")] * 12
        assert exit_code(running) == 0
    assert [*models.parent.glob("espalier-*")] == []


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


# -- TLS: workers share two addresses --------------------------------------------------------------------------------------


def test_workers_share_both_addresses_and_new_certificates(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.signs("service")
    small_model(tmp_path / "models")
    files = {"TLS_CERTIFICATE": pair.certificate, "TLS_KEY": pair.key, "TLS_CLIENT_CA": authority.ca}
    settings = {f"ESPALIER_{name}": str(file) for name, file in files.items()} | {"ESPALIER_ADMIN_ADDRESS": "127.0.0.1:0"}
    with service(tmp_path / "models", 2, **settings) as running:
        running.tls = calling(authority.ca, *pair).current()

        def by_operators(path: str) -> tuple[int, Any]:
            return running.asked(running.admin_port, "GET", path)

        for _ in range(8):
            assert running.request("POST", "/retrieve", {"queries": [{"history": ["item-1"]}], "m": 2})[0] == 200
            assert running.request("GET", "/models/books/removed")[0] == 404
            assert running.request("GET", "/metrics")[0] == 404
            assert by_operators("/models/books/removed")[0] == 200
            assert running.asked(running.admin_port, "GET", "/metrics", Authorization="")[0] == 200
        until(lambda: 'espalier_requests_total{model="books",status="200"} 8' in by_operators("/metrics")[1], "both workers are counted")
        authority.signs("service")
        until(lambda: "".join(running.log).count("certificates have changed: ") == 2, "both workers have the new certificate")
        assert running.request("GET", "/readyz")[0] == 200
        running.replace_workers()
        assert running.request("GET", "/readyz")[0] == by_operators("/readyz")[0] == 200
        running.process.send_signal(signal.SIGTERM)
        assert exit_code(running) == 0
    assert "Traceback" not in "".join(running.log)
