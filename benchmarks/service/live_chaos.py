"""A service with live items whose workers are killed at random while clients write: what was acknowledged must be there, once.

    python -m benchmarks.live_chaos --kills 200 --json live_chaos.json

Starts the service with two workers on a copy of the sample model. Each kill is a SIGKILL, of a worker or of the whole service. Then every
item is asked for by GET and by retrieval, of all workers, and the journal is compared with what was acknowledged. Also: the time to replay
many operations into a version, and what a full disk and a read-only folder do. Knows processes. live_clients.py knows what is asked.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.service.live_clients import KEY, Client, found_by_evidence, judge, request
from benchmarks.service.live_replay import replay_seconds
from benchmarks.service.serving import READY_S, Process
from espalier.bundle import Bundle, find_versions

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "models" / "debian-depends"
WORKERS = 2
CLIENTS = 4
BETWEEN_S = 0.5
"""Mean time from the first answer after a kill to the next kill."""
WHOLE = 0.25
"""Share of kills that end the whole service."""
DISK = "40m"
ASKS = 4
"""How often each item is asked for in the end, on connections of its own, so that both workers are asked."""


class Victim(Process):
    """A service that is killed and started again, and whose workers are killed and stopped."""

    def __init__(self, models: Path, log: Path, workers: int = WORKERS, settings: Mapping[str, str] | None = None) -> None:
        usual = {"ESPALIER_MODELS": str(models), "ESPALIER_DEVICE": "cpu", "ESPALIER_WRITE_KEYS": KEY}
        super().__init__(["service", "--workers", str(workers)], usual | dict(settings or {}), log)

    def start(self) -> None:
        """Start, and wait until it answers."""
        super().start()
        self.wait_until_ready()

    def workers(self) -> list[int]:
        """Its workers that can be killed."""
        with suppress(OSError):
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
        return []

    def kill_worker(self, rng: random.Random) -> bool:
        workers = self.workers()
        if workers:
            with suppress(ProcessLookupError):
                os.kill(rng.choice(workers), signal.SIGKILL)
        return bool(workers)

    def stop_worker(self, rng: random.Random, stopped_s: float) -> None:
        """Let a worker stand still for a time."""
        worker = rng.choice(self.workers())
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGSTOP)
            try:
                time.sleep(stopped_s)
            finally:
                os.kill(worker, signal.SIGCONT)


@dataclass(frozen=True)
class Chaos:
    """See the module; durations in s.

    full   puts for which there was no room where they belong (507)
    found  share of items that are among 50 for a history that they were put with
    """

    kills: int
    of_service: int
    acknowledged: int
    repeated: int
    refused: int
    full: int
    lost: int
    twice: int
    found: float
    seconds: float
    notes: list[str]


def chaos(folder: Path, kills: int, seed: int = 0, sample: Path = SAMPLE) -> Chaos:
    """Kill a service `kills` times while clients write."""
    models, rng, began = copied(sample, folder), random.Random(seed), time.perf_counter()
    victim, of_service = Victim(models, folder / "service.log"), 0
    histories = held_out(models / sample.name)
    clients = [Client(f"c{number}", victim.port, sample.name, histories) for number in range(CLIENTS)]
    threads = [threading.Thread(target=client.run, daemon=True) for client in clients]
    try:
        victim.start()
        for thread in threads:
            thread.start()
        for _ in range(kills):
            _wait_for_answers(victim, clients)
            time.sleep(rng.expovariate(1 / BETWEEN_S))
            if rng.random() < WHOLE or not victim.kill_worker(rng):
                of_service += 1
                victim.kill()
                victim.start()
        _wait_for_answers(victim, clients)
        for client in clients:
            client.stop()
        for thread in threads:
            thread.join()
        victim.wait_until_ready()
        _wait_for_workers(victim)
        found = judge(victim.port, sample.name, models / sample.name / "live.db", clients, ASKS)
        share = found_by_evidence(victim.port, models / sample.name / "live.db", clients[0].expected)
    finally:
        for client in clients:
            client.stop()
        victim.kill()
    refused = [text for client in clients for text in client.refused]
    return Chaos(
        kills=kills,
        of_service=of_service,
        acknowledged=found.acknowledged,
        repeated=sum(client.repeated for client in clients),
        refused=len(refused),
        full=sum(client.full for client in clients),
        lost=found.lost,
        twice=found.twice,
        found=round(share, 3),
        seconds=round(time.perf_counter() - began, 1),
        notes=found.notes + refused[:5],
    )


def copied(sample: Path, folder: Path) -> Path:
    """A models folder with a copy of a model."""
    shutil.copytree(sample, folder / "models" / sample.name)
    return folder / "models"


def held_out(model: Path) -> list[list[str]]:
    """Histories of the users that a model was evaluated on."""
    version = max(find_versions(model.parent)[model.name])
    bundle = Bundle.open(model / str(version), verify=False)
    length = bundle.manifest.query.length if bundle.manifest.query.kind == "history" else 0
    return [history for history in bundle.heldout().column("history").to_pylist() if 1 < len(history) <= length]


def _wait_for_answers(victim: Victim, clients: Sequence[Client]) -> None:
    """Until an operation was answered; starts the service again where it has given up."""
    before, give_up = sum(len(client.acknowledged) for client in clients), time.monotonic() + READY_S
    while sum(len(client.acknowledged) for client in clients) == before:
        if not victim.is_alive():
            victim.start()
        if time.monotonic() > give_up:
            raise RuntimeError("no operation was answered")
        time.sleep(0.01)


def _wait_for_workers(victim: Victim) -> None:
    """Until every worker is there; a killed one is replaced after a second or more."""
    give_up = time.monotonic() + READY_S
    while len(victim.workers()) < WORKERS and time.monotonic() < give_up:
        time.sleep(0.1)
    time.sleep(5.0)


# -- no room, no right to write ---------------------------------------------------------------------------------------------


@contextmanager
def disk(folder: Path, size: str = DISK) -> Iterator[Path]:
    """A file system of that size. Needs the right to mount."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _remount(folder: Path, how: str) -> None:
    """Make a file system read-only (ro) or writable (rw), once nobody writes to it any more."""
    give_up = time.monotonic() + READY_S
    while subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], capture_output=True).returncode:
        if time.monotonic() > give_up:
            raise RuntimeError(f"{folder} cannot be mounted {how}")
        time.sleep(0.1)


