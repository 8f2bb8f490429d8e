"""All replicas of the router. A thread runs their event loop, which polls each of them every second for the shards that it serves.

Knows which replicas serve a shard of a version. Does not know bundles or searches.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import uvloop

from espalier.shards.messages import Pin

from ..router.config import RouterConfig
from ..router.replicas import Budget, Latencies, Replica, Whole, omitted_text
from ..router.transport import Reason, ReplicaFailed, Transport
from ..watch.metrics import Metrics

log = logging.getLogger(__name__)
T = TypeVar("T")
AWAITED_S = 30.0
"""A version counts as awaited for so long after the last call of `awaits`."""
PAUSE_S = 2e-4
"""Pause between two polls of a replica for each shard that it serves: reading a long list delays searches."""
MAX_NAMED = 8
"""Most shards or versions that one line names."""


@dataclass(frozen=True, eq=False)
class SearchedLayout:
    """A layout that an engine searches, as long as the engine holds this object."""

    whole: Whole
    count: int


class Fleet:
    """See the module. `transport` and its coroutines run in the fleet's loop."""

    def __init__(self, transport: Transport, addresses: Sequence[str], config: RouterConfig, metrics: Metrics) -> None:
        self.transport, self.config, self.metrics = transport, config, metrics
        for reason in get_args(Reason):
            metrics.count("espalier_router_failures_total", reason, by=0)  # so that Prometheus sees the first one as an increase
        self.budget = Budget(config.hedge)
        self.latencies: defaultdict[int, Latencies] = defaultdict(Latencies)  # by shard
        self._loop = uvloop.new_event_loop()
        self._names = tuple(addresses)
        self._name_errors: dict[str, str] = {}  # name → why it was not resolved last time, which was logged
        self.replicas: Mapping[str, Replica] = {}  # by address; replaced as a whole
        self._poll_tasks: dict[str, asyncio.Task[None]] = {}
        self._searched_layouts: weakref.WeakSet[SearchedLayout] = weakref.WeakSet()  # used only in the loop
        self._awaited: dict[Whole, float] = {}  # when `awaits` was called last; any thread may add to it
        self._metric_labels: set[tuple[str, int, int]] = set()  # model, version and shard of the metric's series
        self._polled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop polling, and free the connections."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the fleet's loop, from any other thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def wait_until_polled(self, timeout_s: float) -> bool:
        """Block until every replica was polled once."""
        return self._polled.wait(timeout_s)

    def register_search(self, whole: Whole, count: int) -> SearchedLayout:
        """A handle for an engine to hold. While it does, the metric shows the replicas of this layout, whatever others there are."""
        layout = SearchedLayout(whole, count)
        self._loop.call_soon_threadsafe(self._searched_layouts.add, layout)
        return layout

    # -- which replica serves which shard, from any thread --------------------------------------------------------------

    def count_of(self, whole: Whole) -> int | None:
        """Into how many shards a version is cut. Only complete layouts count; the largest number wins. None without one."""
        min_replicas = self.config.min_replicas
        return max((count for count, replicas_S in self._counts(whole).items() if min(replicas_S) >= min_replicas), default=None)

    def awaits(self, whole: Whole) -> str | None:
        """What a version still waits for; None: nothing. The metric shows its replicas from now on."""
        self._awaited[whole] = time.monotonic()
        return None if self.count_of(whole) is not None else self.missing(whole)

    def missing(self, whole: Whole) -> str:
        """What a version still waits for."""
        counts = self._counts(whole)
        if not counts:
            answering = [replica for replica in self.replicas.values() if not replica.gone]
            versions = sorted({other.version for replica in answering for other in replica.layouts if other.of == whole.of})
            remark = f"; there are shards of version {_numbers_text(versions)}" if versions else ""
            if whole.version in versions:
                remark = "; shards of that version were cut from another bundle: their digest differs"
            return f"waiting for shards of {whole.of} version {whole.version}: no address holds one{remark}"
        count = _most_complete(counts)
        min_replicas = self.config.min_replicas
        missing_shards = [index for index, replicas in enumerate(counts[count]) if replicas < min_replicas]
        shards = "shard" if len(missing_shards) == 1 else "shards"
        in_replicas = "" if min_replicas == 1 else f" in {min_replicas} replicas"
        return f"waiting for {shards} {_numbers_text(missing_shards)} of {count}{in_replicas}"

    def _counts(self, whole: Whole) -> Mapping[int, Sequence[int]]:
        """Number of shards into which a version is cut → for each shard, its replicas that are not gone."""
        counts: dict[int, list[int]] = {}
        for replica in self.replicas.values():
            for pin in () if replica.gone else replica.layouts.get(whole, ()):
                if pin.count not in counts:
                    counts[pin.count] = [0] * pin.count
                counts[pin.count][pin.index] += 1
        return counts

    # -- in the loop ----------------------------------------------------------------------------------------------------

    def holders(self, pin: Pin, late: bool = False) -> list[Replica]:
        """The replicas that serve a shard. late: also those that did not answer the last poll in time."""
        holders = (replica for replica in self.replicas.values() if pin in replica.shards)
        return [replica for replica in holders if not replica.gone or (late and replica.trust != "failed")]

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        resolver = self._loop.create_task(self._resolve())
        try:
            self._loop.run_forever()
        finally:
            resolver.cancel()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self.transport.close())
            self._loop.close()

    async def _resolve(self) -> None:
        """Resolve the configured addresses again and again, and poll their replicas."""
        resolved: dict[str, Sequence[str]] = {}
        while True:
            try:
                await self._resolve_once(resolved)
            except Exception:  # no error may end this task
                log.exception("the addresses cannot be followed")
            await asyncio.sleep(self.config.poll_s)

    async def _resolve_once(self, resolved: dict[str, Sequence[str]]) -> None:
        """Resolve all names, and begin to poll new replicas. resolved: the last addresses of each name; updated."""
        for name in self._names:
            try:
                resolved[name] = await self.transport.addresses(name)
                self._name_errors.pop(name, None)
            except ReplicaFailed as error:  # the last addresses may still be valid
                resolved.setdefault(name, ())
                if self._name_errors.get(name) != (text := str(error)):
                    log.warning("%s", text)
                self._name_errors[name] = text
        addresses = dict.fromkeys(address for group in resolved.values() for address in group)
        for address in self.replicas.keys() - addresses.keys():
            self._poll_tasks.pop(address).cancel()
            self.replicas[address].poll_failed(late=False)
            self.transport.forget(address)
        self.replicas = {address: self.replicas.get(address) or Replica(address) for address in addresses}
        for address, replica in self.replicas.items():
            if address not in self._poll_tasks:
                self._poll_tasks[address] = self._loop.create_task(self._poll_forever(replica))
        self._count()
        if not self.replicas:
            self._polled.set()

    async def _poll_forever(self, replica: Replica) -> None:
        while True:
            replica.poll_now.clear()
            try:
                await self._poll(replica)
            except Exception:  # an unexpected error must not end the polling
                log.exception("%s cannot be looked at", replica.address)
            replica.polled = True
            if all(other.polled for other in self.replicas.values()):
                self._polled.set()
            await asyncio.sleep(PAUSE_S * len(replica.shards))
            wait_s = self.config.poll_s
            if replica.trust != "trusted" and not replica.gone:
                wait_s = max(replica.suspect_until - time.monotonic(), 0.01)
            try:
                async with asyncio.timeout(wait_s):
                    await replica.poll_now.wait()
            except TimeoutError:
                continue

    async def _poll(self, replica: Replica) -> None:
        before, was_gone = replica.shards, replica.gone
        try:
            shards = await self.transport.served_shards(replica.address, self.config.poll_timeout_s)
        except ReplicaFailed as error:
            if str(error) != replica.poll_error and (omitted := replica.poll_log_lines.take()) is not None:
                log.warning("%s does not answer: %s%s", replica.address, error, omitted_text(omitted))
            replica.poll_error = str(error)
            replica.poll_failed(error.reason == "late")
        else:
            if (was_gone or shards != before) and (omitted := replica.poll_log_lines.take()) is not None:
                log.info("%s holds %s%s", replica.address, _shards_text(shards), omitted_text(omitted))
            replica.poll_error = ""
            replica.poll_answered(shards, time.monotonic())
        if replica.shards != before or was_gone != replica.gone:
            self._count()

    def _count(self) -> None:
        """Count the replicas of the versions that are searched or awaited. Other versions in a replica's list cost nothing."""
        now = time.monotonic()
        for whole, awaited_at in self._awaited.copy().items():
            if now - awaited_at > AWAITED_S:
                self._awaited.pop(whole, None)
        replicas: dict[tuple[str, int], Sequence[int]] = {}
        for whole in self._awaited.copy():
            if counts := self._counts(whole):
                replicas[whole.of, whole.version] = counts[_most_complete(counts)]
        for layout in self._searched_layouts:
            whole = layout.whole
            replicas[whole.of, whole.version] = self._counts(whole).get(layout.count) or [0] * layout.count
        values = {(*version, shard): count for version, shards in replicas.items() for shard, count in enumerate(shards)}
        for labels in self._metric_labels - values.keys():
            self.metrics.gauges["espalier_router_replicas"].remove(*labels)
        for labels, count in values.items():
            self.metrics.show("espalier_router_replicas", count, *labels)
        self._metric_labels = {*values}


def _numbers_text(numbers: Sequence[int]) -> str:
    """The first MAX_NAMED of some numbers, and how many more there are."""
    more = f" and {len(numbers) - MAX_NAMED} more" if len(numbers) > MAX_NAMED else ""
    return ", ".join(map(str, numbers[:MAX_NAMED])) + more


def _shards_text(pins: frozenset[Pin]) -> str:
    """The first MAX_NAMED shards of a replica, and how many more there are."""
    first_pins = heapq.nsmallest(MAX_NAMED, pins, key=lambda pin: (pin.of, pin.version, pin.index, pin.count))
    shards = [f"{pin.of} version {pin.version} shard {pin.index} of {pin.count}" for pin in first_pins]
    return (", ".join(shards) or "nothing yet") + (f" and {len(pins) - MAX_NAMED} more" if len(pins) > MAX_NAMED else "")


def _most_complete(counts: Mapping[int, Sequence[int]]) -> int:
    """The number of shards of the layout of which the largest share of shards is served."""
    return max(counts, key=lambda count: (sum(replicas > 0 for replicas in counts[count]) / count, count))
