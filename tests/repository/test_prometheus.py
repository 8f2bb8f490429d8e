"""A Prometheus that scrapes a live service answers every query of the dashboard, and no alert fires."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest

from tests.http_servers import reserved_port
from tests.repository.test_watching import (
    ALERTS,
    NOT_AT_ONCE,
    NOT_ON_A_CPU,
    OF_SHARDS,
    PROMETHEUS,
    QUERIES,
    RECORDED,
    Json,
    program,
    series_of,
)
from tests.service.processes import Service, service
from tests.service.test_probe import exported
from tests.waiting import until

pytestmark = pytest.mark.slow


class Scraper:
    """A Prometheus of its own, and what it answers."""

    def __init__(self, port: int) -> None:
        self._port = port

    def ask(self, path: str, **parameters: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        try:
            connection.request("GET", f"/api/v1/{path}?{urlencode(parameters)}")
            answer = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        assert answer["status"] == "success", f"{parameters}: {answer}"
        return answer["data"]

    def samples(self, expression: str) -> list[Json]:
        """The series of an expression that have a value now; NaN is none."""
        expression = re.sub(r"\$(model|cluster|namespace|instance)\b", ".*", expression.replace("$__rate_interval", "1m"))
        return [series for series in self.ask("query", query=expression)["result"] if series["value"][1] != "NaN"]

    def rules(self) -> list[Json]:
        return [rule for group in self.ask("rules")["groups"] for rule in group["rules"]]

    def ready(self) -> bool:
        try:
            self.ask("status/buildinfo")
        except (OSError, http.client.HTTPException, json.JSONDecodeError):
            return False
        return True


@contextmanager
def prometheus(folder: Path, target: str, shards: Sequence[str] = ()) -> Iterator[Scraper]:
    """Prometheus with our configuration and rules; only the places are others, and it looks more often."""
    with reserved_port() as port:
        yield from scraping(port, folder, target, shards)


def scraping(port: int, folder: Path, target: str, shards: Sequence[str]) -> Iterator[Scraper]:
    names = "dns_sd_configs:\n      - { names: [shard-0, shard-1], type: A, port: 8000, refresh_interval: 15s }"
    router = "dns_sd_configs:\n      - { names: [router], type: A, port: 8000, refresh_interval: 15s }"
    config = (PROMETHEUS / "prometheus.yml").read_text()
    for here, there in (
        ("service:8000", target),
        ("localhost:9090", f"127.0.0.1:{port}"),
        (names, f"static_configs:\n      - targets: {json.dumps(list(shards))}"),
        (router, ""),
        ("/etc/prometheus/rules", str(PROMETHEUS / "rules")),
        ("scrape_interval: 5s", "scrape_interval: 1s"),
        ("scrape_timeout: 4s", "scrape_timeout: 1s"),
        ("evaluation_interval: 5s", "evaluation_interval: 1s"),
    ):
        assert here in config
        config = config.replace(here, there)
    (folder / "prometheus.yml").write_text(config)
    command = [program("prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        scraper = Scraper(port)
        until(scraper.ready, lambda: (folder / "prometheus.log").read_text())
        yield scraper
    finally:
        process.kill()
        process.wait()


def traffic(running: Service) -> None:
    """Requests of two beam sizes, of several queries, wrong ones, one in the background, so many incomplete
    ones that an alert is pending; and writes."""
    query = {"history": ["item-3"], "exclude_seen": True}
    for body, status in (
        ({"queries": [query], "m": 4, "beam_size": 16}, 200),
        ({"queries": [query] * 3, "m": 4, "beam_size": 32}, 200),
        ({"queries": [query], "m": 31, "beam_size": 1}, 200),
        ({"model": "films", "queries": [query]}, 404),
        ({"queries": [query], "m": 10_000}, 422),
        ({"queries": []}, 422),
    ):
        assert running.request("POST", "/retrieve", body)[0] == status
    behind = {"Espalier-Priority": "background"}
    assert running.request("POST", "/retrieve", {"queries": [query]}, **behind)[0] == 200
    put = {"events": [["item-3"], ["item-5"]], "source_version": time.monotonic_ns()}
    assert running.request("PUT", "/models/books/items/new", put)[0] in (200, 201)
    assert running.request("PUT", "/models/books/items/newer", {})[0] == 422


NOW_RECORDED = {("recorded", rule["record"]) for rule in RECORDED if rule["record"] not in NOT_AT_ONCE}


def of_shards(queries: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Those (title, query) pairs that a router or a shard answers."""
    return {(title, expression) for title, expression in queries if any(name.startswith(OF_SHARDS) for name, _ in series_of(expression))}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Scraper, Service]]:
    """A Prometheus and the service of two workers, with the probe on, that it scrapes."""
    program("prometheus")
    folder = tmp_path_factory.mktemp("watched")
    exported(folder, np.random.default_rng(0))
    backups = {"ESPALIER_BACKUP": f"file://{folder}/backups", "ESPALIER_BACKUP_EVERY_S": "1"}
    with (
        service(folder / "models", 2, ESPALIER_PROBE_PER_S="20", ESPALIER_WRITE_KEYS="a-write-key-of-tests", **backups) as running,
        prometheus(folder, f"127.0.0.1:{running.port}") as scraper,
    ):
        yield scraper, running


def test_every_query_of_the_dashboard_has_an_answer(watched: tuple[Scraper, Service]) -> None:
    scraper, running = watched
    waiting = {(title, target["expr"]) for title, target in QUERIES if title not in NOT_ON_A_CPU} | NOW_RECORDED
    waiting -= of_shards(waiting) | {query for query in waiting if query[0] == "Failures of the store"}  # there is none
    waiting -= {query for query in waiting if "espalier_key_requests_total" in query[1]}  # nor are there keys
    waiting -= {query for query in waiting if "espalier_shadow_" in query[1]}  # and no version is tried

    def all_answered() -> bool:
        traffic(running)
        waiting.difference_update([(title, expression) for title, expression in waiting if scraper.samples(expression)])
        return not waiting

    until(all_answered, lambda: sorted(waiting), within_s=40)
    for title, target in QUERIES:
        if title in NOT_ON_A_CPU:
            assert scraper.samples(target["expr"]) == [], title  # else it is no exception
    assert set(scraper.ask("label/model/values", **{"match[]": "espalier_model_default_version"})) == {"books"}


def test_every_rule_is_evaluated_without_an_error_and_nothing_fires(watched: tuple[Scraper, Service]) -> None:
    scraper, _ = watched
    until(lambda: all(rule["health"] == "ok" for rule in scraper.rules()), lambda: [r for r in scraper.rules() if r["health"] != "ok"])
    rules = scraper.rules()
    assert {rule["name"] for rule in rules} == set(ALERTS) | {rule["record"] for rule in RECORDED}
    assert [rule["name"] for rule in rules if rule.get("state") == "firing"] == []
    assert {target["health"] for target in scraper.ask("targets")["activeTargets"] if target["labels"]["job"] == "espalier"} == {"up"}