def without_room(folder: Path, read_only: bool, sample: Path = SAMPLE) -> dict[str, Any]:
    """What a service answers while its models folder is full or read-only, and after.

    first       status of a put before
    writes      statuses of puts meanwhile
    retrievals  statuses of retrievals meanwhile
    kept        whether the first item is found meanwhile
    after       status of a put when there is room again, and whether its item is found
    """
    with disk(folder / ("read-only" if read_only else "full")) as mounted:
        models = copied(sample, mounted)
        victim = Victim(models, folder / "service.log")
        client = Client("c", victim.port, sample.name, held_out(models / sample.name))
        filler = mounted / "filler"

        def put(name: str) -> int:
            return request(victim.port, "PUT", f"/models/{sample.name}/items/{name}", client.body(random.Random(name), name, True))[0]

        def is_found(name: str) -> bool:
            query = {"queries": [{"history": []}], "m": 5, "filter": {"title": [name]}}
            status, answer = request(victim.port, "POST", "/retrieve", query)
            return status == 200 and [entry["id"] for entry in answer["results"][0]["items"]] == [name]

        try:
            victim.start()
            first = put("first")
            if read_only:  # a folder with files that are written to cannot be made read-only
                victim.kill()
                _remount(mounted, "ro")
                victim.start()
            else:
                with suppress(OSError), filler.open("wb", buffering=0) as stream:
                    while True:
                        stream.write(b"\0" * 4096)
            writes = {put(f"meanwhile-{number}") for number in range(100)}
            kept = all(is_found("first") for _ in range(ASKS))
            retrievals = {request(victim.port, "POST", "/retrieve", {"queries": [{"history": []}]})[0] for _ in range(ASKS)}
            if read_only:
                _remount(mounted, "rw")
            else:
                filler.unlink()
            after = put("last"), all(is_found("last") for _ in range(ASKS))
            return {"first": first, "writes": sorted(writes), "retrievals": sorted(retrievals), "kept": kept, "after": after}
        finally:
            victim.kill()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.live_chaos", description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--operations", type=int, default=100_000, help="operations of the journal that is replayed")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("chaos", "replay"):
            (folder / part).mkdir()
        found: dict[str, Any] = asdict(chaos(folder / "chaos", given.kills, given.seed))
        found["replay"] = {key: round(value, 2) for key, value in replay_seconds(folder / "replay", given.operations).items()}
        for what, read_only in (("disk_full", False), ("read_only", True)):
            try:
                found[what] = without_room(folder, read_only)
            except subprocess.CalledProcessError as error:
                found[what] = f"not tried: nothing may be mounted here ({error.stderr!r})"
    print(json.dumps(found, indent=2))
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
