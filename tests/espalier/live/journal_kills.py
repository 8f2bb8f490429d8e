"""A journal that several processes write, checkpoint and compact at once, each killed at random: what was acknowledged must be there, once.

SQLite 3.7.0 to 3.51.2 can lose commits when one connection checkpoints while another one commits. Every commit here is followed by a
checkpoint, and other processes do nothing but checkpoint. That bug is so rare that SQLite's authors could not provoke it, so what makes it
possible is counted as well: commits and checkpoints that nobody's lock guarded. `unlocked` leaves out the lock, to see them.
"""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from espalier.errors import JournalBusy, JournalError
from espalier.live import journal as journal_module
from espalier.live import journal_file
from espalier.live.journal import Journal
from espalier.live.journal_upkeep import compact
from espalier.live.operations import ItemBody, Operation
from espalier.live.rows import LiveRow, Placement
from tests import ROOT

Role = Literal["write", "checkpoint", "compact"]
ROLES: tuple[Role, ...] = ("write", "write", "write", "checkpoint", "checkpoint", "compact")
GROUP = 4
"""Most operations of a commit."""
SHARED = 0.3
"""Share of operations on ids that others put as well."""
VERSION = 1
LIFE_S = 0.4
"""Mean time from a commit to the next kill."""
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Found:
    """What became of the acknowledged operations.

    lost     acknowledged and not in the journal, or not as they were, or without their placement
    twice    sequences that were acknowledged for two operations, and operations that the journal holds more than once
    damaged  what SQLite says of the file, empty where it is sound
    unguarded  commits and checkpoints that began while nobody held the lock
    """

    kills: int
    commits: int
    acknowledged: int
    lost: int
    twice: int
    damaged: str
    unguarded: int
    seconds: float


def run(folder: Path, kills: int, seed: int = 0, roles: tuple[Role, ...] = ROLES, unlocked: bool = False) -> Found:
    """Kill processes one after the other, each time a random one, and start it again; then look at the journal."""
    rng = random.Random(seed)
    file, began = folder / "live.db", time.perf_counter()
    processes = [_Process(file, role, f"p{number}", unlocked) for number, role in enumerate(roles)]
    try:
        for process in processes:
            process.start()
        for _ in range(kills):
            _wait_for_a_commit(processes)
            time.sleep(rng.expovariate(1 / LIFE_S))
            rng.choice(processes).restart()
    finally:
        for process in processes:
            process.kill()
    return judged(file, kills, [line for process in processes for line in process.lines], time.perf_counter() - began)


def _wait_for_a_commit(processes: Sequence[_Process]) -> None:
    """Until somebody commits, so that a slow machine does not kill processes that have just begun. Raises RuntimeError."""
    before, give_up = sum(len(process.lines) for process in processes), time.monotonic() + PATIENCE_S
    while sum(len(process.lines) for process in processes) == before:
        if time.monotonic() > give_up:
            raise RuntimeError(f"nobody committed within {PATIENCE_S:g} s")
        time.sleep(0.01)


class _Process:
    """One process that is started again after each kill, and the lines that it has written: a commit each."""

    def __init__(self, file: Path, role: Role, name: str, unlocked: bool) -> None:
        self._file, self._role, self._name, self._unlocked = file, role, name, unlocked
        self._lives = 0
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self.lines: list[str] = []

    def start(self) -> None:
        self._lives += 1
        what = [str(self._file), self._role, f"{self._name}-{self._lives}", str(int(self._unlocked))]
        command = [sys.executable, "-c", "import sys; from tests.espalier.live.journal_kills import work; work(*sys.argv[1:])", *what]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        stream = process.stdout
        if stream is None:
            raise RuntimeError("a process without output")
        self._process = process
        self._reader = threading.Thread(target=lambda: self.lines.extend(stream), daemon=True)
        self._reader.start()

    def kill(self) -> None:
        if self._process is not None and self._reader is not None:
            self._process.kill()
            self._process.wait()
            self._reader.join()
            if self._process.stdout is not None:
                self._process.stdout.close()

    def restart(self) -> None:
        self.kill()
        self.start()


