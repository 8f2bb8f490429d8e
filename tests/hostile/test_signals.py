"""Workers that are killed and stopped at random under load: every request is answered, right, and what was changed stays changed.

A request whose worker was killed is lost with its connection; its client asks again, as clients of an idempotent route do.
"""

from __future__ import annotations

import http.client
import os
import random
import signal
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.service.processes import Service, paused, service
from tests.service.running import Json
from tests.service.test_chaos import Results, bodies, make_models, results, same
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.hostile]
SEEDS = [1, 2]
ROUNDS, CLIENTS = 6, 6
REMOVED = ["item-3", "item-50", "item-120"]


class Client(threading.Thread):
    """Asks on a connection of its own each time, again where the connection was lost, and notes wrong answers."""

    def __init__(self, running: Service, asked: list[Json], expected: list[Results], seed: int) -> None:
        super().__init__(daemon=True)
        self.running, self.asked, self.expected = running, asked, expected
        self.rng, self.end = random.Random(seed), threading.Event()
        self.answered = self.lost = 0
        self.wrong: list[str] = []

    def run(self) -> None:
        while not self.end.is_set():
            number = self.rng.randrange(len(self.asked))
            try:
                status, answer = self.running.request("POST", "/retrieve", self.asked[number])
            except (ConnectionError, http.client.HTTPException):
                self.lost += 1
                continue
            except OSError as error:  # no answer for half a minute
                self.wrong.append(f"{error!r}")
                continue
            self.answered += 1
            if status != 200 or not same(results(answer), self.expected[number]):
                self.wrong.append(f"{status}: {str(answer)[:300]}")


def answered(clients: list[Client], more: int) -> None:
    """Wait until so many more requests are answered."""
    goal = sum(client.answered for client in clients) + more
    until(lambda: sum(client.answered for client in clients) >= goal, f"{more} more are answered")


def loaded(running: Service, times: int) -> None:
    """Wait until so many workers have loaded, the dead ones included."""
    until(lambda: "".join(running.log).count("is ready on") >= times, "another one has loaded")


@pytest.mark.parametrize("seed", SEEDS)
def test_workers_killed_and_stopped_at_random_lose_nothing_and_answer_right(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    models = tmp_path / "models"
    make_models(models)
    asked: list[Json] = [body | {"timeout_ms": 60_000} for body in bodies()]
    with service(models, 2) as running, ExitStack() as stack:
        assert running.request("PUT", "/models/books/removed", {"ids": REMOVED})[0] == 200
        answers = [running.request("POST", "/retrieve", body) for body in asked]
        assert {status for status, _ in answers} == {200}
        expected = [results(answer) for _, answer in answers]
        assert not set(REMOVED) & {item for found in expected for result in found for item, _ in result}
        clients = [Client(running, asked, expected, seed * 100 + i) for i in range(CLIENTS)]
        for client in clients:
            client.start()
            stack.callback(client.end.set)
        killed = 0
        for _ in range(ROUNDS):
            answered(clients, rng.randrange(1, 60))
            victim = rng.choice(running.workers())
            if rng.random() < 0.5:
                os.kill(victim, signal.SIGKILL)
                killed += 1
                loaded(running, 2 + killed)
            else:
                with paused(victim):
                    late = Client(running, asked, expected, seed * 100 + len(clients))  # all before may wait for the one that is stopped
                    clients.append(late)
                    late.start()
                    stack.callback(late.end.set)
                    answered(clients, rng.randrange(1, 60))  # by the other one
        for client in clients:
            client.end.set()
        for client in clients:
            client.join(60)
        assert [wrong for client in clients for wrong in client.wrong] == []
        assert sum(client.lost for client in clients) <= killed * len(clients)
        assert killed
        status, listed = running.request("GET", "/models/books/removed")
        assert (status, listed["ids"]) == (200, REMOVED)
        assert len(running.workers()) == 2
