"""A router with shards and replicas under load, while processes are killed, stopped, made faulty and replaced.

    python -m benchmarks.shards --json FILE [--quick] [--rollouts N] [--model models/debian-depends/1] [--shards 4] [--replicas 2]

The bundle's held-out queries are asked at random times, at a share of what the router can answer; times are counted from when a request was
due. Each phase is a load of its own, with one thing that happens to the fleet meanwhile. Every version has scores of its own (see
`shard_fleet`), so that an answer with parts of two versions would show. Client, router and shards share the machine.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report_file import SAMPLE, command_line, write_report
from benchmarks.service.serving import Process, samples, serving, settings, wait_for
from benchmarks.service.shard_answers import Load, M, SeenAnswer, all_answered, is_mixed, recall, requests_of, summarised, went_back
from benchmarks.service.shard_fleet import Mood, Running, first_version, next_version, running, started
from espalier.bundle import Bundle
from loadtest.loops import Answered, closed_loop, each_once, open_loop, request_bytes
from loadtest.queries import Query, held_out

LOAD_SHARE = 0.4
CLIENTS = 8
"""Clients of the closed loop that measures the capacity."""
WAIT_S = 60.0
OWN = "espalier_router_own_seconds"


@dataclass(frozen=True)
class Plan:
    """How long the phases are, in seconds, and how many rollouts there are."""

    phase_s: float
    rollouts: int
    rollout_s: float


QUICK, FULL = Plan(15, 6, 6), Plan(45, 20, 6)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter phases and fewer rollouts: at most 15 minutes")
    parser.add_argument("--model", type=Path, default=SAMPLE, help="a bundle (default: the sample)")
    parser.add_argument("--shards", type=int, default=4, help="how many to cut it into (default %(default)s)")
    parser.add_argument("--replicas", type=int, default=2, help="of each shard (default %(default)s)")
    parser.add_argument("--rollouts", type=int, help=f"new versions under load (default: {FULL.rollouts}, with --quick {QUICK.rollouts})")
    parser.add_argument("--rate", type=float, help=f"requests per second (default: {LOAD_SHARE:g} of what the router can answer)")
    options = parser.parse_args()
    plan = QUICK if options.quick else FULL
    if options.rollouts is not None:
        plan = replace(plan, rollouts=options.rollouts)
    if min(options.replicas, options.shards) < 2 or plan.rollouts < 1:
        parser.error("expected --replicas and --shards of at least 2, one of which can be killed, and --rollouts of at least 1")
    report = measured(options.model, options.shards, options.replicas, options.rate, plan) | {"quick": options.quick}
    print(json.dumps(report, indent=1))
    write_report(options.json, report)


def measured(model: Path, shards: int, replicas: int, rate: float | None, plan: Plan) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder) / "models"
        name = first_version(model, models, shards)
        queries = held_out(Bundle.open(models / name / "1", verify=False))
        log("bundle alone")
        with serving(["service"], settings(models)) as port:
            single_service_recall = recall(("127.0.0.1", port), name, queries)
        log(f"{shards} shards × {replicas} replicas start")
        with running(models, shards, replicas, Path(folder)) as fleet, ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return Measuring(fleet, pool, models, name, queries, rate, plan).all() | {
                "model": name,
                "shards": shards,
                "replicas": replicas,
                "recall_one": single_service_recall,
            }


def log(text: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {text}", flush=True)


class Measuring:
    def __init__(
        self,
        fleet: Running,
        pool: ProcessPoolExecutor,
        models: Path,
        name: str,
        queries: Sequence[Query],
        rate: float | None,
        plan: Plan,
    ) -> None:
        self._fleet, self._pool, self._models, self._name, self._plan = fleet, pool, models, name, plan
        self._queries, self._requests = queries, requests_of(name, queries)
        self._address = "127.0.0.1", fleet.router.port
        self._phases: dict[str, dict[str, Any]] = {}
        responses = closed_loop(self._address, self._requests, CLIENTS, 5)
        self._capacity = sum(response.status == 200 for response in responses) / 5
        self._rate = rate or LOAD_SHARE * self._capacity
        self._first: dict[int, tuple[float, ...]] = {}

    def all(self) -> dict[str, Any]:
        """Run every phase; the figures of the report."""
        fleet, plan = self._fleet, self._plan
        log(f"capacity {self._capacity:.0f}/s, {self._rate:.0f}/s are offered")
        before = self._buckets(OWN)
        closed_loop(self._address, self._requests, 1, plan.phase_s)
        alone_p50_ms = quantile_ms(before, self._buckets(OWN), 0.5)
        log(f"with one client at a time the router's own time is {alone_p50_ms:g} ms at p50")
        covered = recall(self._address, self._name, self._queries)
        self._first = {answer.number: answer.scores for answer in all_answered(self._address, self._requests).seen}
        before, hedged = self._buckets(OWN), fleet.router.metric("espalier_router_hedges_total")
        healthy = self._phase("healthy")
        own_p50_ms = quantile_ms(before, self._buckets(OWN), 0.5)
        hedges = fleet.router.metric("espalier_router_hedges_total") - hedged
        killed = self._phase("replica killed", fleet.replicas[1][0].kill)
        replicas = len(fleet.all)
        _, replica_back_s = self._back([fleet.replicas[1][0]], lambda: fleet.router.metric("espalier_router_replicas") >= replicas)
        shard = self._killed_shard()
        stopped = self._phase("replica stopped", fleet.replicas[0][0].stop)
        fleet.replicas[0][0].go_on()
        moods: tuple[Mood, ...] = ("slow", "garbage")
        for mood in moods:
            self._phase(f"replica {mood}", partial(setattr, fleet.proxy, "mood", mood))
            fleet.proxy.mood = "well"
            self._wait(self._is_whole)
        rolled = self._rollouts(plan.rollouts)
        fleet.router.kill()
        _, router_s = self._back([fleet.router], self._is_whole)
        return {
            "capacity_per_s": round(self._capacity, 1),
            "offered_per_s": round(self._rate, 1),
            "recall_sharded": covered,
            "router_p50_ms": own_p50_ms,
            "router_one_client_p50_ms": alone_p50_ms,
            "killed_replica_failures": killed["failed"] + killed["not_covered"],
            "killed_replica_back_s": replica_back_s,
            "killed_shard_coverage": shard["least_coverage"],
            "stopped_p999_of_healthy_p99": round(stopped["p999_ms"] / healthy["p99_ms"], 3),
            "hedged_share_healthy": round(hedges / max(healthy["requests"], 1) / len(fleet.replicas), 5),
            "rollouts": rolled["rollouts"],
            "mixed": rolled["mixed"],
            "rollout": rolled,
            "killed_router": {"back_s": router_s},
            "phases": self._phases,
        }

    # -- phases ---------------------------------------------------------------------------------------------------------

    def _phase(self, name: str, action: Callable[[], object] = lambda: None) -> dict[str, Any]:
        """Figures of a load, with an action after a third of it."""
        running_load = self._load(self._plan.phase_s)
        time.sleep(self._plan.phase_s / 3)
        action()
        figures = Load(running_load.result()).figures()
        self._phases[name] = figures
        log(f"{name}: {json.dumps(figures)}")
        return figures

    def _load(self, seconds: float) -> Future[list[Answered]]:
        return self._pool.submit(open_loop, self._address, self._requests, self._rate, seconds, len(self._phases), keep=summarised)

    def _killed_shard(self) -> dict[str, Any]:
        """All replicas of a shard are killed: answers go on without it."""
        last = self._fleet.replicas[-1]

        def kill() -> None:
            for process in last:
                process.kill()

        figures = self._phase("shard killed", kill)
        self._wait(lambda: self._fleet.router.metric("espalier_router_replicas", shard=str(len(self._fleet.replicas) - 1)) == 0)
        whole = {"model": self._name, "queries": [self._queries[0].body()], "m": M, "min_coverage": 1.0}
        figures["status_with_min_coverage_1"] = each_once(self._address, [request_bytes("/retrieve", whole)], 1)[0].status
        figures["replicas_metric"] = 0
        figures["replicas_ready_s"], figures["back_s"] = self._back(last, self._is_whole)
        log(f"shard is back after {figures['back_s']} s, of which its start took {figures['replicas_ready_s']} s")
        return figures

    def _back(self, killed: Sequence[Process], condition: Callable[[], bool]) -> tuple[float, float]:
        """Restart killed processes; seconds until they are ready, and until the router uses them again."""
        began = time.monotonic()
        started(killed)
        ready_s = time.monotonic() - began
        self._wait(condition)
        return round(ready_s, 2), round(time.monotonic() - began, 2)

    def _rollouts(self, count: int) -> dict[str, Any]:
        """New versions under load: none fails, none is mixed, none goes back."""
        shards = len(self._fleet.replicas)
        before = self._fleet.router.metric("espalier_router_mixed_total")
        seconds: list[float] = []
        answers: list[SeenAnswer] = []
        failed = 0
        for number in range(count):
            version = number + 2
            running_load = self._load(self._plan.rollout_s)
            time.sleep(0.5)
            began = time.monotonic()
            next_version(self._models, self._name, shards, version, bundle_first=number % 2 == 1)
            self._wait(partial(self._serves, version))
            seconds.append(time.monotonic() - began)
            load = Load(running_load.result())
            failed += load.figures()["failed"]
            answers += load.seen
            log(f"version {version} serves after {seconds[-1]:.1f} s; {json.dumps(load.figures()['statuses'])}")
        answers_mixed = sum(is_mixed(answer, self._first, len(self._requests)) for answer in answers)
        return {
            "rollouts": count,
            "failed": failed,
            "answers": len(answers),
            "versions": sorted({answer.version for answer in answers}),
            "not_covered": sum(answer.items < 1 for answer in answers),
            "mixed": answers_mixed,
            "refused_as_mixed": self._fleet.router.metric("espalier_router_mixed_total") - before,
            "went_back": went_back(answers),
            "seconds_p50": round(float(np.median(seconds)), 2),
            "seconds_max": round(max(seconds), 2),
        }

    # -- what the fleet says --------------------------------------------------------------------------------------------

    def _now(self) -> list[SeenAnswer]:
        """One answer, or none."""
        return Load(each_once(self._address, self._requests[:1], 1, keep=summarised)).seen

    def _is_whole(self) -> bool:
        return any(answer.items == 1 for answer in self._now())

    def _serves(self, version: int) -> bool:
        return any(answer.version == version for answer in self._now())

    def _buckets(self, name: str) -> list[tuple[float, float]]:
        """The upper bounds of a histogram of the router, in seconds, and how many were at most so long."""
        buckets = sorted((float(labels["le"]), count) for labels, count in samples(self._fleet.router.port, f"{name}_bucket"))
        return buckets[:-1]  # the last bound is infinite

    def _wait(self, condition: Callable[[], bool]) -> None:
        wait_for(condition, "the fleet did not reach the expected state", WAIT_S)


def quantile_ms(before: Sequence[tuple[float, float]], after: Sequence[tuple[float, float]], quantile: float) -> float:
    """A quantile of a histogram's counts between two readings, in milliseconds, interpolated between the bounds."""
    lower_bound_s, lower_count = 0.0, 0.0
    counts = [(bound, count - earlier) for (bound, count), (_, earlier) in zip(after, before, strict=True)]
    target_count = quantile * counts[-1][1]
    for bound, count in counts:
        if count >= target_count:
            return round(1e3 * (lower_bound_s + (bound - lower_bound_s) * (target_count - lower_count) / max(count - lower_count, 1.0)), 3)
        lower_bound_s, lower_count = bound, count
    raise RuntimeError("nothing was counted")


if __name__ == "__main__":
    main()