def work(file: str, role: str, name: str, unlocked: str) -> None:
    """One process: commits, checkpoints or compacts until it is killed. Writes a line for each commit: its sequences and tokens."""
    open_writer = journal_file.open_writer
    if int(unlocked):
        vars(journal_module)["locked"] = lambda *_: nullcontext()
    vars(journal_module).update({"CHECKPOINT_BYTES": 1, "open_writer": lambda file: _watched(open_writer(file), file)})
    journal, rng, number = Journal(Path(file)), random.Random(name), 0
    while True:
        try:
            if role == "checkpoint":
                with journal.exclusive() as connection:
                    connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            elif role == "compact":
                compact(journal, lambda: {VERSION: 0}, keep_from=max(journal.last_sequence() - 2000, 1))
            else:
                tokens = [f"{name}-{number + extra}" for extra in range(rng.randint(1, GROUP))]
                number += len(tokens)
                print(json.dumps(_commit(journal, rng, tokens)), flush=True)
        except JournalBusy:
            continue
        if role != "write":
            time.sleep(rng.uniform(0, 0.002))


def _watched(connection: sqlite3.Connection, file: Path) -> sqlite3.Connection:
    """Write a line for each commit and checkpoint that begins while nobody holds the lock."""

    def watch(statement: str) -> None:
        if statement == "COMMIT" or "wal_checkpoint" in statement:
            with suppress(JournalBusy), journal_file.locked(file, 0):
                print("unguarded", flush=True)

    connection.set_trace_callback(watch)
    return connection


def _commit(journal: Journal, rng: random.Random, tokens: list[str]) -> list[tuple[int, str, str]]:
    """Put an item for each token. Returns (sequence, id, token). Some ids are put again and again, so that there is what to compact."""
    done = []
    with journal.writing() as transaction:
        for token in tokens:
            item = f"shared-{rng.randrange(50)}" if rng.random() < SHARED else token
            body = ItemBody({"token": token}, text="x" * rng.randint(0, 3000))
            done.append((transaction.append(Operation(0, item, "put", body)).sequence, item, token))
        row = LiveRow(np.ones(16, np.float32))
        transaction.store_placements(VERSION, {sequence: [Placement(0, 1, sequence, row)] for sequence, _, _ in done})
    return done


def judged(file: Path, kills: int, lines: list[str], seconds: float) -> Found:
    """Compare what was acknowledged with what the journal holds. A line that a kill cut off acknowledges nothing."""
    whole = [line for line in lines if line.endswith("]\n")]
    acknowledged = [(int(sequence), str(item), str(token)) for line in whole for sequence, item, token in json.loads(line)]
    held: dict[int, Operation] = {}
    placed: set[int] = set()
    last: dict[str, int] = {}
    damaged = ""
    try:
        journal = Journal.open(file)
        while page := journal.since(max(held, default=0), 1000):
            held |= {operation.sequence: operation for operation in page}
            last |= {operation.id: operation.sequence for operation in page}
            placed |= journal.placements(VERSION, [operation.sequence for operation in page]).keys()
        with journal.exclusive() as connection:
            wrong = [str(text) for (text,) in connection.execute("PRAGMA integrity_check(3)") if text != "ok"]
        latest = {item: operation.sequence for item, operation in journal.read([*last]).items()}
        damaged = "; ".join(wrong) or ("" if latest == last else "the table of latest operations is not that of the operations")
    except JournalError as error:
        damaged = str(error)

    def is_kept(sequence: int, item: str, token: str) -> bool:
        if sequence in held:
            return (held[sequence].id, (held[sequence].body.fields or {}).get("token")) == (item, token) and sequence in placed
        return last.get(item, 0) > sequence  # compacted away, for a later operation

    given = Counter(sequence for sequence, _, _ in acknowledged)
    tokens = Counter(str((operation.body.fields or {}).get("token")) for operation in held.values())
    return Found(
        kills,
        len(whole),
        len(acknowledged),
        lost=sum(not is_kept(*operation) for operation in acknowledged),
        twice=sum(count - 1 for counts in (given, tokens) for count in counts.values()),
        damaged=damaged,
        unguarded=lines.count("unguarded\n"),
        seconds=round(seconds, 1),
    )
