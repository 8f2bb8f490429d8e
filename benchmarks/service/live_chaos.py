"""Kills workers of a service with live items while clients write: every acknowledged write must be there, once.

    python -m benchmarks.live_chaos --kills 200 --json live_chaos.json

Starts the service with two workers on a copy of the sample model. Each kill is a SIGKILL, of a worker or of the whole service. Each client
has ids of its own, and repeats an operation until it is answered, as a caller does. In the end every item is asked for by GET and by
retrieval, of all workers, and all answers and the feed are judged as in live_history.py. Also: the time to replay many operations into a
version, and what a full disk and a read-only folder do.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report_file import SAMPLE, command_line, write_report
from benchmarks.service.history_judge import TRANSIENT, WRITES, WRITTEN, Event, judged
from benchmarks.service.live_history import HEADERS, SECTION, Run, served_copy
from benchmarks.service.serving import request, wait_for
from espalier.bundle import Bundle
from espalier.live.journal import Journal
from espalier.live.operations import ItemBody, Operation
from espalier.live.rows import LiveRow, Placement
from service.live.replay import replay
from service.models.loading import EngineSource, load_version
from service.settings import Settings
from service.watch.metrics import Metrics

WORKERS, CLIENTS, ITEMS = 2, 4, 900
BETWEEN_S = 0.5
"""Mean time from the first answer after a kill to the next kill."""
WHOLE = 0.25
"""Share of kills that end the whole service."""
DISK = "40m"
ASKS = 4
"""Retrievals of an item while the disk is full, each over a new connection, so that both workers are asked."""
GROUP, EVENTS, LENGTH = 256, 5, 8
"""Of the replayed journal: operations of a transaction, histories of an item, items of a history."""


def chaos(folder: Path, kills: int, seed: int = 0) -> dict[str, Any]:
    """Kill a service `kills` times while clients write.

    repeated     writes that were not answered, or answered 429 or 503
    full         puts refused because their part of the tree had no room (507)
    lost, twice  violations by history_judge.py: `twice` counts unasked operations and shared sequences, `lost` the others
    found        share of items among the 50 best for a history that they were put with
    """
    run, rng, began, of_service = Run(folder, seed, WORKERS, ITEMS), random.Random(seed), time.perf_counter(), 0
    try:
        run.start()
        with ThreadPoolExecutor(CLIENTS + 1) as pool:
            jobs = [pool.submit(run.follower)]
            jobs += [pool.submit(_client, run, f"c{number}", run.items[number::CLIENTS]) for number in range(CLIENTS)]
            try:
                for _ in range(kills):
                    _wait_for_write(run)
                    time.sleep(rng.expovariate(1 / BETWEEN_S))
                    if rng.random() < WHOLE or not run.victim.kill_worker(rng):
                        of_service += 1
                        run.victim.kill()
                        run.start()
                _wait_for_write(run)
            finally:
                run.over.set()
        for job in jobs:
            job.result()
        run.agree(1)
        found_share = _found_by_evidence(run)
    finally:
        run.victim.kill()
    writes = [event for event in run.events if event.kind in WRITES]
    violations = judged(run.events, run.log, run.trained)
    twice = [violation for violation in violations if violation.rule in ("sequence", "unasked")]
    refused = [event for event in writes if 400 <= event.status < 500 and event.status not in (408, 429, 499)]
    return {
        "kills": kills,
        "of_service": of_service,
        "acknowledged": sum(event.is_acknowledged for event in writes),
        "repeated": sum(event.status in TRANSIENT for event in writes),
        "refused": len(refused),
        "full": sum(event.status == 507 for event in writes),
        "lost": len(violations) - len(twice),
        "twice": len(twice),
        "found": round(found_share, 3),
        "seconds": round(time.perf_counter() - began, 1),
        "notes": [*map(str, violations[:20]), *map(str, refused[:5])],
    }


def _client(run: Run, name: str, items: Sequence[str]) -> None:
    """Put and delete some items until the run is over."""
    rng = random.Random(name)
    while not run.over.is_set():
        item = rng.choice(items)
        is_there = run.tags[item] is not None
        write = Event("delete", item, 0, 0, 0, name)
        if not is_there or rng.random() < 0.9:
            body = _body(run, rng, f"t{next(run.numbers)}", not is_there or rng.random() < 0.5)
            write = Event("put", item, 0, 0, 0, name, body=body)
        status = 0
        while status in TRANSIENT and not run.over.is_set():
            status = run.write(write)


def _body(run: Run, rng: random.Random, title: str, has_events: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"fields": {"title": title, "section": SECTION}}
    if has_events:
        history = rng.choice(run.histories)
        body["events"] = [rng.sample(history, rng.randint(1, len(history))) for _ in range(rng.randint(1, 4))]
    return body


def _wait_for_write(run: Run) -> None:
    """Wait for the next answered write; restart the service if it has ended."""
    before = run.highest

    def is_answered() -> bool:
        if not run.victim.is_alive():
            run.start()
        return run.highest > before

    wait_for(is_answered, "no operation was answered")


def _found_by_evidence(run: Run, most: int = 200) -> float:
    """Share of items among the 50 best for the first history of their last put."""
    last = {event.id: event for event in run.events if event.kind in WRITES and event.status in WRITTEN}
    evidence = {event.id: event.body["events"][0] for event in last.values() if "events" in event.body}
    hits = 0
    for item, history in (queried_items := list(evidence.items())[:most]):
        status, answer = request(run.victim.port, "POST", "/retrieve", {"queries": [{"history": history}], "m": 50})
        hits += status == 200 and any(entry["id"] == item for entry in answer["results"][0]["items"])
    return hits / max(len(queried_items), 1)


# -- no room, no right to write ---------------------------------------------------------------------------------------------


@contextmanager
def disk(folder: Path, size: str = DISK) -> Iterator[Path]:
    """A file system of the given size. Needs the right to mount."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _remount(folder: Path, how: str) -> None:
    """Make a file system read-only (ro) or writable (rw), once no process writes to it."""
    command = ["mount", "-o", f"remount,{how}", str(folder)]
    wait_for(lambda: subprocess.run(command, capture_output=True).returncode == 0, f"{folder} cannot be mounted {how}")


