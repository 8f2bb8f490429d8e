"""The cost of a deadline: share of answered requests, recall and p99 by `timeout_ms`, with and without permission for a smaller beam.

    python -m benchmarks.deadlines --json FILE [--model models/debian-depends/1] [--seconds 8] [--rounds 3] [--beam 400]

One worker gets held-out queries at random times, for 50 items with a wide beam, at 70 % of its capacity (`quiet`) and at 150 % (`full`).
Each deadline is measured with `partial` "allow" and "refuse" in turn. Recall is that of the answers; in `recall_of_all`, a request without
an answer counts 0. Client and service share the machine.

A row is {"load", "timeout_ms", "partial", "answered", "degraded", "recall", "recall_of_all", "p50_ms", "p99_ms", "statuses"}, means of the
rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks.report_file import SAMPLE, command_line, print_row, write_report
from benchmarks.service.serving import UNREFUSED, copied, retrievals, serving, settings
from espalier.bundle import Bundle
from loadtest.cell import recall_at_m
from loadtest.loops import Answered, closed_loop, open_loop, percentiles_ms
from loadtest.queries import Query, held_out

M, DEADLINES_MS = 50, (5.0, 10.0, 20.0, 50.0, 100.0)
LOADS = {"quiet": 0.7, "full": 1.5}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, default=SAMPLE, help="a bundle (default: the sample)")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of a measurement (default %(default)g)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each kind, in turn (default %(default)s)")
    parser.add_argument("--beam", type=int, default=400, help="beam size (default %(default)s)")
    options = parser.parse_args()
    rows = measured(options.model, options.seconds, options.rounds, options.beam)
    write_report(options.json, {"beam_size": options.beam, "m": M, "rows": rows})


def measured(model: Path, seconds: float, rounds: int, beam_size: int) -> list[dict[str, Any]]:
    queries = [query for query in held_out(Bundle.open(model, verify=False)) if query.relevant]
    rows: list[dict[str, Any]] = []
    with copied(model) as (folder, name), serving(["service"], settings(folder, log_level="ERROR")) as port:
        address, body = ("127.0.0.1", port), {"model": name, "m": M, "beam_size": beam_size}
        usual_requests = retrievals(queries, body)
        closed_loop(address, usual_requests, UNREFUSED, 2)  # warm
        capacity = sum(run.status == 200 for run in closed_loop(address, usual_requests, UNREFUSED, seconds)) / seconds
        for load, share in LOADS.items():
            for timeout_ms in DEADLINES_MS:
                requests_of_policy = {
                    policy: retrievals(queries, body | {"timeout_ms": timeout_ms, "partial": policy}) for policy in ("allow", "refuse")
                }
                by_policy: dict[str, list[dict[str, Any]]] = {policy: [] for policy in requests_of_policy}
                for number in range(rounds):
                    for policy, requests in requests_of_policy.items():
                        by_policy[policy].append(figures(open_loop(address, requests, share * capacity, seconds, number), queries))
                for policy, runs in by_policy.items():
                    means = {figure: float(np.mean([run[figure] for run in runs])) for figure in runs[0] if figure != "statuses"}
                    statuses = dict(sum((run["statuses"] for run in runs), Counter[str]()))
                    rows.append({"load": load, "timeout_ms": timeout_ms, "partial": policy, **means, "statuses": statuses})
                    print_row(rows[-1])
    return rows


def figures(answered: Sequence[Answered], queries: Sequence[Query]) -> dict[str, Any]:
    good = [response for response in answered if response.status == 200]
    results = [orjson.loads(response.body)["results"][0] for response in good]
    relevant = [queries[response.number % len(queries)].relevant for response in good]
    recall = recall_at_m([[item["id"] for item in result["items"]] for result in results], relevant, M) if good else 0.0
    p50_ms, p99_ms = percentiles_ms(good)
    share = len(good) / len(answered)
    return {
        "answered": share,
        "degraded": sum(result["degraded"] for result in results) / max(len(good), 1),
        "recall": recall,
        "recall_of_all": recall * share,
        "p50_ms": p50_ms,
        "p99_ms": p99_ms,
        "statuses": Counter(str(response.status) for response in answered),
    }


if __name__ == "__main__":
    main()
