"""A served version that is a shard of another bundle: which one, its numbers, and the masks that it holds.

Knows the shard. Does not know messages or queues.
"""

from __future__ import annotations

from time import monotonic

from espalier.bundle import Bundle
from espalier.manifest import ShardInfo
from espalier.shard_parts import ShardParts
from espalier.shards.local import LocalShard
from espalier.shards.mask_cache import MaskCache
from espalier.shards.messages import Pin


class ShardVersion:
    """See the module.

    pin          what a query must say that is for it
    local        its numbers and those of the whole
    masks        those that routers sent last
    searched_at  seconds of `time.monotonic()`: when a router searched it last
    """

    def __init__(self, bundle: Bundle, info: ShardInfo, parts: ShardParts, mask_bytes: int) -> None:
        """mask_bytes: most that the masks may take."""
        self.info = info
        self.pin = Pin(info.of, info.version, info.digest, info.index, info.count)
        self.local = LocalShard(parts, [alone.tree for alone in bundle.alone])
        self.masks = MaskCache(mask_bytes)
        self.searched_at = float("-inf")

    @staticmethod
    def of(bundle: Bundle, mask_bytes: int) -> ShardVersion | None:
        """That of a bundle; None where it is whole."""
        info, parts = bundle.manifest.shard, bundle.shard
        return None if info is None or parts is None else ShardVersion(bundle, info, parts, mask_bytes)

    def lingers(self, seconds: float) -> bool:
        """Whether a router searched it within the last seconds."""
        return monotonic() - self.searched_at < seconds

    def __str__(self) -> str:
        info = self.info
        return f"shard {info.index} of {info.count} of {info.of} version {info.version}"
