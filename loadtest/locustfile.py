"""The load test with Locust: users that send POST /retrieve, and users that put items. It runs with a web page, in several processes, or
headless.

    locust -f loadtest/locustfile.py --host http://localhost:8000 --headless --shape spike --rate 200 --seconds 60

Four shapes of load (--shape): `steady`; `ramp`, from nothing up to the rate; `spike`, three times the rate in the middle third; `reload`,
steady while another version of the model is made the default again and again. Each test stops by itself after --seconds. The exit code is 1
when more requests failed than --max-failed and --max-refused allow. `espalier loadtest` measures more precisely, with less processor time.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import gevent
import orjson
from locust import FastHttpUser, LoadTestShape, User, constant_throughput, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopUser

from espalier.errors import EspalierError

if not __package__:  # Locust loads this file by its path, which says nothing of the package that it is in
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    __package__ = Path(__file__).resolve().parent.name

from .plan import SHAPES, Plan, answer_problem, complaints, conditions, mix, plan_of, user_count, users, valid, versions
from .target import ask
from .writes import WRITTEN, delete_all

log = logging.getLogger("loadtest")

REFUSED = "refused (429)"
RELOAD, PUT = "reload", "put"

plans: dict[int, Plan] = {}
"""By id of the environment, from the start of its test; absent if the test cannot run."""


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    add: Callable[..., object] = parser.add_argument
    local = {"include_in_web_ui": False}  # paths of the machine that Locust runs on, and keys
    add("--shape", choices=SHAPES, default="steady", help="course of the load (default steady)")
    add("--rate", type=float, default=50.0, help="requests/s of all users together (default 50)")
    add("--seconds", type=float, default=60.0, help="length of the test (default 60)")
    add("--model", default="", help="name of the model; may be left out where one is served")
    add("--models", default="models", **local, help="folder of the bundles, for their held-out queries (default models)")
    add("--queries", default="", **local, help="Parquet or JSON lines instead: history, vector, features or text")
    add("--beam-mix", type=valid(mix), default="50:1,100:8,400:1", help="beam sizes and their weights (default 50:1,100:8,400:1)")
    add("--m-mix", type=valid(mix), default="10:1,50:8,200:1", help="numbers of results and their weights (default 10:1,50:8,200:1)")
    add("--filter", type=valid(conditions), default="", help="JSON of a filter that a part of the requests has")
    add("--filter-share", type=float, default=0.0, help="that part, from 0 to 1 (default 0)")
    add("--exclude-seen", action="store_true", help="items of the history are not returned")
    add("--key", default="", env_var="LOCUST_KEY", **local, help="an API key, where the service wants one (LOCUST_KEY)")
    add("--admin-key", default="", env_var="LOCUST_ADMIN_KEY", **local, help="an admin key, for the shape reload (LOCUST_ADMIN_KEY)")
    add("--write-rate", type=float, default=0.0, help="items put per second, beside the retrievals (default 0)")
    add("--write-key", default="", env_var="LOCUST_WRITE_KEY", **local, help="a key of the role write, for --write-rate (LOCUST_WRITE_KEY)")
    add("--versions", type=valid(versions), default="", help="versions that the shape reload takes turns with (default: all there are)")
    add("--reload-every", type=float, default=5.0, help="seconds from the end of a reload to the next one (default 5)")
    add("--max-failed", type=float, default=0.01, help="share of failed requests, refused ones aside, up to which the exit code is 0")
    add("--max-refused", type=float, default=0.01, help="share of requests answered 429 up to which the exit code is 0 (default .01)")
    add("--seed", type=int, default=0, help="of the mixes (default 0)")


# -- the users ------------------------------------------------------------------------------------------------------------


class Retriever(FastHttpUser):
    """Sends one query at a time, evenly paced."""

    def on_start(self) -> None:
        plan = plans.get(id(self.environment))
        if plan is None:
            raise StopUser
        self.plan, self.pace = plan, constant_throughput(plan.per_user)
        self.headers = {"Content-Type": "application/json", **plan.target.headers}
        time.sleep(plan.rng.random() / plan.per_user)  # otherwise users that start together would always send together

    def wait_time(self) -> float:
        return float(self.pace(self))

    @task
    def retrieve(self) -> None:
        name, m, eligible, body = self.plan.request()
        data = orjson.dumps(body).decode()
        path = f"{self.plan.target.prefix}/retrieve"
        with self.client.request("POST", path, name=name, data=data, headers=self.headers, catch_response=True) as response:
            if response.status_code == 429:
                response.request_meta["name"] = REFUSED
                response.failure("429")
            elif response.status_code != 200:
                response.failure(f"{response.status_code or response.error}: {(response.text or '')[:200]}")
            elif problem := answer_problem(orjson.loads(response.content or b"{}"), m, eligible):
                response.failure(problem)


class Writer(FastHttpUser):
    """Puts one item at a time, evenly paced. An item's evidence is one of the queries."""

    fixed_count = 1

    def on_start(self) -> None:
        plan = plans.get(id(self.environment))
        if plan is None:
            raise StopUser
        self.plan, self.pace = plan, constant_throughput(plan.per_writer)
        self.headers = {"Content-Type": "application/json", **plan.writer.headers}
        time.sleep(plan.rng.random() / plan.per_writer)

    def wait_time(self) -> float:
        return float(self.pace(self))

    @task
    def put(self) -> None:
        item, body = self.plan.put()
        path = f"{self.plan.writer.prefix}/models/{quote(self.plan.model['name'], safe='')}/items/{item}"
        data = orjson.dumps(body).decode()
        with self.client.request("PUT", path, name=PUT, data=data, headers=self.headers, catch_response=True) as response:
            if response.status_code == 429:
                response.request_meta["name"] = REFUSED
                response.failure("429")
            elif response.status_code not in WRITTEN:
                response.failure(f"{response.status_code or response.error}: {(response.text or '')[:200]}")


