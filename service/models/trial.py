"""A candidate on trial: which requests it answers in place of the default version. Knows shares, keys and users, not versions that serve.

A user gets the same version as long as the trial lasts, from every worker and host, and more users join when the share grows: a hash of
name, candidate and user is compared with the share. Another candidate is tried on other users.
"""

from __future__ import annotations

import random
from hashlib import blake2b

from espalier.serving import Candidate

USER, GROUP = "Espalier-User", "Espalier-Group"
"""Headers: whose request it is, so that an answer does not change from one version to the other, and a group that may get the candidate."""


def is_tried(candidate: Candidate, model: str, key: str | None, user: bytes | None, group: bytes | None) -> bool:
    """Whether the candidate answers a request that names no version. Without a user each request is drawn by itself.

    key  the name of its API key
    """
    if key is not None and key in candidate.keys:
        return True
    if group is not None and group.decode("latin-1") in candidate.groups:
        return True
    if not candidate.share:
        return False
    return (random.random() if user is None else place_of(model, candidate.version, user)) < candidate.share


def place_of(model: str, candidate: int, user: bytes) -> float:
    """Where a user stands in a trial: evenly spread from 0 to below 1."""
    digest = blake2b(b"%b\0%d\0%b" % (model.encode(), candidate, user), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) / (1 << 53)