def without_room(folder: Path, read_only: bool) -> dict[str, Any]:
    """A service's answers while its models folder is full or read-only, and afterwards.

    first       status of a put before
    writes      statuses of puts meanwhile
    retrievals  statuses of retrievals meanwhile
    kept        whether the first item is found meanwhile
    after       status of a put when there is room again, and whether its item is found
    """
    name = SAMPLE.parent.name
    with disk(folder / ("read-only" if read_only else "full")) as mounted:
        _, victim = served_copy(mounted, WORKERS, folder / "service.log")
        filler = mounted / "filler"

        def put(item: str) -> int:
            body = {"fields": {"title": item, "section": SECTION}, "events": [history]}
            return request(victim.port, "PUT", f"/models/{name}/items/{item}", body, HEADERS)[0]

        def retrieved(**more: Any) -> tuple[int, Any]:
            return request(victim.port, "POST", "/retrieve", {"queries": [{"history": []}], "m": 5} | more)

        def is_found(item: str) -> bool:
            status, answer = retrieved(filter={"title": [item]})
            return status == 200 and [entry["id"] for entry in answer["results"][0]["items"]] == [item]

        def start() -> None:
            victim.start()
            victim.wait_until_ready()

        history = Bundle.open(SAMPLE, verify=False).heldout().column("history")[0].as_py()[-LENGTH:]
        try:
            start()
            first = put("first")
            if read_only:  # a folder with files that are written to cannot be made read-only
                victim.kill()
                _remount(mounted, "ro")
                start()
            else:
                with suppress(OSError), filler.open("wb", buffering=0) as stream:
                    while True:
                        stream.write(b"\0" * 4096)
            writes = {put(f"meanwhile-{number}") for number in range(100)}
            first_is_found = all(is_found("first") for _ in range(ASKS))
            retrievals = {retrieved()[0] for _ in range(ASKS)}
            if read_only:
                _remount(mounted, "rw")
            else:
                filler.unlink()
            after = put("last"), all(is_found("last") for _ in range(ASKS))
            return {"first": first, "writes": sorted(writes), "retrievals": sorted(retrievals), "kept": first_is_found, "after": after}
        finally:
            victim.kill()


# -- a replay ---------------------------------------------------------------------------------------------------------------


def filled(file: Path, bundle: Bundle, operations: int) -> Journal:
    """A journal of puts of different items, each with five histories, placed under a random parent with a random row."""
    journal, rng, numbers = Journal(file), random.Random(0), np.random.default_rng(0)
    tree, width, version = bundle.tree, bundle.graph_scorer.node_dim, bundle.manifest.fingerprint
    parents = tree.level(tree.height - 1)
    slots = {parent: int(tree.first_child[parent + 1] - tree.first_child[parent]) for parent in parents}
    ids = bundle.items.ids_of(np.arange(min(len(bundle.items), 5000)))
    for begin in range(0, operations, GROUP):
        with journal.writing() as transaction:
            for number in range(begin, min(begin + GROUP, operations)):
                body = ItemBody({"title": f"item {number}"}, events=tuple(rng.sample(ids, LENGTH) for _ in range(EVENTS)))
                stored = transaction.append(Operation(0, f"new-{number}", "put", body))
                parent = rng.choice(parents)
                row = LiveRow(numbers.normal(size=width).astype(np.float32))
                transaction.store_placements(version, {stored.sequence: [Placement(0, parent, slots[parent], row)]})
                slots[parent] += 1
    return journal


def replay_seconds(folder: Path, operations: int) -> dict[str, float]:
    """Seconds (wall and processor) to replay a journal into a newly opened version, and to check the file before."""
    name = SAMPLE.parent.name
    shutil.copytree(SAMPLE, folder / name / SAMPLE.name)
    settings = Settings(models=folder, device="cpu")
    loaded = load_version(settings, Metrics(), EngineSource(), name, int(SAMPLE.name), lambda _: None)
    journal = filled(folder / name / "live.db", loaded.bundle, operations)
    journal.close()
    began = time.perf_counter()
    journal.check()
    checked, used = time.perf_counter(), time.process_time()
    replay(loaded.live, journal)
    ended, cpu_s = time.perf_counter(), time.process_time() - used
    state = loaded.live.state
    if state.live_items != operations or loaded.live.sequence != operations:
        raise RuntimeError("the replay did not apply every operation")
    size_mb = journal.file.stat().st_size / 1e6
    journal.close()
    return {"operations": operations, "check_s": checked - began, "replay_s": ended - checked, "cpu_s": cpu_s, "journal_mb": size_mb}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--operations", type=int, default=100_000, help="operations of the journal that is replayed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for subfolder in ("chaos", "replay"):
            (folder / subfolder).mkdir()
        report = chaos(folder / "chaos", options.kills, options.seed)
        write_report(options.json, report)
        report["replay"] = {key: round(value, 2) for key, value in replay_seconds(folder / "replay", options.operations).items()}
        for failure, read_only in (("disk_full", False), ("read_only", True)):
            try:
                report[failure] = without_room(folder, read_only)
            except subprocess.CalledProcessError as error:
                report[failure] = f"not tried: nothing may be mounted here ({error.stderr!r})"
    print(json.dumps(report, indent=2))
    write_report(options.json, report)


if __name__ == "__main__":
    main()
