"""One key floods the service: how much does another key's ordinary load suffer?

    python -m benchmarks.key_attack --json FILE [--model models/debian-depends/1] [--seconds 20] [--rounds 3] [--attacks NAME,…]

The service has a file of two keys: `shop` without limits, and `flood` with 20 requests and .05 engine seconds a second. The shop sends
requests at random times, at a quarter of one worker's capacity. Meanwhile, from another process, the other key

    requests     sends ordinary requests over 64 connections, as fast as it is answered
    expensive    asks for m and beams at the model's limit, likewise
    connections  holds a thousand connections open and asks over each in turn

Rounds without and with each attack take turns. Goodput is the share of the shop's requests that are answered 200. Client and service share
the machine, so the attacker's process slows the shop, too; `unlimited` and `unlimited-expensive` are the first two attacks without limits.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report_file import SAMPLE, command_line, write_report
from benchmarks.service.serving import UNREFUSED, copied, retrievals, serving, settings
from espalier.bundle import Bundle
from loadtest.loops import closed_loop, open_loop, percentiles_ms, statuses
from loadtest.queries import held_out

SHOP, FLOOD = "shop-key-0123456789", "flood-key-0123456789"
SHARE, M, CLIENTS, CONNECTIONS = 0.25, 50, 64, 1000
KEYS = f"""
[[keys]]
name = "shop"
key = "{SHOP}"
role = "retrieve"

[[keys]]
name = "flood"
key = "{FLOOD}"
role = "retrieve"
"""
LIMITS = "rate = 20\ncost = 0.05\n"
ATTACKS = ("requests", "expensive", "connections", "unlimited", "unlimited-expensive")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, default=SAMPLE, help="a bundle (default: the sample)")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a measurement (default %(default)g)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements without and with each attack, in turn (default %(default)s)")
    parser.add_argument("--attacks", default=",".join(ATTACKS), help="some of them, comma-separated (default: all)")
    options = parser.parse_args()
    rows = [measured(options.model, attack, options.seconds, options.rounds) for attack in options.attacks.split(",")]
    print(json.dumps(rows, indent=1))
    write_report(options.json, {"rows": rows})


def measured(model: Path, attack: str, seconds: float, rounds: int) -> dict[str, Any]:
    """Medians over rounds of the shop's p99 and goodput, without the attack and beside it."""
    bundle = Bundle.open(model, verify=False)
    queries, search = held_out(bundle)[:500], bundle.manifest.search
    with copied(model) as (folder, name), tempfile.TemporaryDirectory() as secrets:
        file = Path(secrets) / "keys.toml"
        file.write_text(KEYS + ("" if attack.startswith("unlimited") else LIMITS))
        environment = settings(folder, keys_file=file, log_level="ERROR")
        with serving(["service"], environment) as port, ProcessPoolExecutor(1, get_context("spawn")) as pool:
            address = "127.0.0.1", port
            shop_requests = retrievals(queries, {"model": name, "m": M}, {"Authorization": f"Bearer {SHOP}"})
            flood_limits = {"m": search.max_m, "beam_size": search.max_beam_size} if attack.endswith("expensive") else {"m": M}
            flood_requests = retrievals(queries, {"model": name} | flood_limits, {"Authorization": f"Bearer {FLOOD}"})
            clients = CONNECTIONS if attack == "connections" else CLIENTS
            closed_loop(address, shop_requests, UNREFUSED, 2)  # warm
            capacity = sum(response.status == 200 for response in closed_loop(address, shop_requests, UNREFUSED, 4)) / 4
            quiet, busy, flood_statuses = list[dict[str, Any]](), list[dict[str, Any]](), list[dict[str, int]]()
            for number in range(rounds):
                quiet.append(shop_figures(address, shop_requests, SHARE * capacity, seconds, number))
                attacking = pool.submit(flood_answers, address, flood_requests, clients, seconds + 1)
                time.sleep(0.5)
                busy.append(shop_figures(address, shop_requests, SHARE * capacity, seconds, number))
                flood_statuses.append(attacking.result())
                print(f"{attack}, round {number + 1}: p99 {busy[-1]['p99_ms']:.1f} ms, without {quiet[-1]['p99_ms']:.1f}", flush=True)
    medians = {
        f"{figure}{suffix}": float(np.median([response[figure] for response in shop_rows]))
        for figure in ("p50_ms", "p99_ms", "goodput")
        for suffix, shop_rows in (("", busy), ("_without", quiet))
    }
    ratio = medians["p99_ms"] / medians["p99_ms_without"]
    return {"attack": attack, "offered_per_s": SHARE * capacity, **medians, "p99_ratio": ratio, "flood_statuses": flood_statuses}


def shop_figures(address: tuple[str, int], requests: Sequence[bytes], per_s: float, seconds: float, seed: int) -> dict[str, Any]:
    """Figures of the shop's requests at random times."""
    answered = open_loop(address, requests, per_s, seconds, seed, keep=lambda body: b"")
    good = [response for response in answered if response.status == 200]
    p50_ms, p99_ms = percentiles_ms(good)
    return {"p50_ms": p50_ms, "p99_ms": p99_ms, "goodput": len(good) / len(answered)}


def flood_answers(address: tuple[str, int], requests: Sequence[bytes], clients: int, seconds: float) -> dict[str, int]:
    return statuses(closed_loop(address, requests, clients, seconds, keep=lambda body: b""))


if __name__ == "__main__":
    main()
