"""The masks that a shard has unpacked, by their digests: those that were used last, up to some bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict

from espalier.search import NodeMask


class MaskCache:
    """Safe to use from several threads. max_bytes: most that the masks take; a larger one is not kept."""

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
        """Keep a mask, and drop others for it. The mask that is there already, where there is one: queries of one filter share it."""
        with self._lock:
            known = self._masks.get(digest)
            if known is not None or mask.nbytes > self.max_bytes:
                return known or mask
            self._masks[digest] = mask
            self.bytes += mask.nbytes
            while self.bytes > self.max_bytes:
                self.bytes -= self._masks.popitem(last=False)[1].nbytes
            return mask
