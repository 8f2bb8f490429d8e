"""What an attack does to a service: its memory, descriptors and answers of /livez meanwhile, and the rule by which it has held.

A row is `ok` if all of this holds:

- the service did what the attack expects (`told` says what it did), and lives;
- its processes took at most 1.5 times the memory that they had before, or that and what the attack's own bound allows;
- SETTLE_S after the attack at the latest they had at most 1.1 times the memory from before, and no more than LEFT descriptors more;
- every /livez was answered within 100 ms: 200, or, where the attack takes all connections, 503 on a new one.

An attack is stopped where the service takes GUARD_MB, or after ATTACK_S.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import TypedDict

from tests.hostile.attacked import Attacked
from tests.hostile.attacks import Attack, Seen, Target
from tests.hostile.attacks.wire import LIVEZ, post
from tests.hostile.livez import TIMEOUT_S, Liveness, watched

GUARD_MB = 3000.0
"""An attack is stopped here; at twice as much the service is killed."""
ATTACK_S = 30.0
SETTLE_S = 10.0
LEFT = 8
LIVEZ_MS = 100.0
PEAK, AFTER = 1.5, 1.1


class Row(TypedDict):
    """One attack. `failed`: which parts of the rule do not hold."""

    attack: str
    livez_ms_max: float
    rss_mb_before: float
    rss_mb_peak: float
    rss_mb_after: float
    ok: bool
    rss_mb_bound: float
    livez_ms_p99: float
    livez_asked: int
    livez_failed: int
    livez_refused: int
    descriptors_before: int
    descriptors_after: int
    log_kb: float
    seconds: float
    died: bool
    stopped: str
    failed: list[str]
    told: str


def line(row: Row) -> str:
    figures = f"{row['livez_ms_max']:>13.1f}{row['rss_mb_before']:>11.0f}{row['rss_mb_peak']:>9.0f}{row['rss_mb_after']:>10.0f}"
    verdict = "ok" if row["ok"] else f"NOT OK ({', '.join(row['failed'])})"
    return f"{row['attack']:<26}{figures}{row['seconds']:>6.0f}  {verdict}: {row['told']}"


def measure(attack: Attack, service: Attacked, target: Target) -> Row:
    """Attack a service and see what it takes."""
    warm_up(target)
    before = settled(service, lambda: False, 1.0)
    fds = service.descriptors()
    service.forget_peak()
    log_kb = service.log_kb()
    seen: list[Seen] = []
    began = time.monotonic()
    with watched(service.port) as liveness:
        peak, stopped = _attack(attack, service, target, seen)
        target.close()
        after = settled(service, lambda: service.rss_mb() <= AFTER * before and service.descriptors() <= fds + LEFT, SETTLE_S)
        left = service.descriptors()
    died = not service.is_alive()
    unanswered = Liveness(TIMEOUT_S * 1e3, TIMEOUT_S * 1e3, 1, 1, 0)
    found = unanswered if died or not liveness else liveness[0]
    outcome = seen[0] if seen else Seen(False, "the attack did not end")
    row: Row = {
        "attack": attack.name,
        "livez_ms_max": round(found.max_ms, 1),
        "rss_mb_before": round(before, 1),
        "rss_mb_peak": round(max(peak, service.peak_mb()), 1),
        "rss_mb_after": round(after, 1),
        "ok": False,
        "rss_mb_bound": round(before + (attack.bound_mb or 0) if attack.bound_mb is not None else PEAK * before, 1),
        "livez_ms_p99": round(found.p99_ms, 1),
        "livez_asked": found.requests,
        "livez_failed": found.failed,
        "livez_refused": found.refused,
        "descriptors_before": fds,
        "descriptors_after": left,
        "log_kb": round(service.log_kb() - log_kb, 1),
        "seconds": round(time.monotonic() - began, 1),
        "died": died,
        "stopped": stopped,
        "failed": [],
        "told": outcome.told + (f"; stopped: {stopped}" if stopped else "") + ("; the service died" if died else ""),
    }
    row["failed"] = judge(row, outcome.ok, attack)
    row["ok"] = not row["failed"]
    return row


def judge(row: Row, expected: bool, attack: Attack) -> list[str]:
    """The parts of the rule that do not hold."""
    after = row["rss_mb_before"] + attack.bound_mb if attack.bound_mb is not None else AFTER * row["rss_mb_before"]
    rule = {
        "died": row["died"],
        "expected": not expected or bool(row["stopped"]),
        "peak": row["rss_mb_peak"] > row["rss_mb_bound"],
        "after": row["rss_mb_after"] > after,
        "descriptors": row["descriptors_after"] > row["descriptors_before"] + LEFT,
        "livez": row["livez_ms_max"] > LIVEZ_MS,
        "livez unanswered": row["livez_failed"] > 0 or (row["livez_refused"] > 0 and not attack.fills),
    }
    return [name for name, broken in rule.items() if broken]


def warm_up(target: Target) -> None:
    """What a service meets on an ordinary day: small retrievals and a larger one, its metrics, several connections."""
    wires = target.connect_many(8)
    for i in range(60):
        wires[i % len(wires)].ask(post(target.retrieval(1 + i % 4, 10 + i, target.fields)))
    for path in (b"livez", b"metrics", b"models"):
        wires[0].ask(LIVEZ.replace(b"livez", path))
    wires[1].ask(post(target.retrieval(16, 500, target.fields)))
    target.close()


def settled(service: Attacked, done: Callable[[], bool], within_s: float) -> float:
    """The service's memory once `done`, or when the time is over."""
    give_up = time.monotonic() + within_s
    while time.monotonic() < give_up and not done() and service.is_alive():
        time.sleep(0.05)
    return service.rss_mb()


def _attack(attack: Attack, service: Attacked, target: Target, seen: list[Seen]) -> tuple[float, str]:
    """Run an attack beside a watch on the service: the most memory that was seen, and why the attack was stopped, or nothing."""

    def work() -> None:
        with contextlib.suppress(OSError):  # what a service needs goes before what attacks it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        try:
            seen.append(attack.run(target))
        except Exception as error:
            seen.append(Seen(False, f"{type(error).__name__}: {error}"))

    attacker = threading.Thread(target=work, name="attack", daemon=True)
    attacker.start()
    peak, stopped, began = 0.0, "", time.monotonic()
    while attacker.is_alive():
        attacker.join(0.02)
        rss_mb, lasted_s = service.rss_mb(), time.monotonic() - began
        peak = max(peak, rss_mb)
        if not stopped and (rss_mb > GUARD_MB or lasted_s > ATTACK_S or not service.is_alive()):
            stopped = f"{rss_mb:.0f} MB" if rss_mb > GUARD_MB else "the service died" if not service.is_alive() else f"{lasted_s:.0f} s"
            target.stop.set()
        if rss_mb > 2 * GUARD_MB:
            service.kill()
        if stopped and lasted_s > ATTACK_S + SETTLE_S + 10:
            break
    return peak, stopped
