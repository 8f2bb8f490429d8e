"""A router and replicas of shards, each a process that can be killed, stopped and restarted; and new versions for them.

The router reaches one replica through a proxy, which can delay its answers or replace them by rubbish.
Knows processes and folders of bundles. Does not know loads.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

from aiohttp import ClientError, ClientSession, web

from benchmarks.service.serving import Process, settings
from espalier.bundle import Bundle

SHIFT = 0.05
"""Each version's scores are higher by this than the previous version's, in log-odds, so that scores tell the version."""
Mood = Literal["well", "slow", "garbage"]
LATE_S = 0.5
"""Delay of a slow replica."""
RUBBISH = b"\x00rubbish" * 64
HOP = frozenset({"connection", "content-length", "transfer-encoding", "keep-alive", "host"})
"""Headers that belong to one connection."""


class Proxy:
    """Runs in a thread, on a free port. mood: what happens to the next searches; other requests always pass."""

    def __init__(self, target: str) -> None:
        self.mood: Mood = "well"
        self._target, self._port = target, Future[int]()
        threading.Thread(target=asyncio.run, args=(self._serve(),), name="proxy", daemon=True).start()
        self.url = f"http://127.0.0.1:{self._port.result(10)}"

    async def _serve(self) -> None:
        async with ClientSession(auto_decompress=False) as session:
            app = web.Application(client_max_size=1 << 30)
            app.router.add_route("*", "/{path:.*}", partial(self._pass_on, session))
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self._port.set_result(runner.addresses[0][1])
            await asyncio.Event().wait()

    async def _pass_on(self, session: ClientSession, request: web.Request) -> web.Response:
        body, mood = await request.read(), self.mood if request.method == "POST" else "well"
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP}
        try:
            async with session.request(request.method, self._target + request.path_qs, data=body, headers=headers) as answer:
                content, status, kind = await answer.read(), answer.status, answer.headers.get("Content-Type", "text/plain")
        except ClientError:
            return web.Response(status=502)
        if mood == "slow":
            await asyncio.sleep(LATE_S)
        return web.Response(body=RUBBISH if mood == "garbage" else content, status=status, headers={"Content-Type": kind})


class Running:
    """A router before shards × replicas.

    replicas  by shard; the router reaches the last one of shard 0 through the proxy
    """

    def __init__(self, models: Path, shards: int, replicas: int, logs: Path) -> None:
        self.replicas: list[list[Process]] = []
        for shard in range(shards):
            environment = settings(shards_folder(models), threads=1, poll_s=0.5, shard=shard)
            self.replicas.append([Process(["service"], environment, logs / f"shard-{shard}-{replica}.log") for replica in range(replicas)])
        self.proxy = Proxy(self.replicas[0][-1].url)
        addresses = [process.url for process in self.all if process is not self.replicas[0][-1]]
        router = ["service.router", "--shards", ",".join([*addresses, self.proxy.url])]
        self.router = Process(router, settings(models, threads=1, poll_s=0.5), logs / "router.log")

    @property
    def all(self) -> list[Process]:
        return [process for processes in self.replicas for process in processes]


@contextmanager
def running(models: Path, shards: int, replicas: int, logs: Path) -> Iterator[Running]:
    """A fleet that is ready."""
    fleet = Running(models, shards, replicas, logs)
    try:
        for processes in zip(*fleet.replicas, strict=True):  # not all at once: each imports a lot
            started(processes)
        started([fleet.router])
        yield fleet
    finally:
        for process in (fleet.router, *fleet.all):
            process.end()


def started(processes: Sequence[Process]) -> None:
    """Start processes at once and wait until all are ready."""
    for process in processes:
        process.start()
    for process in processes:
        process.wait_until_ready()


def shards_folder(models: Path) -> Path:
    """The folder of the shards, outside that of the models."""
    return models.parent / "shards"


def first_version(model: Path, models: Path, shards: int) -> str:
    """Copy a bundle as version 1 into a models folder, and cut it; the model's name."""
    name = Bundle.open(model, verify=False).manifest.name
    copied_version(model, models / name / "1", {"version": 1}, shutil.copy2)
    command = ["training", "shard", "--model", str(models / name / "1"), "--shards", str(shards), "--out", str(shards_folder(models))]
    subprocess.run([sys.executable, "-m", *command], check=True, stdout=subprocess.DEVNULL)
    return name


def next_version(models: Path, name: str, shards: int, version: int, bundle_first: bool) -> None:
    """A new version with the content of version 1 and scores that are `SHIFT` further, and its shards, without cutting it anew.

    bundle_first  it appears before its shards, not after them
    """
    source, target = models / name / "1", models / name / str(version)
    calibration = _shifted(json.loads((source / "manifest.json").read_text()), version)
    staged = target.with_name(f".{version}")
    copied_version(source, staged, {"version": version} | calibration)
    digest = hashlib.sha256((staged / "manifest.json").read_bytes()).hexdigest()
    if bundle_first:
        staged.rename(target)
    for index in range(shards):
        folder = shards_folder(models) / str(index)
        shard_manifest = json.loads((folder / "1" / "manifest.json").read_text())
        changes = {"version": version, "shard": shard_manifest["shard"] | {"version": version, "digest": digest}}
        copied_version(folder / "1", folder / f".{version}", changes | calibration)
        (folder / f".{version}").rename(folder / str(version))
    if not bundle_first:
        staged.rename(target)


def _shifted(manifest: dict[str, Any], version: int) -> dict[str, Any]:
    """The changed keys of a version's manifest besides its number; none if scores are not calibrated."""
    ranking = manifest["ranking"]
    if ranking.get("calibration") is None:
        return {}
    intercept = ranking["calibration"]["intercept"] + SHIFT * (version - 1)
    return {"ranking": ranking | {"calibration": ranking["calibration"] | {"intercept": intercept}}}


def copied_version(source: Path, target: Path, changes: Mapping[str, Any], copy: Callable[[str, str], object] = os.link) -> None:
    """Make a version with the same files and another manifest."""
    shutil.copytree(source, target, copy_function=copy, ignore=shutil.ignore_patterns("manifest.json"))
    manifest = json.loads((source / "manifest.json").read_text()) | changes
    (target / "manifest.json").write_text(json.dumps(manifest))
