"""All replicas that the router knows: an event loop of its own in a thread, which looks every second at what each of them holds.

Knows which shard of which version is where. Does not know bundles or searches.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import threading
import time
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import uvloop

from espalier.shards.messages import Pin

from ..router.config import RouterConfig
from ..router.hedging import Budget, Latencies
from ..router.replicas import Replica, Whole, after
from ..router.transport import Reason, ReplicaFailed, Transport
from ..watch.metrics import Metrics

log = logging.getLogger(__name__)
T = TypeVar("T")
HEDGE_UNKNOWN_S = 0.05
"""After this time a shard is asked a second time, before its percentile is known."""
AWAITED_S = 30.0
"""A version is awaited until so long after somebody asked for it last."""
PAUSE_S = 2e-4
"""Between two looks at a replica, for each shard that it has: reading a long list holds up the searches."""
MOST_NAMED = 8
"""Shards or versions that one line names."""


@dataclass(frozen=True, eq=False)
class Searched:
    """A layout that an engine searches, for as long as the engine keeps this."""

    whole: Whole
    count: int


class Fleet:
    """See the module. `transport` and its coroutines run in the fleet's loop."""

    def __init__(self, transport: Transport, addresses: Sequence[str], config: RouterConfig, metrics: Metrics) -> None:
        self.transport, self.config, self.metrics = transport, config, metrics
        for reason in get_args(Reason):
            metrics.count("espalier_router_failures_total", reason, by=0)  # so that Prometheus sees the first one as an increase
        self.budget = Budget(config.hedge)
        self._latencies: dict[int, Latencies] = {}
        self._loop = uvloop.new_event_loop()
        self._names = tuple(addresses)
        self.replicas: Mapping[str, Replica] = {}  # by address; replaced as a whole
        self._following: dict[str, asyncio.Task[None]] = {}
        self._searched: weakref.WeakSet[Searched] = weakref.WeakSet()  # of the loop alone
        self._awaited: dict[Whole, float] = {}  # when somebody asked for it last; added to by any thread
        self._shown: set[tuple[str, int, int]] = set()  # model, version and shard of the metric's series
        self._looked = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop looking, and free the connections."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the fleet's loop, from any other thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def wait_until_looked(self, timeout_s: float) -> bool:
        """Block until every replica was looked at once."""
        return self._looked.wait(timeout_s)

    def searches(self, whole: Whole, count: int) -> Searched:
        """What an engine keeps that searches this layout: the metric is of its replicas, whatever other layouts there are."""
        searched = Searched(whole, count)
        self._loop.call_soon_threadsafe(self._searched.add, searched)
        return searched

    # -- who holds what, from any thread --------------------------------------------------------------------------------

    def count_of(self, whole: Whole) -> int | None:
        """Into how many shards a version is cut of which all are there; the larger number where there are several. None: none is whole."""
        least = self.config.min_replicas
        return max((count for count, up in self._counts(whole).items() if min(up) >= least), default=None)

    def awaits(self, whole: Whole) -> str | None:
        """What a version still waits for; None: nothing. The metric shows its replicas from now on."""
        self._awaited[whole] = time.monotonic()
        return None if self.count_of(whole) is not None else self.missing(whole)

    def missing(self, whole: Whole) -> str:
        """What a version still waits for."""
        known = self._counts(whole)
        if not known:
            listed = {found for replica in self.replicas.values() if not replica.gone for found in replica.layouts if found.of == whole.of}
            others = sorted({found.version for found in listed})
            other = f"; there are shards of version {_named(others)}" if others else ""
            if whole.version in others:
                other = "; shards of that version were cut from another bundle: their digest differs"
            return f"waiting for shards of {whole.of} version {whole.version}: no address holds one{other}"
        count = _fullest(known)
        least, up = self.config.min_replicas, known[count]
        lacking = [index for index, replicas in enumerate(up) if replicas < least]
        shards = "shard" if len(lacking) == 1 else "shards"
        replicas = "" if least == 1 else f" in {least} replicas"
        return f"waiting for {shards} {_named(lacking)} of {count}{replicas}"

    def _counts(self, whole: Whole) -> Mapping[int, Sequence[int]]:
        """For each number of shards into which a version is cut, the replicas of each shard that answer looks."""
        counts: dict[int, list[int]] = {}
        for replica in self.replicas.values():
            for pin in () if replica.gone else replica.layouts.get(whole, ()):
                if pin.count not in counts:
                    counts[pin.count] = [0] * pin.count
                counts[pin.count][pin.index] += 1
        return counts

    # -- in the loop ----------------------------------------------------------------------------------------------------

    def holders(self, pin: Pin, late: bool = False) -> list[Replica]:
        """The replicas that serve a shard. late: those too that let a look wait, for who has time."""
        held = (replica for replica in self.replicas.values() if pin in replica.shards)
        return [replica for replica in held if not replica.gone or (late and replica.trust != "failed")]

    def latencies(self, index: int) -> Latencies:
        found = self._latencies.get(index)
        if found is None:
            found = self._latencies[index] = Latencies(HEDGE_UNKNOWN_S)
        return found

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        resolving = self._loop.create_task(self._resolve())
        try:
            self._loop.run_forever()
        finally:
            resolving.cancel()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self.transport.close())
            self._loop.close()

    async def _resolve(self) -> None:
        """Follow the replicas that the configured addresses stand for, again and again."""
        known: dict[str, Sequence[str]] = {}
        while True:
            try:
                await self._resolve_once(known)
            except Exception:  # nothing may end the following
                log.exception("the addresses cannot be followed")
            await asyncio.sleep(self.config.poll_s)

    async def _resolve_once(self, known: dict[str, Sequence[str]]) -> None:
        """Look names up, and follow those that are new. known: what each name stood for last."""
        for name in self._names:
            try:
                known[name] = await self.transport.addresses(name)
            except ReplicaFailed as error:  # those that were known last may still be there
                if known.setdefault(name, ()) or not self._looked.is_set():
                    log.warning("%s", error)
        addresses = dict.fromkeys(address for found in known.values() for address in found)
        for address in self.replicas.keys() - addresses.keys():
            self._following.pop(address).cancel()
            self.replicas[address].silent(late=False)
            self.transport.forget(address)
        self.replicas = {address: self.replicas.get(address) or Replica(address) for address in addresses}
        for address, replica in self.replicas.items():
            if address not in self._following:
                self._following[address] = self._loop.create_task(self._follow(replica))
        self._count()
        if not self.replicas:
            self._looked.set()

    async def _follow(self, replica: Replica) -> None:
        while True:
            replica.look.clear()
            try:
                await self._look(replica)
            except Exception:  # a replica that cannot be looked at must not end the looking
                log.exception("%s cannot be looked at", replica.address)
            replica.looked = True
            if all(other.looked for other in self.replicas.values()):
                self._looked.set()
            await asyncio.sleep(PAUSE_S * len(replica.shards))
            wait_s = self.config.poll_s
            if replica.trust != "trusted" and not replica.gone:
                wait_s = max(replica.rests_until - time.monotonic(), 0.01)
            try:
                async with asyncio.timeout(wait_s):
                    await replica.look.wait()
            except TimeoutError:
                continue

    async def _look(self, replica: Replica) -> None:
        before, was = replica.shards, replica.gone
        try:
            held = await self.transport.held(replica.address, self.config.poll_timeout_s)
        except ReplicaFailed as error:
            if str(error) != replica.why and (left_out := replica.looks_told.take()) is not None:
                log.warning("%s does not answer: %s%s", replica.address, error, after(left_out))
            replica.why = str(error)
            replica.silent(error.reason == "late")
        else:
            if (was or held != before) and (left_out := replica.looks_told.take()) is not None:
                log.info("%s holds %s%s", replica.address, _described(held), after(left_out))
            replica.why = ""
            replica.says(held, time.monotonic())
        if replica.shards != before or was != replica.gone:
            self._count()

    def _count(self) -> None:
        """Count the replicas of the versions that are searched or awaited; what else a replica lists costs nothing here."""
        now = time.monotonic()
        for whole, asked_at in self._awaited.copy().items():
            if now - asked_at > AWAITED_S:
                self._awaited.pop(whole, None)
        replicas: dict[tuple[str, int], Sequence[int]] = {}
        for whole in self._awaited.copy():
            if counts := self._counts(whole):
                replicas[whole.of, whole.version] = counts[_fullest(counts)]
        for layout in self._searched:
            whole = layout.whole
            replicas[whole.of, whole.version] = self._counts(whole).get(layout.count) or [0] * layout.count
        shown = {(*version, shard): up for version, shards in replicas.items() for shard, up in enumerate(shards)}
        for gone in self._shown - shown.keys():
            self.metrics.gauges["espalier_router_replicas"].remove(*gone)
        for labels, up in shown.items():
            self.metrics.show("espalier_router_replicas", up, *labels)
        self._shown = {*shown}


def _named(numbers: Sequence[int]) -> str:
    """The first of some numbers, and how many more there are."""
    more = f" and {len(numbers) - MOST_NAMED} more" if len(numbers) > MOST_NAMED else ""
    return ", ".join(map(str, numbers[:MOST_NAMED])) + more


def _described(held: frozenset[Pin]) -> str:
    """What a replica holds, in a few words."""
    named = heapq.nsmallest(MOST_NAMED, held, key=lambda pin: (pin.of, pin.version, pin.index, pin.count))
    shards = [f"{pin.of} version {pin.version} shard {pin.index} of {pin.count}" for pin in named]
    return (", ".join(shards) or "nothing yet") + (f" and {len(held) - MOST_NAMED} more" if len(held) > MOST_NAMED else "")


def _fullest(known: Mapping[int, Sequence[int]]) -> int:
    """Of a version's layouts the one of whose shards the largest share is there."""
    return max(known, key=lambda count: (sum(up > 0 for up in known[count]) / count, count))
