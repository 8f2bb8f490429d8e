"""A served version that is a shard of another bundle: its identity, its local numbering, and the masks that it caches.

Knows the shard. Does not know messages or queues.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from espalier.bundle import Bundle
from espalier.manifest import ShardInfo
from espalier.search import NodeMask
from espalier.shard_parts import ShardParts
from espalier.shards.local import LocalShard
from espalier.shards.messages import Pin


class MaskCache:
    """A least-recently-used cache of the masks that a shard has unpacked, by digest. Safe to use from several threads.

    max_bytes  most bytes of all masks; a larger mask is not kept
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.bytes = max_bytes, 0
        self._masks: OrderedDict[str, NodeMask] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    def get(self, digest: str) -> NodeMask | None:
        with self._lock:
            if digest in self._masks:
                self._masks.move_to_end(digest)
            return self._masks.get(digest)

    def put(self, digest: str, mask: NodeMask) -> NodeMask:
        """Keep a mask and drop others for it. Returns the cached mask if there is one, so that queries of one filter share it."""
        with self._lock:
            cached_mask = self._masks.get(digest)
            if cached_mask is not None or mask.nbytes > self.max_bytes:
                return cached_mask or mask
            self._masks[digest] = mask
            self.bytes += mask.nbytes
            while self.bytes > self.max_bytes:
                self.bytes -= self._masks.popitem(last=False)[1].nbytes
            return mask


class ShardVersion:
    """A served version that is a shard.

    pin          identifies the shard; a query carries the pin of the shard that it is for
    local        maps its numbers to those of the whole bundle
    masks        the masks that routers sent last
    searched_at  when a router searched it last, of time.monotonic()
    """

    def __init__(self, bundle: Bundle, info: ShardInfo, parts: ShardParts, mask_bytes: int) -> None:
        self.info = info
        self.pin = Pin(info.of, info.version, info.digest, info.index, info.count)
        self.local = LocalShard(parts, [alone.tree for alone in bundle.alone])
        self.masks = MaskCache(mask_bytes)
        self.searched_at = float("-inf")

    @staticmethod
    def of(bundle: Bundle, mask_bytes: int) -> ShardVersion | None:
        """The shard version of a bundle; None if the bundle is whole."""
        info, parts = bundle.manifest.shard, bundle.shard
        return None if info is None or parts is None else ShardVersion(bundle, info, parts, mask_bytes)

    def __str__(self) -> str:
        info = self.info
        return f"shard {info.index} of {info.count} of {info.of} version {info.version}"
