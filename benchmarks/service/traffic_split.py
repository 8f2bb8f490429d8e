"""A trial of a version on 5 % of the users under load: is the share right, does a user switch versions, does a request fail?

    python -m benchmarks.traffic_split --json FILE [--model models/debian-depends/1] [--minutes 10] [--share 0.05] [--shadow 0.05]

Two workers serve two equal versions. Users, each with an id, send requests at random times, at a quarter of the service's capacity; the
client shares the machine. The trial begins and ends under this load: `began_ms` and `ended_ms` are the durations of the two calls, and
`after` counts the versions that answered after the end.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report_file import SAMPLE, command_line, write_report
from benchmarks.service.serving import JSON, UNREFUSED, request, serving, settings
from benchmarks.service.shard_fleet import copied_version
from espalier.bundle import Bundle
from loadtest.loops import Answered, closed_loop, open_loop, percentiles_ms, request_bytes
from loadtest.queries import held_out
from service.retrieval.trial import hash_fraction

WORKERS, M, USERS, LOAD_SHARE, TURN_S = 2, 50, 4000, 0.25, 10.0
KEY = "traffic-split-admin-key"
ADMIN = JSON | {"Authorization": f"Bearer {KEY}"}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, default=SAMPLE, help="a bundle (default: the sample)")
    parser.add_argument("--minutes", type=float, default=10.0, help="length of the trial (default %(default)g)")
    parser.add_argument("--share", type=float, default=0.05, help="share of the users (default %(default)g)")
    parser.add_argument("--shadow", type=float, default=0.05, help="share of the others that is answered twice (default %(default)g)")
    options = parser.parse_args()
    report = measured(options.model, options.minutes * 60, options.share, options.shadow)
    print(json.dumps(report, indent=1))
    write_report(options.json, report)


@contextmanager
def two_versions(model: Path) -> Iterator[tuple[Path, str]]:
    """A models folder with a bundle as versions 1 and 2, of which the first is the default; and the model's name."""
    name = Bundle.open(model, verify=False).manifest.name
    with tempfile.TemporaryDirectory() as folder:
        for version in (1, 2):
            copied_version(model, Path(folder) / name / str(version), {"version": version}, shutil.copy2)
        (Path(folder) / name / "serving.json").write_text(json.dumps({"generation": 1, "versions": [1, 2], "default": 1}))
        yield Path(folder), name


def measured(model: Path, seconds: float, share: float, shadow: float) -> dict[str, Any]:
    queries = held_out(Bundle.open(model, verify=False))
    with two_versions(model) as (folder, name):
        environment = settings(folder, workers=WORKERS, admin_keys=KEY, log_level="ERROR")
        with serving(["service"], environment) as port, ThreadPoolExecutor(1) as pool:
            address = "127.0.0.1", port
            users = [f"user-{number}" for number in range(USERS)]
            requests = [
                request_bytes("/retrieve", {"model": name, "queries": [queries[i % len(queries)].body()], "m": M}, {"Espalier-User": user})
                for i, user in enumerate(users)
            ]
            closed_loop(address, requests, UNREFUSED, 2, keep=version_of)  # warm
            per_s = LOAD_SHARE * sum(reply.status == 200 for reply in closed_loop(address, requests, UNREFUSED, 5, keep=version_of)) / 5

            def load_answers(length_s: float, seed: int) -> list[Answered]:
                return open_loop(address, requests, per_s, length_s, seed, keep=version_of)

            def change_under_load(method: str, body: dict[str, Any] | None) -> tuple[list[Answered], float, float]:
                """Responses around one change; when the change was done, and its milliseconds."""
                running = pool.submit(load_answers, TURN_S, len(method))
                time.sleep(TURN_S / 2)
                began = time.perf_counter()
                status, answer = request(port, method, f"/models/{name}/candidate", body, ADMIN)
                done = time.perf_counter()
                if status != 200:
                    raise RuntimeError(f"{method} of the candidate was answered {status}: {answer!r}")
                return running.result(), done, (done - began) * 1e3

            begin_responses, _, began_ms = change_under_load("PUT", {"version": 2, "share": share, "shadow": shadow})
            trial_responses = load_answers(seconds, 0)
            _, figures = request(port, "GET", f"/models/{name}/candidate", None, ADMIN)
            last_replies, over_s, ended_ms = change_under_load("DELETE", None)
    versions_of_user: dict[int, set[bytes]] = {}
    for reply in trial_responses:
        if reply.status != 200:
            continue
        versions_of_user.setdefault(reply.number % USERS, set()).add(reply.body)
    version_counts = Counter(reply.body for reply in trial_responses)
    last_counts = Counter(reply.body for reply in last_replies if reply.began > over_s)
    p50_ms, p99_ms = percentiles_ms([reply for reply in trial_responses if reply.status == 200])
    return {
        "model": name,
        "requests": len(trial_responses),
        "per_s": per_s,
        "users": len(versions_of_user),
        "share": share,
        "share_of_users": float(np.mean([versions == {b"2"} for versions in versions_of_user.values()])),
        "share_of_requests": version_counts[b"2"] / len(trial_responses),
        "users_of_both": sum(len(versions) > 1 for versions in versions_of_user.values()),
        "users_elsewhere": sum(
            versions != {b"2" if hash_fraction(name, 2, users[i].encode()) < share else b"1"} for i, versions in versions_of_user.items()
        ),
        "failed": sum(reply.status != 200 for reply in (*begin_responses, *trial_responses, *last_replies)),
        "p50_ms": p50_ms,
        "p99_ms": p99_ms,
        "began_ms": began_ms,
        "ended_ms": ended_ms,
        "after": {version.decode(): count for version, count in last_counts.items()},
        "figures": figures,
    }


def version_of(body: bytes) -> bytes:
    return body.partition(b'"version":')[2].partition(b",")[0]


if __name__ == "__main__":
    main()