class Reloader(User):
    """Makes the versions the default in turn, loading each anew, and restores the first default in the end."""

    fixed_count = 1
    change: gevent.Greenlet | None = None

    def on_start(self) -> None:
        plan = plans.get(id(self.environment))
        if plan is None:
            raise StopUser
        self.plan, self.turn = plan, plan.versions.index(plan.model["version"]) if plan.model["version"] in plan.versions else -1
        self.default: int = plan.model["version"]

    def wait_time(self) -> float:
        return self.plan.reload_every_s

    @task
    def reload(self) -> None:
        self.turn = (self.turn + 1) % len(self.plan.versions)
        self.change = gevent.spawn(self.make_default, self.plan.versions[self.turn])  # the end of the test waits for this greenlet
        self.change.join()

    def on_stop(self) -> None:
        if self.change is not None:
            self.change.join()
            self.make_default(self.plan.model["version"])

    def make_default(self, version: int) -> None:
        if version == self.default:
            return
        began, failure = time.perf_counter(), None
        former, self.default = self.default, version
        try:
            for action, wanted in (("default", version), ("unload", former)):
                ask(self.plan.admin, "POST", f"/models/{self.plan.model['name']}/{action}", {"version": wanted}, timeout_s=600)
        except EspalierError as error:
            failure = error
        took_ms = (time.perf_counter() - began) * 1e3
        self.environment.events.request.fire(
            request_type="POST", name=RELOAD, response_time=took_ms, response_length=0, exception=failure, context={}
        )


class Shape(LoadTestShape):
    """The number of users over time. A tick of None ends the test."""

    def tick(self) -> tuple[int, float, list[type[User]] | None] | None:
        environment: Any = self.runner.environment if self.runner else None
        options, elapsed_s = environment.parsed_options, self.get_run_time()
        if elapsed_s >= options.seconds or (elapsed_s > 0.5 and id(environment) not in plans):
            return None
        count = user_count(options.shape, users(options.rate), elapsed_s / options.seconds)
        user_classes: list[type[User]] = [Retriever]
        if options.write_rate > 0:
            Writer.fixed_count = users(options.write_rate)
            count += Writer.fixed_count
            user_classes.append(Writer)
        if options.shape == "reload":
            return count + Reloader.fixed_count, count + 1, [*user_classes, Reloader]
        return count, max(count, 1), user_classes


# -- begin and end --------------------------------------------------------------------------------------------------------


@events.test_start.add_listener
def begin(environment: Environment, **_: object) -> None:
    plans.pop(id(environment), None)
    try:
        options: Any = environment.parsed_options
        plans[id(environment)] = plan = plan_of(environment.host, options)
    except (EspalierError, OSError) as error:
        log.error("%s", error)
        return
    log.info("%s version %s, %d queries", plan.model["name"], plan.model["version"], len(plan.queries))


@events.test_stop.add_listener
def clean_up(environment: Environment, **_: object) -> None:
    """Delete the items that were put."""
    plan = plans.get(id(environment))
    if plan is None or plan.writes is None:
        return
    try:
        delete_all(plan.writer, plan.model["name"], plan.writes.ids(next(plan.write_numbers)))
    except EspalierError as error:
        log.error("%s", error)


@events.quitting.add_listener
def judge(environment: Environment, **_: object) -> None:
    """Set the exit code."""
    options: Any = environment.parsed_options
    stats = environment.stats
    if options is None or options.worker:  # the master has the figures of all processes
        return
    failures = {name: entry.num_failures for (name, _method), entry in stats.entries.items()}
    refused, reloads = failures.get(REFUSED, 0), failures.get(RELOAD, 0)
    lines = complaints(
        stats.total.num_requests, stats.total.num_failures - refused - reloads, refused, reloads, options.max_failed, options.max_refused
    )
    for line in lines:
        log.error("%s", line)
    environment.process_exit_code = 1 if lines else 0
