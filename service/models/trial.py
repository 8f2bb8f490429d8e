"""A candidate on trial: which requests it answers in place of the default version. Knows shares, keys and users, not versions that serve.

A hash of model name, candidate and user is compared with the share. A user therefore gets the same version from every worker and host as
long as the trial lasts, and a larger share only adds users. Another candidate is tried on other users.
"""

from __future__ import annotations

import random
from hashlib import blake2b

from espalier.serving import Candidate

USER, GROUP = "Espalier-User", "Espalier-Group"
"""Headers: the user, who gets the same version each time, and a group of users, which may be one that gets the candidate."""


def is_tried(candidate: Candidate, model: str, key: str | None, user: bytes | None, group: bytes | None) -> bool:
    """Whether the candidate answers a request that names no version. Without a user, chance decides for each request.

    key  the name of the request's API key
    """
    if key is not None and key in candidate.keys:
        return True
    if group is not None and group.decode("latin-1") in candidate.groups:
        return True
    if not candidate.share:
        return False
    return (random.random() if user is None else hash_fraction(model, candidate.version, user)) < candidate.share


def hash_fraction(model: str, candidate: int, user: bytes) -> float:
    """A user's hash in a trial, uniform over [0, 1)."""
    digest = blake2b(b"%b\0%d\0%b" % (model.encode(), candidate, user), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) / (1 << 53)
