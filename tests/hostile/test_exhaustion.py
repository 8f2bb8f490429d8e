"""Descriptors, connections and disks that run out: the service goes on with what it has, and is as before once there is more."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.hostile.attacked import Attacked, attacked
from tests.hostile.attacks import Target
from tests.hostile.attacks.wire import LIVEZ, Answer, head, post
from tests.hostile.conftest import LIMITS, books
from tests.service.test_counts import fill, small_disk
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.hostile]
KEY = "a-key-of-the-hostile-tests"
FEW = 8
"""Descriptors that a service may have more after an attack."""


def ask(target: Target, request: bytes) -> Answer:
    """The answer to a request on a connection of its own."""
    found = target.ask(request, 30)
    assert found, f"no answer to {request[:60]!r}"
    return found


def removal(*ids: str) -> bytes:
    """A request for standing removals."""
    body = json.dumps({"ids": ids}).encode()
    return head(len(body), f"Authorization: Bearer {KEY}\r\n", "/models/books/removed", method="PUT") + body


def items(target: Target) -> list[str]:
    """The items that a thousand are asked for."""
    answer = ask(target, post(target.retrieval(1, 1000, beam_size=1000)))
    assert answer.status == 200, answer
    return [item["id"] for item in json.loads(answer.body)["results"][0]["items"]]


# -- descriptors and connections ------------------------------------------------------------------------------------------


@pytest.fixture
def scarce(large: Path, tmp_path: Path) -> Iterator[tuple[Attacked, Target]]:
    """A service with a hundred descriptors, whose limit on connections is not what saves it."""
    settings = LIMITS.environment() | {"ESPALIER_KEEP_ALIVE_S": "60", "ESPALIER_ADMIN_KEYS": KEY}
    models = tmp_path / "models"
    shutil.copytree(large, models)
    with attacked(models, tmp_path / "log", settings, descriptors=100) as service:
        target = books(service.port)
        yield service, target
        target.close()


@contextmanager
def without_descriptors(target: Target) -> Iterator[None]:
    """Connections that say nothing take all descriptors, until the service ends them."""

    def is_answered() -> bool:
        with suppress(OSError):
            found = target.ask(LIVEZ, 1)
            return found is not None and found.status == 200
        return False

    silent = target.connect_many(200)
    until(lambda: any(wire.given_up() for wire in silent), "no more are taken")
    yield
    until(lambda: all(wire.given_up() for wire in silent), "silent connections are ended")
    until(is_answered, "new connections are answered")


def test_a_service_without_descriptors_keeps_its_clients_and_comes_back(scarce: tuple[Attacked, Target]) -> None:
    service, target = scarce
    client = target.connect()
    assert client.ask(LIVEZ) == "200"
    before = service.descriptors()
    with without_descriptors(target):
        for _ in range(20):
            assert client.ask(LIVEZ) == "200"
    assert service.descriptors() <= before + FEW
    assert service.log_kb() < 100


def test_what_needs_a_descriptor_fails_alone_and_works_afterwards(scarce: tuple[Attacked, Target]) -> None:
    _, target = scarce
    client = target.connect()
    assert client.ask(removal()) == "200"  # what admin requests import is imported
    with without_descriptors(target):
        status = client.ask(removal("item-1"), 30)
        assert status in ("200", "409", "503")
    assert ("item-1" in items(target)) == (status != "200")
    assert ask(target, removal("item-2")).status == 200
    assert "item-2" not in items(target)


def test_a_service_under_attack_stops_when_it_is_told(large: Path, tmp_path: Path) -> None:
    with attacked(large, tmp_path / "log", LIMITS.environment() | {"ESPALIER_DRAIN_S": "1"}) as service:
        target = books(service.port)
        target.connect_many(50)
        target.send_many(10, post(target.largest()), receive_buffer=4096)
        target.send_many(3, post((target.largest() + b"\n") * 10, "/retrieve/stream", "application/x-ndjson"), receive_buffer=4096)
        os.kill(service.pid, signal.SIGTERM)
        try:
            assert service.exit_code(30) in (0, 1)
        finally:
            target.close()


# -- disks ----------------------------------------------------------------------------------------------------------------


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """Nothing can be written in there meanwhile."""
    filler = fill(folder)
    try:
        yield
    finally:
        filler.unlink()


@pytest.fixture
def temporary(large: Path, tmp_path: Path) -> Iterator[tuple[Attacked, Path]]:
    """A service of two workers with a temporary folder of 32 megabytes, and that folder."""
    with ExitStack() as stack:
        folder = stack.enter_context(small_disk(tmp_path / "temporary", "32m"))
        environment = LIMITS.environment() | {"TMPDIR": str(folder)}
        service = stack.enter_context(attacked(large, tmp_path / "log", environment, workers=2))
        until(lambda: len(service.workers()) == 2, "both run")
        yield service, folder


def every_status(target: Target) -> list[int]:
    """Requests of every kind, whose counts begin pages of the metrics that were never written."""
    requests = [
        post(target.retrieval()),
        post(target.retrieval(model="nobody")),
        post(target.retrieval(m=0)),
        post(b"{"),
        post(b"{}", kind="text/plain"),
        post(b"x" * (2 << 20)),
        *(post(target.retrieval(1, 10, beam_size=1 << i)) for i in range(10)),
        post((target.retrieval() + b"\n") * 3, "/retrieve/stream", "application/x-ndjson"),
    ]
    return [ask(target, request).status for request in requests for _ in range(4)]


def test_a_worker_that_dies_while_the_temporary_folder_is_full_takes_no_other_along(temporary: tuple[Attacked, Path]) -> None:
    service, folder = temporary
    target = books(service.port)
    first, second = sorted(service.workers())
    with full(folder):
        os.kill(first, signal.SIGKILL)
        until(lambda: first not in service.workers(), "it is gone")
        started: set[int] = set()

        def tried_again() -> bool:
            nonlocal started
            started |= set(service.workers()) - {second}
            return len(started) >= 4 or not service.is_alive()

        with suppress(AssertionError):  # where a replacement lives, no other one is started
            until(tried_again, "replacements begin and end")
        assert service.is_alive()
        assert second in service.workers()
        assert ask(target, post(target.retrieval())).status == 200
    until(lambda: len(service.workers()) == 2, "another one takes its place")
    assert ask(target, post(target.retrieval())).status == 200


def test_a_log_that_cannot_be_written_stops_nothing(large: Path) -> None:
    settings = LIMITS.environment() | {"ESPALIER_LOG_LEVEL": "INFO", "ESPALIER_LOG_REQUESTS": "all"}
    with attacked(large, Path("/dev/full"), settings, workers=2) as service:
        assert set(every_status(books(service.port))) == {200, 404, 413, 415, 422}
