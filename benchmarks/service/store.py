"""A version to a store and back: MB/s and memory, beside `cp` and `sha256sum` of the same bytes in the same run.

    python -m benchmarks.store --json store.json

On a folder (file://), and on moto, an S3 server in a Python process on the same machine. moto reads a whole object for every range, so its
figures say that ranges work and what memory they take, not how fast a store is. Every step runs in a process of its own. The cache of the
disk stays as it is.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import numpy as np

from espalier.bundle import WEIGHTS
from espalier.bundle_files import sha256_of
from espalier.checks.random_bundles import make_bundle
from espalier.hardware import hardware
from espalier.store.fetching import fetch
from espalier.store.objects import Objects
from espalier.store.publishing import publish
from espalier.tree import complete_tree

ROOT = Path(__file__).parents[2]
BUCKET = "models"
BLOCK = 1 << 24
STEPS = ("publish", "fetch")


def version_of(folder: Path, size: int) -> Path:
    """A version of so many bytes, nearly all of them in one random file."""
    rng = np.random.default_rng(0)
    path = make_bundle(folder, rng, complete_tree(rng.permutation(32), 2), name="books").path
    with (path / WEIGHTS).open("wb") as stream:
        for begin in range(0, size, BLOCK):
            stream.write(rng.bytes(min(BLOCK, size - begin)))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][WEIGHTS] = {"sha256": sha256_of(path / WEIGHTS), "size": size}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def step(name: str, url: str, made: Path, cache: Path) -> dict[str, float]:
    """One step in a process of its own: its seconds, and how far its memory rose above that before it."""
    command = [sys.executable, "-m", "benchmarks.store", "--step", name, "--url", url, "--made", str(made), "--cache", str(cache)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def run_step(name: str, url: str, made: Path, cache: Path) -> dict[str, float]:
    before, began = peak_memory(), time.perf_counter()
    store = Objects(url, create=name == "publish")
    if name == "publish":
        publish(store, [made])
    else:
        fetch(store, "books", 1, cache)
    return {"seconds": time.perf_counter() - began, "memory_mb": (peak_memory() - before) / 1e6}


def peak_memory() -> int:
    """Most bytes that this process has had in RAM."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def copied(made: Path, target: Path) -> dict[str, float]:
    """`cp`, flushed, then `sha256sum` of the copy: what a careful copy by hand takes."""
    file, began = made / WEIGHTS, time.perf_counter()
    subprocess.run(["cp", file, target], check=True)
    subprocess.run(["sync", target], check=True)
    middle = time.perf_counter()
    subprocess.run(["sha256sum", target], check=True, stdout=subprocess.DEVNULL)
    end = time.perf_counter()
    target.unlink()
    return {"cp": middle - began, "sha256sum": end - middle}


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """moto in a process of its own, with a bucket. Yields what the environment needs."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _make_bucket(port)
        keys = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_REGION": "us-east-1"}
        yield keys | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    finally:
        server.terminate()
        server.wait()


def _make_bucket(port: int) -> None:
    until = time.monotonic() + 60
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("PUT", f"/{BUCKET}", headers={"Content-Length": "0"})
            if connection.getresponse().status == 200:
                return
        except OSError:
            if time.monotonic() > until:
                raise
        finally:
            connection.close()
        time.sleep(0.2)


def measure(size: int, rounds: int, folder: Path) -> dict[str, object]:
    """Median MB/s of each step, and the most memory that it took."""
    made = version_of(folder / "made", size)
    seconds: dict[str, list[float]] = {}
    memory: dict[str, float] = {}
    with s3_server() as environment:
        os.environ.update(environment)
        for number in range(rounds):
            for name, took in copied(made, folder / "copy").items():
                seconds.setdefault(name, []).append(took)
            for kind, url in (("file", f"file://{folder}/store-{number}"), ("s3", f"s3://{BUCKET}/{number}")):
                for name in STEPS:
                    found = step(name, url, made, folder / f"cache-{kind}-{number}")
                    seconds.setdefault(f"{kind} {name}", []).append(found["seconds"])
                    memory[f"{kind} {name}"] = max(memory.get(f"{kind} {name}", 0.0), found["memory_mb"])
                    print(f"{kind} {name}: {size / 1e6 / found['seconds']:.0f} MB/s, {found['memory_mb']:.0f} MB", file=sys.stderr)
                subprocess.run(["rm", "-rf", folder / f"cache-{kind}-{number}", folder / f"store-{number}"], check=True)
    seconds["cp + sha256sum"] = [copy + digest for copy, digest in zip(seconds["cp"], seconds["sha256sum"], strict=True)]
    rates = {name: size / 1e6 / statistics.median(took) for name, took in seconds.items()}
    return {"bytes": size, "rounds": rounds, "mb_per_s": rates, "memory_mb": memory}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mb", type=int, default=1000, help="size of the version")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    for name in ("--url", "--made", "--cache"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.step is not None:
        print(json.dumps(run_step(given.step, given.url, Path(given.made), Path(given.cache))))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = {"hardware": hardware(), "date": date.today().isoformat()} | measure(given.mb * 1_000_000, given.rounds, Path(folder))
    print(json.dumps(found, indent=1))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
